# SPDX-License-Identifier: Apache-2.0
"""Snapshot documents for tests: complete, and changed where a test says so."""

from __future__ import annotations

import copy
from typing import Any

from uffdprefetch.protocol.snapshot import SCHEMA, decode
from uffdprefetch.view.model import View

MIB = 1 << 20


def rank(number: int, of: int = 4, **changes: Any) -> dict[str, Any]:
    """A rank's part: a quarter of a GiB, two fifths of it walked over."""
    size = 1024 * MIB
    start = size * number // of
    position = start + size * 2 // (5 * of)
    stream = {
        "file": "/data/train/records.mdb", "pid": 4000 + number, "pattern": "consecutive",
        "start_bytes": start, "position_bytes": position, "frontier_bytes": position + 32 * MIB,
        "rate_bytes_per_second": 71_300_000,
    }  # fmt: skip
    document = {
        "rank": number, "local_rank": number, "pids": [4000 + number], "pids_not_listed": 0,
        "commands": ["python3"], "file": stream["file"], "size_bytes": size,
        "pattern": "consecutive", "direction": 1, "start_bytes": start,
        "position_bytes": position, "frontier_bytes": position + 32 * MIB, "stride_bytes": None,
        "density_64KiB": 0.99, "quiet_seconds": 0.1, "rate_bytes_per_second": 71_300_000,
    "read_bytes_per_second": 71_300_000,
        "window_bytes": 28 * MIB, "ahead_bytes": 32 * MIB, "in_flight_bytes": 4 * MIB,
        "wasted_bytes": 0, "wasted_why": None, "late_extents": 2,
        "hit": {"share": 0.998, "misses": 2, "blocks": 1000, "seconds": 10.0, "why": None},
        "demand_misses": 7,
        "stall": {"share": None, "seconds": None, "sensor": None,
                  "why": "kernel.task_delayacct is 0: set it to 1 by sysctl before the job"},
        "walks": 1, "streams": [stream],
    }  # fmt: skip
    document.update(copy.deepcopy(changes))
    return document


def document(count: int = 4, /, **changes: Any) -> dict[str, Any]:
    """A whole document of a run with so many ranks."""
    made = {
        "schema": SCHEMA, "run": "resnet50-7731", "host": "node17",
        "time_unix_seconds": 1.7e9, "seconds": 154.3, "service_pid": 3990, "job_pids": [3999],
        "engine": "cache", "engine_asked": "cache", "policy": "auto", "resolve": "agent", "rung": 1,
        "rung_reason": "userfaultfd with kernel faults works in the job",
        "ranks": [rank(i, count) for i in range(count)], "ranks_not_listed": 0,
        "files": [{
            "path": "/data/train/records.mdb", "size_bytes": 1024 * MIB, "file_system": "lustre",
            "served_by": "checkpoints", "mappings": count, "changed": None,
            "compared_pages": 0, "pool_resident_bytes": None,
            "prefetched_bytes": 512 * MIB, "already_resident_bytes": 0, "late_bytes": 8 * MIB,
            "resident_bytes": 727 * MIB, "resident_sensor": "cachestat", "resident_why": None,
            "used_bytes": 400 * MIB, "unused_bytes": 112 * MIB, "wasted_bytes": 3 * MIB,
            "demand_bytes": 12 * MIB, "counted_seconds_ago": 1.5,
        }],
        "files_not_listed": 0,
        "node": {
            "bandwidth_bytes_per_second": 298_000_000, "latency_seconds": 0.0011,
            "readers_bytes_per_second": 284_000_000, "max_rate_bytes_per_second": None,
            "budget_bytes": 4 << 30, "allowed_bytes": 4 << 30, "allowed_by": "--budget",
            "ahead_bytes": 112 * MIB, "under_way_bytes": 8 * MIB,
            "under_way_target_bytes": 8 * MIB, "queued_bytes": 20 * MIB,
            "prefetched_bytes": 512 * MIB,
            "checkpoint_wait_ns": {"count": 256, "p50": 3300, "p99": 9000, "max": 60000},
            "service_cpu_seconds": 1.2, "service_cpu_share": 0.008,
            "io_pressure": {"share": 0.12, "why": None},
        },
        "history": {
            "step_seconds": 1.0,
            "prefetch_bytes_per_second": [250e6 + 1e6 * (i % 50) for i in range(154)],
            "reader_bytes_per_second": [240e6 + 1e6 * (i % 40) for i in range(154)],
            "misses_per_second": [12.0 if i % 40 == 0 else 0.0 for i in range(154)],
        },
        "not_managed": {"processes": [], "why": None}, "pool": None, "plans": [],
        "counted": True, "degradations": [], "refused": {}, "sensors": {},
    }  # fmt: skip
    made.update(copy.deepcopy(changes))
    return made


def pool(**changes: Any) -> dict[str, Any]:
    """The pool's part of a document: full, and letting go."""
    made: dict[str, Any] = {
        "budget_bytes": 512 * MIB, "limited_by": None, "chunk_bytes": 65536, "huge_pages": False,
        "evict": "cyclic", "resident_bytes": 510 * MIB, "pinned_bytes": 131072,
        "read_bytes": 2048 * MIB, "reread_bytes": 1024 * MIB,
        "others_bytes": 0, "evicted_bytes": 1538 * MIB,
        "read_bytes_per_second": 298_000_000, "evicted_bytes_per_second": 280_000_000,
        "rate_seconds": 10.0, "waiters": 2, "waiters_peak": 7, "faults": 91_234,
        "missing_faults": 1203, "sensor": "exact",
        "hit": {"share": 0.914, "faults": 4711, "seconds": 10.0, "why": None},
        "demand_wait_ns": {"count": 1203, "p50": 851967, "p99": 8388607, "max": 84334712,
                           "sum": 2_051_000_000},
        "fill_ns": {"count": 9258, "p50": 720895, "p99": 6815743, "max": 83834288,
                    "sum": 9_100_000_000},
        "spill": None,
    }  # fmt: skip
    made.update(copy.deepcopy(changes))
    return made


def pooled(count: int = 4, /, **changes: Any) -> dict[str, Any]:
    """A document of a run with --engine pool."""
    made = document(count, engine="pool", pool=pool(), **changes)
    for file in made["files"]:
        file.update(served_by="pool", pool_resident_bytes=510 * MIB, resident_bytes=0)
    return made


def small_files() -> dict[str, Any]:
    """The small files of one: an order that was told, a tree, and one without an order."""
    tree = {
        "path": "/data/train", "directories": 11, "latest": "/data/train/n02", "order": "sorted",
        "read": 1583, "used": 1524, "lost": 0,
    }  # fmt: skip
    empty = {"path": "/data/val", "directories": 1, "order": None, "read": 0, "used": 0}
    return {
        "read": 2183, "read_bytes": 204 * MIB, "used": 2034, "used_bytes": 190 * MIB,
        "already_resident": 7, "trees": [tree, {**tree, **empty}], "trees_not_listed": 3,
        "orders": [{"pid": 77, "files": 600, "position": 510, "read": 600, "used": 510}],
        "orders_not_listed": 0,
    }  # fmt: skip


def view(made: dict[str, Any]) -> View:
    """What is shown of a document."""
    return View(decode(made))


def snapshot(count: int = 4, /, **changes: Any) -> View:
    """The same of document()."""
    return view(document(count, **changes))
