# SPDX-License-Identifier: Apache-2.0
"""Where the checkpoints of a mapping lie with `--policy fixed`: a few pages, fixed before mmap(2)
returns; and by how much a stream's progress is counted.

A checkpoint tells at once that somebody has come to it, and it is where the kernel tells that a
process changes its address space without our interposers. More of them, also ones that slide with
the readers, make nothing faster (docs/benchmarks.md, "Checkpoints"), and each is a request of one
page to the storage.

All mappings of a file have theirs on the same grid of the file, so that one page of the checkpoint
memfd serves every epoch and every rank.
"""

from __future__ import annotations

from collections.abc import Iterable

from uffdprefetch.base.cache_call import CHUNK_MAX_BYTES
from uffdprefetch.base.record import dataclass
from uffdprefetch.predict.storage import BLOCK_BYTES

#: The grid of checkpoints, and the least that a stream's progress is counted by: what one large
#: request brings.
DISTANCE_MIN_BYTES = CHUNK_MAX_BYTES
#: The first bytes of any format are a header that every access reads, and what a fault maps with
#: it: never a checkpoint there.
HEADER_BYTES = BLOCK_BYTES
#: Of one mapping. 16 are as good as 512 (docs/benchmarks.md), and fit into one message.
CHECKPOINTS_MAX = 16


@dataclass(frozen=True)
class Span:
    """The part of the file that a region maps: [start, end) bytes, whole pages of the file only."""

    start_bytes: int
    end_bytes: int
    page_bytes: int

    def page(self, offset: int) -> int | None:
        """The page number of a file offset when it may carry a checkpoint, else None.

        The region's first and last page never do: they tell what lies there (csrc/common/vma.c).
        """
        at = offset - offset % self.page_bytes
        inside = self.start_bytes < at and at + 2 * self.page_bytes <= self.end_bytes
        return at // self.page_bytes if inside and at >= HEADER_BYTES else None

    def pages(self, offsets: Iterable[int]) -> set[int]:
        """The page numbers of all offsets that may carry one."""
        return {p for p in map(self.page, offsets) if p is not None}


def distance_bytes(rate_bytes_per_second: float, lookahead_bytes: int, chosen: int | None) -> int:
    """How finely a stream's progress is followed: the user's --distance, else by rate, a power of
    two >= 4 MiB of which a window holds at least three, and which a reader takes 10 ms for."""
    if chosen is not None:
        return chosen
    distance = DISTANCE_MIN_BYTES
    while distance * 2 <= rate_bytes_per_second / 100 and distance * 6 <= lookahead_bytes:
        distance *= 2
    return distance


def fixed_set(span: Span, spacing_bytes: int) -> list[int]:
    """The pages of a mapping that are its checkpoints, in order; none where it is shorter than
    their spacing.

    The first lies behind the header, because most readers begin there; the others are spread
    evenly.
    """
    length = span.end_bytes - span.start_bytes
    count = min(CHECKPOINTS_MAX, length // spacing_bytes)
    if not count:
        return []
    grid = min(DISTANCE_MIN_BYTES, spacing_bytes)
    step = grid * max(1, -(-length // (grid * count)))
    second = (span.start_bytes // step + 1) * step
    offsets = [span.start_bytes + HEADER_BYTES, *range(second, span.end_bytes, step)]
    return sorted(span.pages(offsets))[:count]
