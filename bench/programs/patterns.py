# SPDX-License-Identifier: Apache-2.0
"""Arrays by numpy.memmap, read in one pattern: `patterns.py DIR --pattern NAME --reads N`.

What a read is depends on the pattern: a page, a piece of 64 KiB, a walk, a file. What is read next
comes from seeds, or from the file, so that each run of a pattern reads the same.
"""

from __future__ import annotations

import argparse
import mmap
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from reading import Reading, together

PAGE = mmap.PAGESIZE
PIECE, SLICE, RECORD = 64 << 10, 1 << 20, 512 << 10
#: Bytes of a page that are looked at.
FEW = 64
#: Processes that follow pointers, and that take turns.
CHASERS = RANKS = 4
#: Who takes turns reads so many records of 80 KiB in a batch, and computes then for as long as a
#: link of 300 MB/s takes for the batches of all.
BATCH, TURN, LINK_BYTES_PER_SECOND = 64, 80 << 10, 300e6
Spans = Iterable[tuple[int, int]]


def mapped(path: Path) -> Any:
    """The bytes of a file."""
    return np.memmap(path, np.uint8, mode="r")


def pieces(first: int, end: int) -> Iterator[tuple[int, int]]:
    """[first, end) in order."""
    for at in range(first, end, PIECE):
        yield at, min(at + PIECE, end)


