# SPDX-License-Identifier: Apache-2.0
"""TFRecord files, located by the 12-byte header of each record.

A record is {length u64, masked CRC-32C of those 8 bytes, data, masked CRC-32C of the data}, little
endian (tensorflow/core/lib/io/record_writer.h). There is no table of records, so the chain of
lengths is followed. On slow storage that is latency-bound, so it is followed from several offsets
at once: each begins at a header with a right CRC, and counts only if the chain from the file's
beginning arrives exactly there.
"""

from __future__ import annotations

import struct
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from uffdprefetch.formats import crc32c
from uffdprefetch.formats.index import FormatOptions, RecordIndex
from uffdprefetch.formats.places import Listed, RecordPlaces, one_part, small_lengths
from uffdprefetch.formats.reader import READ_MAX_BYTES, THREADS, Array, FormatError, RangeReader

HEADER_BYTES, FOOTER_BYTES = 12, 4
FRAME_BYTES = HEADER_BYTES + FOOTER_BYTES
#: Record size below which records are read whole: their headers are on at least every other page.
SKIP_BYTES = 8 << 10
#: Record size above which only headers are read. Between the two sizes the faster way is taken: the
#: header alone, or the record at the storage's streaming rate.
SKIP_SURELY_BYTES = 64 << 10
_STREAM_SECONDS_PER_BYTE = 1e-9
_TIMED = 16
_WINDOW_BYTES = 1 << 20
#: Headers per batch of CRC checks; until then their lengths are followed unchecked.
_CHECKED = 4096
#: Bytes of the file per starting offset, and bytes searched for its header.
_SEGMENT_BYTES = 16 << 20
_SEARCH_BYTES = 1 << 20
_SEARCH_STEP_BYTES = 64 << 10

_LENGTH = struct.Struct("<Q")


class Chain(NamedTuple):
    """Consecutive records: offsets and lengths of their data, offset of the next record."""

    starts: Array
    lengths: Array
    end: int


_NOTHING = Chain(np.zeros(0, np.int64), np.zeros(0, np.int64), -1)


def _right(headers: Array) -> Array:
    """Which of these headers, uint8 of shape (n, 12), have the CRC of their length."""
    stored = headers[:, 8:].copy().view("<u4")[:, 0]
    right: Array = crc32c.masked(crc32c.of_words(headers[:, :8])) == stored
    return right


class _Headers:
    """Headers followed but not checked yet."""

    def __init__(self) -> None:
        self._at = array("q")
        self._bytes: list[bytes] = []

    def __len__(self) -> int:
        return len(self._at)

    def add(self, at: int, header: bytes) -> None:
        self._at.append(at)
        self._bytes.append(header)

    def checked(self) -> tuple[Array, Array]:
        """Check and remove them: offsets and lengths of the data; raises FormatError."""
        at: Array = np.array(self._at, np.int64)
        headers = np.frombuffer(b"".join(self._bytes), np.uint8).reshape(-1, HEADER_BYTES)
        right = _right(headers)
        if not right.all():
            i = int(np.argmin(right))
            what = "no TFRecord" if at[i] == 0 else "wrong CRC of a length"
            raise FormatError(what, int(at[i]), f"{headers[i].tobytes().hex(' ')}")
        lengths = headers[:, :8].copy().view("<u8")[:, 0]
        del self._at[:], self._bytes[:]
        return at + HEADER_BYTES, lengths.astype(np.int64)


class _Window:
    """The part of the file read last: headers, or whole records where that is faster."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        self._data = b""
        self._at = 0
        self._timed = 0
        self._seconds = 0.0

    def header(self, at: int, mean_bytes: float) -> bytes:
        """The header at byte ``at``; ``mean_bytes``: mean record size so far."""
        if not self._at <= at <= self._at + len(self._data) - HEADER_BYTES:
            self._at = at
            self._data = self._read(at, mean_bytes)
            if len(self._data) < HEADER_BYTES:
                end = at + len(self._data)
                raise FormatError("file cut short", end, "it ends in a header")
        return self._data[at - self._at : at - self._at + HEADER_BYTES]

    def _read(self, at: int, mean_bytes: float) -> bytes:
        if mean_bytes < SKIP_BYTES or (mean_bytes < SKIP_SURELY_BYTES and self._slow(mean_bytes)):
            return self._reader.read(at, _WINDOW_BYTES)
        if self._timed == _TIMED:
            return self._reader.read(at, HEADER_BYTES)
        began = time.perf_counter()
        data = self._reader.read(at, HEADER_BYTES)
        self._seconds += time.perf_counter() - began
        self._timed += 1
        return data

    def _slow(self, mean_bytes: float) -> bool:
        each = self._seconds / _TIMED
        return self._timed == _TIMED and each > mean_bytes * _STREAM_SECONDS_PER_BYTE


def follow(reader: RangeReader, begin: int, until: int) -> Chain:
    """The records from byte ``begin``, where one begins, up to the first at or after ``until``.

    Raises FormatError; the reader's errors propagate.
    """
    size_bytes = reader.size_bytes
    headers, window = _Headers(), _Window(reader)
    found: list[tuple[Array, Array]] = []
    at, count = begin, 0
    try:
        while at < until:
            header = window.header(at, (at - begin) / count if count else SKIP_SURELY_BYTES)
            (length,) = _LENGTH.unpack_from(header)
            headers.add(at, header)
            if length > size_bytes - at - FRAME_BYTES:
                detail = f"the record at byte {at} has {length} bytes"
                raise FormatError("file cut short", size_bytes, detail)
            at += length + FRAME_BYTES
            count += 1
            if len(headers) >= _CHECKED:
                found.append(headers.checked())
    except FormatError:
        headers.checked()  # a wrong CRC explains it better
        raise
    found.append(headers.checked())
    starts, lengths = (np.concatenate(part) for part in zip(*found, strict=True))
    return Chain(starts, lengths, at)


# ---- from several offsets at once ---------------------------------------------------------------


def _place_to_begin(reader: RangeReader, begin: int, until: int) -> int | None:
    """The first offset from ``begin`` on with a valid header, which may be a record's data."""
    until = min(until, begin + _SEARCH_BYTES)
    for at in range(begin, until, _SEARCH_STEP_BYTES):
        data = reader.read(at, min(_SEARCH_STEP_BYTES, until - at) + HEADER_BYTES - 1)
        bytes_ = np.frombuffer(data, np.uint8)
        count = len(bytes_) - HEADER_BYTES + 1
        if count < 1:
            return None
        crc = crc32c.masked(crc32c.of_windows(bytes_[:-FOOTER_BYTES], 8))
        stored = np.ndarray((count,), "<u4", data, 8, (1,))
        for place in np.flatnonzero(crc == stored).tolist():
            (length,) = _LENGTH.unpack_from(data, place)
            if length <= reader.size_bytes - at - place - FRAME_BYTES:
                return at + int(place)
    return None


