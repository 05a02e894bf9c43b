# SPDX-License-Identifier: Apache-2.0
"""Files of weights that say where each of their tensors begins.

safetensors: a length of 8 bytes, then so much JSON with the ``data_offsets`` of each tensor, which
count from its end (github.com/huggingface/safetensors, Format). torch.save: a ZIP archive whose
central directory, at its end, has a local header for each storage, which is followed by its bytes
(torch/serialization.py, APPNOTE.TXT of PKWARE).

What a file says is believed where it can be: a part lies within the file, or the file is of no such
format. Nothing is read but the places where that stands.
"""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, NamedTuple

from uffdprefetch.formats.error import FormatError

if TYPE_CHECKING:  # numpy, which a service without a pool does without
    from uffdprefetch.formats.reader import RangeReader

#: Longest header that is parsed: 30 000 tensors. It holds up the service's thread by the
#: interpreter's lock, for 40 ms at most.
HEADER_MAX_BYTES = 4 << 20
#: Most bytes read of a ZIP archive: its central directory, and its end with a comment.
DIRECTORY_MAX_BYTES = HEADER_MAX_BYTES + (128 << 10)
LENGTH_BYTES = 8
ZIP_MAGIC = b"PK\x03\x04"

#: [start, end) bytes of a file.
Range = tuple[int, int]


def parts_of(reader: RangeReader) -> list[Range] | None:
    """The tensors of a file of weights in the order of the file, each from where its reader begins
    (in a ZIP archive at its local header); None: it is no such file, or says it with more than
    HEADER_MAX_BYTES. Raises FormatError where it says what cannot be, and the reader's errors."""
    head = reader.read(0, LENGTH_BYTES + 1)
    if head.startswith(ZIP_MAGIC):
        return _of_zip(reader)
    length = safetensors_header_bytes(head, reader.size_bytes)
    if length is None or length > HEADER_MAX_BYTES:
        return None  # the first bytes of any other file
    tensors = safetensors_of(reader, length)
    return sorted((one.start, one.end) for one in tensors if one.start < one.end)


class Tensor(NamedTuple):
    """[start, end) of the file."""

    start: int
    end: int
    name: str
    dtype: str


def safetensors_header_bytes(head: bytes, size_bytes: int) -> int | None:
    """Length of the header of a file of this size that begins so; None: it is no safetensors."""
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    is_one = len(head) > LENGTH_BYTES and head[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{"
    return length if is_one and LENGTH_BYTES + length <= size_bytes else None


def safetensors_of(reader: RangeReader, header_bytes: int) -> list[Tensor]:
    """The tensors in the order of the header. Raises FormatError where it says what cannot be."""
    data = LENGTH_BYTES + header_bytes
    text = reader.read(LENGTH_BYTES, header_bytes)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError("safetensors header", LENGTH_BYTES, f"no JSON ({error})") from None
    tensors = []
    for name, said in header.items():
        if name == "__metadata__":
            continue
        tensor = said if isinstance(said, dict) else {}
        match tensor.get("data_offsets"):
            case [int(start), int(end)] if 0 <= start <= end <= reader.size_bytes - data:
                tensors.append(Tensor(data + start, data + end, name, str(tensor.get("dtype"))))
            case other:
                raise FormatError(
                    "safetensors header", LENGTH_BYTES, f"{name[:64]!r}: {str(other)[:64]}"
                )
    return tensors


def _of_zip(reader: RangeReader) -> list[Range] | None:
    import zipfile  # 5 ms of a service's start

    file = _Directory(reader)
    try:
        with zipfile.ZipFile(file) as archive:  # type: ignore[arg-type]
            starts = sorted(info.header_offset for info in archive.infolist())
            end = archive.start_dir
    except _TooMuch:
        return None
    except OSError:
        raise
    except Exception as error:  # of each kind: it decodes names, dates and fields of all versions
        raise FormatError("ZIP directory", file.tell(), str(error)) from None
    if starts and not 0 <= starts[0] <= starts[-1] < end <= reader.size_bytes:
        raise FormatError("ZIP directory", end, f"a local header at {starts[0]}..{starts[-1]}")
    return [part for part in zip(starts, [*starts[1:], end], strict=True) if part[0] < part[1]]


class _TooMuch(Exception):
    """More was asked for than a directory may have."""


class _Directory(io.RawIOBase):
    """A file as zipfile reads it, up to DIRECTORY_MAX_BYTES of it."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader, self._at, self._left = reader, 0, DIRECTORY_MAX_BYTES

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._reader.size_bytes}[whence]
        if base + offset < 0:
            raise ValueError("before the file")  # as of any file
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        size = max(0, self._reader.size_bytes - self._at if size < 0 else size)
        self._left -= size
        if self._left < 0:
            raise _TooMuch
        data = self._reader.read(self._at, size)
        self._at += len(data)
        return data
