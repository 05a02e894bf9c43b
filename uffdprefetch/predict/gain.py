# SPDX-License-Identifier: Apache-2.0
"""What a run gained: how much less its readers waited for storage than they would have without us.

How long they did wait is measured (service/waits.py). How long they would have waited is worked
out from what the kernel's own readahead (mm/filemap.c, mm/readahead.c) would have asked for:

- One request of read_ahead_kb for each such piece of the file in which something that we had read
  was then touched. The kernel reads around a miss, so random touches get pieces of that size, too.
- Who has gone elsewhere waits for the next two of them. Who goes on in order has the next one under
  way when it comes to the last one's first page, so that two overlap: with l for a request and c
  for what the reader computes in a piece it waits (l - c) / 2 for each. But who reads a record of
  several pieces at once, and then computes, waits nearly l / 2: which of the two is not seen, so
  the middle is told, and what lies between them is error.
- A request takes the latency and its bytes' share of the bandwidth, both measured by our own reads.
- Readers, and threads of one, wait side by side.
- However they wait, the bytes have to come over the link.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

#: Neither time is known better than to this part of what readers would have waited: states are
#: sampled, 20 times a second, and a reader's jumps are counted where its touches are seen singly
#: (docs/summary-schema.md has both beside what was measured).
ERROR_SHARE = 1 / 8
#: After a jump the first request is for what lies around it, and the mark at which the kernel asks
#: for more lies but a quarter of it before its end.
REQUESTS_PER_JUMP = 2


@dataclass(frozen=True)
class FileReads:
    """Of one file: ``requests`` of ``request_bytes`` that the kernel need not make any more;
    ``jumps``: how often its readers went elsewhere."""

    requests: float
    request_bytes: int
    jumps: float


@dataclass(frozen=True)
class Watched:
    """The readers' time: from first to last touch, of any of them (``wall_seconds``) and of all
    threads together (``thread_seconds``), of which they waited ``waited_seconds``."""

    wall_seconds: float
    thread_seconds: float
    waited_seconds: float


class Saved(NamedTuple):
    """So much longer the readers' wall time would have been without us, give or take the error.
    Less than 0: no more than noise."""

    seconds: float
    error_seconds: float


def saved(
    files: list[FileReads],
    misses: int,
    watched: Watched,
    latency_seconds: float,
    bandwidth_bytes_per_second: float,
) -> Saved:
    """What the readers' wall time would have been longer without us.

    ``misses``: touches that had to wait for a request in spite of us, as they would have without.
    The wall time, latency and bandwidth must be more than 0.
    """
    side_by_side = max(1.0, watched.thread_seconds / watched.wall_seconds)
    computed = max(0.0, watched.thread_seconds - watched.waited_seconds)
    requests = sum(one.requests for one in files)
    computed_each = computed / requests if requests else 0.0
    least = most = misses * latency_seconds
    moved_bytes = 0.0
    for one in files:
        took = latency_seconds + one.request_bytes / bandwidth_bytes_per_second
        alone = min(one.requests, REQUESTS_PER_JUMP * one.jumps)
        least += alone * took + (one.requests - alone) * max(0.0, took - computed_each) / 2
        most += alone * took + (one.requests - alone) * took / 2
        moved_bytes += one.requests * one.request_bytes
    on_link = moved_bytes / bandwidth_bytes_per_second - computed / side_by_side
    waited = watched.waited_seconds / side_by_side
    without = [max(waits / side_by_side, on_link) for waits in (least, most)]
    middle = sum(without) / 2
    return Saved(middle - waited, max(ERROR_SHARE * middle, middle - without[0]))
