# SPDX-License-Identifier: Apache-2.0
"""Tensor starts: of a file that says where its tensors lie (formats/parts.py) the first page of
each, and small ones whole, are read when it is mapped, before all else.

A loader looks at each tensor before it reads any: safetensors' load_file, and transformers with it,
touch the first page of each, torch.load reads the header before it. One after the other, and behind
the window that reads the file in order, those take as long as the whole file does; all at once they
take a few milliseconds. So a touch of one is no stream. Who has touched some, and nothing behind
them, is about to read from the first of them on: that begins then, up to where its stream will be
known, and its window goes on (readers/ahead.py); no more than that may lose at this time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.base.record import dataclass, field
from uffdprefetch.base.units import PAGE_BYTES
from uffdprefetch.formats import parts
from uffdprefetch.native import uffd
from uffdprefetch.predict.bounds import ENTRIES_MAX
from uffdprefetch.predict.storage import BLOCK_BYTES, UNDER_WAY_BYTES
from uffdprefetch.predict.visits import LITTLE_SHARE
from uffdprefetch.readers.file_stream import Want
from uffdprefetch.readers.predictor import RangeSource
from uffdprefetch.readers.reader_streams import ReaderStreams
from uffdprefetch.state.files import FileState, Key
from uffdprefetch.state.opening import Opener
from uffdprefetch.state.reader import Region
from uffdprefetch.warm.consumer import FileConsumer, PrefetchRange, Priority
from uffdprefetch.warm.windows import Windows

#: A tensor that is no longer is read whole: norms and biases, of which a fault maps all.
SMALL_BYTES = BLOCK_BYTES
#: So many of them without what follows them are no stream that was seen where it waits.
LOOKED_AT = 3
Range = tuple[int, int]


@dataclass
class _FileStarts:
    """Whose tensor starts are known."""

    place: int  # where it begins in the order in which they were looked at, bytes
    touched: list[Range] = field(default_factory=list)
    begun: bool = False


class TensorStarts(RangeSource):
    """Of all files of a service, whose thread calls everything here."""

    def __init__(
        self, policy: str, want: Want, streams: ReaderStreams, windows: Windows,
        opener: Opener, room_bytes: Callable[[], int],
    ) -> None:  # fmt: skip
        """``room_bytes``: how much may be read on a guess now."""
        self._room_bytes = room_bytes
        self._policy, self._want, self._streams = policy, want, streams
        self._windows, self._opener = windows, opener
        self._files: dict[Key, _FileStarts] = {}
        self._place = 0

    def attached(self, region: Region) -> bool:
        """See RangeSource. Once for each that is opened, and not where a request costs more than
        its bytes, nor for the pool, which reads what lies around a touch with it."""
        file, reader = region.file, region.reader
        if (
            self._policy != "auto"
            or file.blocks.tensor_starts is not None
            or file.call.unit_bytes
            or reader.reads_pool
        ):
            return False
        try:
            fd = os.dup(file.opened.page_fd)
        except OSError:  # out of descriptors
            return False
        file.blocks.tensor_starts = IntervalSet()
        consumer = FileConsumer(reader.rank, reader.pid)

        def told(found: list[Range] | OSError) -> None:
            if not isinstance(found, OSError) and file.opened.fd >= 0 and not file.guard.changed:
                self._read(consumer, file, found)

        if not self._opener.run(lambda: tensor_starts_of(fd, file.size_bytes), told):
            uffd.close_file(fd)
        return False

    def _read(self, consumer: FileConsumer, file: FileState, found: list[Range]) -> None:
        assert file.blocks.tensor_starts is not None
        for start, end in found:
            file.blocks.tensor_starts.add(start, end)
            # 0: in no order, all of them at once
            self._want(consumer, PrefetchRange(file, start, end, need=0))

    def scanned(self, region: Region, found: list[Range]) -> None:
        """A page-table scan has found these ranges of a file whose tensor starts are known, and
        none of them before."""
        file = region.file
        assert file.blocks.tensor_starts is not None
        known = self._files.get(file.key)
        if known is None:
            known = self._files[file.key] = _FileStarts(self._place)
            self._place += file.size_bytes
            if len(self._files) > ENTRIES_MAX:
                del self._files[next(iter(self._files))]
        if known.begun:
            return
        known.touched += [(a, b) for a, b in found if not file.blocks.tensor_starts.missing(a, b)]
        mapped = region.scan.mapped
        known.touched = [(a, b) for a, b in known.touched if not mapped.contains(b)]
        if len(known.touched) >= LOOKED_AT:
            known.begun = True
            self._begin(region, known)

    def _begin(self, region: Region, known: _FileStarts) -> None:
        """Its reader is about to read what it has looked at. What it has touched before the starts
        were known is no stream either."""
        file, reader, mapped = region.file, region.reader, region.scan.mapped
        assert file.blocks.tensor_starts is not None
        self._streams.forget(reader)
        touched = [
            *known.touched,
            *(one for one in file.blocks.tensor_starts if mapped.contains(one[0])),
        ]
        start = min(touched)[0]
        ahead = min(self._room_bytes(), self._windows.allowed_bytes // self._windows.places.all)
        end = min(start + ahead, region.span.end_bytes)
        wanted = PrefetchRange(
            file, start, end, known.place + start, Priority.STATED,
            yield_bytes=UNDER_WAY_BYTES, guess=True,
        )  # fmt: skip
        self._want(FileConsumer(reader.rank, reader.pid), wanted)


class _Reader:
    """A RangeReader over a descriptor."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd, self.size_bytes = fd, size_bytes

    def read(self, offset: int, length: int) -> bytes:
        """See RangeReader."""
        return os.pread(self._fd, length, offset)


def tensor_starts_of(fd: int, size_bytes: int) -> list[Range]:
    """The tensor starts of a file, none if it does not tell. Closes ``fd``. Raises OSError."""
    try:
        found = parts.parts_of(_Reader(fd, size_bytes))
    except UffdPrefetchError:
        return []  # of no such format
    finally:
        uffd.close_file(fd)
    return starts(found or [], size_bytes)


def starts(found: Iterable[Range], size_bytes: int) -> list[Range]:
    """Of tensors, in the order of the file, what is to be read first: whole pages, those that touch
    as one. None if it were too many, or no little of the file: a reader that wants one tensor of it
    has little use for the others."""
    page = uffd.PAGE_BYTES
    joined: list[Range] = []
    for start, end in found:
        if end - start > SMALL_BYTES:
            end = start + PAGE_BYTES  # what a loader that looks by read(2) takes (stdio's buffer)
        low, high = start // page * page, min(-(-end // page) * page, size_bytes)
        if joined and low <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    if len(joined) > ENTRIES_MAX or LITTLE_SHARE * sum(b - a for a, b in joined) > size_bytes:
        return []
    return joined
