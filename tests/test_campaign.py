# SPDX-License-Identifier: Apache-2.0
"""The fault-injection campaign in small: every state once. `make campaign` runs the full size."""

from __future__ import annotations

import os
from pathlib import Path

from campaign.run import run
from campaign.trial import STATES
from conftest import require


def test_no_state_of_the_agent_is_a_bad_one_to_lose_the_service_or_the_agent_in(
    tmp_path: Path,
) -> None:
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    allowed = os.geteuid() == 0 or not scope.exists() or scope.read_text().strip() == "0"
    require(allowed, "the rings of the ranks cannot be read here (yama/ptrace_scope)")
    report = run(tmp_path, kills=7, exits=8, per_state=1, seed=1)
    for kind, total in (("kill", 7), ("exit", 8)):
        assert report.counted(kind) == total
        assert set(report.hits(kind)) == set(STATES)
    told = report.as_json()
    assert told["kills_counted"] == 7 and told["since_last_fault_ns"]["p50"] <= 10_000_000
