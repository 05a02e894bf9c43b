# SPDX-License-Identifier: Apache-2.0
"""Ranks under mpirun and torchrun: one service for the node, each rank counted as what it is."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from components import CHECKPOINTS, TRAINING, Run, Runner, check_managed, data, ranks_of
from conftest import require
from paths import JOBS

from uffdprefetch.demo.bed import SlowBed, drop_cache
from uffdprefetch.orders import profile_store

pytest_plugins = ["components"]
pytestmark = pytest.mark.mpi

READER = JOBS / "mpi_reader.py"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
RANKS = 4


@functools.cache
def mpirun(ranks: int = RANKS) -> tuple[str, ...]:
    program = shutil.which("mpirun")
    require(program, "mpirun is missing: install openmpi-bin")
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        require(False, "mpi4py is missing: install libopenmpi-dev and run tools/setup.sh")
    assert program is not None
    return (program, "--oversubscribe", "-n", str(ranks))


def words(path: Path, pattern: str) -> list[str]:
    return [sys.executable, str(READER), str(path), pattern]


def run_ranks(runner: Runner, bed: SlowBed, pattern: str, where: str) -> tuple[Run, dict[str, Any]]:
    """(run, what rank 0 printed), mpirun around wrap or wrap around mpirun, on a cold file."""
    path = bed.path(TRAINING)
    drop_cache(data(path))
    bed.reset()
    if where == "mpirun wrap":
        run = runner.wrapped(*words(path, pattern), launcher=mpirun(), **AS_ROOT)
    else:
        run = runner.wrapped(*mpirun(), *words(path, pattern), **AS_ROOT)
    assert run.status == 0, run.stderr
    return run, json.loads(run.stdout)


_plain: dict[str, list[str]] = {}


@pytest.mark.parametrize("pattern", ["contiguous", "skipping"])
@pytest.mark.parametrize("where", ["mpirun wrap", "wrap mpirun"])
def test_four_ranks_share_one_service(
    runner: Runner, bed: SlowBed, where: str, pattern: str
) -> None:
    run, said = run_ranks(runner, bed, pattern, where)
    if pattern not in _plain:
        text = runner.plain(*mpirun(), *words(bed.source / TRAINING, pattern), **AS_ROOT)
        _plain[pattern] = json.loads(text)["sha256"]
    assert said["sha256"] == _plain[pattern]
    assert said["services"] == 1
    check_managed(run, bed.path(TRAINING))
    assert ranks_of(run) == dict.fromkeys(range(RANKS), 1)
    assert [(e["rank"], e["local_rank"]) for e in run.summary["ranks"]] == [
        (rank, rank) for rank in range(RANKS)
    ]
    assert {stream["rank"] for stream in run.summary["streams"]} == set(range(RANKS))
    written = [name for name in os.listdir(runner.cwd) if name.endswith(".json")]
    assert written == ["run.summary.json"]  # the last wrap's, and only that


def test_the_bytes_of_skipping_ranks_come_from_storage_once(runner: Runner, bed: SlowBed) -> None:
    """Each rank's windows hold the others' records too: the union is read, not the sum."""
    run, _ = run_ranks(runner, bed, "skipping", "wrap mpirun")
    file = check_managed(run, bed.path(TRAINING))
    assert bed.counters()["bytes"] <= 1.05 * file["size_bytes"]
    assert file["prefetched_bytes"] <= bed.counters()["bytes"]


def test_contiguous_ranks_are_seen_where_they_are(runner: Runner, bed: SlowBed) -> None:
    """Rank r begins at the r-th quarter, and so do its windows: none begins at the head."""
    run, _ = run_ranks(runner, bed, "contiguous", "mpirun wrap")
    file = check_managed(run, bed.path(TRAINING))
    quarter = file["size_bytes"] / RANKS
    for rank in range(RANKS):
        ends = [s["position_bytes"] for s in run.summary["streams"] if s["rank"] == rank]
        assert any(rank * quarter < end <= (rank + 1.1) * quarter for end in ends), (rank, ends)
    assert bed.counters()["bytes"] <= 1.05 * file["size_bytes"]


def test_a_rank_that_fails_takes_the_job_down_and_leaves_a_summary(
    runner: Runner, store: Path
) -> None:
    code = """
