# SPDX-License-Identifier: Apache-2.0
"""A tree of small files, each read whole: `small_files.py DIR --reader NAME [--reads N]`.

Commands, Python, and PyTorch's loader. What is taken in is each file's name and CRC-32, sorted by
name, or what the command prints, sorted by line: whoever reads in another order reads the same. A
command's output goes to memory, and is taken in when the clock has stopped.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from reading import Reading, read_as_told
from streams import in_memory

BATCH, RANKS = 32, 4
Reader = Callable[[Path, int, Reading], None]


def take_in(found: Iterable[tuple[str, int, int]], reading: Reading) -> None:
    """Name, CRC-32 and bytes of each file."""
    for name, crc, count in sorted(found):
        reading.add(f"{name} {crc:08x} {count}\n".encode())


def crc_of(path: Path | str) -> tuple[int, int]:
    """Of a file that is read whole, and its bytes."""
    with open(path, "rb") as file:
        data = file.read()
    return zlib.crc32(data), len(data)


def all_files(directory: Path) -> list[Path]:
    """As os.walk() comes upon them."""
    return [Path(base) / name for base, _, names in os.walk(directory) for name in names]


# ---- commands --------------------------------------------------------------------------------


def shell(line: str) -> Reader:
    """What a command line prints, as many times as there are reads, or once."""

    def read(directory: Path, reads: int, reading: Reading) -> None:
        printed = [
            subprocess.run(
                ["sh", "-c", line], cwd=directory, stdout=subprocess.PIPE, check=True,
                env={**os.environ, "LC_ALL": "C"},
            ).stdout
            for _ in range(reads or 1)
        ]  # fmt: skip
        reading.end()
        for one in printed:
            reading.add(b"".join(sorted(one.splitlines(keepends=True))))

    return read


def copied(*words: str) -> Reader:
    """What a command copies of the tree to the directory that is its last word."""

    def read(directory: Path, reads: int, reading: Reading) -> None:
        with in_memory() as scratch:
            subprocess.run([*words, ".", f"{scratch}/copy"], cwd=directory, check=True)
            reading.end()
            copy = Path(scratch) / "copy"
            take_in(
                ((str(path.relative_to(copy)), *crc_of(path)) for path in all_files(copy)), reading
            )

    return read


def by_tar(directory: Path, reads: int, reading: Reading) -> None:
    """An archive of them all. (GNU tar that writes to /dev/null itself reads nothing.)"""
    with in_memory() as scratch:
        out = Path(scratch) / "out"
        subprocess.run(
            ["sh", "-c", 'tar -cf - . | cat > "$0"', str(out)], cwd=directory, check=True
        )
        reading.end()
        found = []
        with tarfile.open(out) as archive:
            for member in archive:
                file = archive.extractfile(member)
                if file is not None:
                    data = file.read()
                    found.append((member.name, zlib.crc32(data), len(data)))
        take_in(found, reading)


# ---- Python ----------------------------------------------------------------------------------


def in_order_of(order: Callable[[Path], list[Path]]) -> Reader:
    """One after the other."""

    def read(directory: Path, reads: int, reading: Reading) -> None:
        take_in(
            [(str(path.relative_to(directory)), *crc_of(path)) for path in order(directory)],
            reading,
        )

    return read


def by_class(directory: Path) -> list[Path]:
    """As torchvision's ImageFolder has them: by directory, by name."""
    return [
        Path(base) / name
        for one in sorted(entry.name for entry in os.scandir(directory))
        for base, _, names in sorted(os.walk(directory / one))
        for name in sorted(names)
    ]


def shuffled(directory: Path) -> list[Path]:
    """In an order that nobody is told."""
    paths = sorted(all_files(directory))
    random.Random(3).shuffle(paths)
    return paths


def by_shards(directory: Path, reads: int, reading: Reading) -> None:
    """Archives one after the other, each as a stream, as WebDataset has them."""
    for path in sorted(directory.iterdir()):
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                if member.isfile():
                    content: Any = archive.extractfile(member)
                    reading.add(content.read())


# ---- PyTorch ---------------------------------------------------------------------------------


class Folder:
    """A data set with torchvision's attributes of a DatasetFolder; a sample is a file's CRC-32."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.classes = sorted(entry.name for entry in os.scandir(root))
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self.samples = [(str(path), self.class_to_idx[path.parent.name]) for path in by_class(root)]
        self.targets = [target for _, target in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[int, int]:
        path, target = self.samples[index]
        return crc_of(path)[0], target


def by_loader(workers: int) -> Reader:
    """An epoch of a shuffling DataLoader."""

    def read(directory: Path, reads: int, reading: Reading) -> None:
        import torch
        from torch.utils.data import DataLoader

        seeded = torch.Generator().manual_seed(3)
        folder: Any = Folder(directory)
        loader = DataLoader(
            folder, batch_size=BATCH, shuffle=True, generator=seeded, num_workers=workers
        )
        for batch in loader:
            for values in batch:
                reading.add_tensor(values)

    return read


def by_ranks(directory: Path, reads: int, reading: Reading) -> None:
    """The part of an epoch of each of four ranks, by torchrun; from the first that begins to the
    last that ends."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += [f"--nproc-per-node={RANKS}", __file__, str(directory), "--reader=rank"]
    printed = subprocess.run(
        words, stdout=subprocess.PIPE, check=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    ).stdout  # fmt: skip
    ranks = [json.loads(line) for line in printed.splitlines() if line.startswith(b"{")]
    reading.end()
    reading.begin_ns = min(rank["begin_ns"] for rank in ranks)
    reading.end_ns = max(rank["end_ns"] for rank in ranks)
    for digest in sorted(rank["digest"] for rank in ranks):
        reading.add(digest.encode())


def by_rank(directory: Path, reads: int, reading: Reading) -> None:
    """One of them."""
    import torch.distributed as distributed
    from torch.utils.data import DataLoader, DistributedSampler

    distributed.init_process_group("gloo")
    folder: Any = Folder(directory)
    sampler: Any = DistributedSampler(folder, shuffle=True, seed=3)
    distributed.barrier()
    reading.begin()
    for batch in DataLoader(folder, batch_size=BATCH, sampler=sampler):
        for values in batch:
            reading.add_tensor(values)
    reading.end()
    distributed.barrier()
    distributed.destroy_process_group()


READERS: dict[str, tuple[str, Reader]] = {
    "tar": ("zlib", by_tar),
    "md5sum": ("zlib", shell("md5sum */*")),
    "cp": ("zlib", copied("cp", "-r")),
    "rsync": ("zlib", copied("rsync", "-a")),
    "grep": ("zlib", shell("grep -rac e .")),
    "xargs": ("zlib", shell("find . -type f -print0 | xargs -0 -n 20 -P 4 md5sum")),
    "walk": ("zlib", in_order_of(all_files)),
    "classes": ("zlib", in_order_of(by_class)),
    "shuffled": ("zlib", in_order_of(shuffled)),
    "shards": ("zlib", by_shards),
    "ranks": ("zlib", by_ranks),
    "rank": ("torch.utils.data", by_rank),
    **{
        f"loader-{workers}": ("torch.utils.data", by_loader(workers))
        for workers in (0, 2, 4, 8, 16)
    },
}


if __name__ == "__main__":
    read_as_told(READERS)
