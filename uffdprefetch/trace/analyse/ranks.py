# SPDX-License-Identifier: Apache-2.0
"""Whose an event is: a rank's, our service's or nobody's. Pure."""

from __future__ import annotations

import numpy as np

from uffdprefetch.base.arrays import Array, Int64Array
from uffdprefetch.trace.file.events import Kind, of_kind
from uffdprefetch.trace.file.trace_file import Trace

#: Rank numbers of processes outside the job, and of the service.
NOBODY, SERVICE = -1, -2


class Ranks:
    """Ranks by process, as the trace names them; who warms without a name is our service."""

    def __init__(self, trace: Trace) -> None:
        warmers = np.unique(of_kind(trace.events, Kind.WARM)["tid"]).tolist()
        ranks = dict.fromkeys(warmers, SERVICE)
        ranks |= {
            p.pid: SERVICE if p.role == "service" else p.rank for p in trace.processes.values()
        }
        known = sorted(ranks.items())
        self._pids = np.array([pid for pid, _ in known], np.int64)
        self._ranks = np.array([rank for _, rank in known], np.int64)

    def of(self, pids: Array) -> Int64Array:
        """The rank of each process number; SERVICE, NOBODY."""
        wanted: Int64Array = pids.astype(np.int64)
        if not len(self._pids):
            return np.full(len(wanted), NOBODY)
        at = np.minimum(np.searchsorted(self._pids, wanted), len(self._pids) - 1)
        return np.where(self._pids[at] == wanted, self._ranks[at], NOBODY)
