# SPDX-License-Identifier: Apache-2.0
"""`--policy survival` with a real service and the slow bed: a walk is read ahead of, a wrong guess
costs little, and every byte is right."""

from __future__ import annotations

from pathlib import Path

from components import ARRAY, slowly
from harness import Start, python

from uffdprefetch.demo.bed import SlowBed, drop_cache

pytest_plugins = ("harness_fixtures", "components")
MIB, BANDWIDTH = 1 << 20, 200_000_000

#: Reads parts of the file, [start, end) each, and compares them with the one beside the bed.
READER = """
path, beside = sys.argv[1:3]
m = Mapping(path)
plain = open(beside, "rb")
def right(start, end):
    plain.seek(start)
    return plain.read(end - start) == bytes(m.view[start:end])
say(right=all(right(*map(int, part.split("-"))) for part in sys.argv[3:]), mapped=m.length)
hear()
"""


def reads(job: Start, bed: SlowBed, store: Path, parts: list[tuple[int, int]]) -> tuple[int, int]:
    """(bytes that came from the bed, bytes that were read ahead)."""
    path = bed.path(ARRAY)
    drop_cache(path)
    bed.reset()
    words = [f"{start}-{end}" for start, end in parts]
    command = python(READER, path, store / ARRAY, *words)
    run = job(command, options=("--policy", "survival"))
    assert run.line()["right"]
    came = bed.counters()["bytes"]
    run.tell("end")
    summary = run.finish().good().summary
    assert summary is not None
    return came, summary["totals"]["prefetched_bytes"]


def test_a_walk_is_read_ahead_of_once(job: Start, bed: SlowBed, store: Path) -> None:
    size = (store / ARRAY).stat().st_size
    with slowly(bed, BANDWIDTH):
        came, ahead = reads(job, bed, store, [(0, size)])
    assert ahead > size // 2
    assert came < size * 1.1


def test_who_reads_a_part_here_and_there_has_little_else_read(
    job: Start, bed: SlowBed, store: Path
) -> None:
    size = (store / ARRAY).stat().st_size
    parts = [(at, at + 4096) for at in range(3 * MIB, size - 8 * MIB, 7 * MIB)]
    chosen = [parts[i * 7 % len(parts)] for i in range(len(parts))]
    with slowly(bed, BANDWIDTH):
        came, ahead = reads(job, bed, store, chosen)
    # the kernel brings its readahead with each, and what tells the link is read as well
    assert came < len(chosen) * (256 << 10) + 12 * MIB
    assert ahead < 12 * MIB
