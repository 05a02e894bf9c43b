# SPDX-License-Identifier: Apache-2.0
"""Touches become streams: one reader's walk through one file; how fast it goes on, and whether what
it needs is there before it.

A *touch* is a range of bytes that a reader is known to have read at a time: an armed checkpoint
that fired (one page), or a run of page-table entries that is new (64 KiB resolution, because the
kernel maps the cached neighbours of a fault with it). The words for patterns are Darshan's:
*consecutive* (each access starts where the last one ended) and *sequential* (each starts at a
higher offset); *strided* is sequential with a constant step (skipping in [Stanovnik]).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise

from uffdprefetch.base.record import dataclass, field
from uffdprefetch.base.units import MIB
from uffdprefetch.predict.bounds import LATELY_NS
from uffdprefetch.predict.storage import BLOCK_BYTES, UNDER_WAY_BYTES

#: How far ahead of a stream a touch may lie and still belong to it. Larger than any skip of a few
#: ranks' records, smaller than the distance between two readers of one process.
REACH_BYTES = 32 * MIB
#: As long as a stream has been touched once only: a file's header, a B-tree's root and the first
#: record lie apart, and joining two of them would send the first window to the wrong place.
CANDIDATE_REACH_BYTES = 5 * MIB
#: Out-of-order touches (several threads, B-tree pages) may lie this far behind.
BACK_BYTES = 8 * MIB
#: Streams kept per reader; the longest silent one goes first.
STREAMS_MAX = 128
#: A stream that is silent (LATELY_NS), and that no other one has taken over, is forgotten after
#: this, if its reader reads elsewhere, and a reader protects no blocks of the pool any more.
FORGET_NS = 10_000_000_000
#: Progress that makes a stream sure.
SETTLED_BYTES = 2 * MIB
#: A candidate becomes active when it has seen this many bytes, or a second touch further on.
ACTIVE_BYTES = 256 << 10
#: A stream that touched less of what it went over (in blocks) leaves something out.
DENSITY = 0.8
#: It is asked of each piece, and not of the whole: one gap as wide as REACH_BYTES, as between a
#: file's header and its first record, would outweigh what comes after it. What is touched out of
#: order is in the same piece.
PIECE_BYTES = BACK_BYTES
#: One that did so in so many pieces, the last, skips: together they are as long as REACH_BYTES.
PIECES = REACH_BYTES // PIECE_BYTES
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
    faster than it goes on would be in its way. What was read ahead of it shows our pace."""

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
        is_own = 2 * asked <= blocks  # some is, to learn what storage brings
        if is_own:
            self.is_fast |= blocks * BLOCK_BYTES * RATE_SAMPLE_NS >= UNDER_WAY_BYTES * gone_ns
        if not self.is_fast:
            return 0.0
        now, before = (now_ns, delayed_ns()), self._since
        self._blocks += blocks
        if before is None or not is_own:
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


