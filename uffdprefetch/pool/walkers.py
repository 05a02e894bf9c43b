# SPDX-License-Identifier: Apache-2.0
"""Which walks of the pool's memory a thread is on: by those what is needed next is judged."""

from __future__ import annotations

from uffdprefetch.predict.streams import Stream
from uffdprefetch.state.reader import Reader

#: Who has not read for so long holds no part of the pool back.
SILENT_READER_NS = 10_000_000_000
#: Threads of a process that are told apart in one file.
WALKERS_MAX = 256


def note_walker(reader: Reader, tid: int, stream: Stream) -> None:
    """A thread is on the walk that it has touched twice running: one touch may be a tree's page."""
    walkers = reader.pool.walkers
    on, last = walkers.pop(tid, (stream, stream))
    walkers[tid] = (stream if stream is last else on), stream
    if len(walkers) > WALKERS_MAX:
        del walkers[next(iter(walkers))]


def walks_of(reader: Reader, now: int) -> list[Stream]:
    """The walks by which to judge what is needed next: where its threads are. A walk that ended
    where another one began, and the few steps of a reader through a tree, are none: each would
    hold a part of the pool, have what lies ahead of it read, and make it look needed."""
    since = now - SILENT_READER_NS
    on = {id(stream) for stream, _ in reader.pool.walkers.values()}
    return [s for s in reader.table.active() if id(s) in on and s.last_ns > since]
