# SPDX-License-Identifier: Apache-2.0
"""bench/harm.py: what is allowed, that rounds are whole, a case in small. No time is asserted."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import require
from paths import BENCH

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.demo.bed import why_no_bed

MIB = 1 << 20


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench/harm.py, in an environment that it may change; bench/ is no package."""
    require(BENCH.is_dir(), "the benches are only in a source tree")
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return importlib.import_module("harm")


@pytest.fixture
def table(bench: Any) -> Any:
    """bench/harm_table.py."""
    return importlib.import_module("harm_table")


# ---- what is allowed ----------------------------------------------------------------------------


def run(seconds: float, mib: float) -> dict[str, float]:
    return {"seconds": seconds, "total_seconds": seconds, "bytes_read": mib * MIB}


@pytest.mark.parametrize(
    ("seconds", "mib", "verdict"),
    [
        (2.08, 114, "within"),  # 2 % and 50 ms; a tenth and 4 MiB
        (2.10, 100, "time"),
        (2.00, 115, "bytes"),
        (2.10, 115, "time and bytes"),
        (1.81, 120, "bytes"),  # above 0.9 of plain
        (1.79, 149, "within"),
        (1.79, 151, "bytes"),
        (0.99, 249, "within"),  # below half of it
        (0.99, 251, "bytes"),
    ],
)
def test_bytes_are_allowed_for_what_they_gain(
    table: Any, seconds: float, mib: float, verdict: str
) -> None:
    found = table.judged([run(2.0, 100)] * 3, [run(seconds, mib)] * 3, 1.02)
    assert found["verdict"] == verdict


def test_what_may_be_read_for_a_gain_is_no_less_than_without_one(table: Any) -> None:
    """1.5 of a MiB is less than 1.1 of it and 4 MiB."""
    assert table.judged([run(2.0, 1)], [run(1.5, 5)], 1.02)["verdict"] == "within"
    assert table.judged([run(2.0, 1)], [run(1.5, 5.2)], 1.02)["verdict"] == "bytes"


def test_ratios_are_of_the_same_round(table: Any) -> None:
    """The machine is slower from round to round, and no ratio shows it."""
    plain = [run(1.0, 10), run(2.0, 20), run(4.0, 40)]
    ours = [run(1.5, 11), run(3.0, 22), run(6.0, 44)]
    found = table.judged(plain, ours, 1.05)
    assert found["time_ratio"] == pytest.approx(1.5)
    assert found["bytes_ratio"] == pytest.approx(1.1)
    assert found["verdict"] == "time"


# ---- which variants, which rounds ---------------------------------------------------------------


def words(file: Path, *more: str) -> list[str]:
    return ["--json", str(file), "--files=0.02", "--reads=0.02", *more]


def test_variants_are_engines_policies_and_builds(bench: Any, tmp_path: Path) -> None:
    other = tmp_path / "checkout" / ".venv" / "bin" / "uffdprefetch"
    other.parent.mkdir(parents=True)
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    args = bench.parse(words(tmp_path / "f.json", "--policy=auto,fixed", f"--build=old={other}"))
    variants = {variant.name: variant for variant in bench.variants_of(args)}
    assert list(variants) == [
        "plain", "cache:auto", "pool:auto", "cache:fixed", "pool:fixed", "cache@old", "pool@old",
    ]  # fmt: skip
    assert variants["cache@old"].root == (tmp_path / "checkout").resolve()


class Cut(Exception):
    pass


def measured(
    bench: Any, monkeypatch: pytest.MonkeyPatch, file: Path, *more: str, cut_at: int = 99
) -> tuple[dict[str, Any], list[str]]:
    """The report of runs that are made up, and what was measured; Cut at a run's number."""
    came: list[str] = []

    def measure(_: Any, case: Any, variant: Any, files: Any, command: Any) -> dict[str, Any]:
        if len(came) == cut_at:
            raise Cut
        came.append(f"{case.name} {variant.name}")
        if (case.name, variant.name) == ("backward", "pool"):
            raise UffdPrefetchError("the job ended with status 1")
        totals = {"gain": "saved", "saved_at_least_seconds": 0.5, "cost_seconds": None}
        made = {"variant": variant.name, "said": ["read 1 MiB ahead"], "requests": 1,
                "tool": {"totals": totals}}  # fmt: skip
        digest = "wrong" if (case.name, variant.name) == ("in-order", "cache") else "right"
        return made | run(1.0, 1.0) | {"digest": digest}

    class Done:
        job = {"digest": "right"}  # noqa: RUF012

    class Bed:
        def __init__(self, source: Path) -> None:
            self.source = source

        def settings(self) -> dict[str, int]:
            return {}

        def path(self, name: Any) -> Path:
            return self.source / name

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "SlowBed", lambda source: contextlib.nullcontext(Bed(source)))
    monkeypatch.setattr(bench.Bench, "start", lambda self, command, count: Done)
    report: dict[str, Any] = {}
    with contextlib.suppress(Cut):
        report, _ = bench.measure_all(bench.parse(words(file, *more)))
    return report or json.loads(file.read_text()), came


