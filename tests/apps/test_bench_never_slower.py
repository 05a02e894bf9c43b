# SPDX-License-Identifier: Apache-2.0
"""bench/never_slower.py: what it says of its pairs, and that it goes on where it was cut off."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import require
from paths import BENCH

from uffdprefetch.base.errors import UffdPrefetchError


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench/never_slower_table.py; bench/ is no package."""
    require(BENCH.is_dir(), "the benches are only in a source tree")
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("never_slower_table")


# ---- what is said of pairs ----------------------------------------------------------------------


def test_differences_are_paired(table: Any) -> None:
    """The machine is slower from pair to pair, and no pair shows it."""
    plain = [1.0, 2.0, 3.0, 4.0, 5.0]
    found = table.judged(plain, [seconds + 0.05 for seconds in plain], [0.02] * 5)
    assert found["difference_seconds"] == pytest.approx(0.05)
    assert found["difference_interval_seconds"] == pytest.approx([0.05, 0.05])
    assert found["allowed_seconds"] == pytest.approx(0.02 * 3.0 + 0.02 + 0.02)


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        ([0.05] * 6, "within"),
        ([0.06] * 6, "within"),  # just as much as is allowed
        ([0.07] * 6, "exceeds"),
        ([0.01, 0.02, 0.05, 0.07, 0.20, 0.30], "not decided"),
        ([-1.0] * 6, "within"),
    ],
)
def test_a_row_is_decided_only_where_all_of_the_interval_is(
    table: Any, more: list[float], verdict: str
) -> None:
    # 2 % of 1 s, a bare interpreter's 20 ms, and 20 ms
    found = table.judged([1.0] * 6, [1.0 + seconds - 1e-9 for seconds in more], [0.02] * 6)
    assert found["verdict"] == verdict


def test_pairs_must_be_pairs(table: Any) -> None:
    with pytest.raises(ValueError, match="zip"):
        table.judged([1.0, 1.0], [1.0], [0.02])


# ---- which rows ---------------------------------------------------------------------------------

NAMES = ("a, cold", "b, cold", "a, warm")


def test_rows_are_chosen_by_globs_and_not_measured_again(table: Any) -> None:
    assert table.to_measure(NAMES, "*", []) == list(NAMES)
    assert table.to_measure(NAMES, "a, *;*warm", []) == ["a, cold", "a, warm"]
    assert table.to_measure(NAMES, "*", ["a, cold"]) == ["b, cold", "a, warm"]
    assert table.to_measure(NAMES, "a*", ["a, cold"], again=True) == ["a, cold", "a, warm"]


def test_all_programs_are_measured_cold_and_three_under_every_condition(table: Any) -> None:
    bench: Any = importlib.import_module("never_slower")
    cold = [name for name in bench.ROWS if name.endswith(", cold, 300 MB/s")]
    assert len(cold) == len(bench.EVERY)
    assert len(bench.ROWS) - len(cold) == 3 * (len(bench.CONDITIONS) - 1) == 12


# ---- cut off, and going on ----------------------------------------------------------------------


class Cut(Exception):
    pass


def measured(
    bench: Any, monkeypatch: pytest.MonkeyPatch, file: Path, *words: str, cut_at: int = 99
) -> tuple[dict[str, Any], list[str]]:
    """The report of a run whose rows are made up, and what it measured; Cut at a row's number."""
    came: list[str] = []

    def measure(_: Any, program: Any, condition: Any, pairs: int | None) -> dict[str, Any]:
        if len(came) == cut_at:
            raise Cut
        came.append(f"{program.name}, {condition.name}")
        if program.name == "memmap-scan":
            raise UffdPrefetchError("WRONG VALUES")
        runs = [{"plain": 1.0, "wrap": 1.0, "bare": 0.02}] * (pairs or 1)
        columns = [[run[which] for run in runs] for which in ("plain", "wrap", "bare")]
        return {"file_bytes": 1, "runs": runs} | bench.judged(*columns)

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "SlowBed", lambda source: contextlib.nullcontext())
    monkeypatch.setattr(type(bench.EVERY[0]), "why_not", lambda program, slow: None)
    with contextlib.suppress(Cut):
        bench.measure_all(bench.parse(["--json", str(file), *words]))
    return json.loads(file.read_text()), came


def test_a_run_that_was_cut_off_goes_on(
    table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench: Any = importlib.import_module("never_slower")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    file, globs = tmp_path / "f.json", ("--rows", "safetensors-load_file, *;memmap-*, cold, 3*B/s")
    report, first = measured(bench, monkeypatch, file, *globs, cut_at=2)
    assert list(report["rows"]) == first == [
        "safetensors-load_file, cold, 300 MB/s", "memmap-batches, cold, 300 MB/s",
    ]  # fmt: skip
    report, second = measured(bench, monkeypatch, file, *globs)
    assert not set(first) & set(second) and len(second) == 6
    assert list(report["failures"]) == ["memmap-scan, cold, 300 MB/s"]
    order = list(bench.ROWS)
    assert list(report["rows"]) == sorted(report["rows"], key=order.index)
    assert len(report["rows"]) == 7
    # what has failed is tried again, and what is there only with --again
    assert measured(bench, monkeypatch, file, *globs)[1] == list(report["failures"])
    assert len(measured(bench, monkeypatch, file, *globs, "--again")[1]) == 8
    shown = table.markdown(report)
    assert "| memmap-batches, cold, 300 MB/s | 0 | 1 | 1.00 | 0 [0, 0] | 60 | within |" in shown
    assert "FAILED: memmap-scan, cold, 300 MB/s: WRONG VALUES" in shown
