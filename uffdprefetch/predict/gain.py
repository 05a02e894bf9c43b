# SPDX-License-Identifier: Apache-2.0
"""What a run gained, at the least: by how much less its readers waited than they would have without
us; or what it cost.

How long they did wait is measured (service/waits.py). How long they would have waited is worked out
from the books of the run: of what was read ahead and then used, which misses did not happen.

- Who comes to a place from elsewhere waits for a whole miss: latency and bytes / bandwidth.
- Who goes on in order has the kernel's next request under way when it comes to the last one's
  first page (mm/filemap.c, do_async_mmap_readahead()), so that two overlap. With T for a request
  and c for what the reader computes for what it brings it waits (T - c) / 2. A look at the page
  tables tells what was passed since the one before, and c is no more than that time: so a reader
  that takes many megabytes at once and then computes is told from one that computes for each.
- Who goes backward waits for each request as a whole: nobody reads ahead for it. Page by page half
  of what is read around a miss is there already; piece by piece it is not.
- Who goes on by rows that lie apart leaves out the page at which the kernel would read on, and
  waits as who goes backward page by page: its first misses tell, or its touches of the pool.
- Some have no readahead (MADV_RANDOM): their first misses, where nothing was read ahead, have
  brought less each, and were whole.
- What it came to by misses of its own, and what the kernel read ahead behind those, it would have
  waited for in any case.
- Readers, and threads of one, wait side by side; however they wait, the bytes come over the link.
"""

from __future__ import annotations

from typing import NamedTuple

from uffdprefetch.base.record import dataclass
from uffdprefetch.predict.storage import BLOCK_BYTES, RequestCost, Storage
from uffdprefetch.predict.used import Used


@dataclass(frozen=True)
class FileReads:
    """Of one file, or of several. ``request_bytes``: what a miss brings; ``brought``: the part of
    what was asked for ahead that was not in memory already. What one miss brings are no two:
    ``requests``, of ``request_bytes`` each, in which all that was used had been read ahead,
    and ``own_requests``, the others; None: there are as many as runs. ``stretches`` of used blocks
    lie apart, in each of which the request behind the first miss has none before it."""

    used: Used
    request_bytes: int
    brought: float = 1.0
    requests: int | None = None
    own_requests: int | None = None
    stretches: int = 0

    @property
    def misses_elsewhere(self) -> int:
        """Of readers that have come from elsewhere, misses that did not happen."""
        return self.used.runs if self.requests is None else min(self.used.runs, self.requests)

    @property
    def own_elsewhere(self) -> int:
        """... and those that plain would have had, too. (What was asked for after all, when it was
        used, counts among ``requests``.)"""
        runs = self.used.demand_runs
        if self.requests is None or self.own_requests is None:
            return runs
        return min(runs, self.requests + self.own_requests - self.misses_elsewhere)

    def with_(self, other: FileReads) -> FileReads:
        """Both together, where one request brings as much of either."""
        a, b = self.used, other.used
        went_on = dict(a.went_on)
        for kind, (blocks, ns) in b.went_on.items():
            before = went_on.get(kind, (0, 0))
            went_on[kind] = before[0] + blocks, before[1] + ns
        both = Used(
            runs=a.runs + b.runs,
            back=(a.back[0] + b.back[0], a.back[1] + b.back[1]),
            by_page=a.by_page + b.by_page,
            looks_back=a.looks_back + b.looks_back,
            gaps=a.gaps + b.gaps,
            went_on=went_on,
            passed=a.passed + b.passed,
            demand_runs=a.demand_runs + b.demand_runs,
            demand_blocks=a.demand_blocks + b.demand_blocks,
            first=min(a.first, b.first, key=lambda first: first.tells),
        )
        brought = self.brought * a.ahead_blocks + other.brought * b.ahead_blocks
        share = brought / both.ahead_blocks if both.ahead_blocks else 1.0
        misses = self.misses_elsewhere + other.misses_elsewhere
        own = self.own_elsewhere + other.own_elsewhere
        apart = self.stretches + other.stretches
        return FileReads(both, self.request_bytes, share, misses, own, apart)


@dataclass(frozen=True)
class ReadersTime:
    """The readers' time: from first to last touch, of any of them (``wall_seconds``) and of all
    threads together (``thread_seconds``), of which they waited ``waited_seconds``."""

    wall_seconds: float
    thread_seconds: float
    waited_seconds: float

    @property
    def side_by_side(self) -> float:
        """Threads that read at a time."""
        return max(1.0, self.thread_seconds / self.wall_seconds) if self.wall_seconds else 1.0

    @property
    def computed_seconds(self) -> float:
        """The rest."""
        return max(0.0, self.thread_seconds - self.waited_seconds)


class Spared(NamedTuple):
    """Waiting of all threads together for what was read ahead of them, that did not happen, at the
    least and at the most, and its bytes; at the most that for what was not."""

    seconds: float
    most_seconds: float
    bytes: float
    own_seconds: float