def test_what_is_cut_off_goes_on_with_whole_rounds(
    bench: Any, table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, globs = tmp_path / "f.json", ("--cases=backward,random-300", "--rounds=2")
    report, first = measured(bench, monkeypatch, file, *globs, cut_at=4)
    # the second round was begun, by the variant that was second in the first one, and is kept
    assert first == [
        "random-300 plain", "random-300 cache", "random-300 pool", "random-300 cache",
    ]  # fmt: skip
    assert [(one["round"], one["variant"]) for one in report["runs"]] == [
        (0, "plain"), (0, "cache"), (0, "pool"), (1, "cache"),
    ]  # fmt: skip
    report, second = measured(bench, monkeypatch, file, *globs)
    # it is run again, whole; what failed has been tried in each round
    assert second[:3] == ["random-300 cache", "random-300 pool", "random-300 plain"]
    assert len(second) == 3 + 6
    assert len(report["runs"]) == 6 + 4 and len(report["failures"]) == 2
    # once more: only what has failed
    report, third = measured(bench, monkeypatch, file, *globs)
    assert {name.split()[0] for name in third} == {"backward"} and len(third) == 6
    assert len(report["runs"]) == 6 + 4 and len(report["failures"]) == 2
    # a variant more is compared with plain runs of its own rounds
    _, fourth = measured(bench, monkeypatch, file, *globs[1:], "--cases=random-300", "--policy=,x")
    assert len(fourth) == 2 * 5
    shown = table.markdown(json.loads(file.read_text()))
    assert "| random-300 | 1.00 | 1 | 1.00 | 1.00 |  | 1.00 | 1.00 |  |" in shown
    assert "FAILED: backward, pool, 300/1: the job ended with status 1" in shown
    told = "at most the truth: 0 of 10 (not random-300, cache, random-300, pool, "
    assert f"What each run told that it saved is {told}" in shown


def test_a_case_that_has_changed_is_measured_anew(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, globs = tmp_path / "f.json", ("--cases=random-300,random-1500", "--rounds=1")
    assert len(measured(bench, monkeypatch, file, *globs)[1]) == 6
    changed = [
        dataclasses.replace(case, reads=9000) if case.name == "random-300" else case
        for case in bench.EVERY
    ]
    monkeypatch.setattr(importlib.import_module("harm_cases"), "EVERY", changed)
    report, again = measured(bench, monkeypatch, file, *globs)
    assert again == ["random-300 plain", "random-300 cache", "random-300 pool"]
    assert len(report["runs"]) == 6
    assert report["cases"]["random-300"]["job"][-1] == "--reads=180"


def test_a_run_that_has_read_something_else_counts_as_failed(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "f.json"
    report, _ = measured(bench, monkeypatch, file, "--cases=in-order", "--rounds=1")
    assert [one["variant"] for one in report["runs"]] == ["plain", "pool"]
    (failed,) = report["failures"]
    assert failed["variant"] == "cache" and "WRONG VALUES" in failed["error"]


def test_runs_of_another_size_are_not_mixed(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "f.json"
    measured(bench, monkeypatch, file, "--cases=random-300", "--rounds=1")
    with pytest.raises(UffdPrefetchError, match="give another --json"):
        measured(bench, monkeypatch, file, "--cases=random-300", "--reads=0.5")


def test_a_case_without_its_library_is_named(
    bench: Any, table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "mrcfile" else find(name)
    )
    report, came = measured(bench, monkeypatch, tmp_path / "f.json", "--cases=mrcfile*")
    assert came == []
    shown = table.markdown(report)
    assert "Not run: mrcfile.images: the Python package mrcfile is missing: make apps." in shown


# ---- in small -----------------------------------------------------------------------------------


def test_a_case_in_small_is_measured_compared_and_drawn(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require(why_no_bed() is None, why_no_bed() or "")
    require(shutil.which("git") is not None, "git is missing")
    file, more = tmp_path / "f.json", ("--cases=in-order,git.blobs", "--rounds=1")
    assert bench.main(words(file, *more, "--bed=1G/1")) == 0
    report = json.loads(file.read_text())
    assert report["failures"] == [] and report["skipped"] == {}
    runs = {(one["case"], one["variant"]): one for one in report["runs"]}
    assert len(runs) == 2 * 3
    size = report["cases"]["in-order"]["size_bytes"]
    for variant in ("plain", "cache", "pool"):
        whole = runs["in-order", variant]
        assert whole["resident_bytes_at_start"] == 0
        assert whole["value_bytes"] <= size and whole["bytes_read"] >= whole["value_bytes"]
        assert runs["git.blobs", variant]["digest"] == runs["git.blobs", "plain"]["digest"]
        assert bool(whole["said"]) == (whole["tool"] is not None) == (variant != "plain")
    assert report["settings"]["1G/1"]["read_ahead_kb"] > 0
    assert "| in-order (control) |" in capsys.readouterr().out
    if importlib.util.find_spec("matplotlib") is not None:
        os.environ["MPLCONFIGDIR"] = str(tmp_path)
        picture = tmp_path / "f.png"
        assert bench.main(["draw", str(file), str(picture)]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
