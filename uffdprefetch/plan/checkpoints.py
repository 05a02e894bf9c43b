# SPDX-License-Identifier: Apache-2.0
"""Where to listen: the bounded set over the whole file and the dense set that slides.

Mappings are a bounded good (two for each checkpoint), files are not. A few checkpoints lie over
all of a region to notice a stream that appears, a few at the places where streams began before
(paper 1's conclusion: make the *non-cached distance* small), and a dense set ahead of each active
stream slides with it. All are on a grid of the file, so that one page of the checkpoint memfd
serves every epoch and every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MIB = 1 << 20
#: A warm scan costs 8 % at 4 MiB (design, section 10); never denser in steady state.
DISTANCE_MIN_BYTES = 4 * MIB
#: auto: an event every this long at the reader's rate is plenty.
EVENT_SECONDS = 0.010
#: The first bytes of any format are a header that every access reads: never a checkpoint there.
HEADER_BYTES = 64 << 10
SPARSE_MAX = 128
#: Checkpoints of a stream's dense set.
AHEAD_MIN = 3
AHEAD_MAX = 16
#: Around a place where a stream has appeared: these steps ahead of it.
NEAR_STEPS_BYTES = (256 << 10, 512 << 10, 1 * MIB, 2 * MIB)


@dataclass(frozen=True)
class Span:
    """The part of the file that a region maps: [start, end) bytes, whole pages of the file only."""

    start_bytes: int
    end_bytes: int
    page_bytes: int

    def page(self, offset: int) -> int | None:
        """The page number of a file offset when it may carry a checkpoint, else None."""
        at = offset - offset % self.page_bytes
        inside = self.start_bytes <= at and at + self.page_bytes <= self.end_bytes
        return at // self.page_bytes if inside and at >= HEADER_BYTES else None

    def pages(self, offsets: Iterable[int]) -> set[int]:
        """The page numbers of all offsets that may carry one."""
        return {p for p in map(self.page, offsets) if p is not None}


def distance_bytes(rate_bytes_per_second: float, lookahead_bytes: int, chosen: int | None) -> int:
    """The spacing of the dense set: the user's, else by rate, a power of two >= 4 MiB such that a
    window holds at least AHEAD_MIN of them."""
    if chosen is not None:
        return chosen
    distance = DISTANCE_MIN_BYTES
    while (
        distance * 2 <= rate_bytes_per_second * EVENT_SECONDS
        and distance * 2 * AHEAD_MIN <= lookahead_bytes
    ):
        distance *= 2
    return distance


def sparse(span: Span, most: int, chosen: int | None) -> set[int]:
    """At most ``most`` pages spread evenly over the span, on multiples of the distance grid."""
    grid = chosen or DISTANCE_MIN_BYTES
    length = span.end_bytes - span.start_bytes
    most = min(most, SPARSE_MAX)
    if most <= 0:
        return set()
    step = grid * max(1, -(-length // (grid * most)))
    first = -(-max(span.start_bytes, 1) // step) * step
    return span.pages(range(first, span.end_bytes, step))


def dense(
    span: Span, position_bytes: int, lookahead_bytes: int, distance: int, direction: int = 1
) -> set[int]:
    """The grid points ahead of a stream: those in its window, AHEAD_MIN to AHEAD_MAX of them."""
    count = min(AHEAD_MAX, max(AHEAD_MIN, lookahead_bytes // distance))
    if direction < 0:
        first = (position_bytes - 1) // distance * distance
        return span.pages(range(first, max(0, first - count * distance), -distance))
    first = -(-position_bytes // distance) * distance
    return span.pages(range(first, first + count * distance, distance))


def near(span: Span, position_bytes: int) -> set[int]:
    """Closer ones just ahead of a stream that has only just appeared."""
    return span.pages(position_bytes + step for step in NEAR_STEPS_BYTES)
