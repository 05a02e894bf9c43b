# SPDX-License-Identifier: Apache-2.0
"""Bulk warm: is it cheaper to stream a file whole than to let a reader go on by random misses?

For readers whose order nobody knows (random crops of a token memmap). Pure; who does it is
readers/bulk.py. How long a job goes on is not known either, so this is the ski rental problem
(Karlin, Manasse, Rudolph, Sleator, "Competitive snoopy caching", 1988): a reader that has lost so
much by misses that it could have paid for the stream will probably lose as much again. Nor does the
stream come at once: it keeps pace with what the misses alone would have brought by then, so that a
reader that ends early has had little read for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from uffdprefetch.base.units import format_duration, format_size


class Choice(Enum):
    """What to do with a file whose readers jump about."""

    STREAM = "read it whole"
    WAIT = "not sure yet"
    MEASURE = "the storage is not measured yet"
    NO_ROOM = "it does not fit"
    NO_GAIN = "random reads are as good here"
    RESIDENT = "it is in memory"


#: The file is streamed when misses have cost this part of what the stream will: what is lost if the
#: reader goes on for ever. From the curve in docs/bulk.md.
RENT_SHARE = 0.1
#: ... and when they have cost all of it, where whoever reads has left the last file before its
#: stream was worth its price: then at most twice is paid, and nothing where all are left so.
RENT_AGAIN = 1.0
#: With the stream no more has been read than so many times what misses alone would have brought ...
PACE = 1.9
#: ... until misses cost no more than this part of what they would cost alone: whoever ends then has
#: been served well, whatever has been read ...
LEFT_SHARE = 0.75
#: ... or misses and the rest of the stream would cost more than so many streams: where a miss costs
#: many times what its bytes do, keeping pace with them would take too long.
COST_MOST = 1.35
#: A stream yields to its readers' misses: it is read by pieces of this size, what a miss brings,
#: and a miss waits behind those that are under way. While it keeps pace they need come about as
#: fast as the misses do: PACED_PIECES at a time, unless it has fallen behind by BEHIND_BYTES (where
#: a piece takes no longer than it takes to ask for the next).
PIECE_BYTES = 128 << 10
PACED_PIECES = 2
BEHIND_BYTES = 2 << 20
#: It is read by so many extents at a time: when one has ended, the others go on until the service
#: has sent the next.
EXTENTS = 4
YIELD_MOST_BYTES = 16 << 20
#: Least ratio of the cost of all random misses to that of the stream.
LEAST_GAIN = 1.25
#: Less than this part of a file missing is nothing to stream for.
LITTLE_SHARE = 64
#: Latency is the least of MISS_READS single reads of MISS_BYTES: what the kernel reads around a
#: miss, or what read_ahead_kb says, and after 100 misses of one mapping the page alone
#: (mm/filemap.c).
MISS_READS = 3
MISS_BYTES = 128 << 10
#: Its bandwidth, where no window has been read yet: by the first bytes of the stream, which a miss
#: stands behind: so by this part of what misses have brought, and not before the stream could begin
#: were it as fast as READS_AT_ONCE single reads at a time.
PROBE_SHARE = 0.25
PROBE_LEAST_BYTES, PROBE_MOST_BYTES = 2 << 20, 8 << 20
READS_AT_ONCE = 16


@dataclass(frozen=True)
class BulkInputs:
    """What is known of the random readers of one file. Sizes in bytes, times in seconds."""

    file_bytes: int
    missing_bytes: int  # not in memory
    room_bytes: int  # what of the file may be in memory
    touches_per_second: float  # of places new to their reader, all readers together
    watched_seconds: float  # since the first of these
    miss_seconds: float = 0.0  # one read of miss_bytes; 0: not measured
    miss_bytes: int = 4096
    bandwidth_bytes_per_second: float = 0.0  # of reads in order; 0: not measured
    rent_share: float = 0.0  # in the place of RENT_SHARE, where that is to be found out

    @property
    def measured(self) -> bool:
        """Whether the storage's latency and bandwidth are known."""
        return self.miss_seconds > 0 and self.bandwidth_bytes_per_second > 0

    @property
    def stream_seconds(self) -> float:
        """To read what is missing in order; at the least, where the bandwidth is not known."""
        most = READS_AT_ONCE * MISS_BYTES / self.miss_seconds
        return self.missing_bytes / (self.bandwidth_bytes_per_second or most)

    @property
    def lost_at_most_seconds(self) -> float:
        """Until random misses alone have brought all of it."""
        return self.missing_bytes / self.miss_bytes * self.miss_seconds

    @property
    def lost_seconds(self) -> float:
        """What random misses have cost: how many there were x latency."""
        share = self.missing_bytes / self.file_bytes
        return self.touches_per_second * share * self.watched_seconds * self.miss_seconds


@dataclass(frozen=True)
class BulkDecision:
    """``why`` says it with figures, for people."""

    what: Choice
    why: str