def _guess(reader: RangeReader, begin: int, until: int) -> Chain:
    """A chain from somewhere in [begin, until) to ``until``; may be a false one."""
    try:
        at = _place_to_begin(reader, begin, until)
        return _NOTHING if at is None else follow(reader, at, until)
    except FormatError:
        return _NOTHING


def scan(reader: RangeReader, segment_bytes: int = _SEGMENT_BYTES) -> Chain:
    """All records of the file. ``segment_bytes``: bytes per thread.

    Raises FormatError; the reader's errors propagate.
    """
    size_bytes = reader.size_bytes
    segments = max(min(THREADS, size_bytes // segment_bytes), 1)
    if segments == 1:
        return follow(reader, 0, size_bytes)
    edges = [size_bytes * i // segments for i in range(segments + 1)]
    parts: list[Chain] = []
    at = 0
    with ThreadPoolExecutor(segments, "uffdprefetch-index") as pool:
        first = pool.submit(follow, reader, 0, edges[1])
        guesses = [pool.submit(_guess, reader, a, b) for a, b in pairwise(edges[1:])]
        for future, until in zip([first, *guesses], edges[1:], strict=True):
            if at >= until:
                continue  # within one record
            chain = future.result()
            i = int(np.searchsorted(chain.starts, at + HEADER_BYTES))
            if i < len(chain.starts) and chain.starts[i] == at + HEADER_BYTES:
                parts.append(Chain(chain.starts[i:], chain.lengths[i:], chain.end))
            else:
                parts.append(follow(reader, at, until))
            at = parts[-1].end
    return Chain(
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        at,
    )


# ---- the data's CRC -----------------------------------------------------------------------------


def verify(reader: RangeReader, chain: Chain) -> None:
    """Read everything and check each record's CRC; raises FormatError."""
    ends = chain.starts + chain.lengths + FOOTER_BYTES
    i = 0
    while i < len(ends):
        start = int(chain.starts[i])
        last = max(int(np.searchsorted(ends, start + READ_MAX_BYTES, "right")), i + 1)
        starts: Array = chain.starts[i:last] - start
        lengths = chain.lengths[i:last]
        if last == i + 1:
            register, stored = _one(reader, start, int(lengths[0]))
        else:
            data = np.frombuffer(_whole(reader, start, int(ends[last - 1]) - start), np.uint8)
            register = crc32c.registers(data, starts, lengths)
            at = (starts + lengths)[:, None] + np.arange(FOOTER_BYTES)
            stored = data[at].view("<u4")[:, 0]
        right = crc32c.masked(crc32c.finished(register, lengths)) == stored
        if not right.all():
            wrong = i + int(np.argmin(right))
            detail = f"record {wrong} has another one than its bytes"
            raise FormatError("wrong CRC of data", int(ends[wrong]) - FOOTER_BYTES, detail)
        i = last


def _whole(reader: RangeReader, offset: int, length: int) -> bytes:
    data = reader.read(offset, length)
    if len(data) < length:
        raise FormatError("file cut short", offset + len(data), "it ends here")
    return data


def _one(reader: RangeReader, start: int, length: int) -> tuple[Array, Array]:
    """The register of one record of any length, and its stored CRC."""
    register: Array = np.zeros(1, np.uint32)
    for at in range(0, length, READ_MAX_BYTES):
        data = np.frombuffer(_whole(reader, start + at, min(READ_MAX_BYTES, length - at)), np.uint8)
        bytes_here = np.array([len(data)])
        here = crc32c.registers(data, np.zeros(1, np.int64), bytes_here)
        register = crc32c.joined(register, here, bytes_here)
    stored = _whole(reader, start + length, FOOTER_BYTES)
    return register, np.frombuffer(stored, "<u4")


class TFRecord:
    """See detect.Format."""

    def sniff(self, head: bytes, size_bytes: int, name: str) -> bool:
        if len(head) < HEADER_BYTES:
            return False
        return bool(_right(np.frombuffer(head[:HEADER_BYTES], np.uint8)[None])[0])

    def read(self, reader: RangeReader, options: FormatOptions) -> RecordIndex:
        chain = scan(reader)
        if options.verify:
            verify(reader, chain)
        records = len(chain.starts)
        return RecordIndex(
            "tfrecord",
            reader.size_bytes,
            RecordPlaces(one_part(records), [Listed(chain.starts, small_lengths(chain.lengths))]),
            outside_bytes={"lengths and CRCs": FRAME_BYTES * records},
            facts={"verified": options.verify},
        )
