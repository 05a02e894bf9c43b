# SPDX-License-Identifier: Apache-2.0
"""Unmodified PyTorch jobs under `wrap`: the service finds out which records their samples are and
follows the order of each epoch; the job reads the same bytes in the same order as without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import require, wait_until
from harness import Job, Start, auto, snapshot

from uffdprefetch.demo.bed import SlowBed, drop_cache, why_no_bed

torch = pytest.importorskip("torch")
from lmdb_datasets import KINDS  # noqa: E402
from record_files import grow  # noqa: E402

pytest_plugins = ("harness_fixtures",)
pytestmark = [auto, pytest.mark.torch]

N = 500
SIZES = (40_000, 160_000)
#: A part of what an epoch reads after the pause.
SENT_BYTES = N * SIZES[0] // 4

#: Pauses after some batches, so that the test can look; the rest is what a user writes.
SCRIPT = """
import hashlib, json, os, sys
import torch
from torch.utils.data import DataLoader, RandomSampler
from lmdb_datasets import KINDS

def main():
    kind, path, workers, start = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    dataset = KINDS[kind].dataset(path)
    torch.manual_seed(5)
    loader = DataLoader(dataset, batch_size=16, sampler=RandomSampler(dataset), num_workers=workers,
                        multiprocessing_context=start if workers else None)
    sha, loss = hashlib.sha256(), 0.0
    for epoch in range(2):
        for number, (crc, label) in enumerate(loader):
            sha.update(crc.numpy().tobytes() + label.numpy().tobytes())
            if number == 11:
                print(json.dumps({"read": epoch}), flush=True)
                sys.stdin.readline()
    print(json.dumps({"digest": sha.hexdigest(), "rng": torch.rand(1).item()}), flush=True)

if __name__ == "__main__":
    main()
"""

CASES = [
    ("formatted", 0, "fork", "keys 'image-%09d', from 1"),
    ("formatted", 2, "fork", "keys 'image-%09d', from 1"),
    ("pickled", 2, "spawn", "keys from .keys"),
    ("hashed", 0, "fork", "keys from sha1 of .paths"),
    ("unpadded", 2, "forkserver", "keys '%d', from 0"),
    ("npy", 2, "fork", "record number = sample number"),
    ("arrow", 0, "fork", "record number = sample number"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """On slow storage: where a disk is quick enough an order is left to its reader's own misses."""
    require(why_no_bed() is None, why_no_bed() or "")
    source = tmp_path_factory.mktemp("data")
    kinds = list(dict.fromkeys(case[0] for case in CASES))
    for kind in kinds:
        KINDS[kind].make(source / kind, N, np.random.default_rng(3), sizes=SIZES)
        grow(source / kind / KINDS[kind].file)
    with SlowBed(source) as bed:
        yield {kind: bed.path(kind) for kind in kinds}


def cold(path: Path, kind: str) -> None:
    drop_cache(path / KINDS[kind].file)


def script(directory: Path) -> str:
    path = directory / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def plans(run: Job) -> list[dict[str, Any]]:
    found = snapshot(run.env)
    return [*found.plans, {"degradations": found.degradations}]


def at_pause(run: Job, epoch: int = 0) -> None:
    """Wait until it has read some batches of the epoch."""
    assert run.line() == {"read": epoch}


def read_on(run: Job) -> dict[str, Any]:
    """From the pause in the first epoch to the end: what it says there."""
    run.tell()
    at_pause(run, 1)
    run.tell()
    return run.line()


def plainly(job: Start, words: list[str]) -> dict[str, Any]:
    run = job(words, wrap=False)
    at_pause(run)
    said = read_on(run)
    assert run.finish().status == 0
    return said


