# SPDX-License-Identifier: Apache-2.0
"""py-lmdb and mdb_dump, as they are installed, on cold databases: the same bytes, and managed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from components import CHECKPOINTS, NAMED, TESTING, TRAINING, Run, Runner, check_managed, python
from conftest import require

from uffdprefetch.demo.bed import SlowBed

pytest_plugins = ["components"]
pytestmark = [pytest.mark.root, pytest.mark.slow]

#: argv: options as 'key=0|1', then the databases, of which each epoch reads all in turn.
READ = """
import hashlib, sys, lmdb
options = dict(word.split('=') for word in sys.argv[1].split(','))
flags = {name: value == '1' for name, value in options.items()}
digest = hashlib.sha256()
for epoch in range(2):
    for path in sys.argv[2:]:
        env = lmdb.open(path, map_size=1 << 30, **flags)
        with env.begin(buffers=True) as txn:
            for key, value in [*txn.cursor(), *txn.cursor()]:
                digest.update(key)
                digest.update(value)
        env.close()
    print(epoch, digest.hexdigest())
"""
READ_ONLY = "readonly=1,lock=0,readahead=1"


def check_same(runner: Runner, words: list[str], **wrapped: object) -> Run:
    """Run it under wrap and compare with the plain run."""
    run = runner.wrapped(*words, **wrapped)  # type: ignore[arg-type]
    assert run.status == 0, run.stderr
    assert run.stdout == runner.plain(*words)
    return run


# ---- py-lmdb ------------------------------------------------------------------------------------


@pytest.mark.parametrize("readahead", [True, False])
@pytest.mark.parametrize("lock", [True, False])
@pytest.mark.parametrize("laid", [(), CHECKPOINTS], ids=["auto", "fixed"])
def test_two_epochs_of_py_lmdb(
    runner: Runner, store: Path, readahead: bool, lock: bool, laid: tuple[str, ...]
) -> None:
    """On a local disk, which the job may have read before us (what is prefetched is below):
    lock=True writes lock.mdb, and readahead=False means MADV_RANDOM."""
    options = f"readonly=1,lock={lock:d},readahead={readahead:d}"
    words = python(READ, options, store / TRAINING)
    run = check_same(runner, words, cold=[store / TRAINING], options=laid)
    assert [line.split()[0] for line in run.stdout.splitlines()] == [b"0", b"1"]
    check_managed(run, store / TRAINING, prefetched=False)


def test_py_lmdb_on_slow_storage_is_prefetched_nearly_whole(runner: Runner, bed: SlowBed) -> None:
    path = bed.path(TRAINING)
    run = check_same(runner, python(READ, READ_ONLY, path), cold=[path])
    file = check_managed(run, path)
    assert file["prefetched_bytes"] > file["size_bytes"] // 2
    assert file["prefetched_bytes"] <= file["size_bytes"] * 1.05
    assert run.summary["totals"]["accuracy"] > 0.9


def test_a_job_that_alternates_between_training_and_testing(runner: Runner, bed: SlowBed) -> None:
    paths = [bed.path(TRAINING), bed.path(TESTING)]
    run = check_same(runner, python(READ, READ_ONLY, *paths), cold=paths)
    for path in paths:
        check_managed(run, path)
    assert len(run.summary["files"]) == 2


def test_a_job_with_both_databases_open_at_once(runner: Runner, bed: SlowBed) -> None:
    """A batch of this one, a batch of that one: two walks in one process."""
    code = """
import hashlib, itertools, sys, lmdb
digest = hashlib.sha256()
envs = [lmdb.open(path, readonly=True, lock=False) for path in sys.argv[1:]]
txns = [env.begin(buffers=True) for env in envs]
for values in itertools.zip_longest(*(txn.cursor() for txn in txns)):
    for pair in filter(None, values):
        digest.update(pair[1])
print(digest.hexdigest())
"""
    paths = [bed.path(TRAINING), bed.path(TESTING)]
    run = check_same(runner, python(code, *paths), cold=paths)
    for path in paths:
        check_managed(run, path)
    assert len(run.summary["files"]) == 2


def test_under_checkpoints_an_environment_that_is_open_for_writing_is_only_watched(
    runner: Runner, store: Path
) -> None:
    """O_RDWR: nothing may be laid over it (design, rule 4.2), the page tables tell."""
    path = store / TRAINING
    words = python(READ, "readonly=0,lock=1,readahead=1", path)
    run = check_same(runner, words, cold=[path], options=CHECKPOINTS)
    file = run.file(path)
    assert file["served_by"] != "checkpoints"
    assert run.summary["rung"] == 2
    assert run.summary["totals"]["checkpoints"]["laid"] == 0
    assert run.summary["totals"]["fault_wait_ns"]["count"] == 0
    findings = [line for line in run.summary["degradations"] if "opened for writing" in line]
    assert len(findings) == 1, run.summary["degradations"]
    assert "readonly=True" in run.summary["rung_remedy"]


# ---- mdb_dump -----------------------------------------------------------------------------------


def mdb_dump() -> str:
    program = shutil.which("mdb_dump")
    require(program, "mdb_dump is missing: install lmdb-utils")
    assert program is not None
    return program


@pytest.mark.parametrize("laid", [(), CHECKPOINTS], ids=["auto", "fixed"])
def test_mdb_dump_of_all_sub_databases(runner: Runner, bed: SlowBed, laid: tuple[str, ...]) -> None:
    path = bed.path(NAMED)
    words = [mdb_dump(), "-a", str(path)]
    run = check_same(runner, words, cold=[path], options=laid)
    assert run.stdout.count(b"DATA=END") == 2
    check_managed(run, path)


def test_mdb_dump_through_a_pipe(runner: Runner, bed: SlowBed) -> None:
    path = bed.path(NAMED)
    words = ["sh", "-c", '"$0" -a "$1" | sha256sum', mdb_dump(), str(path)]
    run = check_same(runner, words, cold=[path])
    check_managed(run, path)
    assert len(run.stdout.split()[0]) == 64
