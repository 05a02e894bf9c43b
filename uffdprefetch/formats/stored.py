# SPDX-License-Identifier: Apache-2.0
"""An index as a file that many processes map: written once, verified on reading.

Magic, length and SHA-256 of a header, the header (JSON: key, index.describe(), offsets of the
arrays), the arrays. Native byte order: such a file never leaves its node.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from uffdprefetch.formats.index import RecordIndex, describe, rebuild
from uffdprefetch.formats.reader import Array

MAGIC = b"UPINDEX1"
_PRELUDE = struct.Struct("=8sQ32s")
_ALIGNED = 64
HEADER_MAX_BYTES = 64 << 20
_KINDS = {kind: np.dtype(kind) for kind in ("int64", "uint32", "uint16", "uint8")}

#: Identifies the indexed file and options; compared as a whole.
Key = Mapping[str, Any]


def _layout(key: Key, index: RecordIndex) -> tuple[bytes, dict[str, int], int]:
    """(the header, each array's offset after it, bytes after it)."""
    places, listed, at = {}, [], 0
    for name, array in index.arrays().items():
        at = -(-at // _ALIGNED) * _ALIGNED
        places[name] = at
        listed.append([name, array.dtype.name, len(array), at])
        at += array.nbytes
    header = {"key": dict(key), "index": describe(index), "arrays": listed, "bytes": at}
    return json.dumps(header).encode(), places, at


def _data_begins(header_bytes: int) -> int:
    return -(-(_PRELUDE.size + header_bytes) // _ALIGNED) * _ALIGNED


def file_bytes(key: Key, index: RecordIndex) -> int:
    """The size of the file that write() makes."""
    header, _, data_bytes = _layout(key, index)
    return _data_begins(len(header)) + data_bytes


def write(fd: int, key: Key, index: RecordIndex) -> None:
    """Write an index to an empty file and sync it. Raises OSError."""
    header, places, data_bytes = _layout(key, index)
    begins = _data_begins(len(header))
    prelude = _PRELUDE.pack(MAGIC, len(header), hashlib.sha256(header).digest())
    os.ftruncate(fd, begins + data_bytes)
    _write_at(fd, prelude + header, 0)
    for name, array in index.arrays().items():
        _write_at(fd, np.ascontiguousarray(array).data.cast("B"), begins + places[name])
    # else after a crash the name could exist without its bytes
    os.fsync(fd)


def _write_at(fd: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while len(view):
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done


def read(path: str, key: Key) -> RecordIndex | None:
    """Map the index; None when there is none, or it is not of ``key``, incomplete, or not ours."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path, flags)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        ours = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
        if not stat.S_ISREG(status.st_mode) or not ours or status.st_size < _PRELUDE.size:
            return None
        mapping = mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ)
    except OSError:
        return None
    finally:
        os.close(fd)
    try:
        return _parse(mapping, key)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError):
        return None


def _parse(mapping: mmap.mmap, key: Key) -> RecordIndex | None:
    magic, header_bytes, digest = _PRELUDE.unpack_from(mapping)
    if magic != MAGIC or header_bytes > min(HEADER_MAX_BYTES, len(mapping) - _PRELUDE.size):
        return None
    text = mapping[_PRELUDE.size : _PRELUDE.size + header_bytes]
    if hashlib.sha256(text).digest() != digest:
        return None
    header = json.loads(text)
    begins = _data_begins(header_bytes)
    if header["key"] != key or begins + header["bytes"] != len(mapping):
        return None
    arrays = {
        name: np.frombuffer(mapping, _KINDS[kind], count, begins + at)
        for name, kind, count, at in header["arrays"]
    }
    index = rebuild(header["index"], arrays)
    return index if _fits(index) else None


def _fits(index: RecordIndex) -> bool:
    """Whether the arrays' lengths are consistent."""
    places = index.places
    of_parts = [
        array for name, array in places.arrays().items() if name.endswith((".base", ".extra"))
    ]
    of_records: list[Array] = list(index.columns.values())
    of_records += [
        array for name, array in places.arrays().items() if name.endswith((".start", ".length"))
    ]
    if index.keys is not None:
        of_records += [index.keys.offset, index.keys.length]
    return all(len(array) == len(places.parts) for array in of_parts) and all(
        len(array) == len(index) for array in of_records
    )
