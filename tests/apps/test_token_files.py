# SPDX-License-Identifier: Apache-2.0
"""Megatron's token files: what its arrays say of a sample is what the sample reads; under `wrap`
the order goes through all files that are blended."""

from __future__ import annotations

import importlib
import json
import os
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import wait_until
from harness import Job, Start, auto, snapshot
from token_sets import write_library, write_tokens

from uffdprefetch.job import datasets
from uffdprefetch.job.channel import SCHEMA
from uffdprefetch.orders.announcement import AnnounceError, load
from uffdprefetch.orders.mapped_files import ResolveRequest
from uffdprefetch.orders.samples import SampleResolver
from uffdprefetch.predict.order.order import Order

torch = pytest.importorskip("torch")

pytest_plugins = ("harness_fixtures",)
pytestmark = [auto, pytest.mark.torch]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The modules of tests/support/token_sets.py, in the place of a real megatron-core's."""
    write_library(tmp_path)
    for name in [each for each in sys.modules if each.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [each for each in sys.modules if each.split(".")[0] == "megatron"]:
        del sys.modules[name]


def blended(directory: Path, seed: int, in_memory: bool = False) -> Any:
    """Three data sets, and one that takes from them in a drawn order."""
    rng = np.random.default_rng(seed)
    gpt = importlib.import_module("megatron.core.datasets.gpt_dataset")
    parts = []
    for number in range(3):
        prefix = directory / f"part-{number}"
        write_tokens(prefix, int(rng.integers(1, 80)), int(rng.integers(20, 90)), 17, rng)
        parts.append(gpt.GPTDataset(str(prefix)))
        if in_memory:
            parts[-1].sample_index = np.array(parts[-1].sample_index)
    sizes = [len(part) for part in parts]
    which = rng.permutation(np.repeat(np.arange(3), sizes)).astype(np.int16)
    inner = np.zeros(len(which), np.int64)
    for number, size in enumerate(sizes):
        inner[which == number] = np.arange(size)
    mixed = importlib.import_module("megatron.core.datasets.blended_dataset")
    return mixed.BlendedDataset(parts, which, inner)


def orders_of(
    directory: Path, description: datasets.Description, items: int
) -> tuple[dict[str, Order], list[str]]:
    """What the helper makes of it, by file; and what it has to say."""
    value = {
        "schema": SCHEMA, "pid": 7, "number": 1, "reader": "loader-1", "slot": 1, "items": items,
        "parts": description.parts,
    }  # fmt: skip
    (directory / "7-1.json").write_text(json.dumps(value))
    for name, data in description.arrays.items():
        (directory / f"7-1.{name}").write_bytes(memoryview(data).cast("B"))
    stored: dict[str, Order] = {}
    files = [{"path": str(path), "regions": []} for path in sorted(directory.glob("*.bin"))]
    answer = SampleResolver().orders(
        load(str(directory), 7, 1),
        ResolveRequest(files, 0, []),
        lambda order, path: stored.update({path: order}) or {},
        lambda order, kept: {},  # of whole files there is none
    )
    return stored, answer["findings"]


@pytest.mark.parametrize("seed", range(6))
def test_the_bytes_of_a_sample_are_those_that_it_reads(library: Path, seed: int) -> None:
    data = blended(library, seed, in_memory=seed % 2 == 1)
    numbers = np.random.default_rng(seed).permutation(len(data))
    items = array("q", numbers.tolist())
    description = datasets.describe(data, items, None, torch)
    kinds = {("path" in p["tokens"]["sample"], "path" in p["tokens"]["lengths"])
             for p in description.parts}  # fmt: skip
    assert kinds == {(seed % 2 == 0, True)}, "what is in a file is not copied"
    orders, findings = orders_of(library, description, len(items))
    assert findings == []
    for item, number in enumerate(numbers.tolist()):
        read = b""
        for path, order in orders.items():
            assert order.items == len(items)
            content = Path(path).read_bytes()
            for at in np.flatnonzero(order.item == item).tolist():
                read += content[order.starts[at] : order.ends[at]]
        assert read == data[number]["tokens"].tobytes()


def test_arrays_that_lead_nowhere_are_a_finding(library: Path) -> None:
    data = blended(library, 1)
    items = array("q", range(len(data)))
    broken: list[tuple[str, Any]] = [
        ("count", 5), ("type", "<f4"), ("offset", 1 << 40), ("path", str(library / "none")),
        ("type", "|O"), ("type", "what"),
    ]  # fmt: skip
    for name, value in broken:
        description = datasets.describe(data, items, None, torch)
        for part in description.parts:
            part["tokens"]["sample"][name] = value
        orders, findings = orders_of(library, description, len(items))
        assert orders == {} and len(findings) == 3, (name, value)
        assert "its order is not known" in findings[0]
    (library / "part-0.bin").write_bytes(b"cut short")
    orders, findings = orders_of(library, datasets.describe(data, items, None, torch), len(items))
    assert len(orders) == 2 and "part-0.bin: tokens beyond its end" in findings[0]


@pytest.mark.parametrize("change", [{"path": None}, {"array": "x"}, {"count": -1}, {"type": 5}])
def test_arrays_that_are_none_are_refused(library: Path, change: dict[str, Any]) -> None:
    data = blended(library, 2)
    items = array("q", range(len(data)))
    description = datasets.describe(data, items, None, torch)
    description.parts[0]["tokens"]["shuffle"].update(change)
    with pytest.raises(AnnounceError):
        orders_of(library, description, len(items))


def test_classes_that_read_otherwise_are_left_alone(library: Path) -> None:
    part = blended(library, 3).datasets[0]

    class Other(type(part)):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index // 2)

    part.__class__ = Other
    (said,) = datasets.describe(part, array("q", range(3)), None, torch).parts
    assert "tokens" not in said


SCRIPT = """
import hashlib, json, sys
import numpy, torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from torch.utils.data import DataLoader

workers, prefixes = int(sys.argv[1]), sys.argv[2:]
parts = [GPTDataset(prefix) for prefix in prefixes]
which = numpy.arange(2 * min(map(len, parts))) % 2
loader = DataLoader(BlendedDataset(parts, which, numpy.arange(len(which)) // 2), batch_size=8,
                    num_workers=workers, collate_fn=list)
sha = hashlib.sha256()
for number, batch in enumerate(loader):
    for sample in batch:
        sha.update(sample["tokens"])
    if number == 3:
        print(json.dumps({"read": number}), flush=True)
        sys.stdin.readline()
print(json.dumps({"digest": sha.hexdigest()}), flush=True)
"""


def plans(run: Job) -> list[dict[str, Any]]:
    return list(snapshot(run.env).plans)


@pytest.mark.parametrize(("engine", "workers"), [("cache", 0), ("cache", 2), ("pool", 0)])
def test_an_order_goes_through_all_files_that_are_blended(
    job: Start, tmp_path: Path, engine: str, workers: int
) -> None:
    write_library(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    rng = np.random.default_rng(5)
    prefixes = [tmp_path / name for name in ("books", "web")]
    samples = min(write_tokens(prefix, 400, 30_000, 8192, rng) for prefix in prefixes)
    words = [sys.executable, str(script), str(workers), *map(str, prefixes)]
    plain = job(words, wrap=False)
    assert plain.line() == {"read": 3}
    plain.tell()
    expected = plain.line()
    assert plain.finish().status == 0
    files = [prefix.with_suffix(".bin") for prefix in prefixes]
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    run = job(words, options=("--engine", engine))
    assert run.line() == {"read": 3}
    wait_until(lambda: len(plans(run)) == 2, lambda: f"an order of each file: {plans(run)}")
    run.tell()
    assert run.line() == expected
    summary = run.finish().good().summary
    found = {Path(plan["file"]): plan for plan in summary["plans"]}
    assert set(found) == set(files)
    for plan in found.values():
        assert plan["how"] == "loader-1: tokens as the data set tells" and not plan["dropped"]
        assert plan["items"] == plan["read_items"] == samples
        assert plan["sent_bytes"] >= samples * 4 * 8192
    assert summary["totals"]["prefetched_bytes"] > 0
