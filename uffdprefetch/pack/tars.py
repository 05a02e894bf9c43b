# SPDX-License-Identifier: Apache-2.0
"""The files in a tar, which is read once from its beginning to its end, compressed or not."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Iterator

from uffdprefetch.base.errors import EXIT_CANNOT, UffdPrefetchError
from uffdprefetch.data.layout import VALUE_BYTES_MAX, shown
from uffdprefetch.pack.found import Found, LeftOut

_ENCODING, _ERRORS = "utf-8", "surrogateescape"
#: Of one read from the tar: a request that storage answers at its full rate.
_READ_BYTES = 4 << 20
#: Of it, taken by tarfile at once: each header copies what that has decompressed and not given yet.
_TAKEN_BYTES = 32 << 10


def members(file: bytes, source: int, left_out: LeftOut) -> Iterator[Found]:
    """Raises UffdPrefetchError (1) where the tar cannot be read to its end: what came before it is
    there."""
    name = shown(file)
    try:
        with open(file, "rb", buffering=_READ_BYTES) as raw:
            before = _state(raw.fileno())
            with tarfile.open(
                fileobj=raw, mode="r|*", bufsize=_TAKEN_BYTES, encoding=_ENCODING, errors=_ERRORS
            ) as tar:
                for member in tar:
                    found = _found(tar, member, source, left_out)
                    if found is not None:
                        yield found
                    tar.members = []  # type: ignore[attr-defined]  # else it keeps them all
            if _state(raw.fileno()) != before:
                left_out.name(file, "it changed while it was read")
    except OSError as error:
        raise UffdPrefetchError(f"cannot read {name}: {error.strerror or error}") from None
    except (tarfile.TarError, EOFError, zlib.error) as error:
        why = f"{name}: no tar, or cut short: {error}; --resume goes on once it is whole"
        raise UffdPrefetchError(why, EXIT_CANNOT) from None


def _state(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns


def _found(
    tar: tarfile.TarFile, member: tarfile.TarInfo, source: int, left_out: LeftOut
) -> Found | None:
    name = member.name.encode(_ENCODING, _ERRORS)
    if member.isdir():
        return None
    if not member.isreg():
        kind = "link" if member.issym() or member.islnk() else "special file"
        left_out.count(kind)
        return None
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    path = b"/".join(parts)
    if not parts or b".." in parts:
        left_out.name(name, "its path leads out of the tar")
    elif member.size > VALUE_BYTES_MAX:
        left_out.name(path, "it has 4 GiB or more, too much for a value of LMDB")
    elif left_out.takes(path):
        content = tar.extractfile(member)
        data = b"" if content is None else content.read()
        if len(data) != member.size:
            raise tarfile.ReadError(f"{shown(path)} ends early")
        return Found(path, source, data=data, mtime_ns=round(member.mtime * 1e9))
    return None
