# SPDX-License-Identifier: Apache-2.0
"""At how many places of a mapping the pool knows that its reader goes on (POOL_STREAMS, pool.h)."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Start, python, write_records

pytest_plugins = ("harness_fixtures",)

MIB = 1 << 20
STEPS = 128
#: All of it is in the pool; then another mapping is read at some places, a block at each in turn.
READER = """
import resource
first = Mapping(sys.argv[1])
first.pooled()
first.digest()
m = Mapping(sys.argv[1])
pooled = m.pooled()
usage = lambda: resource.getrusage(resource.RUSAGE_SELF)
before = usage()
for step in range(int(sys.argv[3])):
    for place in range(int(sys.argv[2])):
        m.view[(place * 12 << 20) + (step << 16)]
now = usage()
say(pooled=pooled, faults=now.ru_minflt + now.ru_majflt - before.ru_minflt - before.ru_majflt)
"""


@pytest.mark.parametrize(("places", "is_mapped_ahead"), [(4, True), (5, False)])
def test_what_is_there_is_mapped_ahead_of_readers_at_four_places(
    job: Start, tmp_path: Path, places: int, is_mapped_ahead: bool
) -> None:
    path = tmp_path / "data.bin"
    write_records(path, 64 * MIB)
    work = job(python(READER, path, places, STEPS), options=("--engine", "pool"))
    told = work.line()
    work.finish().good()
    assert told["pooled"]
    if is_mapped_ahead:
        assert told["faults"] < places * STEPS // 2, told
    else:
        assert told["faults"] >= places * STEPS, told


#: Records of so many chunks, at places that are far apart, each touched from its first page on.
RECORDS = """
m = Mapping(sys.argv[1])
pooled = m.pooled()
for record in range(128):
    place = (record * 37) % 128
    for chunk in range(int(sys.argv[2])):
        m.view[(place << 19) + (chunk << 16)]
say(pooled=pooled)
"""


@pytest.mark.parametrize(("chunks", "misses"), [(1, 128), (2, 128 + 16 + 14)])
def test_a_miss_at_a_new_place_brings_two_chunks_where_most_were_followed_by_the_next(
    job: Start, tmp_path: Path, chunks: int, misses: int
) -> None:
    """A record that is longer than a chunk is waited for once; and of others no more is read than
    is touched."""
    path = tmp_path / "data.bin"
    write_records(path, 64 * MIB)
    work = job(python(RECORDS, path, chunks), options=("--engine", "pool", "--policy", "none"))
    assert work.line()["pooled"]
    summary = work.finish().good().summary
    assert summary is not None
    pool = summary["pool"]
    # sixteen tell it, and one of eight after them
    assert abs(pool["missing_faults"] - misses) <= 3, pool
    # who goes on gets twice as much: a chunk too much of each that has missed twice
    assert pool["demand_read_bytes"] <= chunks * pool["missing_faults"] << 16, pool
