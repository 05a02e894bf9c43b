# SPDX-License-Identifier: Apache-2.0
"""bench/apps.py in small: each real program reads the same values under `wrap`, in both engines."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from components import why_no_checkpoints
from conftest import require
from paths import BENCH

from uffdprefetch.demo.bed import proactive_reclaim, why_no_bed
from uffdprefetch.predict.storage import FREE_BYTES

WRAP, POOL = "wrap", "pool"
#: What of the programs' reading is served by now, by column; of the others only the values are
#: compared.
SERVED = {
    "safetensors-load_file": (WRAP, POOL),
    "safetensors-safe_open": (WRAP, POOL),
    "safetensors-numpy": (WRAP, POOL),
    "safetensors-4-shards": (WRAP, POOL),
    "safetensors-4-shards-8-ranks": (WRAP, POOL),
    "transformers-from_pretrained": (WRAP, POOL),
    "torch.load-mmap": (WRAP, POOL),
    "gguf-as-llama.cpp": (WRAP, POOL),
    "gguf-as-llama.cpp-numa": (WRAP, POOL),
    "hf-loader": (WRAP, POOL),
    "hf-loader-2-workers": (WRAP, POOL),
    "hf-loader-4-workers": (WRAP, POOL),
    "hf-shuffle": (WRAP, POOL),
    "hf-iterable": (WRAP, POOL),
    "megatron-blended": (WRAP, POOL),
    "megatron-blended-2-workers": (WRAP, POOL),
    "memmap-batches": (WRAP, POOL),
    "memmap-scan": (WRAP, POOL),
    "memmap-copy-on-write": (WRAP, POOL),
    "pyarrow-ipc": (WRAP, POOL),
    "polars-scan": (WRAP, POOL),
    "lmdb-cursor": (WRAP, POOL),
    "faiss-ivf-mmap": (WRAP, POOL),
    "kraken2-memory-mapping": (WRAP, POOL),
    "mmseqs-easy-search": (WRAP, POOL),
    "blastn": (WRAP, POOL),
}
#: More than a program's files: what a pool reads beyond their ends, and samples to see changes.
BYTES_SHARE_MAX = 1.05


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench/apps_programs.py; bench/ is no package."""
    require(BENCH.is_dir(), "the benches are only in a source tree")
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("apps_programs")


