# SPDX-License-Identifier: Apache-2.0
"""What a watcher sees of a run with --engine pool, and what its summary says of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_SECONDS, require, uffdprefetch, wait_until
from harness import Job, Records, python
from watched import READER

from uffdprefetch.doctor import pool
from uffdprefetch.protocol.snapshot import decode

pytest_plugins = ("harness_fixtures",)

MIB = 1 << 20


@pytest.fixture
def reader(env: dict[str, str], job: Callable[..., Job], records: Records) -> Job:
    """A job that has read all of ``records`` through a pool of a third of it."""
    require(pool.mechanism().status == "ok", "no userfaultfd with kernel faults for this user")
    env.update(UFFDPREFETCH_ENGINE="pool", UFFDPREFETCH_BUDGET="8MiB", LANG="C.UTF-8")
    one = job(python(READER, records.path))
    assert one.line() == {"ready": True}
    one.tell("read")
    assert one.line() == {"digest": records.digest}
    return one


def top(env: dict[str, str], *words: str) -> str:
    return subprocess.run(
        uffdprefetch("top", "--once", *words), env=env, capture_output=True, text=True,
        timeout=HANG_SECONDS, check=True,
    ).stdout  # fmt: skip


def test_the_snapshot_has_the_pools_books(reader: Job, records: Records) -> None:
    document: dict[str, Any] = {}

    def counted() -> bool:
        document.update(json.loads(top(reader.env, "--json")))
        return bool(document["pool"]["evicted_bytes"] >= records.size_bytes - 9 * MIB)

    wait_until(counted, "the look at the pool that is made once a second")
    found = document["pool"]
    assert found["budget_bytes"] == 8 * MIB and found["limited_by"] is None
    assert 0 < found["resident_bytes"] <= 8 * MIB
    assert found["reread_bytes"] == 0 or found["read_bytes"] > records.size_bytes
    assert found["faults"] >= found["missing_faults"] > 0
    assert found["waiters_peak"] >= 1 and found["demand_wait_ns"]["p50"] > 0
    assert (found["hit"]["share"] is None) == (found["hit"]["why"] is not None)
    (file,) = document["files"]
    assert file["served_by"] == "pool" and 0 < file["pool_resident_bytes"] <= 8 * MIB
    shown = decode(document).pool
    assert shown is not None and shown.resident_bytes == found["resident_bytes"]
    # the rank's misses are the pool's, which are no major faults
    assert document["ranks"][0]["demand_misses"] >= found["missing_faults"] > 0


def test_the_line_tells_how_full_it_is(reader: Job) -> None:
    assert "of 8M" in top(reader.env) and " pool " in top(reader.env)


def test_another_engine_has_none(env: dict[str, str], job: Callable[..., Job],
                                 records: Records) -> None:  # fmt: skip
    one = job(python(READER, records.path))
    assert one.line() == {"ready": True}
    document = json.loads(top(one.env, "--json"))
    assert document["pool"] is None and document["files"][0]["pool_resident_bytes"] is None


def test_the_summary_adds_up(reader: Job, records: Records, tmp_path: Path) -> None:
    reader.tell("end")
    summary = reader.finish().good().summary
    assert summary is not None
    books, (file,) = summary["pool"], summary["files"]
    assert books["read_bytes"] == books["demand_read_bytes"] + books["prefetch_read_bytes"]
    assert books["read_bytes"] == books["unique_bytes"] + books["reread_bytes"]
    assert books["unique_bytes"] == records.size_bytes
    assert books["faults"] >= books["present_faults"] + books["missing_faults"]
    assert books["resident_peak_bytes"] <= books["budget_bytes"]
    assert books["demand_wait_ns"]["count"] <= books["missing_faults"]
    assert summary["totals"]["demand_misses"] >= books["missing_faults"] > 0
    assert "the pool had to read for" in summary["totals"]["demand_misses_sensor"]
    assert (file["served_by"], file["warmed_by"]) == ("pool", "the pool")
    assert file["pool_read_bytes"] == books["read_bytes"]
    assert file["already_resident_bytes"] <= books["prefetch_read_bytes"] + books["faults"] * MIB
