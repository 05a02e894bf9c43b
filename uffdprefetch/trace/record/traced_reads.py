# SPDX-License-Identifier: Apache-2.0
"""Of which file a call of read(2) or pread(2) was, as its fills of the page cache tell."""

from __future__ import annotations

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.trace.file.events import Call, Kind, empty

#: Longest read(2) whose file is told by its fills of the page cache.
CALL_NS = 1 << 39
CALL_KEY = np.uint64(4 * CALL_NS)


class TracedReads:
    """Those of a recording."""

    def __init__(self) -> None:
        self._last_took = empty()  # of each thread the last READ

    def name(self, events: Array) -> Array:
        """Calls of read(2) and pread(2) with the file that the thread took pages of meanwhile, as
        the page cache tells: what a descriptor stands for may have changed unseen."""
        what = events["aux"] & 0xFF
        calls = np.flatnonzero(
            (events["kind"] == Kind.CALL) & ((what == Call.READ) | (what == Call.PREAD))
        )
        took = np.concatenate([self._last_took, events[events["kind"] == Kind.READ]])
        if len(took):
            start = max(int(took["time_ns"].min()), int(took["time_ns"].max()) - CALL_NS)
            took = took[took["time_ns"] >= start]
            took = took[np.lexsort((took["time_ns"], took["tid"]))]
            last = np.append(took["tid"][1:] != took["tid"][:-1], True)
            self._last_took = took[last]
        if not len(calls) or not len(took):
            return events
        events = events.copy()
        rows = events[calls]
        # by thread, then by time
        since = np.clip(rows["time_ns"].astype("<i8") - start, 0, 2 * CALL_NS).astype("<u8")
        key = took["tid"].astype("<u8") * CALL_KEY + (took["time_ns"] - np.uint64(start))
        at = np.searchsorted(key, rows["tid"].astype("<u8") * CALL_KEY + since, side="right")
        found = took[np.maximum(at, 1) - 1]
        within = (at > 0) & (found["tid"] == rows["tid"]) & (found["time_ns"] <= rows["time_ns"])
        within &= found["time_ns"] + rows["value"] >= rows["time_ns"]
        events["file"][calls[within]] = found["file"][within]
        return events
