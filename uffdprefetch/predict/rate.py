# SPDX-License-Identifier: Apache-2.0
"""How fast a reader goes, and whether what it needs is there before it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from uffdprefetch.predict.bounds import LATELY_NS
from uffdprefetch.predict.price import FREE_BYTES
from uffdprefetch.predict.storage import BLOCK_BYTES

#: Touches closer than this are one sample: a page-table scan brings several at one time. Nor is a
#: sequence of records looked for, or judged whether to read a file whole, more often.
RATE_SAMPLE_NS = 20_000_000
#: A window grows to this many times what the rate asks for, at most.
BOOST_MAX = 4.0


class Rate:
    """Bytes per second: an exponentially weighted moving average, by time, so that a burst of short
    steps does not outvote a long pause. Its half-life is LATELY_NS: shorter follows batches instead
    of the job. Times in CLOCK_MONOTONIC ns."""

    def __init__(self, since_ns: int | None = None) -> None:
        """None: the first note() only begins it."""
        self.bytes_per_second = 0.0
        self._weight = 0.0
        self._sample_ns = since_ns
        self._sample_bytes = 0

    def note(self, gone_bytes: int, now_ns: int) -> None:
        """So many bytes further at this time."""
        if self._sample_ns is None:
            self._sample_ns = now_ns
            return
        self._sample_bytes += gone_bytes
        elapsed = now_ns - self._sample_ns
        if elapsed < RATE_SAMPLE_NS:
            return
        keep = 0.5 ** (elapsed / LATELY_NS)
        self._weight = self._weight * keep + (1 - keep)
        sample = self._sample_bytes * 1e9 / elapsed
        self.bytes_per_second += (sample - self.bytes_per_second) * (1 - keep) / self._weight
        self._sample_ns, self._sample_bytes = now_ns, 0


@dataclass
class PlainRate:
    """How fast readers of a device go on in order while nothing is read ahead for them: the best of
    late, as others, and a busy core, make it look worse. 0: not known."""

    bytes_per_second: float = 0.0
    _noted_ns: int = 0

    def note(self, bytes_per_second: float, now_ns: int) -> None:
        """One was seen."""
        keep = 0.5 ** ((now_ns - self._noted_ns) / LATELY_NS)
        self.bytes_per_second = max(bytes_per_second, self.bytes_per_second * keep)
        self._noted_ns = now_ns


@dataclass
class OwnPace:
    """How one reader goes on by itself. Of one that is as fast as near storage, where its own
    misses may suffice, that is told before anything is read ahead for it: requests that come no
    faster than it goes on would be in its way."""

    is_fast: bool = False
    is_told: bool = False
    _blocks: int = 0  # of a stretch in which next to nothing was read ahead for it ...
    _since: tuple[int, int] | None = None  # ... when that began, and how long it had been delayed

    @property
    def waits(self) -> bool:
        """Whether nothing is to be read ahead for it until its pace is told."""
        return self.is_fast and not self.is_told

    def saw(
        self, blocks: int, asked: int, seen_ns: int | None, now_ns: int,
        delayed_ns: Callable[[], int],
    ) -> float:  # fmt: skip
        """A look has found that it has gone on by so many blocks in one piece since ``seen_ns``, of
        which ``asked`` were asked for ahead of it. Bytes/s, when that tells. ``delayed_ns``: how
        long it has waited for a core, ever, which is not storage's doing."""
        gone_ns = now_ns - seen_ns if seen_ns is not None else RATE_SAMPLE_NS
        self.is_fast |= blocks * BLOCK_BYTES * RATE_SAMPLE_NS >= FREE_BYTES * gone_ns
        if not self.is_fast:
            return 0.0
        now, before = (now_ns, delayed_ns()), self._since
        self._blocks += blocks
        if before is None or 2 * asked > blocks:  # some is, to learn what storage brings
            self._since, self._blocks = now, 0
            return 0.0
        own_ns = now[0] - before[0] - (now[1] - before[1])
        if own_ns < RATE_SAMPLE_NS:
            return 0.0
        found = self._blocks * BLOCK_BYTES * 1e9 / own_ns
        self.is_told, self._since, self._blocks = True, now, 0
        return found

    def pause(self) -> None:
        """It has unmapped the file: what it does next is another stretch."""
        self._since = None


@dataclass
class Feedback:
    """Whether extents were there before their reader; ``boost`` times what its rate asks for is
    then read ahead."""

    boost: float = 1.0
    late_extents: int = 0
    good_extents: int = 0  # one after the other

    def came(self, asked_bytes: int, brought_bytes: int, seconds: float) -> None:
        """An extent was there after so long; ``brought_bytes`` of it were not before."""

    def note(self, late: bool) -> None:
        """One extent more: the window grows at once when it was late, and shrinks by a fifth after
        64 in time."""
        if late:
            self.late_extents += 1
            self.good_extents = 0
            self.boost = min(BOOST_MAX, self.boost * 1.5)
            return
        self.good_extents += 1
        if self.good_extents >= 64:
            self.good_extents = 0
            self.boost = max(1.0, self.boost * 0.8)
