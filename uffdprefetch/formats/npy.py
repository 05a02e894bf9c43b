# SPDX-License-Identifier: Apache-2.0
"""NumPy's .npy files, versions 1.0 to 3.0: a record is an element of the first axis.

numpy parses the header (numpy.lib.format; NEP 1); the array's bytes follow.
"""

from __future__ import annotations

import io
import math
import struct
import warnings
from typing import Any

from numpy.lib import format as npy_format

from uffdprefetch.formats.index import FormatOptions, RecordIndex
from uffdprefetch.formats.raw import uniform
from uffdprefetch.formats.reader import FormatError, RangeReader

MAGIC = b"\x93NUMPY"
#: numpy's limit for untrusted files: the header is a Python literal.
HEADER_MAX_BYTES = 10_000
#: Version -> format of its header's length.
_LENGTHS = {1: "<H", 2: "<I", 3: "<I"}


def _header(reader: RangeReader) -> tuple[int, int, bytes]:
    """(version, where the data begins, the header's text). Raises FormatError."""
    head = reader.read(0, 12)
    if head[:6] != MAGIC:
        raise FormatError("no .npy file", 0, f"{head[:6].hex(' ') or 'the file ends here'}")
    if len(head) < 12:
        raise FormatError("file cut short", len(head), "it ends in the header")
    version = (head[6], head[7])
    if version[0] not in _LENGTHS or version[1] != 0:
        detail = f"{version[0]}.{version[1]}; 1.0, 2.0 and 3.0 can be read"
        raise FormatError("unknown .npy version", 6, detail)
    how = _LENGTHS[version[0]]
    (length,) = struct.unpack_from(how, head, 8)
    begins = 8 + struct.calcsize(how)
    if length > HEADER_MAX_BYTES:
        detail = f"{length} bytes, numpy reads {HEADER_MAX_BYTES}"
        raise FormatError("impossible length of a header", 8, detail)
    text = reader.read(begins, length)
    if len(text) < length:
        raise FormatError("file cut short", begins + len(text), "it ends in the header")
    return version[0], begins + length, text


def _parse(version: int, text: bytes) -> tuple[tuple[int, ...], bool, Any]:
    """(shape, in Fortran order, dtype) of a header's text; numpy's errors propagate."""
    if version == 3:
        # numpy has no public parser for 3.0: it is 2.0 with UTF-8, which a literal can escape
        text = text.decode("utf-8").encode("ascii", "backslashreplace")
    packed = io.BytesIO(struct.pack("<I", len(text)) + text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on headers by Python 2, and on odd literals
        shape, fortran, dtype = npy_format.read_array_header_2_0(
            packed, max_header_size=10 * HEADER_MAX_BYTES
        )
    return shape, fortran, dtype


class Npy:
    """See detect.Format."""

    def sniff(self, head: bytes, size_bytes: int, name: str) -> bool:
        return head.startswith(MAGIC)

    def read(self, reader: RangeReader, options: FormatOptions) -> RecordIndex:
        version, begins, text = _header(reader)
        try:
            shape, fortran, dtype = _parse(version, text)
        except Exception as error:  # an invalid literal raises anything
            detail = " ".join(str(error).split())[:80] or type(error).__name__
            raise FormatError("impossible header", 8, detail) from None
        if dtype.hasobject:
            raise FormatError("array of Python objects", 8, "a pickle: its records have no places")
        if any(length < 0 for length in shape):
            raise FormatError("impossible shape", 8, str(shape))
        if fortran and sum(length != 1 for length in shape) > 1:
            detail = (
                f"shape {shape}: a record is not in one piece; np.save(np.ascontiguousarray(a))"
            )
            raise FormatError("array in Fortran order", 8, detail)
        records = shape[0] if shape else 1
        record_bytes = math.prod(shape[1:]) * dtype.itemsize
        end = begins + records * record_bytes
        if end > reader.size_bytes:
            detail = f"an array {shape} of {dtype.str} ends at byte {end}"
            raise FormatError("file cut short", reader.size_bytes, detail)
        if records >= 1 << 62 or record_bytes >= 1 << 59:
            raise FormatError("impossible shape", 8, str(shape))
        return RecordIndex(
            "npy",
            reader.size_bytes,
            uniform(records, record_bytes, begins),
            outside_bytes={"header": begins, "after the array": reader.size_bytes - end},
            facts={"version": version, "shape": list(shape), "dtype": dtype.str},
        )
