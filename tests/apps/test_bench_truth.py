# SPDX-License-Identifier: Apache-2.0
"""bench/truth.py: what it makes of what runs have said; its jobs read what they are to read."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import require
from paths import BENCH


@pytest.fixture
def truth(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script; bench/ is no package."""
    require(BENCH.is_dir(), "the benches are only in a source tree")
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("truth")


def run(engine: str, seconds: float, gain: str = "", told: float = 0.0) -> dict[str, Any]:
    totals = {
        "gain": gain,
        "saved_at_least_seconds": told if gain == "saved" else 0.0,
        "cost_seconds": told if gain == "cost" else None,
    }
    return {"job": "in-order", "engine": engine, "seconds": seconds, "totals": totals}


def test_told_is_compared_with_the_median_of_all_rounds(truth: Any) -> None:
    runs = [run("plain", seconds) for seconds in (2.9, 3.0, 9.0)]
    runs += [run("cache", 1.0, "saved", told) for told in (0.9, 1.1, 2.3)]
    runs.append(run("cache", 1.0, "cost", 0.5))
    (row,) = truth.judged({"runs": runs})
    assert row["truth"] == pytest.approx(2.0) and row["told"] == [0.9, 1.1, 2.3, -0.5]
    assert row["at_most"] == [True, True, False, True]
    assert row["half"] == [False, True, True, False]
    assert row["wrong_sign"] == [False, False, False, True]
    said = truth.show({"runs": runs})
    assert "| in-order | cache | 3.00 | +2.00 | 0.90 1.10 2.30 -0.50 |" in said
    assert "wrong sign: in-order (cache)" in said


def test_what_is_not_told_is_no_wrong_sign(truth: Any) -> None:
    runs = [run("plain", 1.0), run("pool", 2.0, "even"), run("pool", 2.0, "saved", 0.05)]
    (row,) = truth.judged({"runs": runs})
    assert row["told"] == [0.0, 0.0] and row["wrong_sign"] == [False, False]


def test_each_job_reads_its_file(tmp_path: Path) -> None:
    require(BENCH.is_dir(), "the benches are only in a source tree")
    program = str(BENCH / "truth_jobs.py")
    small = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import truth_jobs as jobs;"
        "jobs.SIZES = {kind: 16 << 20 for kind in jobs.SIZES};"
        "[jobs.make(kind, pathlib.Path(sys.argv[2]) / kind) for kind in jobs.SIZES];"
        "print(*[f'{name}={kind}' for name, (kind, _) in jobs.JOBS.items()])"
    )
    words = [sys.executable, "-c", small, str(BENCH), str(tmp_path)]
    made = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    digests: dict[str, str] = {}
    for name, _, kind in (one.partition("=") for one in made):
        words = [sys.executable, program, name, str(tmp_path / kind)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        digests[name] = json.loads(done.stdout)["digest"]
    assert digests["in-order"] == digests["in-order-bursts"] != digests["backward-slices"]
    assert digests["columns-said"] == digests["columns"]
