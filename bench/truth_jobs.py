# SPDX-License-Identifier: Apache-2.0
"""The jobs of bench/truth.py: `truth_jobs.py NAME FILE`, `truth_jobs.py --make KIND FILE`.

Each maps FILE and comes to its bytes in a way of its own; it prints how long that took and a digest
of what it has read.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4 * KIB
RECORD = 256 * KIB
#: Of LMDB, and of images: as in the data sets that they stand for.
RECORD_MOST, IMAGE = 192 * KIB, 518 * KIB
COLUMNS, GROUPS, WANTED = 20, 16, (3, 11)
Pieces = Iterator[tuple[int, int]]
#: Mappings stay until the process ends, as those of most programs do.
KEPT: list[Any] = []


def mapping(path: str, advice: int | None = None) -> mmap.mmap:
    """The whole file, read only."""
    with open(path, "rb") as file:
        found = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    KEPT.append(found)
    if advice is not None:
        import numpy

        # as a static program says it: by the system call, which nobody stands before
        number = {"x86_64": 28, "aarch64": 233}[platform.machine()]
        at = numpy.frombuffer(found, numpy.uint8).ctypes.data
        if ctypes.CDLL(None, use_errno=True).syscall(
            number, ctypes.c_void_p(at), ctypes.c_size_t(len(found)), advice
        ):
            raise OSError(ctypes.get_errno(), "madvise")
    return found


def digest(data: mmap.mmap, pieces: Pieces) -> str:
    """Of one byte of each page."""
    found = hashlib.blake2b(digest_size=8)
    for start, end in pieces:
        found.update(data[start:end:PAGE])
    return found.hexdigest()


def in_order(size: int, step: int = MIB) -> Pieces:
    """One after the other."""
    return ((at, min(size, at + step)) for at in range(0, size, step))


def resting(pieces: Pieces, each_bytes: int, seconds: float) -> Pieces:
    """As an accelerator would let a job rest after so many bytes."""
    left = each_bytes
    for start, end in pieces:
        yield start, end
        left -= end - start
        if left <= 0:
            time.sleep(seconds)
            left = each_bytes


def shuffled(size: int, step: int, count: int | None = None, length: int | None = None) -> Pieces:
    """Pieces at multiples of ``step``, each once."""
    places = list(range(0, size - (length or step) + 1, step))
    random.Random(7).shuffle(places)
    return ((at, at + (length or step)) for at in places[:count])


def columns(data: mmap.mmap, said: bool) -> str:
    """Two of twenty columns, group by group; ``said``: that all is needed, as Arrow does."""
    if said:
        data.madvise(mmap.MADV_WILLNEED)
    chunk = len(data) // (COLUMNS * GROUPS)
    starts = [(group * COLUMNS + one) * chunk for one in WANTED for group in range(GROUPS)]
    return digest(data, ((at, at + chunk) for at in starts))


def ranks(path: str, pieces: Callable[[int, int], Pieces], count: int = 4) -> str:
    """So many processes, each with a mapping and pieces of its own."""
    ends = []
    for rank in range(count):
        read, write = os.pipe()
        if not os.fork():
            data = mapping(path)
            os.write(write, digest(data, pieces(rank, len(data))).encode())
            os._exit(0)
        os.close(write)
        ends.append(read)
    found = "".join(os.read(end, 64).decode() for end in ends)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return found


def quarters(rank: int, size: int) -> Pieces:
    """The rank's own fourth."""
    part = size // 4
    return ((at, at + MIB) for at in range(rank * part, (rank + 1) * part, MIB))


def skipping(rank: int, size: int) -> Pieces:
    """Every fourth record."""
    return ((at, at + RECORD) for at in range(rank * RECORD, size, 4 * RECORD))


def lmdb_shuffled(path: str) -> str:
    """All records by their keys, in an order that nobody knows."""
    import lmdb

    found = hashlib.blake2b(digest_size=8)
    env = lmdb.open(path, subdir=False, readonly=True, lock=False)
    KEPT.append(env)
    with env.begin(buffers=True) as reading:
        order = list(range(env.stat()["entries"]))
        random.Random(7).shuffle(order)
        for one in order:
            found.update(bytes(reading.get(b"%08d" % one))[::PAGE])
    return found.hexdigest()


