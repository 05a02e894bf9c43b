# SPDX-License-Identifier: Apache-2.0
"""The directory's file by read(2) and pread(2): `streams.py DIR --reader NAME [--reads N]`.

Commands, Python, libraries; in order, in another order, and as nobody should be helped. A command's
output goes to memory, and is taken in when the clock has stopped.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reading import Reading, read_as_told

PAGE, KIB, MIB = 4096, 1 << 10, 1 << 20
PIECE = 64 * KIB
#: Words of a command: the file, which is in its working directory, and where its output goes.
FILE, OUT = "{file}", "{out}"
THREADS = 4
#: Between two reads of a thread of a crowd.
BUSY_EVERY_SECONDS = 0.1
Reader = Callable[[Path, int, Reading], None]


def the_file(directory: Path) -> Path:
    """The only one."""
    (path,) = directory.iterdir()
    return path


def in_memory() -> tempfile.TemporaryDirectory[str]:
    """A directory for what comes out."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def pieces(path: Path, size: int) -> Iterator[bytes]:
    """A file's bytes, by unbuffered read(2)."""
    with open(path, "rb", buffering=0) as file:
        while data := file.read(size):
            yield data


def command(*words: str) -> Reader:
    """One that reads the file; its output is OUT, if it is told that, or what it prints."""

    def read(directory: Path, reads: int, reading: Reading) -> None:
        with in_memory() as scratch:
            out = Path(scratch) / "out"
            places = {FILE: the_file(directory).name, OUT: str(out)}
            told = [word.format(file=places[FILE], out=places[OUT]) for word in words]
            done = subprocess.run(told, cwd=directory, stdout=subprocess.PIPE, check=True)
            reading.end()
            reading.add(done.stdout)
            if out.exists():
                for data in pieces(out, MIB):
                    reading.add(data)

    return read


# ---- in order --------------------------------------------------------------------------------


def by_read(size: int) -> Reader:
    """read(2) of so many bytes, as many times through the file as there are reads, or once."""

    def read(directory: Path, reads: int, reading: Reading) -> None:
        for _ in range(reads or 1):
            for data in pieces(the_file(directory), size):
                reading.add(data)

    return read


def spans_by_pread(path: Path, spans: Iterator[tuple[int, int]]) -> Iterator[bytes]:
    """(offset, length) by pread(2)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        for offset, length in spans:
            yield os.pread(fd, length, offset)
    finally:
        os.close(fd)


def steps(first: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """[first, end) in pieces of a size."""
    return ((at, min(size, end - at)) for at in range(first, end, size))


def by_pread(size: int) -> Reader:
    """pread(2) of so many bytes."""

    def read(directory: Path, reads: int, reading: Reading) -> None:
        path = the_file(directory)
        for data in spans_by_pread(path, steps(0, path.stat().st_size, size)):
            reading.add(data)

    return read


def at_once(directory: Path, reads: int, reading: Reading) -> None:
    """All of it by one call."""
    with open(the_file(directory), "rb") as file:
        data = file.read()
    reading.end()
    reading.add(data)


def by_threads(directory: Path, reads: int, reading: Reading) -> None:
    """Four at a time, each of them a quarter, by pread."""
    path = the_file(directory)
    size = path.stat().st_size
    ends = [size * number // THREADS for number in range(THREADS + 1)]
    found = [0] * THREADS

    def quarter(number: int) -> None:
        for data in spans_by_pread(path, steps(ends[number], ends[number + 1], PIECE)):
            found[number] = zlib.crc32(data, found[number])

    threads = [threading.Thread(target=quarter, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for crc in found:
        reading.add(crc.to_bytes(4, "little"))


# ---- libraries -------------------------------------------------------------------------------


def parquet_groups(directory: Path, reads: int, reading: Reading) -> None:
    """A row group after the other."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(the_file(directory)) as file:
        for number in range(file.num_row_groups):
            for column in file.read_row_group(number).columns:
                for chunk in column.chunks:
                    reading.add(chunk.buffers()[1])


def arrow_file(directory: Path, reads: int, reading: Reading) -> None:
    """An Arrow file that is not mapped."""
    import pyarrow as pa

    with pa.OSFile(str(the_file(directory))) as source, pa.ipc.open_file(source) as file:
        for number in range(file.num_record_batches):
            for column in file.get_batch(number).columns:
                reading.add(column.buffers()[1])


def hdf5_chunks(directory: Path, reads: int, reading: Reading) -> None:
    """A chunk after the other."""
    import h5py

    with h5py.File(the_file(directory), "r") as file:
        data = file["x"]
        for number in range(len(data)):
            reading.add(data[number])


def by_numpy(load: str) -> Reader:
    """All of it, by np.load or np.fromfile."""

    def read(directory: Path, reads: int, reading: Reading) -> None:
        import numpy as np

        array = np.load(the_file(directory)) if load == "load" else np.fromfile(the_file(directory))
        reading.end()
        reading.add(array)

    return read