def spared(one: FileReads, storage: Storage, watched: ReadersTime, misses: int) -> Spared:
    """What the readers of a file would have waited without us.

    ``misses``: touches, of any file, that have waited for a request in spite of us.
    """
    used, blocks, often = one.used, one.used.ahead_blocks, one.used.first.a_block
    if blocks < 2 * used.runs:  # its first misses were in order (an index), and the others are not
        often = 0.0
    request_bytes = min(one.request_bytes, BLOCK_BYTES / often) if often else one.request_bytes
    whole = storage.request_seconds(request_bytes)
    most_seconds = used.first.most_seconds(watched.side_by_side)
    if often:
        whole = min(whole, most_seconds)
    each = BLOCK_BYTES / request_bytes * whole  # of blocks, as long as there is readahead
    # what was there when we asked for it the reader's own requests had begun
    demand_on = used.demand_blocks - used.demand_runs + (1 - one.brought) * (blocks - used.runs)
    if often:
        seconds = (one.misses_elsewhere + (blocks - used.runs) * often) * whole
        own = (one.own_elsewhere + demand_on * often) * whole
    elif request_bytes < BLOCK_BYTES:  # no readahead: each block was one miss at the least
        seconds, own = blocks * whole, used.demand_blocks * whole
    else:
        computed = watched.computed_seconds
        share = computed / watched.thread_seconds if watched.thread_seconds else 1.0
        went_on = [*used.went_on.values(), *([] if used.backward else [used.back])]
        passed = [(n, ns / 1e9 * share) for n, ns in went_on]
        passed.append((used.passed, computed))  # it is not known when
        # page by page half of what is read around a miss is there already
        brings_bytes = used.first.brings_bytes
        a_page = max(BLOCK_BYTES, min(request_bytes // 2, brings_bytes or request_bytes))
        a_page_takes = min(storage.request_seconds(a_page), most_seconds)
        page_each = BLOCK_BYTES / a_page * a_page_takes
        rows = used.first.rows_share
        in_order = sum(max(0.0, (1 - rows) * n * each - while_) / 2 for n, while_ in passed)
        own_on = (1 - rows) * demand_on * each / 2
        # none overlaps with the first of the requests in order: of each the other half, too
        first = min(one.stretches, one.misses_elsewhere + one.own_elsewhere)
        more = 1 + min(1.0, first * whole / 2 / (in_order + own_on)) if in_order + own_on else 1.0
        by_row = rows * sum(n for n, _ in passed)
        seconds = one.misses_elsewhere * whole + in_order * more + by_row * page_each
        if used.backward:
            by_page = 0 < 4 * brings_bytes <= 3 * request_bytes
            seconds += used.back[0] * (page_each if by_page else each)
        seconds += used.by_page * page_each
        own = one.own_elsewhere * whole + own_on * more + rows * demand_on * page_each
    # of runs of its own those begin with a miss that is seen; else all of them were in memory
    own *= min(1.0, misses / max(1, one.own_elsewhere))
    # none of them while another was under way
    most = max(seconds, one.misses_elsewhere * whole + (blocks - used.runs) * each)
    spared_bytes = one.brought * blocks * BLOCK_BYTES
    return Spared(one.brought * seconds, one.brought * most, spared_bytes, own)


class Gain(NamedTuple):
    """Wall time of the readers: that they waited less, at the least (less than 0: more), and what
    the link was busy with for nothing beyond all that can have been spared."""

    saved_seconds: float
    lost_seconds: float


def _without_queue(
    files: list[FileReads], unused_bytes: int, watched: ReadersTime, cost: RequestCost
) -> Storage:
    """Where readers beside one another keep the link busy no request may have been alone: before
    each there may have been two of each other reader, and the latency is told that much too long.
    It is that of the quickest of many: the chance of that is so high a power of the part of the
    time in which the link was busy."""
    blocks = sum(one.used.ahead_blocks + one.used.demand_blocks for one in files)
    busy = cost.stream_seconds(blocks * BLOCK_BYTES + unused_bytes) / watched.wall_seconds
    request_bytes = max((one.request_bytes for one in files), default=0)
    before = cost.stream_seconds(2 * (watched.side_by_side - 1) * request_bytes)
    latency = cost.latency_seconds - min(1.0, busy) ** cost.reads * before
    return Storage(cost.bandwidth_bytes_per_second, max(0.0, latency))


def gain(
    files: list[FileReads], misses: int, unused_bytes: int, watched: ReadersTime, cost: RequestCost
) -> Gain:
    """``misses``: see spared(); ``unused_bytes``: read ahead and not used. The wall time must be
    more than 0."""
    side_by_side = watched.side_by_side
    storage = _without_queue(files, unused_bytes, watched, cost)
    found = [spared(one, storage, watched, misses) for one in files]
    seconds, most = sum(one.seconds for one in found), sum(one.most_seconds for one in found)
    own = sum(one.own_seconds for one in found)
    # of waits that were not seen nobody knows what they were for
    own -= 2 * max(0.0, own - watched.waited_seconds)
    on_link = storage.stream_seconds(sum(one.bytes for one in found))
    without = max(seconds + own, on_link * side_by_side - watched.computed_seconds)
    return Gain(
        (without - watched.waited_seconds) / side_by_side,
        storage.stream_seconds(unused_bytes) - most,
    )
