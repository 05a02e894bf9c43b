# SPDX-License-Identifier: Apache-2.0
"""At how many places of a mapping the pool knows that its reader goes on (POOL_STREAMS, pool.h)."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
from conftest import wait_until
from harness import Start, python, snapshot, write_records

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
if sys.argv[3]:
    import mmap
    m.advise(getattr(mmap, sys.argv[3]))
    time.sleep(0.5)  # the service has heard of it
for record in range(128):
    place = (record * 37) % 128
    for chunk in range(int(sys.argv[2])):
        m.view[(place << 19) + (chunk << 16)]
say(pooled=pooled)
"""


#: Where there is no room for all of the file.
SHORT = ("--budget", "32MiB")


@pytest.mark.parametrize(
    ("room", "chunks", "misses", "brought"),
    [
        (SHORT, 1, 128, 1),
        (SHORT, 2, 128 + 16 + 14, 2),
        ((), 1, 128, 2),
        ((), 2, 128, 2),
    ],
)
def test_a_miss_at_a_new_place_brings_two_chunks_where_most_were_followed_by_the_next_or_all_fits(
    job: Start, tmp_path: Path, room: tuple[str, ...], chunks: int, misses: int, brought: int
) -> None:  # fmt: skip
    """A record that is longer than a chunk is waited for once; and of others no more is read than
    is touched, or than the kernel would have read."""
    path = tmp_path / "data.bin"
    write_records(path, 64 * MIB)
    words = python(RECORDS, path, chunks, "")
    work = job(words, options=("--engine", "pool", "--policy", "none", *room))
    assert work.line()["pooled"]
    summary = work.finish().good().summary
    assert summary is not None
    pool = summary["pool"]
    # sixteen tell it, and one of eight after them
    assert abs(pool["missing_faults"] - misses) <= 3, pool
    # who goes on gets twice as much: a chunk too much of each that has missed twice
    assert pool["demand_read_bytes"] <= brought * pool["missing_faults"] << 16, pool
    assert pool["demand_read_bytes"] > (brought - 1) * pool["missing_faults"] << 16, pool


#: A new mapping for each page.
AGAIN = """
began = time.monotonic()
for number in range(300):
    m = Mapping(sys.argv[1])
    m.view[number << 16]
    m.unmap()
say(seconds=time.monotonic() - began)
"""


def test_a_file_of_the_pool_that_is_mapped_again_and_again_is_the_pools_each_time(
    job: Start, tmp_path: Path
) -> None:
    """As many mappings of other files are not all waited for (csrc/job/reply.c)."""
    path = tmp_path / "data.bin"
    write_records(path, 64 * MIB)
    for _ in range(5):
        work = job(
            python(AGAIN, path), options=("--engine", "pool"), UFFDPREFETCH_TEST_PATIENCE="10"
        )  # as users have it: 50 ms
        seconds = work.line()["seconds"]
        summary = work.finish().good().summary
        if seconds < 0.9:  # else they waited for longer than all together may
            assert not [line for line in summary["degradations"] if "at once" in line], summary
            return
    pytest.skip("300 mappings take a second here")


def test_of_what_a_job_says_to_read_here_and_there_a_miss_brings_one_chunk(
    job: Start, tmp_path: Path
) -> None:
    """The kernel reads single pages of it."""
    path = tmp_path / "data.bin"
    write_records(path, 64 * MIB)
    work = job(python(RECORDS, path, 1, "MADV_RANDOM"), options=("--engine", "pool"))
    assert work.line()["pooled"]
    pool = work.finish().good().summary["pool"]
    assert pool["missing_faults"] > 16, pool
    assert pool["demand_read_bytes"] <= pool["missing_faults"] << 16, pool


#: Records, each two of their lengths from the next, in an order of which the service is told; when
#: so much is in the pool that all of them are, they are read.
TOLD = """
import random
from uffdprefetch.plan import announce
KIB = 1 << 10
m = Mapping(sys.argv[1])
pooled = m.pooled()
size, count = int(sys.argv[2]), int(sys.argv[3])
places = random.Random(1).sample(range(0, len(m.view) - size, 3 * size), count)
order = announce(sys.argv[1], ranges=[(at, at + size) for at in places])
say(pooled=pooled)
hear()
digest = hashlib.sha256()
for at in places:
    for page in range(at, at + size, 4 * KIB):
        digest.update(m.view[page : page + 4 * KIB])
say(digest=digest.hexdigest())
"""


@pytest.mark.parametrize(
    ("size", "count", "faults"),
    [(256 << 10, 64, 64), (2 * MIB, 8, 16)],
    ids=["short", "longer than is mapped at once"],
)
def test_a_record_of_a_told_order_is_mapped_by_its_first_touch(
    job: Start, tmp_path: Path, size: int, count: int, faults: int
) -> None:
    """RECORD_MOST_BYTES of it (csrc/service/pool/pool_main.c)."""
    path = tmp_path / "data.bin"
    write_records(path, 64 * MIB)
    words = python(TOLD, path, size, count)
    work = job([words[0], *words[2:]], options=("--engine", "pool"))
    assert work.line()["pooled"]
    there = count * size
    wait_until(lambda: snapshot(work.env).pool.resident_bytes >= there, "all to be in the pool")
    work.tell()
    data, digest = path.read_bytes(), hashlib.sha256()
    for at in random.Random(1).sample(range(0, len(data) - size, 3 * size), count):
        digest.update(data[at : at + size])
    assert work.line()["digest"] == digest.hexdigest()
    pool = work.finish().good().summary["pool"]
    assert 2 * faults // 3 < pool["faults"] <= 3 * faults // 2, pool
