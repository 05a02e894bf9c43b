# SPDX-License-Identifier: Apache-2.0
"""Which records a rank reads that skips the others': from page tables and a record index. Pure.

Skipping ([Stanovnik]): of R ranks each reads `run` records (one, or a batch), then skips those of
the others: records first + k * period + i, i < run. A page table shows more than was read: a fault
maps what is cached of its aligned 64 KiB with it. So a record whose pages are mapped may have been
read, and one whose pages are not has not been: a sequence is taken for the reader's when every
record of it is mapped, nearly all others are not, and those that are lie beside one that was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import Ranges, covered, union
from uffdprefetch.base.units import PAGE_BYTES
from uffdprefetch.predict.storage import BLOCK_BYTES

if TYPE_CHECKING:
    from uffdprefetch.formats.index import RecordIndex


#: Periods that a sequence must have been seen for.
PERIODS_MIN = 6
#: More where records are so small that neighbours are often mapped too: so many times BLOCK_BYTES /
#: mean record.
PERIODS_OF_A_BLOCK = 8
#: Least number of records, read or not, as evidence: one bit each, too many for a random reader.
EVIDENCE_RECORDS_MIN = 24
#: Smaller records than this, on average, lie too many in what one fault maps.
RECORD_MIN_BYTES = BLOCK_BYTES // PERIODS_OF_A_BLOCK
#: Records that an inference looks at, some 10 ms at the longest: the last ones. A period of 1,365
#: is seen PERIODS_MIN times in them.
RECORDS_MAX = 1 << 13
#: In this part of the periods every record of the sequence must be mapped, and so much of each of
#: them (pages are reclaimed); and for each record of the sequence, or each other one, where those
#: are fewer, no more than the rest may be mapped that no neighbour explains ...
MEMBER_SHARE = 0.9
#: ... another place of the period in no more than this, ...
OTHER_SHARE = 0.85
#: ... and all those in no more than half.
OTHERS_SHARE = 0.5


@dataclass(frozen=True)
class Skipping:
    """Records j with (j - first) % period < run, in the order of their numbers, or against it
    (``direction`` -1); 0 <= first < period, 1 <= run < period."""

    first: int
    run: int
    period: int
    direction: int = 1

    def members(self, records: int) -> Array:
        """Their numbers in a file of so many records, in reading order, int64."""
        begins: Array = np.arange(self.first - self.period, records, self.period, dtype=np.int64)
        numbers = (begins[:, None] + np.arange(self.run)).ravel()
        numbers = numbers[(numbers >= 0) & (numbers < records)]
        return numbers if self.direction > 0 else numbers[::-1]

    def has(self, numbers: Array) -> Array:
        """Whether each of these records is one of them."""
        found: Array = (numbers - self.first) % self.period < self.run
        return found

    def __str__(self) -> str:
        some = f"record {self.first}" if self.run == 1 else f"{self.run} records from {self.first}"
        return f"{some} of each {self.period}" + (", backward" if self.direction < 0 else "")


@dataclass(frozen=True, eq=False)
class Seen:
    """Records ``first``, ``first`` + 1, ... that lie in the part of the file that was walked over:
    their places in it (bytes, ascending) and whether each is mapped, as far as it can be."""

    first: int
    starts: Array
    ends: Array
    mapped: Array  # bool

    def __len__(self) -> int:
        return len(self.starts)


def look(
    index: RecordIndex, runs: Sequence[tuple[int, int]], low: int, high: int, direction: int = 1
) -> Seen | None:
    """What page tables tell of the records that lie in [low, high) of the file.

    runs: (offset, bytes) of what is mapped there, of any number of processes, in any order. Of more
    than RECORDS_MAX records the last ones in ``direction``. None: no record there, or records that
    are not in one piece each, in the order of their numbers, or too small to tell them apart.
    """
    if not len(index) or index.file_bytes < RECORD_MIN_BYTES * len(index):
        return None
    numbers = index.records_in([low], [high])
    numbers = numbers[-RECORDS_MAX:] if direction > 0 else numbers[:RECORDS_MAX]
    if not len(numbers) or int(numbers[-1] - numbers[0]) != len(numbers) - 1:
        return None
    starts, ends = index.extents(numbers)
    if len(starts) != len(numbers) or (starts[1:] < ends[:-1]).any():
        return None
    inside = np.flatnonzero((starts >= low) & (ends <= high))
    if not len(inside):
        return None
    first, last = int(inside[0]), int(inside[-1]) + 1
    starts, ends = starts[first:last], ends[first:last]
    begin, end = _page(starts), _page(ends + PAGE_BYTES - 1)
    missing = end - begin - covered(union(*_ranges(runs)), begin, end)
    mapped = missing <= (1 - MEMBER_SHARE) * (end - begin)
    return Seen(int(numbers[first]), starts, ends, mapped)


def infer(seen: Seen, direction: int = 1) -> Skipping | None:
    """The sequence that explains what is mapped, the one with the shortest period; None: none that
    is worth it, or that is sure yet."""
    at = np.flatnonzero(seen.mapped)
    if not len(at):
        return None
    # up to the last one that was read: the reader may be in the middle of what follows
    first, last = int(at[0]), int(at[-1]) + 1
    mapped = seen.mapped[first:last]
    backward = direction < 0
    if backward:
        mapped = mapped[::-1]
    mean_bytes = int(seen.ends[last - 1] - seen.starts[first]) / len(mapped)
    least = max(PERIODS_MIN, round(PERIODS_OF_A_BLOCK * BLOCK_BYTES / mean_bytes))
    for period in range(2, len(mapped) // least + 1):
        some = max(least, -(-EVIDENCE_RECORDS_MIN // period))
        for periods in (some, 2 * some, 4 * some):
            records = periods * period
            if records > len(mapped):
                break
            counts = mapped[len(mapped) - records :].reshape(periods, period).sum(0, np.uint32)
            if counts.max() < periods - 1:
                break
            place = _one_run(counts, periods)
            if place is None:
                continue
            column, run = place
            # from a place in the periods that end with the last mapped record to a number
            if backward:
                number = seen.first + first + (period - 1 - (column + run - 1) % period)
                part = slice(first, first + records)
            else:
                number = seen.first + last - period + column
                part = slice(last - records, last)
            found = Skipping(number % period, run, period, direction)
            # a smaller gap would be read with the runs beside it
            if _explains(found, seen, part) and _gap_bytes(found, seen, part) >= BLOCK_BYTES:
                return found
    return None


def fits(skipping: Skipping, seen: Seen) -> bool | None:
    """Whether a sequence still explains what is mapped; None: too little to tell."""
    at = np.flatnonzero(seen.mapped)
    members = skipping.has(seen.first + np.arange(len(seen)))
    if len(at) and members.any():
        upto = slice(int(at[0]), int(at[-1]) + 1)
        if members[upto].sum() >= PERIODS_MIN * skipping.run:
            return _explains(skipping, seen, upto, strict=False)
    return None


# ---- one period ---------------------------------------------------------------------------------


def _one_run(counts: Array, periods: int) -> tuple[int, int] | None:
    """(place, length) of the one run of places, around the end perhaps, that are mapped in all
    ``periods`` (``counts``: in how many each is), when the others mostly are not."""
    most = periods if periods < 10 else int(np.ceil(MEMBER_SHARE * periods))
    members = counts >= most
    run = int(members.sum())
    if not 0 < run < len(members):
        return None
    others = counts[~members]
    if others.max() > OTHER_SHARE * periods or others.mean() > OTHERS_SHARE * periods:
        return None
    begins = np.flatnonzero(members & ~np.roll(members, 1))
    return (int(begins[0]), run) if len(begins) == 1 else None


def _explains(skipping: Skipping, seen: Seen, part: slice, strict: bool = True) -> bool:
    """Whether all of it is mapped there, and little else but for what lies beside it."""
    starts, ends, mapped = seen.starts[part], seen.ends[part], seen.mapped[part]
    members = skipping.has(np.arange(*part.indices(len(seen))) + seen.first)
    share = (1 - MEMBER_SHARE) * (1 if strict else 3)
    if mapped[members].mean() < 1 - share:
        return False
    around = union(
        starts[members] // BLOCK_BYTES * BLOCK_BYTES,
        -(-ends[members] // BLOCK_BYTES) * BLOCK_BYTES,
    )
    others = np.flatnonzero(mapped & ~members)
    begin, end = _page(starts[others]), _page(ends[others] + PAGE_BYTES - 1)
    unexplained = int((covered(around, begin, end) < end - begin).sum())
    return unexplained <= share * int(min(members.sum(), (~members).sum()))


def _gap_bytes(skipping: Skipping, seen: Seen, part: slice) -> float:
    """Bytes of the file between one run and the next, on average."""
    starts, ends = seen.starts[part], seen.ends[part]
    others = ~skipping.has(np.arange(*part.indices(len(seen))) + seen.first)
    gaps = max(1, len(starts) // skipping.period)
    return float((ends - starts)[others].sum()) / gaps


# ---- ranges -------------------------------------------------------------------------------------


def _page(offsets: Array) -> Array:
    floor: Array = offsets // PAGE_BYTES * PAGE_BYTES
    return floor


def _ranges(runs: Sequence[tuple[int, int]]) -> Ranges:
    table: Array = np.array(runs, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 0] + table[:, 1]
