# SPDX-License-Identifier: Apache-2.0
"""The bench in small: what it counts and computes. No time is asserted anywhere."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import require
from paths import BENCH

from uffdprefetch.demo.bed import why_no_bed

Load = Callable[[str], ModuleType]


@pytest.fixture
def load_bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """load_bench(NAME): a script of bench/ as a module; it is no package."""
    require(BENCH.is_dir(), "the benches are only in a source tree")
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


def test_ratios_are_paired_within_a_round(load_bench: Load) -> None:
    bench, suites = load_bench("runs"), load_bench("suites")
    names = {field.name: None for field in dataclasses.fields(bench.Run)}

    def run(variant: str, number: int, seconds: float) -> Any:
        given = {"case": "c", "variant": variant, "round": number, "seconds": seconds}
        return bench.Run(**(names | given | {"stall_seconds": 0.0}))

    # The machine is twice as slow in round 1: no ratio may show it.
    runs = []
    for number, factor in enumerate((1.0, 2.0, 1.0)):
        runs += [
            run(suites.BASELINE, number, 6.0 * factor),
            run(suites.TOOL, number, 3.0 * factor),
            run(suites.WARM, number, 2.0 * factor),
        ]
    rows = {row["variant"]: row for row in bench.summarize(runs, 200, 100)}
    assert rows[suites.TOOL]["ratio_to_limit"] == 1.5
    assert rows[suites.TOOL]["ratio_to_limit_interval"] == (1.5, 1.5)
    assert rows[suites.TOOL]["ratio_to_baseline"] == 0.5
    assert rows[suites.WARM]["ratio_to_limit"] == 1.0
    # A link that takes longer than the warm run is the limit.
    slow = {row["variant"]: row for row in bench.summarize(runs[:3], 1200, 100)}
    assert slow[suites.TOOL]["ratio_to_limit"] == 0.25
    # Without a warm run in the round there is no limit.
    assert bench.summarize(runs[:2], 200, 100)[0]["ratio_to_limit"] is None


def test_the_bootstrap_interval_holds_the_median_and_narrows(load_bench: Load) -> None:
    bench = load_bench("runs")
    few, many = [1.0, 1.1, 1.2, 1.3], [1.0, 1.1, 1.2, 1.3] * 25
    low, high = bench.bootstrap_interval(few)
    assert 1.0 <= low <= 1.15 <= high <= 1.3
    narrow = bench.bootstrap_interval(many)
    assert narrow[1] - narrow[0] < high - low


def test_a_bench_in_small_measures_counts_and_renders(tmp_path: Path, load_bench: Load) -> None:
    require(why_no_bed() is None, why_no_bed() or "")
    file = tmp_path / "bench.json"
    words = ["--suite=peers", "--pairs=2", "--size=4MiB", "--case=skipping 4, compute 0.95"]
    words += ["--only=MADV_WILLNEED,own prefetch thread x8", "--work", str(tmp_path / "data")]
    ended = subprocess.run(
        [sys.executable, str(BENCH / "run.py"), *words, "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(file.read_text())
    variants = ["plain mmap", "warm cache", "MADV_WILLNEED", "own prefetch thread x8"]
    assert [run["variant"] for run in report["runs"]] == variants * 2
    assert [run["round"] for run in report["runs"]] == [0] * 4 + [1] * 4
    assert report["failures"] == []
    # a kernel that takes pages away at any moment may spoil one of the two
    prepared = [run["variant"] for run in report["runs"] if run["as_prepared"]]
    assert set(prepared) == set(variants)
    for run in report["runs"]:
        assert run["epochs"][0]["bytes"] == report["dataset"]["record_bytes"]
        assert run["bed"]["bandwidth_bytes_per_second"] == 300_000_000
    for place in (str(BENCH.parent), sys.executable, "uffdprefetch-bed-"):
        assert place not in file.read_text()
    for name in ("command", "date", "kernel", "cpus", "bed"):
        assert report[name]

    render = load_bench("render")
    text = render.markdown(report)
    assert "skipping 4, compute 0.95" in text
    assert report["command"] in text
    assert all(f"| {name} |" in text for name in variants)
    if importlib.util.find_spec("matplotlib") is not None:
        assert render.main([str(file), "-o", str(tmp_path / "t.md"), "--png", str(tmp_path)]) == 0
        (picture,) = tmp_path.glob("*.png")
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_renderer_refuses_what_is_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], load_bench: Load
) -> None:
    render = load_bench("render")
    file = tmp_path / "other.json"
    file.write_text("{}")
    assert render.main([str(file)]) == 1
    assert "no report" in capsys.readouterr().err


def test_a_sweep_and_a_timeline_are_rendered(load_bench: Load) -> None:
    render = load_bench("render")
    summary = {"median_stall_seconds": 0.0, "ratio_to_limit": None, "ratio_to_baseline": None}
    summary |= {"ratio_to_limit_interval": None, "ratio_to_baseline_interval": None, "runs": 1}
    report = {
        "summary": [
            summary
            | {
                "case": "sweep 1, compute 0.95",
                "variant": f"fixed size {size} distance {distance} MiB",
                "median_seconds": size + distance / 100,
            }
            for size in (50, 100)
            for distance in (8, 10)
        ],
        "runs": [
            {"tool_summary": None},
            {
                "tool_summary": {
                    "timeline": {
                        "bin_seconds": 0.5,
                        "bins": [{"window_bytes": 7, "deep": {}}, {"window_bytes": 9, "deep": {}}],
                    }
                }
            },
        ],
    }
    lines = render.sweep_table(report).splitlines()
    assert lines[0] == "| epoch 1 s | distance 8 MiB | distance 10 MiB |"
    assert lines[3] == "| size 100 MiB | 100.08 | 100.10 |"
    lines = render.timeline_table(report).splitlines()
    assert (lines[0], lines[3]) == ("| seconds | window_bytes |", "| 0.5 | 9 |")
    assert render.timeline_table({"runs": []}) is None
