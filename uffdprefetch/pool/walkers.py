# SPDX-License-Identifier: Apache-2.0
"""Which streams of the pool's memory threads follow: those predict the next uses of blocks."""

from __future__ import annotations

from uffdprefetch.predict.streams import FORGET_NS, STREAMS_MAX, Stream
from uffdprefetch.state.reader import Reader


def note_walker(reader: Reader, tid: int, stream: Stream) -> None:
    """A thread follows the stream of its last two touches: a single one may be a tree's page."""
    walkers = reader.pool.walkers
    on, last = walkers.pop(tid, (stream, stream))
    walkers[tid] = (stream if stream is last else on), stream
    if len(walkers) > STREAMS_MAX:  # there are no more to follow
        del walkers[next(iter(walkers))]


def walks_of(reader: Reader, now: int) -> list[Stream]:
    """The streams of a reader that its threads follow. A stream that ended where another began, and
    a reader's few steps through a tree, do not count: each would protect blocks and be prefetched
    for."""
    since = now - FORGET_NS  # idle for longer it protects no blocks from eviction
    on = {id(stream) for stream, _ in reader.pool.walkers.values()}
    return [s for s in reader.table.active() if id(s) in on and s.last_ns > since]
