# SPDX-License-Identifier: Apache-2.0
"""Jobs that are made up, for tests of sim/replay."""

from __future__ import annotations

import numpy as np

from uffdprefetch.sim.replay.demand import Demand, ThreadAccesses
from uffdprefetch.sim.replay.engine import ReplayOutcome, ReplayPolicy, replay
from uffdprefetch.sim.replay.eviction import EvictionPolicy
from uffdprefetch.sim.replay.link import StorageModel
from uffdprefetch.trace.file.trace_file import TracedFile

PAGE = 4096
MIB = 1 << 20
SLOW = StorageModel(100e6, 1e-3)


def stream(
    first: list[int], pages: int = 1, think: float = 0.0, rank: int = 0,
    down: bool = False, brings: tuple[int, int] = (0, 0),
) -> ThreadAccesses:  # fmt: skip
    """Accesses of ``pages`` pages each, ``think`` seconds between them; ``down``: from the last
    page to the first; ``brings``: pages before a miss and from it on that it was recorded to
    bring."""
    begin, n = np.array(first, np.int64), len(first)
    return ThreadAccesses(
        rank, 100 + rank, np.zeros(n, np.int64), begin, begin + pages, np.full(n, down),
        np.full(n, brings[0]), np.full(n, brings[1]), np.full(n, True),
        np.full(n, int(think * 1e9)), 0,
    )  # fmt: skip


def demand(*streams: ThreadAccesses, pages: int = 4096) -> Demand:
    return Demand(
        [TracedFile(1, "/data/f", pages * PAGE)], list(streams), PAGE, 1.0, 0.0, ["job", "a b"]
    )


def straight(pages: int = 4096, think: float = 0.0) -> Demand:
    return demand(stream(list(range(0, pages, 16)), 16, think), pages=pages)


def run(
    wanted: Demand,
    policy: ReplayPolicy,
    eviction: EvictionPolicy | None = None,
    storage: StorageModel = SLOW,
) -> ReplayOutcome:
    return replay(wanted, storage, policy, eviction)