@dataclass
class Passed:
    """What a stream has gone over, and what of that was touched, as page tables tell."""

    bytes: int = 0
    touched_bytes: int = 0
    sparse_pieces: int = 0  # that left something out, one after the other, up to the present one
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    _piece: tuple[int, int] = (0, 0)  # bytes and touched_bytes where the present one began

    @property
    def density(self) -> float | None:
        """Share of the bytes walked over that were touched, at 64 KiB resolution."""
        if self.bytes < ACTIVE_BYTES:
            return None
        return min(1.0, self.touched_bytes / self.bytes)

    @property
    def stride_bytes(self) -> int | None:
        """The constant distance between run starts, within one 64 KiB block of each other."""
        if len(self.steps) < 4:
            return None
        middle = sorted(self.steps)[len(self.steps) // 2]
        near = sum(abs(step - middle) <= 65536 for step in self.steps)
        return middle if near >= 0.8 * len(self.steps) else None

    def saw(self, gone_bytes: int, runs: list[tuple[int, int]]) -> None:
        """Account the page-table runs (offset, bytes) found in ``gone_bytes`` walked over."""
        self.bytes += gone_bytes
        self.touched_bytes += sum(length for _, length in runs)
        began, touched = self._piece
        if self.bytes - began >= PIECE_BYTES:
            sparse = self.touched_bytes - touched < DENSITY * (self.bytes - began)
            self.sparse_pieces = self.sparse_pieces + 1 if sparse else 0
            self._piece = self.bytes, self.touched_bytes
        for (a, _), (b, _) in pairwise(runs):
            self.steps.append(b - a)


@dataclass(eq=False)
class Stream:
    """One stream. Offsets and sizes in bytes, times CLOCK_MONOTONIC ns."""

    id: int
    rank: int
    reader: int  # pid
    start_bytes: int
    position_bytes: int  # end of the furthest touch
    first_ns: int
    last_ns: int
    direction: int = 1
    touches: int = 1
    active: bool = False
    passed: Passed = field(default_factory=Passed)
    rate: Rate = field(init=False)

    def __post_init__(self) -> None:
        self.rate = Rate(self.first_ns)

    @property
    def rate_bytes_per_second(self) -> float:
        """How fast it goes."""
        return self.rate.bytes_per_second

    @property
    def settled(self) -> bool:
        """Whether it has walked far enough to be no accident."""
        return self.active and abs(self.position_bytes - self.start_bytes) >= SETTLED_BYTES

    @property
    def skips(self) -> bool:
        """Whether it has left something out all along its last PIECES * PIECE_BYTES."""
        return self.active and self.passed.sparse_pieces >= PIECES

    @property
    def pattern(self) -> str:
        """'new', 'consecutive', 'strided' or 'sequential'; with ' backward' where it is so."""
        if not self.active:
            return "new"
        density = self.passed.density
        name = "sequential"
        if density is None or density >= 0.9:
            name = "consecutive"
        elif self.passed.stride_bytes:
            name = "strided"
        return name if self.direction > 0 else f"{name} backward"

    def expected_bytes(self, now_ns: int, most_bytes: int) -> int:
        """Where the reader probably is: on from its last touch at its rate, by at most
        ``most_bytes`` (the next look would have told)."""
        gone = self.rate_bytes_per_second * max(0, now_ns - self.last_ns) / 1e9
        return self.position_bytes + self.direction * min(int(gone), most_bytes)

    def turn(self, start: int, end: int) -> None:
        """A stream that is not sure yet goes where it is touched further: it may begin backward,
        and a backward reader of blocks reads each block forward."""
        beyond = self.start_bytes - start if self.direction > 0 else end - self.start_bytes
        if not self.settled and beyond >= abs(self.position_bytes - self.start_bytes):
            self.start_bytes, self.position_bytes = self.position_bytes, self.start_bytes
            self.direction = -self.direction

    def advance(self, start: int, end: int, now_ns: int) -> int:
        """Move to a touch; returns the bytes gone forward (0 when it lay behind)."""
        self.touches += 1
        if self.touches == 2:
            self.rate = Rate()  # how long it had stood where it begins says nothing
        forward = end - self.position_bytes if self.direction > 0 else self.position_bytes - start
        if forward <= 0:
            self.last_ns = max(self.last_ns, now_ns)
            return 0
        self.position_bytes = end if self.direction > 0 else start
        self.last_ns = max(self.last_ns, now_ns)
        self.rate.note(forward, self.last_ns)
        self.active = self.active or self.touches > 1 or abs(end - start) >= ACTIVE_BYTES
        return forward


class StreamTable:
    """The streams of one reader in one file."""

    def __init__(self, rank: int, reader: int) -> None:
        self.rank = rank
        self.reader = reader
        self.streams: list[Stream] = []
        self.absorbed: list[Stream] = []  # for the caller to forget
        self._next_id = 1

    def active(self) -> list[Stream]:
        """The streams worth planning for."""
        return [s for s in self.streams if s.active]

    def match(self, start: int, end: int) -> Stream | None:
        """The nearest stream to which a touch of [start, end) can belong.

        A place that was touched only once is second to a stream that is nearby, and what lies
        behind it belongs there if nowhere else: an LMDB's root page stands among the records, and
        is not where a reader goes that walks up to it.
        """
        best, best_rank = None, (3, 0)
        for s in self.streams:
            ahead = (start - s.position_bytes) * s.direction
            if s.touches > 1:
                fits = -BACK_BYTES <= ahead <= REACH_BYTES
                rank = 0 if abs(ahead) <= CANDIDATE_REACH_BYTES else 1
            else:
                fits = abs(ahead) <= CANDIDATE_REACH_BYTES
                rank = 1 if ahead >= s.start_bytes - s.position_bytes else 2
            if fits and (rank, abs(ahead)) < best_rank:
                best, best_rank = s, (rank, abs(ahead))
        return best

    def touch(self, start: int, end: int, now_ns: int) -> tuple[Stream, int]:
        """Feed one touch of [start, end) bytes: (its stream, bytes gone forward).

        A touch that fits nowhere starts a candidate, which is not active yet unless it is already
        a run of ACTIVE_BYTES.
        """
        s = self.match(start, end)
        if s is not None:
            s.turn(start, end)
            before = s.position_bytes
            forward = s.advance(start, end, now_ns)
            if forward:
                self._absorb(s, before)
            return s, forward
        s = Stream(
            id=self._next_id,
            rank=self.rank,
            reader=self.reader,
            start_bytes=start,
            position_bytes=end,
            first_ns=now_ns,
            last_ns=now_ns,
        )
        s.active = end - start >= ACTIVE_BYTES
        self._next_id += 1
        if len(self.streams) >= STREAMS_MAX:
            oldest = min(self.streams, key=lambda old: (old.active, old.last_ns))
            self.streams.remove(oldest)
            self.absorbed.append(oldest)
        self.streams.append(s)
        return s, 0

    def _absorb(self, s: Stream, before: int) -> None:
        """A stream that walks over another's position is the same walk, seen twice: what was queued
        for that is dropped with it."""
        low, high = sorted((before, s.position_bytes))
        for other in [o for o in self.streams if o is not s and low <= o.position_bytes <= high]:
            if other.direction == s.direction or not other.active:
                self.streams.remove(other)
                self.absorbed.append(other)

    def expire(self, now_ns: int) -> None:
        """Once in a while: end the streams that their reader has left."""
        latest = max((s.last_ns for s in self.streams), default=0)
        for old in list(self.streams):
            quiet = now_ns - old.last_ns
            if old.last_ns == latest or quiet < LATELY_NS:
                continue
            taken_over = any(
                s.last_ns > old.last_ns
                and (s.start_bytes - REACH_BYTES - old.position_bytes) * s.direction <= 0
                and (s.position_bytes - old.position_bytes) * s.direction >= 0
                for s in self.streams
                if s is not old
            )
            if taken_over or quiet >= FORGET_NS:
                self.streams.remove(old)
                self.absorbed.append(old)
