# SPDX-License-Identifier: Apache-2.0
"""The fault-injection campaign in small: every state once. `make campaign` runs the full size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from campaign.run import run
from campaign.trial import ENGINES, RECENT_NS
from conftest import require

pytestmark = pytest.mark.slow


@pytest.mark.limit_seconds(1800)  # up to 15 jobs of four ranks, one after the other
@pytest.mark.parametrize(
    ("engine", "kills", "exits"),
    [("cache", 7, 8), ("pool", 4, 4), ("cache-plan", 7, 8), ("pool-plan", 4, 4)],
)
def test_no_state_of_the_agent_is_a_bad_one_to_lose_the_service_or_the_agent_in(
    tmp_path: Path, engine: str, kills: int, exits: int
) -> None:
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    allowed = os.geteuid() == 0 or not scope.exists() or scope.read_text().strip() == "0"
    require(allowed, "the rings of the ranks cannot be read here (yama/ptrace_scope)")
    report = run(tmp_path, kills, exits, per_state=1, seed=1, engine=engine)
    for kind, total in (("kill", kills), ("exit", exits)):
        assert report.counted(kind) == total
        assert set(report.hits(kind)) == set(ENGINES[engine].states)
    told = report.as_json()
    assert told["kills_counted"] == kills
    if ENGINES[engine].rings:
        assert told["since_last_fault_ns"]["max"] <= RECENT_NS  # others are not counted