@pytest.mark.parametrize(("kind", "workers", "start", "how"), CASES)
def test_the_order_of_an_unmodified_script_is_followed(
    job: Start, data: dict[str, Path], tmp_path: Path, kind: str, workers: int, start: str, how: str
) -> None:
    words = [sys.executable, script(tmp_path), kind, str(data[kind]), str(workers), start]
    expected = plainly(job, words)
    cold(data[kind], kind)
    run = job(words)
    for epoch in range(2):
        at_pause(run, epoch)
        # and much of the order to be sent: a reader overtakes a service that is not scheduled
        wait_until(
            lambda: sum(how in plan.get("how", "") and plan["sent_bytes"] > SENT_BYTES
                        for plan in plans(run)) > epoch,  # noqa: B023
            lambda: f"the mapping: {plans(run)}",
        )  # fmt: skip
        run.tell()
    assert run.line() == expected
    done = run.finish().good()
    followed = [plan for plan in done.summary["plans"] if how in plan["how"]]
    assert [plan["dropped"] for plan in followed] == [None, None]  # two epochs
    assert [plan["items"] for plan in followed] == [N, N]
    assert followed[1]["read_items"] == N
    assert min(plan["sent_bytes"] for plan in followed) > SENT_BYTES


def test_two_data_sets_in_one_loader_are_two_orders(
    job: Start, data: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "both.py"
    path.write_text(
        SCRIPT.replace(
            "dataset = KINDS[kind].dataset(path)",
            "one, other = (KINDS[k].dataset(p) for k, p in zip(kind.split(','), path.split(',')))\n"
            "    dataset = torch.utils.data.ConcatDataset([one, torch.utils.data.Subset(other,"
            " range(0, len(other), 2))])",
        )
    )
    kinds = ("hashed", "npy")
    both = ",".join(str(data[kind]) for kind in kinds)
    words = [sys.executable, str(path), ",".join(kinds), both, "0", "fork"]
    expected = plainly(job, words)
    for kind in kinds:
        cold(data[kind], kind)
    run = job(words)
    at_pause(run)
    wait_until(lambda: len(plans(run)) >= 3, lambda: f"two orders: {plans(run)}")
    assert read_on(run) == expected
    done = run.finish().good()
    assert {Path(plan["file"]).name for plan in done.summary["plans"]} == {"data.mdb", "data.npy"}


def test_a_data_set_whose_records_cannot_be_told_is_left_alone_with_a_line(
    job: Start, data: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "odd.py"
    path.write_text(
        SCRIPT.replace(
            "dataset = KINDS[kind].dataset(path)",
            "base = KINDS[kind].dataset(path)\n"
            "    class Odd(torch.utils.data.Dataset):\n"
            "        def __len__(self): return len(base)\n"
            "        def __getitem__(self, i): return base[i * 7919 % len(base)]\n"
            "    dataset = Odd()",
        ).replace("number == 11", "number == 8")
    )
    words = [sys.executable, str(path), "unpadded", str(data["unpadded"]), "0", "fork"]
    expected = plainly(job, words)
    cold(data["unpadded"], "unpadded")
    run = job(words)
    at_pause(run)
    text = "which records its samples read is not known"
    wait_until(
        lambda: any(text in line for line in plans(run)[-1]["degradations"]),
        lambda: f"the finding: {plans(run)}",
    )
    assert read_on(run) == expected
    assert run.finish().good().summary["plans"] == []


def test_torch_off_leaves_the_order_unknown(
    job: Start, data: dict[str, Path], tmp_path: Path
) -> None:
    words = [sys.executable, script(tmp_path), "hashed", str(data["hashed"]), "0", "fork"]
    run = job(words, options=("--torch", "off"))
    at_pause(run)
    read_on(run)
    assert run.finish().good().summary["plans"] == []


def test_death_of_the_service_changes_no_byte_and_no_random_number(
    job: Start, data: dict[str, Path], tmp_path: Path
) -> None:
    words = [sys.executable, script(tmp_path), "pickled", str(data["pickled"]), "2", "fork"]
    expected = plainly(job, words)
    cold(data["pickled"], "pickled")
    run = job(words)
    at_pause(run)
    run.kill_service()
    assert read_on(run) == expected
    assert run.finish().status == 0
