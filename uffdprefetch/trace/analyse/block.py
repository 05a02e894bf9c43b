# SPDX-License-Identifier: Apache-2.0
"""Requests to block devices: whose they were, and how long they took. Pure.

The kernel tells of all requests of the machine, with the thread that issued each. What a kernel
thread issues for the job (an encrypted or a loop device, some file systems) cannot be told from
what it issues for others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.trace.analyse.ranks import NOBODY, Ranks
from uffdprefetch.trace.file.events import Kind, of_kind


def requests_of_job(events: Array, ranks: Ranks) -> Array:
    """The BLOCK events that processes of the job, or our service, issued."""
    rows = of_kind(events, Kind.BLOCK)
    return rows[ranks.of(rows["pid"]) != NOBODY]


def block_report(events: Array, ranks: Ranks) -> dict[str, Any]:
    """``block`` (docs/trace-report.md)."""
    every, own = of_kind(events, Kind.BLOCK), requests_of_job(events, ranks)
    p50, p99 = np.percentile(own["value"], (50, 99)) / 1e9 if len(own) else (None, None)
    return {
        "requests": len(own),
        "bytes": int(own["length"].sum()),
        "latency_p50_seconds": None if p50 is None else float(p50),
        "latency_p99_seconds": None if p99 is None else float(p99),
        "others_requests": len(every) - len(own),
        "others_bytes": int(every["length"].sum()) - int(own["length"].sum()),
    }
