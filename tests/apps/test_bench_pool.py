# SPDX-License-Identifier: Apache-2.0
"""bench/pool.py in small: what it counts, checks and says. No time is asserted anywhere."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conftest import require
from paths import BENCH

from uffdprefetch.base import config
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.demo.bed import why_no_bed

Load = Callable[[str], ModuleType]
MIB = 1 << 20
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
#: Of skips: what a machine may lack without a failure of the bench.
LACKS = ("fio is missing", "the pool has no huge pages", "shmem_enabled cannot be set")


@pytest.fixture
def load_bench(monkeypatch: pytest.MonkeyPatch) -> Load:
    """load_bench(NAME): a script of bench/ as a module; it is no package."""
    require(BENCH.is_dir(), "the benches are only in a source tree")
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


def run_show(tmp_path: Path, *words: str) -> dict[str, Any]:
    """The JSON of one small measurement; what it printed is in it as "text"."""
    require(why_no_bed() is None, why_no_bed() or "")
    file = tmp_path / "pool.json"
    ended = subprocess.run(
        [sys.executable, str(BENCH / "pool.py"), *words, "--pairs=1", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(file.read_text())
    assert report["failures"] == []
    for skipped in report["skipped"]:
        assert skipped["reason"].startswith(LACKS), skipped
        assert f"skip {skipped['variant']}: {skipped['reason']}" in ended.stderr
    report["text"] = ended.stdout
    for run in report["runs"]:
        assert f"| {run['variant']} |" in ended.stdout
    return report


def by_name(report: dict[str, Any], case: str) -> dict[str, dict[str, Any]]:
    return {run["variant"]: run for run in report["runs"] if run["case"] == case}


# ---- the four measurements -------------------------------------------------------------------


def test_ranks_are_counted_by_the_bed_and_checked_against_the_file(
    tmp_path: Path, load_bench: Load
) -> None:
    require(shutil.which("mpirun"), "mpirun is missing: install openmpi-bin")
    cgroup = load_bench("pool_cgroup")
    require(cgroup.why_not() is None, cgroup.why_not() or "")
    words = ("--size=32MiB", "--ranks=2", "--patterns=contiguous,apart", "--only=mmap,DIRECT,pool")
    report = run_show(tmp_path, "ranks", *words)
    size = report["dataset"]["file_bytes"]
    for case, parts in (("contiguous, 2 ranks", 1), ("apart, 2 ranks", 2)):
        runs = by_name(report, case)
        for run in runs.values():
            assert sum(run["rank_bytes"]) == parts * size
            assert run["bytes_read"] >= size  # all of it was cold
            assert (run["service_switches"] is not None) == ("engine" in run["variant"])
        assert runs["O_DIRECT readers"]["bytes_read"] == parts * size
        assert runs["pool engine"]["bytes_read"] <= 1.01 * size
        assert runs["pool engine"]["pool"]["unique_bytes"] >= size
        groups = runs["plain mmap, a cgroup for each rank"]
        assert all(peak <= groups["limit_bytes"] for peak in groups["peak_bytes"])
    apart = by_name(report, "apart, 2 ranks")
    # Limits, not cgroups, make the second rank read again (half of the file fits in both).
    assert apart["plain mmap, a cgroup for each rank"]["bytes_read"] > 1.2 * size


@pytest.mark.parametrize("reader", ["C scan", "py-lmdb"])
def test_epochs_are_counted_each_and_kept_to_the_budget(
    tmp_path: Path, load_bench: Load, reader: str
) -> None:
    cgroup = load_bench("pool_cgroup")
    require(cgroup.why_not() is None, cgroup.why_not() or "")
    report = run_show(tmp_path, "epochs", "--size=32MiB", "--epochs=2", f"--readers={reader}")
    runs = by_name(report, reader)
    assert list(runs) == ["plain mmap", "pool, lru", "pool, cyclic"]
    size = report["dataset"]["file_bytes"]
    for run in runs.values():
        assert len(run["hit_rates"]) == len(run["epoch_bytes"]) == 2
        assert sum(run["epoch_bytes"]) <= run["bytes_read"]
        assert run["budget_bytes"] <= size / 2
        assert run["peak_bytes"] <= run["limit_bytes"]
        if run.get("pool"):
            assert run["pool"]["resident_peak_bytes"] <= run["budget_bytes"]
    assert runs["pool, lru"]["pool"]["evict"] == "lru"
    assert "| Belady's optimum | 0.0 % | 4" in report["text"]


@pytest.mark.alone
def test_a_scan_finds_its_data_and_leaves_the_kernels_setting_as_it_was(tmp_path: Path) -> None:
    before = SHMEM_ENABLED.read_text() if SHMEM_ENABLED.exists() else ""
    words = ("--size=16MiB", "--passes=1", "--local", str(tmp_path))
    report = run_show(tmp_path, "scan", *words)
    assert (SHMEM_ENABLED.read_text() if SHMEM_ENABLED.exists() else "") == before
    runs = by_name(report, "warm scan")
    for name, run in runs.items():
        assert (run["faults_per_gb"] > 1) != name.startswith("read(2)"), name
        if run["folio_bytes"] is not None:
            assert run["folio_bytes"] >= 4096
    pool = runs["pool, 4 KiB pages"]["pool"]
    assert pool["huge_pages"] is False
    assert pool["reread_bytes"] == 0


def test_a_fill_reads_the_file_once_whoever_reads(tmp_path: Path) -> None:
    words = ("--size=16MiB", "--bandwidths=0", "--only=fio,mmap,pool,1 MiB,64 KiB")
    report = run_show(tmp_path, "fill", *words)
    size = report["dataset"]["file_bytes"]
    runs = by_name(report, "no link")
    assert {"plain mmap", "pool", "UFFDIO_COPY pager, 1 MiB"} <= set(runs)
    for name, run in runs.items():
        # fio reads whole blocks only, each of its jobs
        assert size - (8 * MIB if "jobs" in name else MIB) <= run["bytes_read"] <= 1.02 * size, name
    assert runs["UFFDIO_COPY pager, 64 KiB"]["faults"] == -(-size // (64 << 10))


# ---- what they are made of -------------------------------------------------------------------


def test_a_checkout_without_the_engine_skips_it_with_one_line(
    load_bench: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = load_bench("pool_bench")
    monkeypatch.setattr(config, "ENGINES", ("cache", "off"))
    place: Any = Path("/nowhere")
    made = bench.Bench(place, place, place, place, 0, 0)
    saved = []
    variants = {"pool engine": lambda: made.wrapped("pool", ())}
    made.rounds("a case", 3, variants, lambda: saved.append(1))
    assert made.runs == [] and made.failures == [] and saved == [1, 1, 1]
    line = "bench: skip pool engine: `uffdprefetch wrap` has no --engine pool in this checkout\n"
    assert capsys.readouterr().err == line


def test_a_run_that_fell_back_to_another_engine_is_no_run_of_the_pool(
    load_bench: Load, tmp_path: Path
) -> None:
    bench = load_bench("pool_bench")
    (tmp_path / "tool.summary.json").write_text('{"engine": "cache", "pool": null}')
    made: Any = bench.Bench(None, None, None, tmp_path, 0, 0)
    with pytest.raises(UffdPrefetchError, match="engine 'cache'"):
        made.pool_summary()


@pytest.mark.parametrize("pattern", ["contiguous", "skipping", "whole", "apart"])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_each_byte_that_a_rank_read_counts_where_it_lies(
    tmp_path: Path, load_bench: Load, pattern: str, ranks: int
) -> None:
    gate, slides = load_bench("pool_gate"), load_bench("slides")
    path = tmp_path / "data"
    data = np.random.default_rng(1).integers(0, 1 << 63, 5 * 8192 // 8 + 3 * 512, dtype=np.uint64)
    data.tofile(path)
    sums = gate.unit_sums(path, 8192, 8)
    assert len(sums) == 7
    parts = [gate.units_of(pattern, 7, rank, ranks) for rank in range(ranks)]
    times = ranks if pattern in ("whole", "apart") else 1
    assert sorted(np.concatenate(parts)) == sorted(list(range(7)) * times)

    program = slides.build("pool_read", tmp_path)
    lines = []
    for rank in range(ranks):
        words = [str(program), f"--pattern={pattern}", "--unit=8192", str(path)]
        variables = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(ranks)}
        lines.append(json.loads(subprocess.check_output(words, env=variables)))
    gate.check_sums(lines, sums, pattern)
    assert sum(line["bytes"] for line in lines) == times * data.nbytes

    # two words that have changed places are the same bytes, at wrong offsets
    data[[10, 11]] = data[[11, 10]]
    data.tofile(path)
    with pytest.raises(UffdPrefetchError, match="WRONG BYTES"):
        gate.check_sums(lines, gate.unit_sums(path, 8192, 8), pattern)


def test_ratios_are_paired_within_a_round_of_the_pool(load_bench: Load) -> None:
    bench = load_bench("pool_bench")
    runs = []
    for number, slow in enumerate((1.0, 3.0, 1.0)):  # the machine is slower in round 1
        runs.append({"variant": "plain mmap", "round": number, "seconds": 4.0 * slow})
        runs.append({"variant": "pool", "round": number, "seconds": 2.0 * slow})
    assert bench.paired(runs, "pool", "plain mmap") == (0.5, (0.5, 0.5))
    assert bench.paired(runs, "pool", "nobody") is None


def test_a_job_that_dies_or_hangs_is_told_with_its_last_words(
    tmp_path: Path, load_bench: Load
) -> None:
    gate = load_bench("pool_gate")

    def run(script: str, timeout_seconds: float) -> None:
        gate.run_readers(
            lambda _gate: ["sh", "-c", script],
            ranks=2, epochs=1, timeout_seconds=timeout_seconds, scratch=tmp_path,
        )  # fmt: skip

    with pytest.raises(UffdPrefetchError, match=r"status 3; it said: no such thing"):
        run("echo no such thing >&2; exit 3", 60)
    with pytest.raises(UffdPrefetchError, match="did not come to its next epoch"):
        run("sleep 600", 0.0)


def test_the_tables_of_an_earlier_run_are_shown_again(
    tmp_path: Path, load_bench: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = load_bench("pool")
    file = tmp_path / "other.json"
    file.write_text("{}")
    assert pool.main(["show", str(file)]) == 1
    assert "no report of this bench" in capsys.readouterr().err
    assert pool.main(["show", str(tmp_path / "missing")]) == 1
    assert pool.main(["fill", "--size", "much"]) == 1
    assert "not a size" in capsys.readouterr().err
