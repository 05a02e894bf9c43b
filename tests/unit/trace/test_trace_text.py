# SPDX-License-Identifier: Apache-2.0
"""The text report of a trace: fits its width, says what is missing, hides no n/a behind a 0."""

from __future__ import annotations

from typing import Any

import pytest
import synthetic
from traces import Machine, without_index

from uffdprefetch.cli.trace import GROUPINGS
from uffdprefetch.report import text
from uffdprefetch.trace.analyse.report import analyse


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return analyse(synthetic.make("skip", records=400))


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("by", GROUPINGS)
def test_no_line_is_longer_than_the_width(report: dict[str, Any], by: str, width: int) -> None:
    lines = text.lines(report, by, width)
    assert max(map(len, lines)) <= min(width, text.WIDTH_MAX)
    assert not any(line != line.rstrip() for line in lines)


def test_every_rank_has_a_row_with_its_major_faults(report: dict[str, Any]) -> None:
    rows = [line.split() for line in text.lines(report, "file", 140)]
    for reader in report["readers"]:
        row = next(r for r in rows if r[:1] == [str(reader["rank"])])
        assert str(reader["faults"]["major"]) in row


def test_processes_are_named_when_asked_for(report: dict[str, Any]) -> None:
    out = text.text(report, "pid", 120)
    assert all(f"{pid} python train.py" in out for pid in (1000, 1001, 1002, 1003))


def test_each_process_of_a_rank_has_its_own_figures() -> None:
    """One goes forward, one backward over its half; both are rank 0."""
    machine = Machine(4096)
    walks = {1000: range(2048), 1001: range(4095, 2047, -1)}
    machine.run((machine.reader(0, pid=pid), walk) for pid, walk in walks.items())
    report = analyse(machine.trace(), without_index)
    (reader,) = report["readers"]
    assert [one["pid"] for one in reader["processes"]] == [1000, 1001]
    for one, truth in zip(reader["processes"], machine.readers, strict=True):
        assert one["faults"]["total"] == truth.faults and one["faults"]["major"] == truth.majors
        assert one["stall_seconds"] == pytest.approx(truth.stall_ns / 1e9)
    out = text.lines(report, "pid", 140)
    rows = {pid: line.split() for pid in walks for line in out if line.split()[:1] == [str(pid)]}
    assert "consecutive" in rows[1000] and "backward" in rows[1001]
    for truth in machine.readers:
        assert str(truth.majors) in rows[truth.pid]


def test_ranks_are_named_with_their_file_when_asked_for(report: dict[str, Any]) -> None:
    assert "3 train.lmdb/data.mdb" in text.text(report, "rank", 140)


def test_what_is_missing_is_said_with_its_reason_and_remedy(report: dict[str, Any]) -> None:
    lack = {"what": "page-cache fills", "why": "no BPF here", "lift": "sudo sysctl x=1"}
    told = {**report["trace"], "missing": [lack], "lost_events": 7, "truncated": "cut at byte 9"}
    out = " ".join(text.text({**report, "trace": told}, width=140).split())
    assert "page-cache fills: no BPF here; to have it: sudo sysctl x=1" in out
    assert "7 events" in out and "7 lost" in out
    assert "cut at byte 9" in out


def test_a_figure_that_is_null_is_not_a_zero(report: dict[str, Any]) -> None:
    file = {**report["files"][0], "useless_bytes": None, "fill_bytes": None}
    reader = {**report["readers"][0], "stall_seconds": None, "faults": None, "hit": None}
    out = text.text({**report, "files": [file], "readers": [reader]}, width=140)
    assert "never used n/a" in out and "brought in n/a" in out
    row = next(line for line in out.splitlines() if line.split()[:1] == ["0"])
    assert row.split().count("n/a") >= 3


def test_findings_come_in_their_order_with_remedy_and_cost() -> None:
    findings = [
        {"severity": "high", "title": "first", "cost_text": "9 s", "remedy": "`do this`",
         "source": "Stanovnik et al.", "detail": ""},
        {"severity": "low", "title": "second", "cost_text": None, "remedy": None},
    ]  # fmt: skip
    out = text.text({"findings": findings})
    assert "1. high: first (9 s)" in out and "remedy: `do this` [Stanovnik et al.]" in out
    assert out.index("first") < out.index("second")


def test_a_path_cannot_drive_the_terminal() -> None:
    trace = synthetic.make("skip", records=40, path="/data/\x1b[2J\x07evil\nname.mdb")
    out = text.text(analyse(trace))
    assert "\x1b" not in out and "\x07" not in out
    assert "\\x1b[2J" in out and "evil\\nname" in out


def test_long_tables_and_lists_are_cut_and_counted() -> None:
    readers = [{"rank": r, "file": 1, "pattern": {"name": "random"}} for r in range(60)]
    findings = [{"severity": "low", "title": f"finding {i}"} for i in range(30)]
    out = text.text({"files": [{"id": 1, "path": "f"}], "readers": readers, "findings": findings})
    assert f"and {60 - text.ROWS_MAX} more" in out
    assert f"and {30 - text.FINDINGS_MAX} more" in out


@pytest.mark.parametrize("by", GROUPINGS)
def test_a_report_without_its_parts_is_still_told(by: str) -> None:
    assert text.lines({}, by)
    assert text.lines({"trace": {}, "files": None, "readers": None, "findings": None}, by)
    assert text.lines({"files": [{}], "readers": [{}], "findings": [{}], "block": {}}, by)


def test_findings_come_first_then_the_files_that_cost_most(report: dict[str, Any]) -> None:
    file, reader = report["files"][0], report["readers"][0]
    files = [{**file, "id": i, "path": f"/data/f{i}"} for i in range(12)]
    readers = [{**reader, "file": i, "stall_seconds": float(i)} for i in range(12)]
    out = text.lines({**report, "files": files, "readers": readers}, width=140)
    found = next(i for i, line in enumerate(out) if line.startswith("findings"))
    paths = [i for i, line in enumerate(out) if line.startswith("/data/f")]
    assert found < paths[0]
    assert [out[i].split(":")[0] for i in paths] == [f"/data/f{i}" for i in range(11, 1, -1)]
    (rest,) = [line for line in out if "2 files more" in line]
    assert "stall 1 s" in rest
