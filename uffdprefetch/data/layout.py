# SPDX-License-Identifier: Apache-2.0
"""How a packed database is laid out. Pure.

The main database has the files: path below the source -> bytes, as they are or compressed. The
database META says more of them. It has a name that no path has, and keys that no path is: numbers
in the order of packing. So whoever looks a path up, in whatever database, finds the file alone.

META: number (8 bytes, big-endian) -> a file's Entry; SOURCE -> a PackDescription; PATHS -> all
paths by their numbers, once all are there; DICTIONARY -> what values were compressed with. Each of
its values begins with a checksum of key and value.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from uffdprefetch.base.errors import EXIT_USAGE, UffdPrefetchError

META = b"/meta"
SOURCE, PATHS, DICTIONARY = b"#source", b"#paths", b"#dictionary"
VERSION = 1
#: liblmdb's MDB_MAXKEYSIZE, as it is built everywhere.
PATH_BYTES_MAX = 511
#: Of a value: its length has 32 bits in a node (mdb.c: MAXDATASIZE).
VALUE_BYTES_MAX = (1 << 32) - 1

_NUMBER = struct.Struct(">Q")
_CHECK = struct.Struct("<I")
#: size, time of modification, number of its source, SHA-256; the path follows.
_ENTRY = struct.Struct("<QqH32s")


class DamagedError(UffdPrefetchError):
    """A packed database, or a value of it, is not as it was written."""

    def __init__(self, message: str) -> None:
        super().__init__(message, EXIT_USAGE)


@dataclass(frozen=True)
class Entry:
    """A file as it was packed. ``source``: the number of the source that it is of."""

    path: bytes
    size_bytes: int
    mtime_ns: int
    source: int
    sha256: bytes

    def encoded(self) -> bytes:
        return _ENTRY.pack(self.size_bytes, self.mtime_ns, self.source, self.sha256) + self.path

    @classmethod
    def decoded(cls, data: bytes) -> Entry:
        size_bytes, mtime_ns, source, sha256 = _ENTRY.unpack_from(data)
        return cls(data[_ENTRY.size :], size_bytes, mtime_ns, source, sha256)


@dataclass(frozen=True)
class PackDescription:
    """What a database was packed of, and how. ``roots``: absolute paths of directories and tars, as
    os.fsdecode() gives them. ``seed``: of the order, None: that of the source. ``level``: of zstd,
    None: not compressed; ``asked_level``: what was asked for, and may not have paid. ``count``,
    ``size_bytes``: of all files, once it is ``complete``."""

    roots: tuple[str, ...]
    seed: int | None = None
    asked_level: int | None = None
    level: int | None = None
    count: int = 0
    size_bytes: int = 0
    complete: bool = False
    version: int = VERSION

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, data: bytes, name: str) -> PackDescription:
        """Raises DamagedError, UffdPrefetchError (2) for a later version."""
        try:
            found = json.loads(data)
            version = int(found["version"])
            known = {field.name for field in fields(cls)}
            values = {key: value for key, value in found.items() if key in known}
            description = cls(**{**values, "roots": tuple(found["roots"])})
        except (ValueError, TypeError, KeyError) as error:
            raise DamagedError(f"{name}: damaged: its description cannot be read") from error
        if version > VERSION:
            what = f"{name}: packed in version {version} of the layout, known here is {VERSION}"
            raise UffdPrefetchError(f"{what}: use a newer uffdprefetch", EXIT_USAGE)
        return description


def number_key(number: int) -> bytes:
    """META's key of the file that was packed as this one."""
    return _NUMBER.pack(number)


def number_of(key: bytes) -> int | None:
    """The number that a key of META is of; None: it is of no file."""
    return _NUMBER.unpack(key)[0] if len(key) == _NUMBER.size else None


def checked(key: bytes, payload: bytes) -> bytes:
    """A value of META."""
    return _CHECK.pack(zlib.crc32(payload, zlib.crc32(key))) + payload


def payload(key: bytes, value: bytes, name: str) -> bytes:
    """What checked() was given. Raises DamagedError, about the database ``name``."""
    found = bytes(value[_CHECK.size :])
    if bytes(value[: _CHECK.size]) != _CHECK.pack(zlib.crc32(found, zlib.crc32(key))):
        raise DamagedError(f"{name}: damaged: an entry of its files is not as it was written")
    return found


def joined(paths: Sequence[bytes]) -> bytes:
    """The value of PATHS."""
    return zlib.compress(b"\0".join(paths))


def split(data: bytes, name: str) -> list[bytes]:
    """What joined() was given. Raises DamagedError."""
    try:
        body = zlib.decompress(data)
    except zlib.error as error:
        raise DamagedError(f"{name}: damaged: the list of its files cannot be read") from error
    return body.split(b"\0") if body else []


def shown(path: bytes) -> str:
    """A path for people, on one line."""
    text = path.decode("utf-8", "backslashreplace")
    return text if text.isprintable() else ascii(text)[1:-1]
