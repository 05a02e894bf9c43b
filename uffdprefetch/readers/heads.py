# SPDX-License-Identifier: Apache-2.0
"""Who has reading asked for on a guess (readers/ahead.py): the heads of walks, and places where
processes begin next; and what goes on between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from uffdprefetch.predict.bounds import LATELY_NS
from uffdprefetch.predict.fronts import RECENT_BLOCKS, Front
from uffdprefetch.predict.rate import Feedback, Rate
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.sense.pagetable_scan import LOOK_FIRST_NS
from uffdprefetch.state.reader import Reader
from uffdprefetch.warm.consumer import FileConsumer
from uffdprefetch.warm.scheduler import Scheduler


class Head:
    """A front, as the scheduler sees it. ``depths``: how much may be under way for it, and for all
    where something for it is to go with it."""

    def __init__(
        self,
        front: Front,
        reader: Reader,
        now_ns: int,
        depths: tuple[Callable[[Front], int], Callable[[Front], int]],
    ) -> None:
        self.front = front
        self._depth_bytes, self._depth_of_all_bytes = depths
        self.rank, self.reader = reader.rank, reader.pid
        self.feedback = Feedback()
        self._rate = Rate(now_ns)
        self._noted = front.position

    @property
    def direction(self) -> int:
        """See Consumer."""
        return self.front.direction

    @property
    def position_bytes(self) -> int:
        """See Consumer."""
        return self.front.position * BLOCK_BYTES

    @property
    def rate_bytes_per_second(self) -> float:
        """See Consumer."""
        return self._rate.bytes_per_second

    @property
    def depth_bytes(self) -> int:
        """See Consumer."""
        return self._depth_bytes(self.front)

    @property
    def depth_of_all_bytes(self) -> int:
        """See Consumer."""
        return self._depth_of_all_bytes(self.front)

    @property
    def last_ns(self) -> int:
        """When it went on last."""
        return self.front.last_ns

    @property
    def settled(self) -> bool:
        """Whether it has come so far that what follows its file may be what it comes to."""
        return self.front.length >= RECENT_BLOCKS

    def moved(self, now_ns: int) -> None:
        """The front has."""
        gone = abs(self.front.position - self._noted) * BLOCK_BYTES
        self._rate.note(gone, now_ns)
        self._noted = self.front.position

    def expected_bytes(self, now_ns: int, most_bytes: int) -> int:
        """See Consumer."""
        gone = self.rate_bytes_per_second * max(0, now_ns - self.front.last_ns) / 1e9
        return self.position_bytes + self.direction * min(int(gone), most_bytes)


class Places(FileConsumer):
    """Where a process begins next: its places come first, whatever lies between them."""

    def __init__(self, reader: Reader, scheduler: Scheduler) -> None:
        super().__init__(reader.rank, reader.pid, position_bytes=-1)
        self._scheduler = scheduler

    def expected_bytes(self, now_ns: int, most_bytes: int) -> int:
        """See Consumer."""
        return self._scheduler.first_queued(self) or 0


@dataclass
class Traffic:
    """What goes on in this turn: who has missed, and the length of the longest walk."""

    now_ns: int = 0
    longest: int = 0
    #: When a process was last seen to have missed, and where.
    missed: dict[int, tuple[int, Front]] = field(default_factory=dict)

    def step(self, fronts: Iterable[Front], now_ns: int) -> None:
        """Another turn, with these fronts."""
        self.now_ns = now_ns
        moving = (front.length for front in fronts if now_ns - front.last_ns < LATELY_NS)
        self.longest = max(moving, default=0)

    def just_missed(self) -> list[tuple[int, Front]]:
        """Processes that have, and where. It may be told two looks late, and so may the other."""
        since = self.now_ns - 4 * LOOK_FIRST_NS
        return [(pid, at) for pid, (at_ns, at) in self.missed.items() if at_ns > since]
