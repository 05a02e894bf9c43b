# SPDX-License-Identifier: Apache-2.0
"""Data sets over record files as their users write them, and the files that they read.

``make_formatted(path, n, rng)`` and the like write a database of n samples with py-lmdb,
``Formatted(path)`` and the like read it: torch Datasets that open it in the process that reads,
and can be pickled. A sample is (CRC of all bytes of its record, a label): both collate. ``KINDS``
has all of them by name; ``keys_read()`` tells which keys a data set asks for.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
import pyarrow as pa
from torch.utils.data import Dataset

#: Bytes of a record, least and most.
SIZES = (1 << 10, 200 << 10)


# ---- writing ------------------------------------------------------------------------------------


def values(n: int, rng: np.random.Generator, sizes: tuple[int, int]) -> Iterator[bytes]:
    for size in rng.integers(sizes[0], sizes[1] + 1, n).tolist():
        yield rng.bytes(size)


def write(path: Path, items: Iterator[tuple[bytes, bytes]], n: int, sizes: tuple[int, int]) -> None:
    """A database in the directory ``path``."""
    room = (n + 1) * (sizes[1] + 16384) + (16 << 20)
    with lmdb.open(str(path), map_size=room, sync=False) as env, env.begin(write=True) as txn:
        for key, value in items:
            txn.put(key, value)


def names(n: int, rng: np.random.Generator) -> list[str]:
    """Paths of image files of some classes, in no order."""
    classes = [f"n{number:08d}" for number in rng.integers(1_000_000, 9_999_999, 10)]
    picked = rng.integers(0, len(classes), n)
    found = [f"{classes[c]}/{classes[c]}_{i}.JPEG" for i, c in enumerate(picked.tolist())]
    return [found[i] for i in rng.permutation(n).tolist()]


def make_formatted(
    path: Path, n: int, rng: np.random.Generator, sizes: tuple[int, int] = SIZES
) -> None:
    def items() -> Iterator[tuple[bytes, bytes]]:
        for number, value in enumerate(values(n, rng, sizes), 1):
            yield b"image-%09d" % number, value
            yield b"label-%09d" % number, str(number * 7).encode()
        yield b"num-samples", str(n).encode()

    write(path, items(), n, sizes)


def make_pickled(
    path: Path, n: int, rng: np.random.Generator, sizes: tuple[int, int] = SIZES
) -> None:
    keys = [name.encode("ascii") for name in names(n, rng)]

    def items() -> Iterator[tuple[bytes, bytes]]:
        for number, (key, value) in enumerate(zip(keys, values(n, rng, sizes), strict=True)):
            yield key, pickle.dumps((value, number))
        yield b"__keys__", pickle.dumps(keys)
        yield b"__len__", pickle.dumps(n)

    write(path, items(), n, sizes)


def make_hashed(
    path: Path, n: int, rng: np.random.Generator, sizes: tuple[int, int] = SIZES, hash: str = "sha1"
) -> None:
    paths = names(n, rng)

    def items() -> Iterator[tuple[bytes, bytes]]:
        for name, value in zip(paths, values(n, rng, sizes), strict=True):
            yield hashlib.new(hash, name.encode()).hexdigest().encode(), value

    write(path, items(), n, sizes)
    (path / "files.txt").write_text("".join(f"{name}\n" for name in paths))


def make_unpadded(
    path: Path, n: int, rng: np.random.Generator, sizes: tuple[int, int] = SIZES
) -> None:
    def items() -> Iterator[tuple[bytes, bytes]]:
        for number, value in enumerate(values(n, rng, sizes)):
            yield str(number).encode(), value
        yield b"length", str(n).encode()

    write(path, items(), n, sizes)


def make_npy(path: Path, n: int, rng: np.random.Generator, sizes: tuple[int, int] = SIZES) -> None:
    """Rows of the largest size."""
    path.mkdir()
    np.save(path / "data.npy", rng.integers(0, 256, (n, sizes[1]), np.uint8))


def make_arrow(
    path: Path, n: int, rng: np.random.Generator, sizes: tuple[int, int] = SIZES
) -> None:
    path.mkdir()
    schema = pa.schema([("image", pa.binary()), ("label", pa.int64())])
    with pa.OSFile(str(path / "data.arrow"), "wb") as sink, pa.ipc.new_file(sink, schema) as file:
        for first in range(0, n, 100):
            some = list(values(min(100, n - first), rng, sizes))
            labels = list(range(first, first + len(some)))
            file.write(pa.record_batch([some, pa.array(labels, pa.int64())], schema=schema))


# ---- reading ------------------------------------------------------------------------------------


class LmdbDataset(Dataset):
    """What all of them do: the environment is opened by the process that reads."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.env: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"env": None}

    def open(self) -> Any:
        return lmdb.open(
            self.path, readonly=True, lock=False, readahead=False, meminit=False, max_readers=32
        )

    def get(self, key: bytes) -> bytes:
        if self.env is None:
            self.env = self.open()
        with self.env.begin(write=False) as txn:
            return txn.get(key)