def measure(tmp_path: Path, *words: str) -> dict[str, Any]:
    """The JSON of a small measurement; what it printed is in it as "text"."""
    require(why_no_bed() is None, why_no_bed() or "")
    file = tmp_path / "apps.json"
    done = subprocess.run(
        [sys.executable, str(BENCH / "apps.py"), "--size=small", "--json", str(file), *words],
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(file.read_text())
    assert report["failures"] == []
    report["text"] = done.stdout
    return report


def test_every_program_of_the_matrix_is_tried_here(bench: ModuleType) -> None:
    assert [program.name for program in bench.EVERY] == list(SERVED)


@pytest.mark.parametrize("name", SERVED)
def test_a_program_reads_the_same_values_under_wrap(
    name: str, tmp_path: Path, bench: ModuleType
) -> None:
    (program,) = bench.chosen(name)
    missing = program.why_not(slow=True)
    if missing is not None:
        pytest.skip(missing)  # whatever UFFDPREFETCH_TEST_FORCE says: large ones are asked for
    require(why_no_checkpoints() is None, f"no userfaultfd: {why_no_checkpoints()}")
    report = measure(tmp_path, "--programs", name, "--columns=plain,wrap,pool", "--slow")
    runs = {run["column"]: run for run in report["runs"]}
    assert list(runs) == ["plain", WRAP, POOL]
    (told,) = report["programs"]
    for column, run in runs.items():
        assert run["resident_bytes_at_start"] == 0
        assert (run["digest"], run["value_bytes"]) == (told["digest"], told["value_bytes"]), column
    assert [runs[column]["tool"]["engine"] for column in (WRAP, POOL)] == ["cache", "pool"]
    # Where the machine's owner takes idle pages away all the time, perhaps most of them.
    taken = told["file_bytes"] if proactive_reclaim() else 0
    for column in SERVED[name]:
        run = runs[column]
        assert run["tool"]["totals"]["prefetched_bytes"] > 0, column
        # of weights the pool has the header's mapping, not the tensors': guesses for either
        most = BYTES_SHARE_MAX * told["file_bytes"] + (column == POOL) * 2 * FREE_BYTES + taken
        assert run["bytes_read"] <= most, column


def test_all_columns_are_measured_and_shown_again(tmp_path: Path, bench: ModuleType) -> None:
    report = measure(tmp_path, "--programs=memmap-scan", "--pairs=2")
    runs, (told,) = report["runs"], report["programs"]
    columns = ["plain", WRAP, POOL, "cat", "peer"]
    if report["skipped"]:
        assert "vmtouch is missing" in report["skipped"][0]["reason"]
        columns.remove("peer")
    assert [(run["round"], run["column"]) for run in runs] == [
        (number, column) for number in range(2) for column in columns
    ]
    for run in runs:
        assert run["bytes_read"] >= told["value_bytes"] == told["file_bytes"]
        if run["column"] in ("cat", "peer"):
            assert run["bytes_read_before"] >= told["file_bytes"]
            assert run["before_seconds"] > 0
        else:
            assert run["bytes_read_before"] == run["resident_bytes_at_start"] == 0
    again = subprocess.run(
        [sys.executable, str(BENCH / "apps.py"), "show", str(tmp_path / "apps.json")],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    assert again.stdout == report["text"]
    assert "| memmap-scan | 32 |" in again.stdout


def test_values_that_differ_fail_the_measurement(
    tmp_path: Path, bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    apps_bench: Any = importlib.import_module("apps_bench")
    (program,) = bench.chosen("memmap-scan")
    file = tmp_path / "file"
    file.write_bytes(b"12")
    one = apps_bench.Bench(None, tmp_path, tmp_path, 2, 0, 0, ("plain", "cat"))
    monkeypatch.setattr(one, "make", lambda kind: None)
    monkeypatch.setattr(one, "files", lambda kind: [file])
    expected = type("Ran", (), {"job": {"digest": "12", "bytes": 1}})
    monkeypatch.setattr(one, "start", lambda words, file_bytes: expected)
    figures = {"seconds": 1, "total_seconds": 1, "bytes_read": 0, "major_faults": 0}

    def measure_one(program: Any, column: str) -> dict[str, Any]:
        return {"digest": "12" if column == "plain" else "34", "column": column, **figures}

    monkeypatch.setattr(one, "measure", measure_one)
    one.run(program, pairs=1)
    assert [run["column"] for run in one.runs] == ["plain"]
    assert one.failures[0]["error"].startswith("WRONG VALUES")


def test_a_glob_that_no_program_has_and_no_report(
    tmp_path: Path, bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    apps: Any = importlib.import_module("apps")
    assert apps.main(["--programs", "nothing-*"]) == 1
    assert "no program is called nothing-*: safetensors-load_file; " in capsys.readouterr().err
    file = tmp_path / "other.json"
    file.write_text("{}")
    assert apps.main(["show", str(file)]) == 1
    assert "no report of this bench" in capsys.readouterr().err


def test_the_limit_is_the_rounds_own_warm_run_or_the_link(bench: ModuleType) -> None:
    table: Any = importlib.import_module("apps_table")

    def run(column: str, number: int, seconds: float, before: float = 0.0) -> dict[str, Any]:
        figures = {"seconds": seconds, "before_seconds": before, "file_bytes": 200}
        return {"program": "p", "column": column, "round": number, **figures}

    runs = [run("cat", 0, 1.0), run("wrap", 0, 3.0), run("cat", 1, 4.0), run("wrap", 1, 4.0)]
    rounds = table.rounds_of({"runs": runs}, "p")
    # The link takes 2 s: the limit of the first round; that of the second is its warm run.
    assert table.to_limit(rounds, "wrap", 100) == 1.25
    assert table.to_limit(rounds, "wrap", 0) == 2.0
    assert table.to_limit(rounds, "peer", 100) is None
    assert table.median_of(rounds, "wrap", "seconds", "before_seconds") == 3.5
