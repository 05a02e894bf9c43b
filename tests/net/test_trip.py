# SPDX-License-Identifier: Apache-2.0
"""One touch's trip through the service: how many source files one must know who follows it, how
often a turn goes through the same touches, and how often it computes the same window."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from paths import ROOT

#: Of a touch that page tables tell, and of one in the pool: [files, passes and windows in a turn],
#: as a rule. A new file on the way of every touch wants a reason.
MOST = {"demo-on": ("timer", 20, 1, 1), "pool": ("told", 29, 1, 1)}


def counted(name: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.net.trip", name], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[0])
    return found


@pytest.mark.parametrize("name", MOST)
def test_a_touch_of_a_plain_reader_visits_few_files_once(name: str) -> None:
    kind, files, passes, windows = MOST[name]
    found = counted(name)[kind]
    assert found["trips"] > 20
    assert found["files"][1] <= files, found
    assert found["passes"][0] <= passes and found["windows"][0] <= windows, found


def test_who_knows_orders_is_not_asked_of_a_plain_reader() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.net.trip", "demo-on", "--files"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = set(done.stdout.split())
    assert not files & {"readers/known_order.py", "readers/strides.py"}
    assert {"predict/fronts.py", "predict/survival.py", "warm/scheduler.py"} <= files
