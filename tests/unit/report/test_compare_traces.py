# SPDX-License-Identifier: Apache-2.0
"""report/compare.py: two recordings of one job, with what it read by calls."""

from __future__ import annotations

from typing import Any

from uffdprefetch.report import compare

MIB = 1 << 20


def calls(count: int, bytes_: int, seconds: float) -> dict[str, Any]:
    return {"count": count, "bytes": bytes_, "seconds": seconds}


def file(number: int, path: str, read_calls: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "id": number, "path": path, "fill_bytes": MIB, "useless_bytes": 0, "read_calls": read_calls
    }  # fmt: skip


def reader(number: int, faults: int | None, stall: float | None) -> dict[str, Any]:
    counts = None if faults is None else {"total": faults, "minor": 0, "major": faults}
    return {"file": number, "rank": 0, "stall_seconds": stall, "faults": counts}


def group(name: str, seconds: float, opens: float | None = None) -> dict[str, Any]:
    return {
        "name": name, "wait_seconds": seconds, "fill_bytes": MIB, "read_calls": None,
        "opens": None if opens is None else {"count": 9, "seconds": opens},
    }  # fmt: skip


def report(
    files: list[dict[str, Any]], readers: list[dict[str, Any]], others: list[dict[str, Any]],
    counted: bool = True,
) -> dict[str, Any]:  # fmt: skip
    return {
        "trace": {"path": "a.uptrace", "seconds": 2.0, "command": ["job"]},
        "calls": {"read": 1} if counted else None,
        "files": files, "readers": readers, "others": others,
    }  # fmt: skip


def row(shown: list[str], name: str) -> list[str]:
    (line,) = [one for one in shown if one.startswith(name)]
    return line[len(name) :].split()


def test_what_calls_have_read_stands_beside_the_faults() -> None:
    """Of a job that reads by calls it had nothing but zeros."""
    mapped = reader(1, 64, 0.8), reader(1, 4, 0.1)
    before = report(
        [file(1, "/mapped"), file(2, "/read", calls(99, 160 * MIB, 1.2))],
        [mapped[0], reader(2, 0, 0.0)], [group("/small", 2.5, 1.0), group("/etc", 0.00002)],
    )  # fmt: skip
    after = report(
        [file(1, "/mapped"), file(2, "/read", calls(99, 160 * MIB, 0.6))],
        [mapped[1], reader(2, 0, 0.0)], [group("/small", 1.0, 0.9), group("/etc", 0.00004)],
    )  # fmt: skip
    document = compare.of_traces(before, after)
    assert [part["of"] for part in document["parts"]] == ["/small", "/mapped, rank 0", "/read"]
    shown = compare.lines(document)
    assert row(shown, "in read(2)") == ["1.2", "s", "600", "ms", "-50", "%", "better"]
    assert row(shown, "by read(2)") == ["160", "MiB", "160", "MiB", "+0", "%"]
    assert row(shown, "programs, small files")[:4] == ["2.5", "s", "1", "s"]
    under = shown[shown.index("/read") + 1 :]
    assert under[0].split()[:3] == ["in", "read(2)", "1.2"]
    assert "in opens" in shown[shown.index("/small") + 2]


def test_times_that_vary_by_chance_are_neither_better_nor_worse() -> None:
    two = report([], [], [group("/etc", 0.0002)]), report([], [], [group("/etc", 0.0009)])
    document = compare.of_traces(*two)
    assert not document["parts"]
    assert {one["verdict"] for one in document["figures"]} == {None}


def test_where_calls_are_not_recorded_they_are_no_zero() -> None:
    one = report([file(1, "/mapped")], [reader(1, None, None)], [], counted=False)
    document = compare.of_traces(one, one)
    figures = {figure["name"]: figure["before"] for figure in document["figures"]}
    assert figures["in read(2)"] is figures["read calls"] is None
    assert figures["programs, small files"] is None
    assert [part["of"] for part in document["parts"]] == ["/mapped, rank 0"]
