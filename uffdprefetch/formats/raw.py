# SPDX-License-Identifier: Apache-2.0
"""Raw records of one size, after an optional header; never detected, only requested."""

from __future__ import annotations

import numpy as np

from uffdprefetch.base.errors import usage_error
from uffdprefetch.formats.index import FormatOptions, RecordIndex
from uffdprefetch.formats.places import RecordPlaces, Strided, one_part
from uffdprefetch.formats.reader import Array, FormatError, RangeReader


def uniform(records: int, record_bytes: int, header_bytes: int) -> RecordPlaces:
    """Records of one size, one after the other, after the header."""
    base: Array = np.array([header_bytes], np.int64)
    return RecordPlaces(one_part(records), [Strided(8 * record_bytes, base, np.zeros_like(base))])


class Raw:
    """See detect.Format."""

    def sniff(self, head: bytes, size_bytes: int, name: str) -> bool:
        return False  # any bytes could be raw records

    def read(self, reader: RangeReader, options: FormatOptions) -> RecordIndex:
        size, header = options.record_bytes, options.header_bytes
        if size is None:
            raise usage_error("raw records: how long is one? give --record-size")
        if size < 1:
            raise usage_error("--record-size: at least 1 byte")
        if header > reader.size_bytes:
            raise FormatError("file cut short", reader.size_bytes, f"a header of {header} bytes")
        records, tail = divmod(reader.size_bytes - header, size)
        return RecordIndex(
            "raw",
            reader.size_bytes,
            uniform(records, size, header),
            outside_bytes={"header": header, "part of a last record": tail},
            facts={"record_bytes": size, "partial_record_bytes": tail},
        )
