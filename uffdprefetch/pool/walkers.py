# SPDX-License-Identifier: Apache-2.0
"""Which streams of a pool's mapping its threads follow: those predict the next uses of blocks."""

from __future__ import annotations

from uffdprefetch.predict.streams import Stream
from uffdprefetch.state.region import Region

#: Idle time after which a reader no longer protects blocks from eviction.
SILENT_READER_NS = 10_000_000_000
#: Threads of a process that are tracked in one mapping.
WALKERS_MAX = 256


def note_walker(region: Region, tid: int, stream: Stream) -> None:
    """A thread follows the stream of its last two touches: a single one may be a tree's page."""
    on, last = region.pool.walkers.pop(tid, (stream, stream))
    region.pool.walkers[tid] = (stream if stream is last else on), stream
    if len(region.pool.walkers) > WALKERS_MAX:
        del region.pool.walkers[next(iter(region.pool.walkers))]


def readers(region: Region, now: int) -> list[Stream]:
    """The streams of a region that its threads follow. A stream that ended where another began, and
    a reader's few steps through a tree, do not count: each would protect blocks and be prefetched
    for."""
    since = now - SILENT_READER_NS
    on = {id(stream) for stream, _ in region.pool.walkers.values()}
    return [s for s in region.table.active() if id(s) in on and s.last_ns > since]
