# SPDX-License-Identifier: Apache-2.0
"""What a wrong guess costs, by a real service on the slow bed, in both engines: a walk is read
ahead of once, who needs a part of what it opens has little else read, and every byte is right
(readers/ahead.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from components import ARRAY, slowly
from harness import MIB, Start, auto, python

from uffdprefetch.demo.bed import SlowBed, drop_cache, resident_bytes

pytest_plugins = ("harness_fixtures", "components")
pytestmark = auto

FILE_BYTES, SHARD_BYTES, SHARDS = 384 * MIB, 40 * MIB, 8
BANDWIDTH = 200_000_000
ENGINES = pytest.mark.parametrize("engine", ["cache", "pool"])

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


def reads(
    job: Start, bed: SlowBed, store: Path, parts: list[tuple[int, int]], engine: str
) -> tuple[int, int]:
    """(bytes that came from the bed, bytes that were read ahead)."""
    path = bed.path(ARRAY)
    drop_cache(path)
    bed.reset()
    words = [f"{start}-{end}" for start, end in parts]
    command = python(READER, path, store / ARRAY, *words)
    run = job(command, options=("--engine", engine))
    assert run.line()["right"]
    came = bed.counters()["bytes"]
    run.tell("end")
    summary = run.finish().good().summary
    assert summary is not None
    return came, summary["totals"]["prefetched_bytes"]


@ENGINES
def test_a_stream_is_read_ahead_of_once(job: Start, bed: SlowBed, store: Path, engine: str) -> None:
    size = (store / ARRAY).stat().st_size
    with slowly(bed, BANDWIDTH):
        came, ahead = reads(job, bed, store, [(0, size)], engine)
    assert ahead > size // 2
    assert came < size * 1.1


@ENGINES
def test_who_reads_a_part_here_and_there_has_little_else_read(
    job: Start, bed: SlowBed, store: Path, engine: str
) -> None:
    size = (store / ARRAY).stat().st_size
    parts = [(at, at + 4096) for at in range(3 * MIB, size - 8 * MIB, 7 * MIB)]
    chosen = [parts[i * 7 % len(parts)] for i in range(len(parts))]
    with slowly(bed, BANDWIDTH):
        came, ahead = reads(job, bed, store, chosen, engine)
    # the kernel brings its readahead with each, and what tells the link is read as well
    assert came < len(chosen) * (256 << 10) + 12 * MIB
    assert ahead < 12 * MIB


@ENGINES
def test_a_page_of_each_mib_has_no_more_read_than_plainly(
    job: Start, bed: SlowBed, store: Path, engine: str
) -> None:
    size = (store / ARRAY).stat().st_size
    parts = [(at, at + 4096) for at in range(0, size - MIB, MIB)]
    with slowly(bed, BANDWIDTH):
        came, _ = reads(job, bed, store, parts, engine)
    assert came < len(parts) * (192 << 10) + 12 * MIB


# ---- files that are no part of the bed's own ----------------------------------------------------


def made(path: Path, size: int, first: int = 0) -> Path:
    """A file of which no word is there twice."""
    numpy.arange(first // 8, (first + size) // 8).tofile(path)
    return path


@pytest.fixture
def large(store: Path) -> Iterator[Path]:
    path = made(store / "passed-over.bin", FILE_BYTES)
    yield path
    path.unlink()


def both(
    job: Start, bed: SlowBed, code: str, beside: list[Path], *options: str
) -> tuple[int, int, list[str]]:
    """(bytes that came plainly, bytes that came under wrap, findings) of a job that says the digest
    of what it has read, which is the same."""
    paths = [bed.path(path.name) for path in beside]
    digests, came, findings = [], [], []
    with slowly(bed, BANDWIDTH):
        for wrap in (False, True):
            for path in paths:
                drop_cache(path)
            bed.reset()
            work = job(python(code, *paths), wrap=wrap, options=("--strict", *options))
            digests.append(work.line()["digest"])
            summary: Any = work.finish().good().summary
            came.append(bed.counters()["bytes"])
            if wrap:
                findings = summary["degradations"]
    assert digests[0] == digests[1]
    return came[0], came[1], findings


def test_a_reader_that_takes_a_tenth_after_a_start_in_order(
    job: Start, bed: SlowBed, large: Path
) -> None:
    code = """
    m, sha = Mapping(sys.argv[1]), hashlib.sha256()
    for at in range(0, 48 << 20, 1 << 16):
        sha.update(m.view[at : at + (1 << 16)])
    for at in range(48 << 20, m.length, 640 << 10):
        sha.update(m.view[at : at + 64])
    say(digest=sha.hexdigest())
    """
    plain, ours, _ = both(job, bed, code, [large])
    # what lay ahead of it where it ceased to go on
    assert ours < plain + 64 * MIB


#: In order, all of it: a new mapping for each batch, or what was read given back.
BATCHES = {
    "maps": """
for begin in range(0, size, 8 << 20):
    m = mmap.mmap(file.fileno(), 8 << 20, prot=mmap.PROT_READ, offset=begin)
    for at in range(0, 8 << 20, 1 << 18):
        sha.update(m[at : at + (1 << 18)])
    m.close()
""",
    "gives-back": """
m = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
for begin in range(0, size, 8 << 20):
    for at in range(begin, begin + (8 << 20), 1 << 18):
        sha.update(m[at : at + (1 << 18)])
    m.madvise(mmap.MADV_DONTNEED, begin, 8 << 20)
""",
}


@pytest.mark.parametrize("how", BATCHES)
def test_a_reader_whose_touches_are_gone_when_they_are_looked_for_goes_on(
    job: Start, bed: SlowBed, large: Path, how: str
) -> None:
    head = 'import mmap\nsha, file = hashlib.sha256(), open(sys.argv[1], "rb")\n'
    code = head + "size = os.fstat(file.fileno()).st_size\n" + BATCHES[how]
    plain, ours, findings = both(job, bed, code + "say(digest=sha.hexdigest())\n", [large])
    assert findings == [] and ours < 1.1 * plain


def test_shards_of_which_every_other_one_is_read(job: Start, bed: SlowBed, store: Path) -> None:
    names = [f"odd-{number:05d}-of-{SHARDS:05d}.safetensors" for number in range(1, SHARDS + 1)]
    every = [
        made(store / name, SHARD_BYTES, number * SHARD_BYTES) for number, name in enumerate(names)
    ]
    code = """
    sha = hashlib.sha256()
    for path in sys.argv[1::2]:
        m = Mapping(path)
        for at in range(0, m.length, 1 << 18):
            sha.update(m.view[at : at + (1 << 18)])
            time.sleep(0.001)
        m.unmap()
    say(digest=sha.hexdigest())
    """
    _, ours, _ = both(job, bed, code, every)
    assert [resident_bytes(bed.path(name)) for name in names[5::2]] == [0, 0], "it has learnt"
    assert ours <= (SHARDS / 2 + 2) * SHARD_BYTES * 1.03
    for path in every:
        path.unlink()
