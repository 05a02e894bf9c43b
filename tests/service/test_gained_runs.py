# SPDX-License-Identifier: Apache-2.0
"""What real runs say that they have gained: warm nothing, cold the requests that were spared."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import require, wait_until
from harness import MIB, Start, auto, has_seen, python, write_records

from uffdprefetch.demo.bed import SlowBed, drop_cache, warm_fully, why_no_bed
from uffdprefetch.report.summary import short_lines

pytest_plugins = ("harness_fixtures",)
pytestmark = auto

SIZE = 64 * MIB
#: A large copy touches both ends of what it takes before its middle.
COPIES = """
m = Mapping(sys.argv[1])
for start in range(0, len(m.view), 1 << 20):
    for at in (start, start + (1 << 20) - 1, *range(start, start + (1 << 20), 4096)):
        m.view[at]
say(pooled=m.pooled())
"""
SCAN = "m = Mapping(sys.argv[1]).followed(); m.digest(); say(read=True); hear()"


@pytest.mark.parametrize("cold", [False, True])
def test_a_run_says_what_it_has_gained(job: Start, tmp_path: Path, cold: bool) -> None:
    require(why_no_bed() is None, why_no_bed() or "")
    (tmp_path / "source").mkdir()
    (tmp_path / "mount").mkdir()
    write_records(tmp_path / "source" / "data.bin", SIZE)
    # so far away that plain waits for latency, four times what the bytes take
    bed = SlowBed(tmp_path / "source", tmp_path / "mount", bandwidth=100_000_000, latency_us=10_000)
    with bed:
        path = bed.path("data.bin")
        if cold:
            drop_cache(path)
        else:
            warm_fully(path)
        work = job(python(SCAN, path))
        assert work.line() == {"read": True}
        wait_until(lambda: has_seen(work.env, SIZE * 3 // 4), "the service to see most of it read")
        work.tell()
        summary = work.finish().good().summary
    assert summary is not None
    totals = summary["totals"]
    if cold:
        assert totals["gain"] == "saved", totals
        assert totals["waited_seconds"] > 0 and totals["saved_at_least_seconds"] > 0
        assert short_lines(summary)[0].startswith("kept ahead")
    else:
        assert (totals["gain"], totals["saved_at_least_seconds"]) == ("in-memory", None), totals
        assert short_lines(summary)[0] == "nothing to gain: the data was in memory"


def test_what_the_pool_maps_ahead_of_a_copy_is_used(job: Start, tmp_path: Path) -> None:
    require(why_no_bed() is None, why_no_bed() or "")
    (tmp_path / "source").mkdir()
    (tmp_path / "mount").mkdir()
    size = 4 * SIZE
    write_records(tmp_path / "source" / "data.bin", size)
    with SlowBed(tmp_path / "source", tmp_path / "mount", bandwidth=300_000_000) as bed:
        path = bed.path("data.bin")
        work = job(python(COPIES, path), options=("--engine", "pool"))
        assert work.line() == {"pooled": True}
        summary = work.finish().good().summary
    assert summary is not None
    (file,) = summary["files"]
    used = file["prefetched_used_blocks_bytes"] + file["demand_used_blocks_bytes"]
    # what was mapped ahead of it before it ended is told of by no fault
    assert used >= 0.92 * size, file
