# SPDX-License-Identifier: Apache-2.0
"""Detects a file's format, and opens its index."""

from __future__ import annotations

import importlib
import os
from typing import Protocol

from uffdprefetch.base.errors import EXIT_USAGE, UffdPrefetchError, usage_error
from uffdprefetch.formats.index import FormatOptions, RecordIndex
from uffdprefetch.formats.reader import FileReader, FormatError, RangeReader


class Format(Protocol):
    """Interface of a format. A new one is a file here and a line in FORMATS."""

    def sniff(self, head: bytes, size_bytes: int, name: str) -> bool:
        """Whether a file of this size and name that begins with ``head`` (HEAD_BYTES, or the whole
        file) is of this format. No false positives: the first match is taken."""
        ...

    def read(self, reader: RangeReader, options: FormatOptions) -> RecordIndex:
        """Index what ``reader`` reads, reading no more than needed, whatever the content.

        Raises FormatError with the byte offset of the error; the reader's errors propagate.
        """
        ...


HEAD_BYTES = 4096

#: name -> (module, class), in the order in which they are tried. Imported on use.
FORMATS: dict[str, tuple[str, str]] = {
    "lmdb": ("uffdprefetch.formats.lmdb", "Lmdb"),
    "npy": ("uffdprefetch.formats.npy", "Npy"),
    "arrow": ("uffdprefetch.formats.arrow", "Arrow"),
    "tfrecord": ("uffdprefetch.formats.tfrecord", "TFRecord"),
    "safetensors": ("uffdprefetch.formats.safetensors", "Safetensors"),
    "raw": ("uffdprefetch.formats.raw", "Raw"),
}
#: Magic numbers of whole-file compression, which cannot be indexed.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


def load(name: str) -> Format:
    """An instance of the format of this name. Raises UffdPrefetchError (exit 2)."""
    if name not in FORMATS:
        raise usage_error(f"--format {name}: one of {', '.join(FORMATS)}")
    module, class_name = FORMATS[name]
    found: Format = getattr(importlib.import_module(module), class_name)()
    return found


def detect(head: bytes, size_bytes: int, name: str) -> str:
    """The name of the format of a file. Raises UffdPrefetchError (exit 2) when there is none."""
    for candidate in FORMATS:
        if load(candidate).sniff(head, size_bytes, name):
            return candidate
    if not size_bytes:
        detail = "it is empty"
    else:
        detail = f"it begins with {head[:8].hex(' ')}"
        for magic, program in _COMPRESSED.items():
            if head.startswith(magic):
                detail = f"{program} has compressed it as a whole: no byte of it is of one record"
    raise UffdPrefetchError(
        f"{name}: no known format: {detail}; name it with --format, or give --record-size",
        EXIT_USAGE,
    )


def data_file(path: str | os.PathLike[str]) -> str:
    """The data file: of an LMDB's directory its data.mdb."""
    name = os.fspath(path)
    if not os.path.isdir(name):
        return name
    inside = os.path.join(name, "data.mdb")
    if not os.path.lexists(inside):
        raise UffdPrefetchError(f"{name} is a directory without data.mdb: name a file", EXIT_USAGE)
    return inside


def choose(reader: RangeReader, name: str, wanted: str | None, options: FormatOptions) -> str:
    """The format's name: ``wanted``, else by the options, else by the file."""
    if options.record_bytes is not None and wanted not in (None, "raw"):
        raise usage_error(f"--record-size is for raw records, not for {wanted}")
    if wanted is not None:
        load(wanted)
        return wanted
    if options.record_bytes is not None:
        return "raw"
    return detect(reader.read(0, HEAD_BYTES), reader.size_bytes, name)


def read_index(
    reader: RangeReader, name: str, wanted: str | None = None, options: FormatOptions | None = None
) -> RecordIndex:
    """Index what ``reader`` reads; ``name`` is the file's in messages.

    Raises FormatError, and UffdPrefetchError (exit 2) when it cannot be read or is of no known
    format.
    """
    options = options or FormatOptions()
    try:
        return load(choose(reader, name, wanted, options)).read(reader, options)
    except FormatError as error:
        raise error.of(name) from None
    except OSError as error:
        raise UffdPrefetchError(f"cannot read {name}: {error.strerror}", EXIT_USAGE) from None
    except MemoryError:
        raise UffdPrefetchError(f"{name}: no memory for its index", EXIT_USAGE) from None


def read_steady(
    reader: FileReader, name: str, wanted: str | None, options: FormatOptions | None
) -> RecordIndex:
    """As read_index(); also raises UffdPrefetchError when the file changed meanwhile."""
    before = reader.stamp()
    index = read_index(reader, name, wanted, options)
    if reader.stamp() != before:
        raise UffdPrefetchError(
            f"{name} changed while it was indexed: again, when nobody writes it", EXIT_USAGE
        )
    return index


def open_index(
    path: str | os.PathLike[str], wanted: str | None = None, options: FormatOptions | None = None
) -> RecordIndex:
    """The index of a record file (or of an LMDB's directory), read now; see read_index().

    ``wanted``: the format's name, when it is not to be detected.
    """
    name = data_file(path)
    with FileReader(name) as reader:
        return read_steady(reader, name, wanted, options)
