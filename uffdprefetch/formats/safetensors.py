# SPDX-License-Identifier: Apache-2.0
"""safetensors files: a record is a tensor, in the order of the file, its key the tensor's name.

A length of 8 bytes, so much JSON, then the tensors' bytes (github.com/huggingface/safetensors,
Format; parts.py reads it).
"""

from __future__ import annotations

import itertools

import numpy as np

from uffdprefetch.formats.index import FormatOptions, RecordIndex
from uffdprefetch.formats.keys import Keys
from uffdprefetch.formats.parts import LENGTH_BYTES, safetensors_header_bytes, safetensors_of
from uffdprefetch.formats.places import Listed, RecordPlaces, one_part, small_lengths
from uffdprefetch.formats.reader import Array, FormatError, RangeReader

#: The library's own limit (MAX_HEADER_SIZE).
HEADER_MAX_BYTES = 100_000_000


class Safetensors:
    """See detect.Format."""

    def sniff(self, head: bytes, size_bytes: int, name: str) -> bool:
        length = safetensors_header_bytes(head, size_bytes)
        # an object: a name, or nothing; blanks only behind it, says the format
        return length is not None and head[LENGTH_BYTES + 1 : LENGTH_BYTES + 2] in (b'"', b"}")

    def read(self, reader: RangeReader, options: FormatOptions) -> RecordIndex:
        length = safetensors_header_bytes(reader.read(0, LENGTH_BYTES + 1), reader.size_bytes)
        if length is None:
            raise FormatError("no safetensors header", 0, "a length and a { are expected")
        if length > HEADER_MAX_BYTES:
            detail = f"{length} bytes, the library reads {HEADER_MAX_BYTES}"
            raise FormatError("impossible length of a header", 0, detail)
        tensors = sorted(safetensors_of(reader, length))
        for before, after in itertools.pairwise(tensors):
            if after.start < before.end:
                detail = f"{before.name[:64]!r} and {after.name[:64]!r}"
                raise FormatError("tensors overlap", after.start, detail)
        start: Array = np.array([one.start for one in tensors], np.int64)
        end: Array = np.array([one.end for one in tensors], np.int64)
        return RecordIndex(
            "safetensors",
            reader.size_bytes,
            RecordPlaces(one_part(len(tensors)), [Listed(start, small_lengths(end - start))]),
            _keys([one.name.encode("utf-8", "surrogatepass") for one in tensors]),
            outside_bytes={"header": LENGTH_BYTES + length},
            facts={"dtypes": ", ".join(sorted({one.dtype[:16] for one in tensors}))},
        )


def _keys(names: list[bytes]) -> Keys:
    length: Array = np.array([len(name) for name in names], np.int64)
    offset: Array = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])[:-1]
    data: Array = np.frombuffer(b"".join(names), np.uint8)
    return Keys(offset, length, data, ((0, len(names), False),))