def by_torch(directory: Path, reads: int, reading: Reading) -> None:
    """A checkpoint that is not mapped."""
    import torch

    state: dict[str, Any] = torch.load(the_file(directory), mmap=False)
    reading.end()
    for tensor in state.values():
        reading.add_tensor(tensor)


# ---- as nobody should be helped --------------------------------------------------------------


def random_pieces(directory: Path, reads: int, reading: Reading) -> None:
    """Pieces of 64 KiB, each once, anywhere."""
    path = the_file(directory)
    places = random.Random(3).sample(range(path.stat().st_size // PIECE), reads)
    for data in spans_by_pread(path, ((place * PIECE, PIECE) for place in places)):
        reading.add(data)


def chase(directory: Path, reads: int, reading: Reading) -> None:
    """What is in a page tells which is next."""
    path = the_file(directory)
    pages, page, seen = path.stat().st_size // PAGE, 0, set[int]()
    fd = os.open(path, os.O_RDONLY)
    for _ in range(reads):
        while page in seen:
            page = (page + 1) % pages
        seen.add(page)
        data = os.pread(fd, PAGE, page * PAGE)
        reading.add(data)
        page = int.from_bytes(data[:8], "little") % pages
    os.close(fd)


def thrown_away(directory: Path, reads: int, reading: Reading) -> None:
    """As many times through the file as there are reads; what was read is not to be kept."""
    fd = os.open(the_file(directory), os.O_RDONLY)
    for _ in range(reads):
        os.lseek(fd, 0, os.SEEK_SET)
        for number in itertools.count():
            data = os.read(fd, MIB)
            if not data:
                break
            reading.add(data)
            os.posix_fadvise(fd, number * MIB, MIB, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def a_tenth(directory: Path, reads: int, reading: Reading) -> None:
    """The first tenth, in order."""
    path = the_file(directory)
    end = path.stat().st_size // 10
    for data in spans_by_pread(path, steps(0, end, PIECE)):
        reading.add(data)


def member(threads: int, busy: bool, gate: int, told: int) -> None:
    """A process of a crowd: threads that wait for a lock, or read a page in memory now and then,
    and one that waits for a pipe."""
    locked = threading.Lock()
    locked.acquire()
    fd = os.open(sys.executable, os.O_RDONLY)

    def read_on() -> None:
        while not locked.acquire(timeout=BUSY_EVERY_SECONDS):
            os.pread(fd, PAGE, 0)

    for _ in range(threads - 1):
        threading.Thread(target=read_on if busy else locked.acquire, daemon=True).start()
    os.write(told, b".")
    os.read(gate, 1)
    os._exit(0)


def beside(processes: int, threads: int, busy: bool = False) -> Reader:
    """As by_read(), in memory; beside it there is a crowd that waits for nothing of storage."""

    def read(directory: Path, reads: int, reading: Reading) -> None:
        gate, hold = os.pipe()
        ready, told = os.pipe()
        children = []
        for _ in range(processes):
            child = os.fork()
            if child == 0:
                os.close(hold)
                member(threads, busy, gate, told)
            children.append(child)
        for _ in children:
            os.read(ready, 1)
        reading.begin()
        by_read(PIECE)(directory, reads, reading)
        reading.end()
        os.close(hold)
        for child in children:
            os.waitpid(child, 0)

    return read


def dd(size: str) -> Reader:
    """By dd, in blocks of a size."""
    return command("dd", f"if={FILE}", f"of={OUT}", f"bs={size}", "status=none")


READERS: dict[str, tuple[str, Reader]] = {
    "dd-4k": ("zlib", dd("4k")),
    "dd-64k": ("zlib", dd("64k")),
    "dd-4M": ("zlib", dd("4M")),
    "sha1sum": ("zlib", command("sha1sum", FILE)),
    "cp": ("zlib", command("cp", FILE, OUT)),
    "zstd": ("zlib", command("zstd", "-dq", FILE, "-o", OUT)),
    "wc": ("zlib", command("wc", "-l", FILE)),
    "read": ("zlib", by_read(PIECE)),
    "read-all": ("zlib", at_once),
    "pread-64k": ("zlib", by_pread(PIECE)),
    "pread-4M": ("zlib", by_pread(4 * MIB)),
    "threads": ("zlib", by_threads),
    "parquet-groups": ("pyarrow.parquet", parquet_groups),
    "arrow-file": ("pyarrow", arrow_file),
    "hdf5-chunks": ("h5py", hdf5_chunks),
    "np-load": ("numpy", by_numpy("load")),
    "np-fromfile": ("numpy", by_numpy("fromfile")),
    "torch-load": ("torch", by_torch),
    "random": ("zlib", random_pieces),
    "chase": ("zlib", chase),
    "dontneed": ("zlib", thrown_away),
    "tenth": ("zlib", a_tenth),
    "crowd": ("zlib", beside(32, 8)),
    "crowd-busy": ("zlib", beside(32, 8, busy=True)),
    "crowd-large": ("zlib", beside(128, 32)),
}


if __name__ == "__main__":
    read_as_told(READERS)
