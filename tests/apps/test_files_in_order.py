# SPDX-License-Identifier: Apache-2.0
"""Jobs that read small files in an order that is known, under `wrap`, from cold on the slow bed: a
shuffled DataLoader's, as the hook or the program tells it, an announced one, a plan's. The bytes
are right, and most files were read ahead and used. No time is asserted."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from components import Run, Runner, on_memory, python
from conftest import require, wait_until

from uffdprefetch.demo.bed import SlowBed, drop_cache, why_no_bed

pytest_plugins = ("components",)

DIRECTORIES, EACH = 12, 50
FILES = DIRECTORIES * EACH
#: Of files that are read ahead and used, of those that are read: at most the others are read by the
#: job before its order is known, which takes a DataLoader's first batches.
USED_SHARE = 0.8
#: Slow enough that a service beside a busy machine keeps ahead of the job.
BANDWIDTH, LATENCY = 30_000_000, 4_000


@dataclass(frozen=True)
class Images:
    """A directory for each class, as torchvision's ImageFolder has them; and what SHA-256 says of
    the digests of all files, sorted."""

    directory: Path
    digest: str


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    directory, source = tmp_path_factory.mktemp("images"), random.Random(4)
    require(not on_memory(directory), "temporary files are in memory; set TMPDIR")
    digests = []
    names = [(at % DIRECTORIES, at) for at in range(FILES)]
    source.shuffle(names)
    for which, at in names:
        path = directory / f"c{which:02}" / f"{at * 7919 % 10007:05}.jpg"
        path.parent.mkdir(exist_ok=True)
        content = source.randbytes(source.randrange(8 << 10, 60 << 10))
        path.write_bytes(content)
        digests.append(hashlib.sha256(content).hexdigest())
    return Images(directory, hashlib.sha256("".join(sorted(digests)).encode()).hexdigest())


@pytest.fixture(scope="module")
def bed(images: Images) -> Iterator[SlowBed]:
    require(why_no_bed() is None, why_no_bed() or "")
    with SlowBed(images.directory, bandwidth=BANDWIDTH, latency_us=LATENCY) as mounted:
        yield mounted


@pytest.fixture
def runner(runner: Runner) -> Runner:
    """The service is up before the job."""
    runner.env["UFFDPREFETCH_STRICT"] = "1"
    return runner


#: Prints the digest of the files' digests, sorted. Those whose order is told begin when something
#: was read ahead of them, as a job that loads its libraries meanwhile: the last argument is a file
#: that is there then.
JOB = """
import glob, hashlib, os, random, sys, time
paths = sorted(glob.glob(sys.argv[1] + "/*/*.jpg"))
digests = []
def read(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
def wait():
    while not os.path.exists(sys.argv[-1]):
        time.sleep(0.01)
def tell():
    print(hashlib.sha256("".join(sorted(digests)).encode()).hexdigest(), len(digests))
"""
LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset
class Images(Dataset):
    def __init__(self, samples):
        self.samples = samples
    def __len__(self):
        return len(paths)
    def __getitem__(self, index):
        return read(self.path(index))
    def path(self, index):
        return self.samples[index][0]
torch.manual_seed(3)
DATASET
for batch in loader:
    digests.extend(batch)
tell()
"""
LISTED = """
loader = DataLoader(Images([(path, 0) for path in paths]), batch_size=20, shuffle=True,
                    num_workers=int(sys.argv[2]))
"""
#: Which file a sample is of can be seen in no list.
HIDDEN = """
import uffdprefetch.torch
class Hidden(Images):
    def path(self, index):
        return paths[index * 7 % len(paths)]
data = Hidden(None)
loader = DataLoader(data, batch_size=20, shuffle=True, num_workers=int(sys.argv[2]))
uffdprefetch.torch.prefetch(loader, path=data.path)
"""
ANNOUNCED = """
from uffdprefetch.plan import announce
random.Random(8).shuffle(paths)
with announce(paths=paths):
    wait()
    digests.extend(map(read, paths))
tell()
"""
PLANNED = """
wait()
for path in open(sys.argv[2]).read().split():
    digests.append(read(path))
tell()
"""


def wrapped(runner: Runner, bed: SlowBed, *words: str, **how: Any) -> Run:
    """A run from cold."""
    for path in sorted(bed.path(".").rglob("*.jpg")):
        drop_cache(path)
    bed.reset()
    with ThreadPoolExecutor(1) as pool:
        go = pool.submit(tell_what_has_come, bed, go_file(runner))
        run = runner.wrapped(*words, **how)
        go.result()
    assert run.status == 0, run.stderr
    return run


def go_file(runner: Runner) -> Path:
    return runner.cwd / "go"


def tell_what_has_come(bed: SlowBed, go: Path) -> None:
    """The file is there once something was read of the bed, or else in the end."""
    try:
        wait_until(lambda: bed.counters()["bytes"], "something to be read")
    finally:
        go.touch()


def check_read_ahead(run: Run, bed: SlowBed, images: Images) -> None:
    """Right bytes, too."""
    assert run.stdout.split() == [images.digest.encode(), b"%d" % FILES]
    check_small_files(run, bed, images)


def check_small_files(run: Run, bed: SlowBed, images: Images) -> None:
    """Each file came once, and most of them before the job opened them. (One that is asked for
    twice at the same time counts twice.)"""
    small = run.summary["reads"]["small_files"]
    assert small is not None, run.summary["degradations"]
    assert small["used"] > USED_SHARE * FILES, (small, run.summary["degradations"])
    assert small["read"] <= 1.05 * FILES, small
    size = sum(path.stat().st_size for path in images.directory.rglob("*.jpg"))
    assert bed.counters()["bytes"] <= 1.1 * size + (1 << 20)


def shuffled(bed: SlowBed, seed: int) -> list[str]:
    paths = sorted(map(str, bed.path(".").rglob("*.jpg")))
    random.Random(seed).shuffle(paths)
    return paths


@pytest.mark.torch
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [LISTED, HIDDEN], ids=["hook", "prefetch"])
def test_a_shuffled_data_loaders_files_are_read_ahead(
    runner: Runner, bed: SlowBed, images: Images, dataset: str, workers: int
) -> None:
    pytest.importorskip("torch")
    code = JOB + LOADER.replace("DATASET", dataset)
    run = wrapped(runner, bed, *python(code, bed.path("."), str(workers)))
    check_read_ahead(run, bed, images)


