# SPDX-License-Identifier: Apache-2.0
"""Readers for whom most is read for nothing, on the slow bed: that ends, the summary says so, and
they read the file's bytes (readers/waste.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from harness import MIB, Start, python

from uffdprefetch.demo.bed import SlowBed, drop_cache, resident_bytes

pytest_plugins = ("harness_fixtures", "components")

FILE_BYTES, SHARD_BYTES, SHARDS = 384 * MIB, 40 * MIB, 8


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
    for wrap in (False, True):
        for path in paths:
            drop_cache(path)
        bed.reset()
        work = job(python(code, *paths), wrap=wrap, options=("--strict", *options))
        digests.append(work.line()["digest"])
        summary: Any = work.finish().good().summary
        came.append(bed.counters()["bytes"])
        if wrap:
            findings = [one for one in summary["degradations"] if "was not touched" in one]
    assert digests[0] == digests[1]
    return came[0], came[1], findings


def test_a_reader_that_takes_a_tenth_after_a_start_in_order(
    job: Start, bed: SlowBed, large: Path
) -> None:
    """With windows that are short beside the file."""
    code = """
    m, sha = Mapping(sys.argv[1]), hashlib.sha256()
    for at in range(0, 48 << 20, 1 << 16):
        sha.update(m.view[at : at + (1 << 16)])
    for at in range(48 << 20, m.length, 640 << 10):
        sha.update(m.view[at : at + 64])
    say(digest=sha.hexdigest())
    """
    plain, ours, findings = both(job, bed, code, [large], "--budget", "64MiB")
    assert len(findings) == 1 and "windows" in findings[0]
    assert plain < ours < 0.8 * FILE_BYTES, "it had passed some of it before that was known"


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
    _, _, findings = both(job, bed, code + "say(digest=sha.hexdigest())\n", [large])
    assert findings == []


def test_what_was_said_to_be_needed_is_no_waste_of_windows(
    job: Start, bed: SlowBed, large: Path
) -> None:
    code = """
    m, sha = Mapping(sys.argv[1]), hashlib.sha256()
    for at in range(0, m.length, 1 << 20):
        sha.update(m.view[at : at + 64])
        time.sleep(0.001)
    say(digest=sha.hexdigest())
    """
    _, _, findings = both(job, bed, code, [large], "--whole", large.name)
    assert findings == []


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
    plain, ours, findings = both(job, bed, code, every)
    assert len(findings) == 1 and "file that follows" in findings[0]
    # by the link: what lies in memory unread may be taken away again
    assert ours > plain + 8 * MIB, "it is not known before"
    assert [resident_bytes(bed.path(name)) for name in names[5::2]] == [0, 0]
    assert ours <= (SHARDS / 2 + 2) * SHARD_BYTES * 1.03
    for path in every:
        path.unlink()