def random_pages(generator: Any, first: int, end: int, count: int) -> Iterator[tuple[int, int]]:
    """The first bytes of ``count`` pages of [first, end)."""
    for page in generator.integers(first // PAGE, end // PAGE, count).tolist():
        yield page * PAGE, page * PAGE + FEW


def read(data: Any, spans: Spans, reading: Reading) -> None:
    """All of these parts."""
    for first, end in spans:
        reading.add(data[first:end])


# ---- one reader of one file ------------------------------------------------------------------


def in_order(size: int, reads: int) -> Spans:
    """Pieces, from the begin."""
    return pieces(0, min(size, reads * PIECE))


def copied(size: int, reads: int) -> Spans:
    """Slices of 1 MiB, each copied out: a copy touches both ends of one before its middle."""
    starts = range(0, min(size, reads * SLICE), SLICE)
    return ((at, min(at + SLICE, size)) for at in starts)


def backward(size: int, reads: int) -> Spans:
    """Pieces, from the end."""
    return (
        (at, at + PIECE) for at in range(size - PIECE, max(size - (reads + 1) * PIECE, 0), -PIECE)
    )


def skip_3_of_4(size: int, reads: int) -> Spans:
    """Every fourth of records of 12 to 192 KiB, as one of four ranks."""
    generator, at, spans = np.random.default_rng(2), 0, []
    while len(spans) < reads:
        record = int(generator.integers(3, 49)) * PAGE
        if at + 4 * record > size:
            break
        spans.append((at, at + record))
        at += record + int(generator.integers(9, 145)) * PAGE
    return spans


def random(size: int, reads: int) -> Spans:
    """Pages at random."""
    return random_pages(np.random.default_rng(3), 0, size, reads)


def every_page(size: int, reads: int) -> Spans:
    """All pages, each once, in random order."""
    order = np.random.default_rng(4).permutation(size // PAGE)[:reads]
    return ((page * PAGE, page * PAGE + FEW) for page in order.tolist())


def strided(size: int, reads: int) -> Spans:
    """One page at each of ``reads`` places, equally far apart."""
    step = size // reads // PAGE * PAGE
    return ((number * step, number * step + FEW) for number in range(reads))


def switch(size: int, reads: int) -> Spans:
    """The first third of the file in order, pages at random, the last third in order."""
    yield from pieces(0, size // 3)
    yield from random_pages(np.random.default_rng(5), size // 3, size, reads)
    yield from pieces(2 * size // 3, size)


def any_length(size: int, reads: int) -> Spans:
    """Walks of 64 KiB to 32 MiB (or an eighth of the file), begun anywhere: one that has gone for
    so long goes on for as long again in one case of two."""
    generator = np.random.default_rng(6)
    doublings = np.log2(min(32 << 20, size // 8) / PIECE)
    for _ in range(reads):
        length = int(PIECE * 2 ** generator.uniform(0, doublings))
        first = int(generator.integers(0, size - length)) // PAGE * PAGE
        yield from pieces(first, first + length)


def record_ends(size: int, reads: int) -> Spans:
    """The first and the last page of records of 512 KiB, in order, and one record of four whole."""
    whole = np.random.default_rng(8).random(reads) < 0.25
    for number, at in enumerate(range(0, min(size, reads * RECORD), RECORD)):
        yield at, at + FEW
        if whole[number]:
            yield from pieces(at, at + RECORD)
        yield at + RECORD - PAGE, at + RECORD - PAGE + FEW


def short_walks(size: int, reads: int) -> Spans:
    """Walks of 128 KiB, begun anywhere, and one that goes through a third of the file at last."""
    for first in np.random.default_rng(7).integers(0, size // PAGE - 32, reads).tolist():
        yield first * PAGE, (first + 32) * PAGE
    yield from pieces(0, size // 3)


ONE_FILE: dict[str, Callable[[int, int], Spans]] = {
    "in-order": in_order,
    "copied": copied,
    "backward": backward,
    "skip-3-of-4": skip_3_of_4,
    "random": random,
    "every-page": every_page,
    "strided": strided,
    "switch": switch,
    "any-length": any_length,
    "record-ends": record_ends,
    "short-walks": short_walks,
}


def read_one(directory: Path, reads: int, reading: Reading, pattern: str, advice: str) -> None:
    """One process, the directory's file."""
    (path,) = directory.iterdir()
    data = mapped(path)
    if advice:
        data._mmap.madvise(getattr(mmap, advice))
    spans = ONE_FILE[pattern](len(data), reads)
    if pattern == "copied":
        for first, end in spans:
            reading.add(bytes(data._mmap[first:end]))
        return
    read(data, spans, reading)


# ---- several processes -----------------------------------------------------------------------


def chase(path: Path, number: int, reads: int) -> int:
    """What is in a page tells which is next."""
    data = np.memmap(path, np.uint64, mode="r")
    pages, words = len(data) * 8 // PAGE, PAGE // 8
    page, crc = number * pages // CHASERS, 0
    for step in range(reads):
        value = int(data[page * words + step % words])
        crc = zlib.crc32(value.to_bytes(8, "little"), crc)
        page = value % pages
    return crc


def digest(path: Path, spans: Callable[[int], Spans]) -> int:
    """Of these parts of a file."""
    data = mapped(path)
    crc = 0
    for first, end in spans(len(data)):
        crc = zlib.crc32(data[first:end], crc)
    return crc


def read_chased(directory: Path, reads: int, reading: Reading) -> None:
    """CHASERS processes follow pointers through one file."""
    (path,) = directory.iterdir()
    together([lambda n=n: chase(path, n, reads) for n in range(CHASERS)], reading)


def takes_turns(path: Path, rank: int, reads: int) -> int:
    """The records of a rank, and a rest after each batch."""
    data, crc = mapped(path), 0
    for number in range(min(reads, len(data) // TURN // RANKS)):
        at = (number * RANKS + rank) * TURN
        crc = zlib.crc32(data[at : at + TURN], crc)
        if number % BATCH == BATCH - 1:
            time.sleep(0.95 * BATCH * TURN * RANKS / LINK_BYTES_PER_SECOND)
    return crc


def read_in_turns(directory: Path, reads: int, reading: Reading) -> None:
    """RANKS processes skip each other's records, and compute in between."""
    (path,) = directory.iterdir()
    together([lambda n=n: takes_turns(path, n, reads) for n in range(RANKS)], reading)


def read_beside(directory: Path, reads: int, reading: Reading) -> None:
    """A process goes through values.dat, another one reads pages of index.idx at random."""
    walk = lambda size: pieces(0, size)  # noqa: E731
    jump = lambda size: random(size, reads)  # noqa: E731
    together(
        [
            lambda: digest(directory / "values.dat", walk),
            lambda: digest(directory / "index.idx", jump),
        ],
        reading,
    )


# ---- one process, several files --------------------------------------------------------------


def read_indexed(directory: Path, reads: int, reading: Reading) -> None:
    """A page of index.idx at random, the next part of values.dat, and so on."""
    index, values = mapped(directory / "index.idx"), mapped(directory / "values.dat")
    part = len(values) // reads // PAGE * PAGE
    spans = random(len(index), reads)
    for number, (first, end) in enumerate(spans):
        reading.add(index[first:end])
        read(values, pieces(number * part, (number + 1) * part), reading)


def read_whole(directory: Path, reads: int, reading: Reading) -> None:
    """Files whole, each mapped and let go of."""
    for path in sorted(directory.iterdir())[:reads]:
        data = mapped(path)
        read(data, pieces(0, len(data)), reading)


def read_one_place(directory: Path, reads: int, reading: Reading) -> None:
    """Of each file the one part that is no hole: its name tells where."""
    for path in sorted(directory.iterdir())[:reads]:
        first, end = map(int, path.stem.split("-")[1:])
        reading.add(mapped(path)[first:end])


FILES: dict[str, Callable[[Path, int, Reading], None]] = {
    "chase": read_chased,
    "beside": read_beside,
    "turns-and-computes": read_in_turns,
    "indexed": read_indexed,
    "whole": read_whole,
    "one-place": read_one_place,
}


def main() -> None:
    """Read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--pattern", choices=(*ONE_FILE, *FILES), required=True)
    parser.add_argument("--reads", type=int, required=True)
    parser.add_argument("--advice", default="", help="MADV_RANDOM ...")
    args = parser.parse_args()
    with Reading() as reading:
        if args.pattern in FILES:
            FILES[args.pattern](args.directory, args.reads, reading)
        else:
            read_one(args.directory, args.reads, reading, args.pattern, args.advice)


if __name__ == "__main__":
    main()
