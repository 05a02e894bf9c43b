# SPDX-License-Identifier: Apache-2.0
"""bench/reads.py: limits, what is allowed, warm and cold, cases in small. No time is asserted."""

from __future__ import annotations

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
LINK_BYTES = 100 * MIB


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench/reads.py, in an environment that it may change; bench/ is no package."""
    require(BENCH.is_dir(), "the benches are only in a source tree")
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return importlib.import_module("reads")


@pytest.fixture
def table(bench: Any) -> Any:
    """bench/reads_table.py."""
    return importlib.import_module("reads_table")


@pytest.fixture
def cases(bench: Any) -> dict[str, Any]:
    """By their names."""
    return {case.name: case for case in bench.EVERY}


def test_what_is_measured_has_its_bytecode(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rounds = importlib.import_module("rounds")
    other = tmp_path / "other" / ".venv" / "bin" / "uffdprefetch"
    compiled = list[Path]()
    monkeypatch.setattr(rounds.compileall, "compile_dir", lambda one, quiet: compiled.append(one))
    monkeypatch.setattr(rounds, "commit_of", lambda root: str(root))
    args = bench.parse(["--json", str(tmp_path / "f.json")])
    variants = [rounds.Variant(), rounds.Variant("wrap", (), "before", other)]
    rounds.opened(args, variants, "schema/1", "reads.py")
    assert {one.parent for one in compiled} == {rounds.ROOT, tmp_path / "other"}


# ---- what is allowed ----------------------------------------------------------------------------


def run(seconds: float, mib: float = 100, **more: Any) -> dict[str, Any]:
    made = {"seconds": seconds, "total_seconds": seconds, "bytes_read": mib * MIB}
    return made | {"file_bytes": 100 * MIB} | more


@pytest.mark.parametrize(
    ("name", "warm_seconds", "limit"),
    [
        ("stream.sha1sum", 0.4, 1.0),  # the link takes a second
        ("stream.sha1sum", 1.5, 1.5),
        ("small.md5sum", 0.4, 1.4),
        ("harm.random", 0.4, None),
    ],
)
def test_a_limit_is_of_the_link_and_of_the_job_in_memory(
    table: Any, cases: dict[str, Any], name: str, warm_seconds: float, limit: float | None
) -> None:
    case = cases[name].described(1, 1)
    assert table.limit_seconds(case, {"warm": run(warm_seconds)}, LINK_BYTES) == limit
    assert table.limit_seconds(case, {"plain": run(warm_seconds)}, LINK_BYTES) is None


@pytest.mark.parametrize(
    ("name", "seconds", "mib", "verdict"),
    [
        ("stream.sha1sum", 1.09, 100, "within"),  # 1.05 and 50 ms, of a second
        ("stream.sha1sum", 1.11, 100, "limit"),
        ("stream.sha1sum", 1.09, 300, "within"),  # more bytes would have cost their time
        ("small.md5sum", 1.14, 100, "within"),
        ("small.md5sum", 1.16, 100, "limit"),
        ("harm.random", 2.08, 108, "within"),  # of 2 s and 100 MiB: 1.02 and 50 ms, 1.05 and 4 MiB
        ("harm.random", 2.10, 108, "time"),
        ("harm.random", 2.00, 110, "bytes"),
        ("harm.random", 2.10, 110, "time and bytes"),
    ],
)
def test_a_job_is_held_to_its_limit_or_to_plain(
    table: Any, cases: dict[str, Any], name: str, seconds: float, mib: float, verdict: str
) -> None:
    case = cases[name].described(1, 1)
    limit = None if name.startswith("harm") else 1.0
    found = table.judged(case, [run(2.0)] * 3, [run(seconds, mib)] * 3, [limit] * 3)
    assert found["verdict"] == verdict


def test_bytes_are_counted_where_plain_reads_none(table: Any, cases: dict[str, Any]) -> None:
    case = cases["harm.cached-stream"].described(1, 1)
    found = table.judged(case, [run(2.0, 0)], [run(2.0, 5)], [None])
    assert found["verdict"] == "bytes" and found["bytes_ratio"] is None
    assert table.judged(case, [run(2.0, 0)], [run(2.0, 3)], [None])["verdict"] == "within"


def test_ratios_are_of_the_same_round(table: Any, cases: dict[str, Any]) -> None:
    """The machine is slower from round to round, and no ratio shows it."""
    case = cases["stream.cp"].described(1, 1)
    plain, ours = [run(2.0), run(4.0), run(8.0)], [run(1.0), run(2.0), run(4.0)]
    found = table.judged(case, plain, ours, [0.8, 1.6, 3.2])
    assert found["time_ratio"] == pytest.approx(0.5)
    assert found["limit_ratio"] == pytest.approx(1.25)


# ---- cases and variants -------------------------------------------------------------------------


def words(file: Path, *more: str) -> list[str]:
    return ["--json", str(file), "--files=0.02", "--reads=0.02", *more]


def test_variants_are_ways_builds_and_one_in_memory(bench: Any, tmp_path: Path) -> None:
    other = tmp_path / "checkout" / ".venv" / "bin" / "uffdprefetch"
    other.parent.mkdir(parents=True)
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    args = bench.parse(words(tmp_path / "f", "--way=--reads=off", f"--build=old={other}"))
    variants = {variant.name: variant for variant in bench.variants_of(args)}
    assert list(variants) == ["plain", "wrap", "wrap --reads=off", "wrap@old", "warm"]
    assert variants["wrap --reads=off"].options == ("--reads=off",)


def test_what_has_no_limit_is_not_run_in_memory(bench: Any, tmp_path: Path) -> None:
    args = bench.parse(words(tmp_path / "f"))
    variants = bench.variants_of(args)
    reads = bench.Reads(args, {}, variants, bench.EVERY, 0.0)
    for case in bench.EVERY:
        names = [variant.name for variant in reads.variants_of(case)]
        assert names == ["plain", "wrap", *([] if case.limit is bench.Limit.NONE else ["warm"])]


def test_every_case_has_a_reader_and_files(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH / "programs")
    kinds = importlib.import_module("apps_files").KINDS
    assert len({case.name for case in bench.EVERY}) == len(bench.EVERY)
    for case in bench.EVERY:
        readers = importlib.import_module(case.script.removesuffix(".py")).READERS
        assert case.options[0].removeprefix("--reader=") in readers
        assert case.kind in kinds


def test_reads_are_told_where_they_are_counted(cases: dict[str, Any]) -> None:
    assert cases["harm.random"].scaled(1, 0.5)[1] == 200
    assert cases["stream.cp"].scaled(1, 0.5)[1] == 0
    computing = cases["stream.pread-64k-computing"]
    assert computing.computing(95_000_000) == ["--compute-seconds-per-byte=1e-08"]
    assert cases["stream.pread-64k"].computing(95_000_000) == []


# ---- in small -----------------------------------------------------------------------------------


def measured(bench: Any, file: Path, *more: str) -> dict[str, Any]:
    bench.main(words(file, "--bed=1G/1", "--rounds=1", *more))
    return dict(json.loads(file.read_text()))


def test_cold_is_cold_and_warm_is_warm(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(why_no_bed() is None, why_no_bed() or "")
    monkeypatch.setattr(bench, "variants_of", lambda args: [bench.Variant(), bench.Variant("warm")])
    report = measured(bench, tmp_path / "f.json", "--cases=stream.cp,small.walk,harm.cached-small")
    assert report["failures"] == []
    runs = {(one["case"], one["variant"]): one for one in report["runs"]}
    for name in ("stream.cp", "small.walk"):
        plain, warm = runs[name, "plain"], runs[name, "warm"]
        assert plain["digest"] == warm["digest"]
        assert plain["bytes_read"] >= plain["file_bytes"] > 0 and warm["bytes_read"] == 0
        assert plain["lookups"] > 0 and warm["lookups"] == 0
        assert warm["resident_bytes_at_start"] >= warm["file_bytes"]
    assert runs["harm.cached-small", "plain"]["bytes_read"] == 0
    assert report["settings"]["1G/1"]["bandwidth_bytes_per_second"] == 1_000_000_000


def test_what_did_not_come_over_the_link_was_not_cold(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is read behind the bench's back before each run that is to be cold."""
    require(why_no_bed() is None, why_no_bed() or "")
    started = bench.started

    def spoilt(here: Any, case: Any, variant: Any, *rest: Any) -> Any:
        for path in here.files(case.kind):
            path.read_bytes()
        return started(here, case, variant, *rest)

    monkeypatch.setattr(bench, "started", spoilt)
    monkeypatch.setattr(bench, "variants_of", lambda args: [bench.Variant()])
    report = measured(bench, tmp_path / "f.json", "--cases=stream.wc")
    (failed,) = report["failures"]
    assert failed["error"].startswith("NOT COLD") and report["runs"] == []


