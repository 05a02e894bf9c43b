# SPDX-License-Identifier: Apache-2.0
"""A DataLoader's epoch: what was announced of it, how far it is, and whether it is true."""

from __future__ import annotations

import heapq
import itertools
import sys
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from .channel import Announcement
from .samplers import flat

#: Epochs of a loader whose announced order was wrong, before nothing more is said of it.
STRIKES = 2


class Settings:
    """What uffdprefetch.torch.prefetch() was told of a loader."""

    def __init__(self, key: Callable[[int], Any] | None = None, file: str | None = None) -> None:
        self.key, self.file = key, file
        #: What key() has answered, by item number.
        self.answers: dict[int, Any] = {}
        self._complained = False

    def complain(self, line: str) -> None:
        """To the user, once."""
        if not self._complained:
            self._complained = True
            sys.stderr.write(f"uffdprefetch: {line}\n")


class Reader:
    """A DataLoader and its iterators, to none of which it may refer (job/tables.py).

    When they are all gone its name is given to another: a job that makes a new loader for every
    epoch is one reader, whose orders take each other's place.
    """

    _free: ClassVar[list[int]] = []
    _count: ClassVar[itertools.count[int]] = itertools.count(1)

    def __init__(self) -> None:
        try:
            self._number = heapq.heappop(self._free)
        except IndexError:
            self._number = next(self._count)
        self.name = f"loader-{self._number}"
        self.strikes = 0
        self.refusal_announced = False  # that its order is not known
        self.settings: Settings | None = None
        #: Of a loader with two iterators at once it is the later one's.
        self.current: Epoch | None = None

    def __del__(self, push: Callable[..., None] = heapq.heappush) -> None:
        push(self._free, self._number)  # a default: at the interpreter's end heapq may be gone


class Epoch:
    """One way of an iterator through its sampler. It is silent until announced() was called, and
    after it has ended or turned out to be otherwise."""

    def __init__(self, reader: Reader, ahead: bool) -> None:
        """``ahead``: indices are handed to workers before their batches are asked for."""
        self.reader = reader
        self.begun = False
        #: The order, where it had to be found before the iterator was made.
        self.early: array[int] | None = None
        self._ahead = ahead
        self._order: array[int] = array("q")
        self._announcement: Announcement | None = None
        self._drawn_items = 0
        self._delivered_items = 0
        self._sizes: deque[int] = deque()

    def follow(self, order: array[int], announcement: Announcement) -> None:
        """This is what it will read."""
        self._order, self._announcement = order, announcement
        self.reader.current = self

    def on_index(self, index: Any) -> str | None:
        """The sampler has given ``index``. Returns what is wrong with it, a line, the first time
        that it is not what was announced."""
        if self._announcement is None:
            return None
        try:
            real = flat(index)
        except (TypeError, ValueError, OverflowError):
            real = array("q")
        size = len(real)
        if not size or real != self._order[self._drawn_items : self._drawn_items + size]:
            at = self._drawn_items
            return self._was_wrong(f"not the order that was announced, from item {at}")
        self._drawn_items += size
        self._sizes.append(size)
        return None

    def on_batch(self) -> None:
        """The job has got another batch."""
        if self._announcement is None:
            return
        if self._ahead:
            self._delivered_items += self._sizes.popleft() if self._sizes else 0
        else:  # also what a failed batch had
            self._delivered_items = self._drawn_items
        if self.reader.current is self:
            self._announcement.said(self._delivered_items)

    def on_sampler_end(self) -> str | None:
        """The sampler has no more. Returns what is wrong with that, a line, or None."""
        if self._announcement is None or self._drawn_items == len(self._order):
            return None
        return self._was_wrong(f"ended after {self._drawn_items} items of {len(self._order)}")

    def end(self) -> None:
        """Nothing more will be read: the sampler has ended, or the iterator has gone."""
        announcement, self._announcement = self._announcement, None
        self._order = array("q")
        if announcement is not None and self.reader.current is self:
            self.reader.current = None
            announcement.end()  # the slot is the reader's: an iterator that follows may have it

    def _was_wrong(self, why: str) -> str:
        self.reader.strikes += 1
        self.end()
        return f"{self.reader.name}: {why}"