import os, sys, time, lmdb
env = lmdb.open(sys.argv[1], readonly=True, lock=False)
end = time.monotonic() + 60
while 'uffdprefetch-checkpoints' not in open('/proc/self/maps').read():  # it reads only once
    time.sleep(0.005)
    if time.monotonic() > end:
        sys.exit('waited in vain for checkpoints')
with env.begin(buffers=True) as txn:
    size = sum(len(value) for _, value in txn.cursor())
sys.exit(3 if os.environ['OMPI_COMM_WORLD_RANK'] == '2' else 0)
"""
    path = store / TRAINING
    job = [sys.executable, "-c", code, str(path)]
    # SIGKILL follows mpirun's SIGTERM after one second by default: on a loaded machine that is
    # before wrap has written its summary
    patience = {"OMPI_MCA_odls_base_sigkill_timeout": "10"}
    words = [*mpirun(), *job]
    run = runner.wrapped(*words, options=CHECKPOINTS, cold=[path], **AS_ROOT, **patience)
    assert run.status == 3
    # from a disk, at once: there may be nothing left to prefetch when the walks are known
    check_managed(run, path, prefetched=False)


#: A start: files one after the other, then nothing new.
START = """
import sys
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        file.read()
"""


def test_the_start_of_eight_ranks_is_replayed_once(runner: Runner, tmp_path: Path) -> None:
    """By one of them, each byte of storage once; what they have read is one run of one profile."""
    ranks, size = 8, 256 << 10
    source = tmp_path / "source"
    source.mkdir()
    for number in range(40):
        (source / f"part{number}").write_bytes(random.Random(number).randbytes(size))
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with SlowBed(source, bandwidth=20_000_000) as storage:
        paths = [storage.path(f"part{number}") for number in range(40)]
        job = [sys.executable, "-c", START, *map(str, paths)]
        for state in ("first run", "done"):
            options = ["--learn=ranks", "--strict"]
            before = storage.counters()["bytes"]
            run = runner.wrapped(
                *job, options=options, launcher=mpirun(ranks), cold=paths, **AS_ROOT, **cache
            )
            assert run.status == 0, run.stderr
            read = storage.counters()["bytes"] - before
            assert len(paths) * size <= read < 1.2 * len(paths) * size
            learn = run.summary["learn"]
            if state == "first run":
                assert learn["state"] == state
                continue
            # where the node is busy the job may end before the last path is read
            assert learn["state"] in (state, "cut short"), learn
            profile = profile_store.load(str(tmp_path / "cache/uffdprefetch/profiles/ranks.upl"))
            assert profile.runs == 2
            assert len(paths) // 2 < learn["paths"] <= len(profile.entries), "more than one replay"


def test_torchrun_shares_one_service_too(runner: Runner, bed: SlowBed) -> None:
    torchrun = Path(sys.executable).parent / "torchrun"
    require(torchrun.exists(), "torchrun is missing: see tools/setup.sh")
    path = bed.path(TRAINING)
    launcher = [str(torchrun), "--no-python", "--nproc-per-node", "2"]
    run = runner.wrapped(
        *words(path, "skipping"), launcher=launcher, cold=[path], OMP_NUM_THREADS="1"
    )
    assert run.status == 0, run.stderr
    said = {line["rank"]: line["sha256"] for line in map(json.loads, run.stdout.splitlines())}
    environment = {"WORLD_SIZE": "2"}
    for rank in range(2):
        text = runner.plain(*words(path, "skipping"), RANK=str(rank), **environment)
        assert json.loads(text)["sha256"] == said[rank]
    check_managed(run, path)
    assert ranks_of(run) == {0: 1, 1: 1}
