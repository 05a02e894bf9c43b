# SPDX-License-Identifier: Apache-2.0
"""Streams of read(2) and pread(2), proven by what was seen of the threads that wait in them.

A thread is seen now and then, where it waits, with its offset and the bytes that it has read so far
by system calls, of whatever file (rchar of proc(5)). Where the offset has grown by just as much as
rchar, all that the thread has read between is this file, in order: the stream is proven, and until
the thread is seen again its position is the offset and what rchar has grown by. It may skip less
than a page, as who reads what is aligned in its file does (the tensors of torch.save): pages are
what is read. Where it reads
something else in between (pipes, an index), the offset grows by less than rchar: three sightings in
order do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

from uffdprefetch.base.record import dataclass
from uffdprefetch.base.units import PAGE_BYTES
from uffdprefetch.predict.bounds import ENTRIES_MAX


class ReadSighting(NamedTuple):
    """What was seen of a thread. ``thread``: (pid, tid), tid 0 for a process of whose threads it is
    not known which reads; ``offset``: in bytes, None: it does not wait, and it is not known how far
    it has come; ``asked_bytes``: what the call that it waits in asks for, 0: not known."""

    thread: tuple[int, int]
    fd: int
    file: Hashable
    offset: int | None
    asked_bytes: int
    rchar: int
    at_ns: int


class ReadStretch(NamedTuple):
    """What a sighting says: a thread has read [start, end) of a file since the last one, is at
    ``end``, and will read up to ``asked_end`` for sure. ``proven``: as a part of a sequential
    stream. Bytes."""

    stream: int
    start: int
    end: int
    asked_end: int
    proven: bool


@dataclass
class _ReadStream:
    number: int
    file: Hashable
    offset: int
    rchar: int  # that belongs to this offset
    told: int  # where the last stretch has ended
    in_order: bool = False  # the last two sightings were
    exact: bool = False  # between them the thread has read nothing else
    proven: bool = False

    def step(self, offset: int, rchar: int) -> bool:
        """The next sighting; whether it goes on from the last one."""
        grown, read = offset - self.offset, rchar - self.rchar
        if grown == 0:
            return True  # the same call, or other files in between
        skipped = grown - read
        if grown < 0 or skipped >= PAGE_BYTES:
            return False
        self.exact = skipped >= 0
        self.proven = self.proven or self.exact or self.in_order
        self.in_order = True
        return True


class ReadStreams:
    """Of all threads; of more than ENTRIES_MAX streams those go that were seen longest ago."""

    def __init__(self) -> None:
        self._streams: OrderedDict[tuple[int, int, int], _ReadStream] = OrderedDict()
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._streams)

    def saw(self, seen: ReadSighting) -> ReadStretch | None:
        """What it says; None: nothing new."""
        key = (*seen.thread, seen.fd)
        stream = self._streams.get(key)
        if stream is not None and stream.file != seen.file:
            stream = None
        if seen.offset is None:
            return None if stream is None else self._between(stream, seen.rchar)
        if stream is None or not stream.step(seen.offset, seen.rchar):
            stream = self._begin(key, seen.file, seen.offset, seen.rchar)
        self._streams.move_to_end(key)
        start = min(stream.told, seen.offset) if stream.proven else seen.offset
        stream.offset, stream.rchar, stream.told = seen.offset, seen.rchar, seen.offset
        asked_end = seen.offset + seen.asked_bytes
        return ReadStretch(stream.number, start, seen.offset, asked_end, stream.proven)

    def _between(self, stream: _ReadStream, rchar: int) -> ReadStretch | None:
        """A thread that does not wait has come so far, if it has read nothing else."""
        start, end = stream.told, stream.offset + rchar - stream.rchar
        if not stream.proven or not stream.exact or end <= start:
            return None
        stream.told = end
        return ReadStretch(stream.number, start, end, end, True)

    def _begin(
        self, key: tuple[int, int, int], file: Hashable, offset: int, rchar: int
    ) -> _ReadStream:
        self._numbers += 1
        stream = self._streams[key] = _ReadStream(self._numbers, file, offset, rchar, offset)
        if len(self._streams) > ENTRIES_MAX:
            self._streams.popitem(last=False)
        return stream

    def left(self, pid: int) -> None:
        """A process has ended: forget its streams."""
        for key in [key for key in self._streams if key[0] == pid]:
            del self._streams[key]
