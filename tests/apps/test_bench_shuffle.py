# SPDX-License-Identifier: Apache-2.0
"""bench/shuffle.py and bench/wrongplan.py in small: bytes, orders, counters, no times."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conftest import clean_environment, require
from paths import BENCH

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.demo.bed import proactive_reclaim, why_no_bed
from uffdprefetch.demo.dataset import DATABASE_NAME, INDEX_NAME, digest_of, make_dataset

pytestmark = pytest.mark.torch

Load = Callable[[str], ModuleType]
MIB = 1 << 20
#: Of skips: what a checkout may lack without a failure of the bench.
LACKS = "this checkout"


@pytest.fixture
def load_bench(monkeypatch: pytest.MonkeyPatch) -> Load:
    """load_bench(NAME): a script of bench/ as a module; it is no package."""
    require(BENCH.is_dir(), "the benches are only in a source tree")
    require(importlib.util.find_spec("torch"), "torch is missing: pip install torch")
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


def run_bench(tmp_path: Path, script: str, *words: str) -> dict[str, Any]:
    """The JSON of one small measurement; what it printed is in it as "text"."""
    require(why_no_bed() is None, why_no_bed() or "")
    file = tmp_path / "bench.json"
    ended = subprocess.run(
        [sys.executable, str(BENCH / script), "--pairs=1", *words, "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(file.read_text())
    assert report["failures"] == []
    for skipped in report["skipped"]:
        assert skipped["reason"].startswith(LACKS), skipped
    report["text"] = ended.stdout
    for run in report["runs"]:
        assert f"| {run['variant']} |" in ended.stdout
    return report


def by_name(report: dict[str, Any], case: str) -> dict[str, dict[str, Any]]:
    return {run["variant"]: run for run in report["runs"] if run["case"] == case}


# ---- the measurements ------------------------------------------------------------------------


def test_each_variant_reads_the_samplers_order_and_the_bed_counts_it(
    tmp_path: Path, load_bench: Load
) -> None:
    words = ("--size=8MiB", "--ranks=2", "--only=4 workers,own,--plan", "--batch=8")
    report = run_bench(tmp_path, "shuffle.py", *words)
    runs = by_name(report, "2 ranks")
    tools = ["wrap --plan", "wrap --plan, pool"]
    assert list(runs) == ["plain", "warm", "4 workers", "own prefetcher, 8 threads", *tools]
    size = report["dataset"]["file_bytes"]
    # Where the machine's owner takes idle pages away all the time, perhaps most of them.
    taken = size if proactive_reclaim() else 0
    for name, run in runs.items():
        # What was warm may be taken away by the kernel in between.
        assert run["as_prepared"] or (name == "warm" and proactive_reclaim()), name
        assert run["needed_bytes"] <= size
        assert len(run["epoch_seconds"]) == len(run["epoch_stall_seconds"]) == 2
        assert run["stall_seconds"] <= run["seconds"]
        if name != "warm":
            assert run["needed_bytes"] <= run["bytes_read"] <= 1.05 * size + taken
            # The second epoch found all in memory, but for pages that the kernel took away in
            # between and those by which a pool tells whether the file has changed.
            assert run["bytes_read"] - run["epoch_bytes_read"][1] < size // 16 + taken, name
    assert [runs[name]["tool"]["engine"] for name in tools] == ["cache", "pool"]
    # but for pages that the kernel took away in between
    assert max(runs["warm"]["epoch_bytes_read"]) < size // 16 + taken
    assert report["command"].startswith("python bench/shuffle.py --pairs=1 --size=8MiB")


def test_a_wrong_plan_is_measured_against_no_plan(tmp_path: Path, load_bench: Load) -> None:
    words = ("--size=8MiB", "--only=no wrap", "--engines=cache", "--batch=8")
    report = run_bench(tmp_path, "wrongplan.py", *words)
    runs = by_name(report, "engine cache")
    assert list(runs) == ["plain, no wrap", "no plan"]
    assert runs["no plan"]["tool"]["engine"] == "cache"
    assert runs["no plan"]["findings"] == []
    # the job trains on half of the records
    assert all(run["needed_bytes"] < 0.6 * 8 * MIB for run in runs.values())


# ---- what they are made of -------------------------------------------------------------------


def test_orders_are_those_that_the_script_reads(tmp_path: Path, load_bench: Load) -> None:
    case = load_bench("shuffle_case")
    manifest = make_dataset(tmp_path, 2 * MIB)
    orders = case.sampler_orders(manifest.records, 2, 2, seed=5)
    database = tmp_path / DATABASE_NAME
    words = ["--db", str(database), "--seed=5", "--batch=4"]
    for rank in range(2):
        out = subprocess.check_output(
            [sys.executable, str(BENCH / "shuffle_job.py"), *words],
            env={**clean_environment(), "RANK": str(rank), "WORLD_SIZE": "2"},
            timeout=120,
        )
        lines = [json.loads(line) for line in out.splitlines()]
        assert [line["epoch"] for line in lines] == [0, 1]
        for epoch, line in enumerate(lines):
            assert line["rank"] == rank
            assert line["sha256"] == digest_of(database, orders[epoch][rank].tolist())
    # each record once an epoch, and another order in the next one
    assert set(np.concatenate(orders[0]).tolist()) == set(range(manifest.records))
    assert not np.array_equal(orders[0][0], orders[1][0])


def test_a_split_and_an_early_stop_read_only_their_records(
    tmp_path: Path, load_bench: Load
) -> None:
    case = load_bench("shuffle_case")
    make_dataset(tmp_path, 2 * MIB)
    database = tmp_path / DATABASE_NAME
    (order,) = case.sampler_orders(10, 1, 1, seed=0)[0]
    words = ["--db", str(database), "--first=10", "--stop-after=2", "--batch=3", "--epochs=1"]
    out = subprocess.check_output(
        [sys.executable, str(BENCH / "shuffle_job.py"), *words],
        env=clean_environment(),
        timeout=120,
    )
    line = json.loads(out)
    assert line["records"] == 6
    assert line["sha256"] == digest_of(database, order[:6].tolist())


def test_needed_bytes_are_the_pages_of_the_records_each_once(
    tmp_path: Path, load_bench: Load
) -> None:
    case = load_bench("shuffle_case")
    make_dataset(tmp_path, 2 * MIB)
    extents = np.load(tmp_path / INDEX_NAME)
    generator = random.Random(1)
    for _ in range(20):
        records = generator.choices(range(len(extents)), k=generator.randrange(1, 40))
        pages = set()
        for record in records:
            offset, length = extents[record].tolist()
            pages |= set(range(offset // 4096, (offset + length - 1) // 4096 + 1))
        assert case.page_bytes(extents, np.array(records)) == 4096 * len(pages)


def test_the_limit_is_the_rounds_own_warm_run_or_the_link(load_bench: Load) -> None:
    bench = load_bench("shuffle")
    runs = []
    for number, slow in enumerate((1.0, 3.0, 1.0)):  # the machine is slower in round 1
        runs.append({"variant": "warm", "round": number, "seconds": 2.0 * slow})
        runs.append({"variant": "plain", "round": number, "seconds": 6.0 * slow})
    assert bench.to_limit(runs, "plain", 100, 100) == (3.0, (3.0, 3.0))
    assert bench.to_limit(runs[:2], "plain", 1200, 100)[0] == 0.5
    assert bench.to_limit(runs[1:2], "plain", 1200, 100) is None


def test_another_order_than_the_samplers_is_wrong_bytes(tmp_path: Path, load_bench: Load) -> None:
    case, pool_bench = load_bench("shuffle_case"), load_bench("pool_bench")
    gate = load_bench("pool_gate")
    manifest = make_dataset(tmp_path, 2 * MIB)
    nowhere: Any = Path("/nowhere")
    bench = pool_bench.Bench(nowhere, tmp_path, manifest, nowhere, 0, 0)
    made = case.Shuffle(bench, ranks=1, epochs=1)
    good = digest_of(tmp_path / DATABASE_NAME, made.orders[0][0].tolist())
    made.check(gate.Readers([[{"sha256": good, "records": 1}]], 0.0))
    swapped = made.orders[0][0].tolist()
    swapped[:2] = swapped[1::-1]
    bad = digest_of(tmp_path / DATABASE_NAME, swapped)
    with pytest.raises(UffdPrefetchError, match="WRONG BYTES: rank 0 of 1, epoch 0"):
        made.check(gate.Readers([[{"sha256": bad, "records": 1}]], 0.0))


def test_wrong_orders_are_wrong_and_as_long_as_the_right_one(load_bench: Load) -> None:
    bench, case = load_bench("wrongplan"), load_bench("shuffle_case")
    right = case.sampler_orders(50, 1, 1, 0)[0][0]
    wrong = bench.wrong_orders(101, 50, 0)
    for name, orders in wrong.items():
        assert not np.array_equal(orders[0][0], right), name
        assert len(orders[0][0]) in (50, 51), name
    assert set(wrong["plan of the other half"][0][0].tolist()) == set(range(50, 101))
    assert (wrong["plan with every other record wrong"][0][0] >= 50).sum() == 25


def test_the_plan_that_is_written_is_one(tmp_path: Path, load_bench: Load) -> None:
    case = load_bench("shuffle_case")
    plan_file = importlib.import_module("uffdprefetch.orders.plan_file")
    source, scratch = tmp_path / "data", tmp_path / "scratch"
    manifest = make_dataset(source, 2 * MIB)
    scratch.mkdir()

    class Bed:
        def path(self, name: str) -> Path:
            return source / name

    pool_bench: Any = load_bench("pool_bench")
    bench = pool_bench.Bench(Bed(), source, manifest, scratch, 0, 0)
    made = case.Shuffle(bench, ranks=2, epochs=2)
    plan = plan_file.load(str(made.write_plan(made.orders)))
    data = str(source / DATABASE_NAME / "data.mdb")
    extents = np.load(source / INDEX_NAME)
    for epoch in range(2):
        for rank in range(2):
            order = plan.order(data, None, rank, epoch)
            starts = extents[made.orders[epoch][rank], 0]
            assert order is not None
            value = np.append(order.item[1:] != order.item[:-1], True)  # its leaf comes before it
            sha = hashlib.sha256(np.asarray(order.starts[value], dtype=np.int64).tobytes())
            # where liblmdb says that the values lie
            assert sha.digest() == hashlib.sha256(starts.astype(np.int64).tobytes()).digest()


def test_the_tables_of_an_earlier_run_are_shown_again(
    tmp_path: Path, load_bench: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("shuffle", "wrongplan"):
        bench = load_bench(name)
        file = tmp_path / "other.json"
        file.write_text("{}")
        assert bench.main(["show", str(file)]) == 1
        assert "no report of this bench" in capsys.readouterr().err
        assert bench.main(["show", str(tmp_path / "missing")]) == 1
        assert bench.main(["--size", "much"]) == 1
        assert "not a size" in capsys.readouterr().err
