# SPDX-License-Identifier: Apache-2.0
"""The document `uffdprefetch.summary/2`: its keys, and what a run says in which nothing was seen.

docs/summary-schema.md says what each one means. The service fills it in (service/summary.py);
where a job has ended before there was one, the launcher does (launch/nothing_reported.py), for whom
nothing is loaded here that takes time.
"""

from __future__ import annotations

from uffdprefetch.base.record import field, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SCHEMA = "uffdprefetch.summary/2"


def _quantiles() -> dict[str, Any]:
    return {"count": 0, "p50": None, "p99": None, "max": None}


def _nothing_laid() -> dict[str, Any]:
    return {"laid": 0, "taken_away": 0, "rearmed": 0, "lost_events": 0}


def _nothing_compared() -> dict[str, Any]:
    return {
        "compared_pages": 0,
        "sampled_pages": 0,
        "differing_pages": 0,
        "rewritten_pages": 0,
        "storage_requests": 0,
        "cpu_seconds": 0.0,
        "old_at_most_ns": _quantiles(),
    }


def fault_wait(sensor: str, quantiles: dict[str, Any] | None = None) -> dict[str, Any]:
    """The object ``fault_wait_ns``."""
    return {**(quantiles or {**_quantiles(), "sum": 0}), "sensor": sensor}


def storage(
    sensor: str, bandwidth_bytes_per_second: int | None = None, latency_seconds: float | None = None
) -> dict[str, Any]:
    """The object ``storage``."""
    return {
        "bandwidth_bytes_per_second": bandwidth_bytes_per_second,
        "latency_seconds": latency_seconds,
        "sensor": sensor,
    }


def service(
    cpu_seconds: float, cpu_share: float = 0.0, worker_cpu_seconds: float = 0.0,
    stood_still_seconds: float = 0.0, died: bool = False, silent: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The object ``service``; ``died``, ``silent`` (it did not answer at the end): so that what it
    knew is lost."""
    return {
        "cpu_seconds": round(cpu_seconds, 3),
        "cpu_share": round(cpu_share, 4),
        "worker_cpu_seconds": round(worker_cpu_seconds, 3),
        "worker_cpu_note": "the copy of the reads into the page cache is in it",
        "stood_still_seconds": round(stood_still_seconds, 3),
        "died": died,
        "silent": silent,
    }


def timeline(bin_seconds: float = 0.1, bins: list[Any] | None = None) -> dict[str, Any]:
    """The object ``timeline``."""
    return {"bin_seconds": bin_seconds, "bins": bins or []}


@record(frozen=True)
class Totals:
    """The object ``totals``."""

    demand_misses_sensor: str
    used_sensor: str
    fault_wait_ns: dict[str, Any]
    gain: str
    gained_method: str
    waited_sensor: str
    unserved_read_sensor: str
    unserved_read_files_sensor: str
    saved_at_least_seconds: float | None = None
    cost_seconds: float | None = None
    waited_seconds: float | None = None
    demand_misses: int | None = None
    prefetched_bytes: int | None = 0
    used_bytes: int | None = 0
    wasted_bytes: int | None = 0
    already_resident_bytes: int | None = 0
    accuracy: float | None = None
    accuracy_denominator_bytes: int | None = 0
    coverage: float | None = None
    coverage_denominator_bytes: int | None = 0
    timeliness: float | None = None
    timeliness_denominator_bytes: int | None = 0
    storage_read_bytes: int | None = None
    storage_read_reason: str | None = None
    job_storage_bytes: int | None = None
    unserved_read_bytes: int | None = None
    unserved_read_files: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: dict[str, Any] = field(default_factory=_nothing_laid)
    freshness: dict[str, Any] = field(default_factory=_nothing_compared)


@record(frozen=True)
class Summary:
    """The document; ``engine_asked``: as asked for; ``totals``: vars() of Totals."""

    run: str
    host: str
    engine: str
    engine_asked: str
    policy: str
    rung_reason: str
    wall_seconds: float
    totals: dict[str, Any]
    service: dict[str, Any]
    storage: dict[str, Any]
    schema: str = SCHEMA
    resolve: str = "agent"  # who answers checkpoints; nobody else does
    pool: dict[str, Any] | None = None
    cluster: dict[str, Any] | None = None
    rung: int | None = None
    rung_lifts: bool = False
    rung_remedy: str | None = None
    ranks: list[dict[str, Any]] = field(default_factory=list)
    files: list[dict[str, Any]] = field(default_factory=list)
    streams: list[dict[str, Any]] = field(default_factory=list)
    plans: list[dict[str, Any]] = field(default_factory=list)
    reads: dict[str, Any] | None = None
    learn: dict[str, Any] | None = None
    refused: dict[str, str] = field(default_factory=dict)
    coarse: dict[str, str] = field(default_factory=dict)
    unserved: list[dict[str, Any]] = field(default_factory=list)
    degradations: list[str] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    timeline: dict[str, Any] = field(default_factory=timeline)
