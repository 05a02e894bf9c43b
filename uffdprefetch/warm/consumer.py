# SPDX-License-Identifier: Apache-2.0
"""Who wants something read, and what: the scheduler's side of the predictors."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from uffdprefetch.base.record import dataclass, field
from uffdprefetch.predict.order.worth import OrderWorth
from uffdprefetch.predict.streams import Feedback, Rate
from uffdprefetch.state.files import FileState


class Priority(IntEnum):
    """What goes first; within one, what is nearest to its consumer."""

    NEEDED = 0  # a reader comes by
    MEASURING = 1  # a decision waits for how long it takes
    STATED = 2  # the job, or its user, has said that it will be needed
    BACKGROUND = 3  # nobody waits: not while the storage is busy


class Consumer(Protocol):
    """Whose ranges they are. Positions are bytes of the file, or of an order (``need``)."""

    @property
    def rank(self) -> int:
        """Of the reader."""

    @property
    def reader(self) -> int:
        """Its pid; 0: several processes."""

    @property
    def direction(self) -> int:
        """1, or -1: it goes backward."""

    @property
    def position_bytes(self) -> int:
        """Where it was seen last."""

    @property
    def rate_bytes_per_second(self) -> float:
        """How fast it goes; 0: not known."""

    @property
    def feedback(self) -> Feedback:
        """Whether what was read for it was there in time."""

    @property
    def depth_bytes(self) -> int:
        """How much of what is guessed may be under way for it, now; 0: as each range says."""

    @property
    def depth_of_all_bytes(self) -> int:
        """How much of what is guessed, for whomever, may be under way where something for it is to
        go with it, now; 0: as each range says."""

    def expected_bytes(self, now_ns: int, most_bytes: int) -> int:
        """Where it probably is: on from its last touch at its rate, by at most ``most_bytes``."""


@dataclass(frozen=True)
class PrefetchRange:
    """[start, end) bytes of a file, wanted. ``need``: where the consumer is when it needs them, if
    it does not walk through the file itself but through an order; ``whole``: what lies around it
    is needed too, by some reader, some time; ``pooled``: the reader has the pool's memory;
    ``yield_bytes``: it yields to demand misses, so no more than this of it is under way to the page
    cache at one time (0: it does not yield); ``guess``: its consumer may never come to it, so no
    more than ``yield_bytes``, or what its consumer says, stands before a miss, and nothing is read
    that its consumer has passed; ``record``: who comes to it takes all of it."""

    file: FileState
    start: int
    end: int
    need: int | None = None
    priority: Priority = Priority.NEEDED
    whole: bool = False
    pooled: bool = False
    yield_bytes: int = 0
    guess: bool = False
    record: bool = False


@dataclass
class OrderConsumer:
    """A reader in the coordinate of its order."""

    rank: int
    last_ns: int
    position_bytes: int = 0
    direction: int = 1
    reader: int = 0
    depth_bytes: int = 0
    depth_of_all_bytes: int = 0
    rate: Rate = field(init=False)
    feedback: OrderWorth = field(default_factory=OrderWorth)

    def __post_init__(self) -> None:
        self.rate = Rate(self.last_ns)

    @property
    def rate_bytes_per_second(self) -> float:
        """See Consumer."""
        return self.rate.bytes_per_second

    def advance(self, position_bytes: int, now_ns: int) -> None:
        """It is there now; never back."""
        self.last_ns = max(self.last_ns, now_ns)
        if position_bytes > self.position_bytes:
            self.rate.note(position_bytes - self.position_bytes, self.last_ns)
            self.position_bytes = position_bytes

    def expected_bytes(self, now_ns: int, most_bytes: int) -> int:
        """See Consumer."""
        gone = self.rate.bytes_per_second * max(0, now_ns - self.last_ns) / 1e9
        return self.position_bytes + min(int(gone), most_bytes)


@dataclass
class FileConsumer:
    """A whole file, from its beginning on, for nobody in particular."""

    rank: int
    reader: int
    position_bytes: int = 0
    direction: int = 1
    rate_bytes_per_second: float = 0.0
    depth_bytes: int = 0
    depth_of_all_bytes: int = 0
    feedback: Feedback = field(default_factory=Feedback)

    def expected_bytes(self, now_ns: int, most_bytes: int) -> int:
        """See Consumer."""
        return 0
