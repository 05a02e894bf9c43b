# SPDX-License-Identifier: Apache-2.0
"""A DataLoader's epoch: its announced order, its progress, and whether the order is right."""

from __future__ import annotations

import heapq
import itertools
import sys
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from .channel import ProgressSlot
from .samplers import flat

#: Wrongly announced epochs of a loader after which none is announced.
STRIKES = 2


class Settings:
    """Arguments of uffdprefetch.torch.prefetch() for a loader."""

    def __init__(
        self,
        key: Callable[[int], Any] | None = None,
        file: str | None = None,
        path: Callable[[int], Any] | None = None,
    ) -> None:
        self.key, self.file, self.path = key, file, path
        #: Results of key() or path(), by item number.
        self.answers: dict[int, Any] = {}
        self._complained = False

    def complain(self, line: str) -> None:
        """Write to the user's stderr, once."""
        if not self._complained:
            self._complained = True
            sys.stderr.write(f"uffdprefetch: {line}\n")


class LoaderReader:
    """A DataLoader and its iterators, to none of which it may refer (job/tables.py).

    Its name is reused once they have all died: a job that makes a new loader for every epoch is
    one reader, whose orders replace each other.
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
        self.refusal_announced = False  # that its order cannot be known
        self.settings: Settings | None = None
        #: With two iterators at once the later one's.
        self.current: Epoch | None = None

    def __del__(self, push: Callable[..., None] = heapq.heappush) -> None:
        push(self._free, self._number)  # a default: at the interpreter's end heapq may be gone


class Epoch:
    """One pass of an iterator through its sampler. Reports progress from follow() on, until it ends
    or its order turns out to be wrong."""

    def __init__(self, reader: LoaderReader, ahead: bool, ahead_items: int) -> None:
        """``ahead``: workers get indices before the job asks for their batches; ``ahead_items``: so
        many may have been read beyond the batches that it has received."""
        self.reader = reader
        self.ahead_items = ahead_items
        self._ahead = ahead
        self.begun = False
        #: The order, where it had to be computed before the iterator was made.
        self.early: array[int] | None = None
        self._order: array[int] = array("q")
        self._announcement: ProgressSlot | None = None
        self._drawn_items = 0
        self._delivered_items = 0
        self._sizes: deque[int] = deque()

    def follow(self, order: array[int], announcement: ProgressSlot) -> None:
        """Compare with ``order``, and report progress to ``announcement``."""
        self._order, self._announcement = order, announcement
        self.reader.current = self

    @property
    def is_ahead(self) -> bool:
        """Whether the order is announced, and no index of it drawn."""
        return self._announcement is not None and not self._drawn_items

    def on_index(self, index: Any) -> str | None:
        """The sampler has given ``index``. Returns an error, a line, the first time that it is not
        as announced."""
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
        """The job has received another batch."""
        if self._announcement is None:
            return
        if self._ahead:
            self._delivered_items += self._sizes.popleft() if self._sizes else 0
        else:  # including a failed batch's
            self._delivered_items = self._drawn_items
        if self.reader.current is self:
            self._announcement.said(self._delivered_items)

    def on_sampler_end(self) -> str | None:
        """The sampler has ended. Returns an error, a line, if it was too early."""
        if self._announcement is None or self._drawn_items == len(self._order):
            return None
        return self._was_wrong(f"ended after {self._drawn_items} items of {len(self._order)}")

    def end(self) -> None:
        """The sampler has ended, or the iterator has died."""
        announcement, self._announcement = self._announcement, None
        self._order = array("q")
        if announcement is not None and self.reader.current is self:
            self.reader.current = None
            announcement.end()  # not if a later iterator has the reader's slot

    def _was_wrong(self, why: str) -> str:
        self.reader.strikes += 1
        self.end()
        return f"{self.reader.name}: {why}"
