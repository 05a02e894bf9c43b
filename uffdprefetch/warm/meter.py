# SPDX-License-Identifier: Apache-2.0
"""How fast storage is, from the extents that were read."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from math import inf

from uffdprefetch.base.record import dataclass, field
from uffdprefetch.native import uffd
from uffdprefetch.predict.bounds import LATELY_COUNT
from uffdprefetch.predict.storage import MISS_BYTES, SLOW_BYTES_PER_SECOND, RequestCost, Storage
from uffdprefetch.warm.depth import MAX_SECONDS

#: Less than this is what memory takes, and the clock's and the scheduler's noise, seconds.
LATENCY_LEAST = 1e-4
#: So many tell a latency: readers' own requests may have stood before all of a few. Of reads of
#: which nobody knows what was there so many are taken, and the middle one of them.
SAMPLES_LEAST = 3
#: What a large request takes beside its latency is at least this part of it, once that is known.
LATENCY_PART = 8
#: Of so many one, the quickest, is left out: a part of what it brought may have been under way for
#: somebody else.
UNLIKELY = 16
#: What tells the bandwidth is read by so much at a time, or, of records in a known order, beside as
#: much: of less it is latency that shows, and the clock's noise.
TELLING_BYTES = 512 << 10


@dataclass
class BusyStretches:
    """Stretches in which something was under way all the time: what the storage brings then."""

    bandwidth: float = 0.0  # lately
    #: The most that two in a row have reached: what the storage can give a reader in order, of whom
    #: records in random places tell less.
    peak: float = 0.0
    _last: float = 0.0
    #: One that is being measured, by a clock that stands still while a pool's jobs wait for room
    #: and nothing is being read.
    _from_ns: int = 0
    _bytes: int = 0

    def note(self, result: uffd.WarmResult, was_idle: bool) -> float | None:
        """An extent was read; bytes/s when the stretch was long enough."""
        if was_idle or not self._from_ns:
            self._from_ns, self._bytes = result.start_ns - result.idle_start_ns, 0
        self._bytes += result.bytes
        now_ns = result.done_ns - result.idle_done_ns
        elapsed = now_ns - self._from_ns
        if elapsed < MAX_SECONDS * 1e9:
            return None
        sample = self._bytes * 1e9 / elapsed
        self.peak, self._last = max(self.peak, min(sample, self._last)), sample
        self.bandwidth += (sample - self.bandwidth) * (0.3 if self.bandwidth else 1.0)
        self._from_ns, self._bytes = now_ns, 0
        return sample


@dataclass
class QuickestReads:
    """For the books, of each size the quickest of requests of which nothing was there. Whatever was
    under way beside one, ours or others', made it look worse, so the quickest tell what one takes,
    and the more there were the better."""

    #: The power of two of its bytes -> (seconds, bytes), and how many there were of those.
    _of_size: dict[int, tuple[float, int]] = field(default_factory=dict)
    _counts: Counter[int] = field(default_factory=Counter)

    def note(self, result: uffd.WarmResult, brought: int) -> None:
        """An extent was read, ``brought`` bytes of it from storage."""
        if result.resident_bytes or not 0 < result.bytes <= brought:
            return
        kind, one = result.bytes.bit_length(), (result.took_ns / 1e9, result.bytes)
        self._counts[kind] += 1
        self._of_size[kind] = min(self._of_size.get(kind, one), one)

    @property
    def all(self) -> list[tuple[int, float]]:
        """(bytes, seconds) of the quickest."""
        return [(size, took) for took, size in self._of_size.values()]

    def count(self, below_bytes: float = inf) -> int:
        """How many there were of sizes whose quickest had less."""
        sizes = self._of_size.items()
        return sum(self._counts[kind] for kind, (_, size) in sizes if size < below_bytes)


@dataclass
class Meter:
    """Bandwidth and base latency of storage, from finished extents (Little's law)."""

    busy: BusyStretches = field(default_factory=BusyStretches)
    #: For the books: of all that was read, be it alone or not.
    quickest: QuickestReads = field(default_factory=QuickestReads)
    #: Of all that is read, guesses included, which may be too few or too small to fill the link.
    _of_all: BusyStretches = field(default_factory=BusyStretches)
    _latencies: deque[float] = field(default_factory=lambda: deque(maxlen=LATELY_COUNT))
    #: Of single pages, seconds.
    _pages: deque[float] = field(default_factory=lambda: deque(maxlen=LATELY_COUNT))
    #: Of extents that were read alone, (bytes, seconds), those of which nothing was there, be it
    #: under way; of large ones, little; and the others, which tell only as long as there is nothing
    #: better.
    _small: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=LATELY_COUNT))
    _mixed: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=LATELY_COUNT))
    #: Small ones of which nobody knows what was there: of a file of another user's. The first few,
    #: which are sent where nobody reads (readers/ahead.py, _probe()): later ones meet readahead.
    _unsure: list[tuple[int, float]] = field(default_factory=list)
    _large: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=4 * LATELY_COUNT))
    _link: Storage | None = None
    _link_is_old: bool = False

    def note(self, result: uffd.WarmResult, was_idle: bool, alone: bool) -> float | None:
        """Feed an extent that was really read; returns bytes/s when a busy stretch was long enough.

        ``was_idle``: nothing was under way before it. ``alone``: nothing was when it was sent, so
        that it did not stand behind others of ours.
        """
        sample = self.busy.note(result, was_idle)
        if sample is not None:
            self._link_is_old = True
        if alone and self.busy.bandwidth:
            took = result.took_ns / 1e9
            self._latencies.append(max(LATENCY_LEAST, took - result.bytes / self.busy.bandwidth))
        return sample

    def note_any(self, result: uffd.WarmResult, alone: bool) -> None:
        """Feed an extent of any kind that was really read; see note()."""
        if self._of_all.note(result, alone) is not None:
            self._link_is_old = True

    def note_alone(self, result: uffd.WarmResult) -> None:
        """Feed an extent of any size that was really read, and alone."""
        took, self._link_is_old = result.took_ns / 1e9, True
        if result.bytes + result.resident_bytes >= TELLING_BYTES:
            if result.bytes >= 3 * result.resident_bytes:
                self._large.append((result.bytes, took))
        elif result.sensor < 0:
            if len(self._unsure) < SAMPLES_LEAST:
                self._unsure.append((result.bytes, took))
        else:
            kind = self._mixed if result.resident_bytes else self._small
            kind.append((result.bytes, took))

    def note_pages(self, result: uffd.WarmResult, pages: int) -> None:
        """Feed reads of so many single pages."""
        each = (result.done_ns - result.start_ns) / 1e9 / pages
        if each >= LATENCY_LEAST:  # else they were in the page cache
            self._pages.append(each)
            self._link_is_old = True

    @property
    def of_pages(self) -> Storage:
        """With the latency of single pages: known as soon as a mapping has checkpoints."""
        return Storage(self.busy.bandwidth, min(self._pages, default=0.0))

    def cost(self, others: Iterable[tuple[int, float]] = ()) -> RequestCost:
        """What one more request costs, by the quickest of all reads, and by ``others``, (bytes,
        seconds): for the books, no decision is made on it. 0: not known.

        No more is told than was. A request that stood behind others tells a slow link: so the
        latency is that of the quickest, where some small ones are known, of which little is their
        bytes' share, less the noise that is in all of them (a worker begins and ends a read). The
        bandwidth is the best of busy stretches, or of a large read beside the quickest small one;
        where neither is known, of reads no larger than a miss; at last a request takes as long as
        the quickest, whatever it brings.
        """
        few = [*((uffd.PAGE_BYTES, took) for took in self._pages), *others]
        few = [one for one in few if one[1] >= LATENCY_LEAST]
        reads = [*few, *(one for one in self.quickest.all if one[1] >= LATENCY_LEAST)]
        small = [(took, size) for size, took in reads if size < TELLING_BYTES]
        least, less = min(small, default=(0.0, 0))
        rates = [
            (size - less) / max(took - least, took / 2)
            for size, took in reads
            if size > max(MISS_BYTES, less)
        ]
        # of those that are no larger than a miss: what it takes itself
        near = [
            (size - less) / (took - least)
            for size, took in reads
            if less < size <= MISS_BYTES and took > least
        ]
        best = max(rates, default=0.0)
        first = self.busy.peak or max(self.busy.bandwidth, best)
        first = first and max(first, self._of_all.peak)
        links = [first, best, max(near, default=inf), inf]
        known = self.quickest.count(TELLING_BYTES) + len(few)
        is_busy = self.quickest.count() - self.quickest.count(TELLING_BYTES) > known
        if not small or known < SAMPLES_LEAST:
            return RequestCost(first)
        # where most were large ones all the small ones may have stood behind those
        telling = [one for one in reads if is_busy or one[0] < TELLING_BYTES]
        for bandwidth in filter(None, links):
            latency = min(took - size / bandwidth for size, took in telling)
            if latency > LATENCY_LEAST:
                break  # else it was never busy, or what tells it had stood behind others
        if bandwidth == inf:  # a miss takes no less than a smaller one
            latency *= min(1.0, MISS_BYTES / less)
        return RequestCost(bandwidth, max(0.0, latency - LATENCY_LEAST), known)

    @property
    def link(self) -> Storage | None:
        """What one more request costs, from what was read alone; None: not known yet. Whatever runs
        beside it makes it look worse: the best that was seen tells."""
        if self._link_is_old:
            self._link, self._link_is_old = self._measured(), False
        return self._link

    @property
    def is_sure(self) -> bool:
        """Whether enough small requests tell the latency: before each of a few there may have stood
        one of a reader's own."""
        told = len(self._small) + len(self._pages)
        return told >= 2 * SAMPLES_LEAST or len(self._unsure) >= SAMPLES_LEAST

    @property
    def lacks_large(self) -> bool:
        """Whether of what tells the link it is a large request that is missing most."""
        told = max(len(self._small) + len(self._pages), len(self._unsure))
        return len(self._large) < min(SAMPLES_LEAST, 1 + told)

    def _measured(self) -> Storage | None:
        few = list(self._small or (() if self._pages else self._unsure or self._mixed))
        if not self._large or not (few or self._pages):
            return None
        few.sort(key=lambda one: one[1])
        least = len(few) // (UNLIKELY if self._small else 2)
        small = few[least] if few else (0, 0.0)
        pages = min(self._pages, default=0.0)
        quickest, rates = small[1] or pages, list[float]()
        # what is left of it without a latency is little where the link is long: few tell that not
        most = LATENCY_PART if self.is_sure else 2
        for size, took in self._large:
            took = max(took, LATENCY_LEAST)
            rates.append(size / max(took - quickest, took / most))
        bandwidth = sorted(rates)[-1 - len(rates) // UNLIKELY]
        if len(rates) < SAMPLES_LEAST:  # guesses that keep the link busy leave no request alone
            bandwidth = max(self._of_all.peak or SLOW_BYTES_PER_SECOND, bandwidth)
        bandwidth = max(self.busy.peak, bandwidth)
        latency = small[1] - small[0] / bandwidth if small[0] else pages
        # a request takes no longer than a larger one: of few each may have met a busy node
        without = 0.0 if self.is_sure else 1 / bandwidth
        larger = sorted(took - size * without for size, took in self._large)
        latency = min(latency, larger[len(larger) // UNLIKELY])
        return Storage(bandwidth, max(LATENCY_LEAST, latency))

    @property
    def told_latency(self) -> float | None:
        """For people, seconds; None: none was measured, or it is less than the clock's noise."""
        latency = self.storage.latency_seconds
        return round(latency, 6) if latency > LATENCY_LEAST else None

    @property
    def storage(self) -> Storage:
        """What the planner needs to know."""
        latency = min(self._latencies) if self._latencies else 0.0
        return Storage(self.busy.bandwidth, latency)