def test_announced_files_are_read_ahead(runner: Runner, bed: SlowBed, images: Images) -> None:
    run = wrapped(runner, bed, *python(JOB + ANNOUNCED, bed.path("."), go_file(runner)))
    check_read_ahead(run, bed, images)


def test_the_files_of_a_plan_are_read_ahead(
    runner: Runner, bed: SlowBed, images: Images, tmp_path: Path
) -> None:
    plan = tmp_path / "files.txt"
    plan.write_text("\n".join(shuffled(bed, 1)))
    # a shell is the first process, and reads nothing
    words = [
        "sh",
        "-c",
        '"$0" "$@"; true',
        *python(JOB + PLANNED, bed.path("."), plan, go_file(runner)),
    ]
    check_read_ahead(wrapped(runner, bed, *words, options=("--plan", str(plan))), bed, images)


def test_each_ranks_files_of_a_plan_are_read_ahead_in_each_epoch(
    runner: Runner, bed: SlowBed, images: Images, tmp_path: Path
) -> None:
    paths, source = shuffled(bed, 2), random.Random(5)
    epochs = [source.sample(range(FILES), FILES) for _ in range(2)]
    ranks = [{str(rank): order[rank::2] for rank in range(2)} for order in epochs]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({
        "schema": "uffdprefetch.plan/1",
        "paths": {"list": paths, "epochs": [{"ranks": each} for each in ranks]},
    }))  # fmt: skip
    expected: list[str] = []
    for rank in range(2):
        names = [paths[at] for each in ranks for at in each[str(rank)]]
        (tmp_path / f"{rank}.txt").write_text("\n".join(names))
        files = [images.directory / Path(name).relative_to(bed.path(".")) for name in names]
        digests = sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
        expected += [hashlib.sha256("".join(digests).encode()).hexdigest(), str(FILES)]
    files = f"{tmp_path}/$rank.txt {go_file(runner)} > {tmp_path}/$rank.out"
    one = f'RANK=$rank WORLD_SIZE=2 "$0" "$@" {files} &'
    shell = f"for rank in 0 1; do {one} done; wait; cat {tmp_path}/?.out"
    words = ["sh", "-c", shell, sys.executable, "-c", JOB + PLANNED, str(bed.path("."))]
    run = wrapped(runner, bed, *words, options=("--plan", str(plan)))
    assert run.stdout.decode().split() == expected
    check_small_files(run, bed, images)