class Formatted(LmdbDataset):
    """Keys made of the sample's number, from 1: image-000000001, and a label beside each."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        with self.open() as env, env.begin(write=False) as txn:
            self.nSamples = int(txn.get(b"num-samples"))

    def __len__(self) -> int:
        return self.nSamples

    def __getitem__(self, index: int) -> tuple[int, int]:
        index += 1
        image = self.get(b"image-%09d" % index)
        label = self.get(b"label-%09d" % index)
        return zlib.crc32(image), int(label)


class Pickled(LmdbDataset):
    """A list of keys, in an order of its own, stored in the database itself."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        with self.open() as env, env.begin(write=False) as txn:
            self.length = pickle.loads(txn.get(b"__len__"))
            self.keys = pickle.loads(txn.get(b"__keys__"))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        image, label = pickle.loads(self.get(self.keys[index]))
        return zlib.crc32(image), label


class Hashed(LmdbDataset):
    """Keys are hashes of the paths of a list."""

    hash = "sha1"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        with open(os.path.join(self.path, "files.txt")) as listed:
            self.paths = listed.read().splitlines()
        classes = sorted({path.split("/")[0] for path in self.paths})
        self.class_to_index = {name: number for number, name in enumerate(classes)}

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[int, int]:
        path = self.paths[index]
        key = hashlib.new(self.hash, path.encode("utf-8")).hexdigest()
        label = self.class_to_index[path.split("/")[0]]
        return zlib.crc32(self.get(key.encode("ascii"))), label


class Unpadded(LmdbDataset):
    """Keys are the number as it is written, which sort as text: 0, 1, 10, 11, 2."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        with self.open() as env, env.begin(write=False) as txn:
            self.length = int(txn.get(b"length").decode("utf-8"))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        return zlib.crc32(self.get(f"{index}".encode())), index


class Npy(Dataset):
    """Rows of a mapped .npy file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.file = os.path.join(os.fspath(path), "data.npy")
        self.rows: Any = None
        self.length = len(np.load(self.file, mmap_mode="r"))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"rows": None}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        if self.rows is None:
            self.rows = np.load(self.file, mmap_mode="r")
        return zlib.crc32(self.rows[index]), index


class Arrow(Dataset):
    """Rows of a mapped Arrow file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.file = os.path.join(os.fspath(path), "data.arrow")
        self.table: Any = None
        self.length = len(self.open())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"table": None}

    def open(self) -> Any:
        return pa.ipc.open_file(pa.memory_map(self.file)).read_all()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        if self.table is None:
            self.table = self.open()
        image = self.table["image"][index].as_buffer()
        return zlib.crc32(image), self.table["label"][index].as_py()


class Kind(NamedTuple):
    make: Callable[..., None]
    dataset: Callable[[Path], Any]
    file: str  # in the directory


KINDS = {
    "formatted": Kind(make_formatted, Formatted, "data.mdb"),
    "pickled": Kind(make_pickled, Pickled, "data.mdb"),
    "hashed": Kind(make_hashed, Hashed, "data.mdb"),
    "unpadded": Kind(make_unpadded, Unpadded, "data.mdb"),
    "npy": Kind(make_npy, Npy, "data.npy"),
    "arrow": Kind(make_arrow, Arrow, "data.arrow"),
}


# ---- the truth ----------------------------------------------------------------------------------


def keys_read(dataset: LmdbDataset, sample: int) -> list[bytes]:
    """The keys that it asks its database for to read a sample."""
    asked: list[bytes] = []
    own, get = "get" in dataset.__dict__, dataset.get

    def noted(key: bytes) -> bytes:
        asked.append(key)
        return get(key)

    assert not own
    dataset.get = noted  # type: ignore[method-assign]
    try:
        dataset[sample]
    finally:
        del dataset.get
    return asked