def judge(inputs: BulkInputs) -> BulkDecision:
    """What to do now. Inputs that are not measured give NO_ROOM, RESIDENT, WAIT or MEASURE."""
    if inputs.missing_bytes * LITTLE_SHARE <= inputs.file_bytes:
        return BulkDecision(
            Choice.RESIDENT, f"{format_size(inputs.missing_bytes)} of it are not in memory"
        )
    if inputs.file_bytes > inputs.room_bytes:
        sizes = f"{format_size(inputs.file_bytes)} do not fit in {format_size(inputs.room_bytes)}"
        return BulkDecision(Choice.NO_ROOM, sizes)
    if not inputs.miss_seconds:
        return BulkDecision(Choice.MEASURE, "the storage is not measured yet")
    paid = inputs.lost_seconds >= (inputs.rent_share or RENT_SHARE) * inputs.stream_seconds
    if paid and not inputs.measured:
        return BulkDecision(Choice.MEASURE, "the storage is not measured yet")
    stream, lost = format_duration(inputs.stream_seconds), format_duration(inputs.lost_seconds)
    if not inputs.measured:
        return BulkDecision(
            Choice.WAIT, f"random misses have cost {lost}, streaming the rest {stream} at the least"
        )
    one = (
        f"one random read {format_duration(inputs.miss_seconds)}, in order "
        f"{format_size(round(inputs.bandwidth_bytes_per_second))}/s"
    )
    if inputs.lost_at_most_seconds < LEAST_GAIN * inputs.stream_seconds:
        return BulkDecision(Choice.NO_GAIN, f"random reads are as good as a stream here ({one})")
    why = f"random misses have cost {lost}, streaming the rest {stream} ({one})"
    return BulkDecision(Choice.STREAM if paid else Choice.WAIT, why)


@dataclass
class Pace:
    """How far a stream may be, by what its readers' misses bring meanwhile. Sizes in bytes."""

    first_missing_bytes: int  # not in memory at first
    demanded_bytes: int = 0  # of that, misses have brought ...
    plain_bytes: float = 0.0  # ... and would have brought without a stream
    streamed_bytes: int = 0  # have come by the stream

    def note(self, missing_bytes: int, streamed_bytes: int) -> None:
        """So much is missing now, and so much has come by the stream. A random miss hits what the
        stream has left; without it as many more would have hit what had been left then."""
        self.streamed_bytes = streamed_bytes
        demanded = self.first_missing_bytes - missing_bytes - streamed_bytes
        more = demanded - self.demanded_bytes
        if more > 0:
            left = self.first_missing_bytes - self.plain_bytes
            self.plain_bytes += min(left, more * left / (missing_bytes + more / 2))
            self.demanded_bytes = demanded

    def is_behind(self, most_bytes: int) -> bool:
        """Whether less has come by the stream than might have, of ``most_bytes``."""
        return self.streamed_bytes + BEHIND_BYTES < most_bytes

    def may_stream_bytes(
        self, missing_bytes: int, bandwidth_bytes_per_second: float, lost_seconds: float
    ) -> int | None:
        """How much may have come by the stream by now, where misses have cost ``lost_seconds``;
        None: all of it, as fast as it can."""
        rest, whole = (
            size / bandwidth_bytes_per_second for size in (missing_bytes, self.first_missing_bytes)
        )
        little = missing_bytes * LITTLE_SHARE <= self.first_missing_bytes
        served = self.demanded_bytes < LEFT_SHARE * self.plain_bytes
        if little or served or lost_seconds + rest >= COST_MOST * whole:
            return None
        return max(0, int(PACE * self.plain_bytes) - self.demanded_bytes)


def alone_seconds(
    size_bytes: int, used_share: float, block_bytes: int, miss_bytes: int, miss_seconds: float
) -> float:
    """What random misses alone would have cost whoever has used such a part of a file's blocks, of
    which one miss may bring several."""
    piece = max(block_bytes, miss_bytes)
    brought = 1 - (1 - used_share) ** (piece / block_bytes)
    return size_bytes / piece * brought * miss_seconds


def probe_bytes(plain_bytes: float) -> int:
    """What of the stream tells the bandwidth, where misses alone have brought so much."""
    return int(min(PROBE_MOST_BYTES, max(PROBE_LEAST_BYTES, plain_bytes * PROBE_SHARE)))


def yield_bytes(
    miss_seconds: float, bandwidth_bytes_per_second: float, keeps_pace: bool = False
) -> int:
    """What of a stream is under way at one time where a miss of MISS_BYTES takes so long."""
    if keeps_pace:
        return PACED_PIECES * PIECE_BYTES
    latency = max(0.0, miss_seconds - MISS_BYTES / bandwidth_bytes_per_second)
    return busy_bytes(latency, bandwidth_bytes_per_second)


def busy_bytes(latency_seconds: float, bandwidth_bytes_per_second: float) -> int:
    """What of a stream, under way at one time, keeps the storage busy: what comes in its latency
    and a piece more, in whole pieces for each of the EXTENTS that are read."""
    step = EXTENTS * PIECE_BYTES
    steps = -(-(int(bandwidth_bytes_per_second * latency_seconds) + PIECE_BYTES) // step)
    return min(steps * step, YIELD_MOST_BYTES)