def test_what_is_not_in_memory_is_not_warm(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bed:
        def set(self, **_: int) -> None: ...

    class Here:
        bed = Bed()

        def start(self, *_: Any) -> None: ...

        def files(self, kind: str) -> list[int]:
            return [40, 58]

    monkeypatch.setattr(bench, "resident_bytes", lambda count: count)
    with pytest.raises(UffdPrefetchError, match="NOT WARM: 98 bytes are in memory, of 100"):
        bench.made_warm(Here(), bench.EVERY[0], [], 100)
    assert bench.made_warm(Here(), bench.EVERY[0], [], 98) == 98


def test_a_run_whose_service_has_died_counts_as_failed(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job went on as plain: its seconds would be taken for ours."""
    rounds = importlib.import_module("rounds")
    log = tmp_path / "wrap-1.sock.log"
    log.write_text("Traceback\nImportError: no such name\n")

    class Done:
        stderr = f"uffdprefetch: the service died during the run; see {log}\n"

    class Here:
        scratch = tmp_path
        bed = type("Bed", (), {"reset": lambda self: None, "counters": lambda self: {}})()

        def start(self, *_: Any) -> type[Done]:
            return Done

    monkeypatch.setattr(rounds, "read_tool_summary", lambda _: {"service": {"died": True}})
    monkeypatch.setattr(rounds.Variant, "words", lambda *_: ["wrap"])
    with pytest.raises(UffdPrefetchError, match="THE SERVICE DIED: ImportError: no such name"):
        rounds.started(Here(), bench.EVERY[0], rounds.Variant("wrap"), [], 1)
    log.unlink()
    with pytest.raises(UffdPrefetchError, match="THE SERVICE DIED: the service died during"):
        rounds.started(Here(), bench.EVERY[0], rounds.Variant("wrap"), [], 1)


@pytest.mark.parametrize("glob", ["stream.*", "harm.*", "library.*", "small.[!l]*,small.loader-2"])
def test_cases_in_small_read_the_same_wrapped(bench: Any, tmp_path: Path, glob: str) -> None:
    require(why_no_bed() is None, why_no_bed() or "")
    report = measured(bench, tmp_path / "f.json", f"--cases={glob}")
    assert report["failures"] == []
    runs = {(one["case"], one["variant"]): one for one in report["runs"]}
    for name in report["cases"]:
        wrapped = runs[name, "wrap"]
        assert wrapped["digest"] == runs[name, "plain"]["digest"]
        assert wrapped["said"] and wrapped["tool"]["service"]["cpu_seconds"] > 0
    chosen = {case.name for case in bench.chosen(glob)}
    assert chosen == set(report["cases"]) | set(report["skipped"])
    if "small.rsync" in chosen:
        assert ("small.rsync" in report["skipped"]) == (shutil.which("rsync") is None)
