# SPDX-License-Identifier: Apache-2.0
"""Work by many threads, whose results come in the order of what was given, and whose bytes are
bounded, however large one result is."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

#: Reads under way: enough for a file system that takes a millisecond for each of several requests a
#: file to give thousands of files a second.
WORKERS = 16
#: Bytes of results that are held at a time, and their number; one alone may be larger.
HELD_BYTES, HELD = 128 << 20, 1024


class Held(Protocol):
    """What is given, and what comes of it: the bytes of memory that it holds."""

    @property
    def held_bytes(self) -> int: ...


Given = TypeVar("Given", bound=Held)
Result = TypeVar("Result", bound=Held)
#: To be called once, with the bytes that the result will hold, before these are brought.
Admit = Callable[[int], None]


class _Closed(Exception):
    """Nobody wants the results any more."""


class _ByteRoom:
    """Admits results in their order. So who is admitted waits for nobody who is not, and whoever
    takes results in their order makes room for the next."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held_bytes = 0
        self._next = 0
        self._closed = False
        self._changed = threading.Condition()

    def enter(self, number: int, held_bytes: int) -> None:
        """Wait until all before ``number`` have entered, and there is room."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._admits(number, held_bytes))
            if self._closed:
                raise _Closed
            self._next += 1
            self._held_bytes += held_bytes
            self._changed.notify_all()

    def _admits(self, number: int, held_bytes: int) -> bool:
        fits = not self._held_bytes or self._held_bytes + held_bytes <= self._most_bytes
        return self._next == number and fits

    def leave(self, held_bytes: int) -> None:
        with self._changed:
            self._held_bytes -= held_bytes
            self._changed.notify_all()

    def close(self) -> None:
        """Whoever waits, or will, gets _Closed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class _Task(Generic[Given, Result]):
    """One piece of the work."""

    def __init__(self, room: _ByteRoom, number: int, given: Given) -> None:
        self._room, self._number, self.given = room, number, given
        #: What it has been admitted with.
        self.entered_bytes: int | None = None

    def run(self, work: Callable[[Given, Admit], Result]) -> Result:
        try:
            return work(self.given, self._admit)
        finally:
            if self.entered_bytes is None:
                self._admit(0)  # those after it wait for it

    def _admit(self, held_bytes: int) -> None:
        if self.entered_bytes is None:
            self._room.enter(self._number, held_bytes)
            self.entered_bytes = held_bytes


def in_order(
    given: Iterable[Given],
    work: Callable[[Given, Admit], Result],
    workers: int = WORKERS,
    most_bytes: int = HELD_BYTES,
) -> Iterator[Result]:
    """``work`` of each, in the order of ``given``. What is given is taken in the caller's thread,
    when a result is; what it holds already counts, too. Errors of ``given`` and ``work`` come in
    their order."""
    room = _ByteRoom(most_bytes)
    source = enumerate(given)
    waiting: deque[tuple[_Task[Given, Result], Future[Result]]] = deque()
    brought_bytes, more = 0, True
    failed: Exception | None = None
    threads = ThreadPoolExecutor(workers, "uffdprefetch-pack")
    try:
        while True:
            while more and len(waiting) < HELD and (not waiting or brought_bytes < most_bytes):
                try:
                    number, item = next(source, (-1, None))
                except Exception as error:
                    item, failed = None, error  # once what came before it is done
                if item is None:
                    more = False
                    break
                task: _Task[Given, Result] = _Task(room, number, item)
                brought_bytes += item.held_bytes
                waiting.append((task, threads.submit(task.run, work)))
            if not waiting:
                if failed is not None:
                    raise failed
                return
            task, future = waiting.popleft()
            result = future.result()
            brought_bytes -= task.given.held_bytes
            room.leave(task.entered_bytes or 0)
            del future
            yield result
    finally:
        room.close()
        threads.shutdown(wait=True, cancel_futures=True)
