# SPDX-License-Identifier: Apache-2.0
"""Real runs on storage of which the kernel reads enough ahead by itself: nothing is read ahead of
who reads in order, and as before of who does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import READAHEAD_BYTES, READAHEAD_VARIABLE, require, wait_until
from harness import MIB, Start, auto, has_seen, python, write_records

from uffdprefetch.demo.bed import SlowBed, drop_cache, why_no_bed

pytest_plugins = ("harness_fixtures",)
pytestmark = [auto, pytest.mark.usefixtures("patient")]

SIZE = 128 * MIB
#: Of which a millisecond is little: the bed's own stays as it is.
ENOUGH_BYTES = 1 << 30
#: Each MiB after a MiB that is left out.
READERS = {
    "in order": "m = Mapping(sys.argv[1]).followed(); m.digest(); say(read=True); hear()",
    "skips": (
        "m = Mapping(sys.argv[1]).followed()\n"
        "for at in range(0, m.length, 2 << 20):\n"
        "    bytes(m.view[at:at + (1 << 20)])\n"
        "    time.sleep(0.01)\n"
        "say(read=True); hear()"
    ),
}


def run(job: Start, tmp_path: Path, reader: str, readahead_bytes: int) -> dict[str, Any]:
    """The summary of a reader, from cold, on a bed that is 1 ms away."""
    require(why_no_bed() is None, why_no_bed() or "")
    for name in ("source", "mount"):
        (tmp_path / name).mkdir()
    write_records(tmp_path / "source" / "data.bin", SIZE)
    bed = SlowBed(tmp_path / "source", tmp_path / "mount", bandwidth=300_000_000, latency_us=1000)
    with bed:
        path = bed.path("data.bin")
        drop_cache(path)
        words = python(READERS[reader], path)
        work = job(words, **{READAHEAD_VARIABLE: str(readahead_bytes)})
        assert work.line() == {"read": True}
        wait_until(lambda: has_seen(work.env, SIZE * 3 // 4), "the service to see most of it read")
        work.tell()
        summary = work.finish().good().summary
    assert summary is not None
    return summary


@pytest.mark.parametrize(
    ("reader", "readahead_bytes", "left"),
    [
        ("in order", ENOUGH_BYTES, True),
        ("in order", READAHEAD_BYTES, False),
        ("skips", ENOUGH_BYTES, False),
    ],
)
def test_what_is_read_in_order_is_left_to_a_kernel_that_suffices(
    job: Start, tmp_path: Path, reader: str, readahead_bytes: int, left: bool
) -> None:
    summary = run(job, tmp_path, reader, readahead_bytes)
    prefetched = summary["totals"]["prefetched_bytes"]
    said = [text for text in summary["degradations"] if "left to the kernel" in text]
    if left:
        assert len(said) == 1, summary
        assert prefetched < SIZE // 32, "more than what told how far away the storage is"
        assert "data.bin: left to the kernel, whose readahead of 1 GiB suffices" in said[0]
    else:
        assert prefetched > SIZE // 32, summary
