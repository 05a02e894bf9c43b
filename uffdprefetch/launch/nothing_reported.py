# SPDX-License-Identifier: Apache-2.0
"""The summary of a job that had ended before its service was up, without ever asking for it.

What a service says of a run in which nothing was reported to it (service/summary.py), with the
words for what nobody has looked at. Loads nothing of the service, for which nobody waits here.
"""

from __future__ import annotations

import os

from uffdprefetch.base.config import why_fallen_back

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from uffdprefetch.base.config import Config

WHY = "the job ended before the service was up"


def summary(
    config: Config, run: str, seconds: float, service_cpu_seconds: float, read: int | None
) -> dict[str, Any]:
    """The document of docs/summary-schema.md. ``seconds``: of the job; ``run``: its key;
    ``service_cpu_seconds``: what the service's start took until it was ended; ``read``: what the
    job has read by read(2) and its kind, in bytes."""
    return {
        "schema": "uffdprefetch.summary/1",
        "run": run,
        "host": os.uname().nodename,
        "engine": config.engine,
        "engine_asked": config.engine_asked or config.engine,
        "policy": config.policy,
        "resolve": "agent",
        "pool": None,
        "rung": None,
        "rung_reason": WHY,
        "rung_lifts": False,
        "wall_seconds": round(seconds, 3),
        "ranks": [],
        "files": [],
        "streams": [],
        "plans": [],
        "refused": {},
        "unserved": [],
        "totals": _totals(read),
        "service": {
            "cpu_seconds": round(service_cpu_seconds, 3),
            "cpu_share": 0.0,  # of the serving: there was none
            "worker_cpu_seconds": 0.0,
            "worker_cpu_note": "the copy of the reads into the page cache is in it",
        },
        "storage": {
            "bandwidth_bytes_per_second": None,
            "latency_seconds": None,
            "sensor": WHY,
        },
        "degradations": [why_fallen_back(config)] if config.engine_asked else [],
        "timeline": {"bin_seconds": 0.1, "bins": []},
    }


def _totals(read: int | None) -> dict[str, Any]:
    quantiles: dict[str, Any] = {"count": 0, "p50": None, "p99": None, "max": None}
    return {
        "demand_misses": None,
        "demand_misses_sensor": WHY,
        "prefetched_bytes": 0,
        "prefetched_reason": None,
        "untold_bytes": 0,
        "used_bytes": 0,
        "used_sensor": WHY,
        "wasted_bytes": 0,
        "already_resident_bytes": 0,
        "accuracy": None,
        "accuracy_denominator_bytes": 0,
        "coverage": None,
        "coverage_denominator_bytes": 0,
        "timeliness": None,
        "timeliness_denominator_bytes": 0,
        "fault_wait_ns": {**quantiles, "sum": 0, "sensor": WHY},
        "storage_read_bytes": None,
        "storage_read_reason": WHY,
        "unserved_read_bytes": read,
        "unserved_read_sensor": "/proc/PID/io rchar of wrap and of what it has waited for",
        "unserved_read_files": [],
        "unserved_read_files_sensor": WHY,
        "checkpoints": {"laid": 0, "taken_away": 0, "rearmed": 0, "lost_events": 0},
        "freshness": {
            "compared_pages": 0,
            "sampled_pages": 0,
            "differing_pages": 0,
            "rewritten_pages": 0,
            "storage_requests": 0,
            "cpu_seconds": 0.0,
            "old_at_most_ns": quantiles,
        },
    }