def of(size: Callable[[int], Pieces], advice: int | None = None) -> Callable[[str], str]:
    """A job of one process and mapping."""

    def job(path: str) -> str:
        data = mapping(path, advice)
        return digest(data, size(len(data)))

    return job


def two_pages(size: int) -> Pieces:
    """As glibc's memcpy of large pieces goes: two pages in turn, half of each and then the rest."""
    for at in range(0, size, 2 * PAGE):
        yield at, at + 1
        yield at + PAGE, at + PAGE + 1


def burst(size: int) -> Pieces:
    return resting(in_order(size), 8 * MIB, 0.03)


#: name -> (kind of its file, job)
JOBS: dict[str, tuple[str, Callable[[str], str]]] = {
    "in-order": ("bytes", of(in_order)),
    "in-order-bursts": ("bytes", of(burst)),
    "in-order-steadily": ("bytes", of(lambda n: resting(in_order(n, 128 * KIB), 128 * KIB, 4e-4))),
    "in-order-slowly": ("small", of(lambda n: resting(in_order(n, 128 * KIB), 128 * KIB, 4e-3))),
    "in-order-two-pages": ("bytes", of(two_pages)),
    "skipping": ("bytes", of(lambda n: ((at, at + RECORD) for at in range(0, n, 4 * RECORD)))),
    "backward-pages": ("bytes", of(lambda n: ((at, at + 1) for at in range(n - PAGE, -1, -PAGE)))),
    "backward-slices": ("bytes", of(lambda n: ((at, at + MIB) for at in range(n - MIB, -1, -MIB)))),
    "random-pages": ("bytes", of(lambda n: shuffled(n, 64 * KIB, 300, 1))),
    "random-records": ("bytes", of(lambda n: shuffled(n, 128 * KIB))),
    "madv-random-in-order": ("small", of(in_order, mmap.MADV_RANDOM)),
    "madv-random-pages": ("small", of(lambda n: shuffled(n, PAGE), mmap.MADV_RANDOM)),
    "lmdb-shuffled": ("lmdb", lmdb_shuffled),
    "columns-said": ("columns", lambda path: columns(mapping(path), True)),
    "columns": ("columns", lambda path: columns(mapping(path), False)),
    "images": ("columns", of(lambda n: shuffled(n, IMAGE, 150))),
    "one-page-of-2MiB": ("columns", of(lambda n: ((at, at + 1) for at in range(0, n, 2 * MIB)))),
    "ranks-quarters": ("bytes", lambda path: ranks(path, quarters)),
    "ranks-skipping": ("bytes", lambda path: ranks(path, skipping)),
}
SIZES = {"bytes": 192 * MIB, "small": 24 * MIB, "columns": 400 * MIB, "lmdb": 96 * MIB}


def make(kind: str, path: Path) -> None:
    """Bytes that differ from page to page."""
    size = SIZES[kind]
    if kind == "lmdb":
        import lmdb

        chance, total, number = random.Random(5), 0, 0
        with (
            lmdb.open(str(path), subdir=False, map_size=2 * size) as env,
            env.begin(write=True) as t,
        ):
            while total < size:
                length = chance.randrange(12 * KIB, RECORD_MOST)
                t.put(b"%08d" % number, chance.randbytes(64) * (length // 64))
                total, number = total + length, number + 1
        return
    chance = random.Random(3)
    with open(path, "wb") as file:
        for _ in range(0, size, MIB):
            file.write(b"".join(chance.randbytes(64) * (PAGE // 64) for _ in range(MIB // PAGE)))


def main(name: str, path: str) -> None:
    """Run one."""
    job = JOBS[name][1]
    began = time.monotonic()
    found = job(path)
    print(json.dumps({"seconds": time.monotonic() - began, "digest": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
