# SPDX-License-Identifier: Apache-2.0
"""The demonstration: what it proves, what it shows, when it fails."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import require
from training import SIZE_BYTES

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.demo import jobrun, table
from uffdprefetch.demo import run as demo
from uffdprefetch.demo.bed import why_no_bed

pytestmark = pytest.mark.slow


def options(**changes: Any) -> demo.DemoOptions:
    """Baseline and warm only: what this file tests does not need the tool."""
    return dataclasses.replace(
        demo.DemoOptions(
            size_bytes=SIZE_BYTES, bandwidth=1 << 30, configurations=("baseline", "warm cache")
        ),
        **changes,
    )


@pytest.mark.parametrize("local", [False, True], ids=["bed", "local"])
def test_the_demo_proves_the_bytes_and_leaves_nothing(tmp_path: Path, local: bool) -> None:
    if not local:
        require(why_no_bed() is None, why_no_bed() or "")
    said: list[str] = []
    work = tmp_path / "work"
    result = demo.run_demo(options(local=local, work=work), said.append)
    assert [row.name for row in result.configurations] == ["baseline", "warm cache"]
    assert result.digests_right
    assert all(row.sha256 == result.expected_sha256 for row in result.configurations)
    assert all(len(row.epoch_seconds) == 1 for row in result.configurations)
    baseline, warm = result.configurations
    if local:
        assert baseline.storage_counters is None
    else:
        assert baseline.storage_counters is not None and warm.storage_counters is not None
        assert baseline.storage_counters["bytes"] >= result.record_bytes
        assert warm.storage_counters["bytes"] < result.record_bytes / 10
        assert baseline.storage_counters["bandwidth_bytes_per_second"] == 1 << 30
    assert any("local disk" in line for line in said) == local
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    json.dumps(result.to_json())


def test_the_demo_falls_back_to_the_local_disk_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UFFDPREFETCH_SLOWFS", "/nonexistent/slowfs")
    said: list[str] = []
    result = demo.run_demo(
        options(work=tmp_path, configurations=("baseline",), epochs=1), said.append
    )
    assert result.storage.startswith("local disk")
    assert any("/nonexistent/slowfs" in line and "local disk" in line for line in said)


def row(name: str, seconds: float, right: bool = True, **changes: Any) -> demo.Configuration:
    """A configuration with invented times."""
    base = demo.Configuration(
        name=name,
        epoch_seconds=[seconds, 1.0],
        stall_seconds=seconds - 1,
        major_faults=7,
        sha256="ab" * 32 if right else "cd" * 32,
        digest_right=right,
        digest_beyond_compute_seconds=0.0,
        resident_before_bytes=0,
        storage_counters={"bytes": 0},
        tool_summary=None,
        run={"steal_seconds": 0.0, "wall_seconds": 10.0},
    )
    return dataclasses.replace(base, **changes)


def result_of(*rows: demo.Configuration) -> demo.DemoResult:
    """A result with those rows."""
    return demo.DemoResult(demo.SCHEMA, "a link", 1 << 30, 1 << 30, 1, 1.0, "ab" * 32, list(rows))


def shown(result: demo.DemoResult) -> str:
    """The table as 80 columns of text."""
    from rich.console import Console

    console = Console(width=80)
    with console.capture() as captured:
        console.print(table.render_table(result))
    return captured.get()


def test_the_table_shows_ratios_and_check_marks() -> None:
    result = result_of(row("baseline", 6.0), row("prefetch-on", 2.2), row("warm cache", 2.0))
    lines = shown(result).splitlines()
    (line,) = [line for line in lines if "prefetch-on" in line]
    assert line.split()[:7] == ["prefetch-on", "2.20", "1.00", "1.20", "1.10", "2.73", "7"]
    assert line.split()[7:] == ["abababababab", "✓"]
    text = table.verdict(result)
    assert "6.0 s to 2.2 s" in text and "2.73 times" in text and "1.10 x" in text


def test_no_gain_is_called_no_gain() -> None:
    result = result_of(row("baseline", 2.0), row("prefetch-on", 2.5), row("warm cache", 1.9))
    assert table.verdict(result).startswith("Prefetching gained nothing on this storage")


def test_a_wrong_digest_is_shown_and_said() -> None:
    result = result_of(row("baseline", 6.0), row("prefetch-on", 2.0, right=False))
    assert not result.digests_right
    assert "cdcdcdcdcdcd ✗" in shown(result)
    assert table.verdict(result).startswith("WRONG BYTES in prefetch-on")


def test_a_row_without_its_reference_is_not_available() -> None:
    assert "n/a" in shown(result_of(row("prefetch-on", 2.0)))


def test_disturbances_are_remarked_and_silence_is_golden() -> None:
    assert table.remarks(result_of(row("baseline", 6.0), row("warm cache", 2.0))) == []
    stolen = row("baseline", 6.0, run={"steal_seconds": 1.0, "wall_seconds": 10.0})
    late = row("prefetch-on", 2.0, digest_beyond_compute_seconds=0.5)
    cold = row("warm cache", 2.0, storage_counters={"bytes": 4096})
    first, second, third = table.remarks(result_of(stolen, late, cold))
    assert "1.00 s of CPU" in first
    assert "hashing" in second
    assert "4 KiB" in third


def command(*words: str) -> tuple[Any, argparse.Namespace]:
    """The demo command and its parsed options."""
    from uffdprefetch.cli.demo import Command

    parser = argparse.ArgumentParser()
    one = Command()
    one.prepare_parser(parser)
    return one, parser.parse_args(words)


@pytest.mark.parametrize(("right", "status"), [(True, 0), (False, 1)])
def test_the_command_fails_exactly_when_a_digest_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: bool, status: int
) -> None:
    asked: list[demo.DemoOptions] = []

    def fake(options: demo.DemoOptions, say: Callable[[str], None]) -> demo.DemoResult:
        asked.append(options)
        return result_of(row("baseline", 6.0), row("prefetch-on", 2.0, right=right))

    monkeypatch.setattr(demo, "run_demo", fake)
    file = tmp_path / "demo.json"
    words = ["--size=2GiB", "--bandwidth=1GB/s", "--latency=5ms", "--local", "--json", str(file)]
    one, args = command(*words)
    assert one.run(args, None) == status
    assert json.loads(file.read_text())["digests_right"] is right
    (options,) = asked
    assert (options.size_bytes, options.bandwidth) == (2 << 30, 1_000_000_000)
    assert (options.latency_us, options.local) == (5000, True)


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        (["--size=1"], None),
        (["--configurations=cold"], None),
        (["--bandwidth=fast"], None),
        ([], ["python"]),
    ],
)
def test_the_command_refuses_what_it_cannot_do(words: list[str], rest: list[str] | None) -> None:
    one, args = command(*words)
    with pytest.raises(UffdPrefetchError) as caught:
        one.run(args, rest)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('no such disk')", "status 1: no such disk"),
        ("print('hello')", "no JSON"),
        ("import time; time.sleep(600)", "was killed"),
    ],
)
def test_a_job_that_fails_or_hangs_is_one_clear_error(program: str, message: str) -> None:
    timeout_seconds = 1.0 if "sleep" in program else 60.0
    with pytest.raises(UffdPrefetchError, match=message):
        jobrun.run_job([sys.executable, "-c", program], timeout_seconds=timeout_seconds)
