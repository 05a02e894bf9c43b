# SPDX-License-Identifier: Apache-2.0
"""Real programs on real data sets, plainly and under `wrap`, and what the summary must then say.

The data sets are made once per session in a directory on a disk (tmpfs is memory already, and not
prefetched), and shown a second time behind the slow bed. A test compares what a program printed
under `wrap` with what it printed plainly, and check_managed() with the summary, so that it cannot
pass with the tool off.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy
import pytest
from conftest import HANG_SECONDS, require, uffdprefetch
from paths import ROOT
from suite import own_name

from uffdprefetch.base import file_systems
from uffdprefetch.demo.bed import DEFAULT_BANDWIDTH, SlowBed, drop_cache, why_no_bed
from uffdprefetch.demo.dataset import DATABASE_NAME, make_dataset
from uffdprefetch.doctor import faults
from uffdprefetch.doctor.check import OK

MIB = 1 << 20
TRAINING = f"training/{DATABASE_NAME}"
TESTING = f"testing/{DATABASE_NAME}"
NAMED = "named.lmdb"  # with two sub-databases, for mdb_dump -a
ARRAY = "array.npy"
TABLES = "tables.sqlite"
TRAINING_BYTES, TESTING_BYTES, ARRAY_BYTES = 96 * MIB, 64 * MIB, 96 * MIB


def data(path: Path) -> Path:
    """The file that a data set is mapped from: of an LMDB its data.mdb."""
    return path / "data.mdb" if path.is_dir() else path


def on_memory(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory lies on a file system that is memory itself."""
    return file_systems.at(os.fspath(directory)).in_memory


def _make_named(path: Path) -> None:
    """Two sub-databases of 20 MiB each, with values that lie in leaves and on overflow pages."""
    generator = numpy.random.PCG64(5)
    env = lmdb.open(str(path), map_size=256 * MIB, max_dbs=2, sync=False)
    for name, length, count in ((b"large", 40_000, 500), (b"small", 900, 20_000)):
        database = env.open_db(name)
        with env.begin(write=True, db=database) as txn:
            for i in range(count):
                value = generator.random_raw(length // 8 + 1).tobytes()[:length]
                txn.put(b"%06d" % i, value, append=True)
    env.sync(True)
    env.close()


def _make_tables(path: Path) -> None:
    """An SQLite database of about 48 MiB; its rows are what a seeded generator gives."""
    generator = numpy.random.PCG64(6)
    with sqlite3.connect(path) as connection:
        connection.execute("create table records (id integer primary key, label int, value blob)")
        rows = ((i, i % 10, generator.random_raw(500).tobytes()) for i in range(12_000))
        connection.executemany("insert into records values (?, ?, ?)", rows)
    connection.close()


@pytest.fixture(scope="session")
def store() -> Iterator[Path]:
    """A directory on a disk with TRAINING, TESTING, NAMED, ARRAY and TABLES in it."""
    candidates = [tempfile.gettempdir(), "/var/tmp", str(ROOT / "build")]
    where = next((d for d in candidates if os.path.isdir(d) and not on_memory(d)), None)
    require(where, f"none of {', '.join(candidates)} is on a disk; set TMPDIR")
    with tempfile.TemporaryDirectory(prefix=own_name(""), dir=where) as name:
        directory = Path(name)
        make_dataset(directory / "training", TRAINING_BYTES, seed=1)
        make_dataset(directory / "testing", TESTING_BYTES, seed=2)
        _make_named(directory / NAMED)
        numpy.save(
            directory / ARRAY,
            numpy.random.PCG64(3).random_raw(ARRAY_BYTES // 8).reshape(-1, 1024),
        )
        _make_tables(directory / TABLES)
        yield directory


@pytest.fixture(scope="session")
def bed(store: Path) -> Iterator[SlowBed]:
    """The store behind a link of 300 MB/s and 1 ms."""
    reason = why_no_bed()
    require(reason is None, reason or "")
    with SlowBed(store) as mounted:
        yield mounted


@contextlib.contextmanager
def slowly(bed: SlowBed, bandwidth: int) -> Iterator[None]:
    """The link takes its time meanwhile: what comes within a moment is little."""
    bed.set(bandwidth=bandwidth)
    try:
        yield
    finally:
        bed.set(bandwidth=DEFAULT_BANDWIDTH)


@functools.cache
def why_no_checkpoints() -> str | None:
    """Why userfaultfd cannot be used by us here; None when it can."""
    checks = [faults.by_syscall(), faults.by_device()]
    if any(check.status == OK for check in checks):
        return None
    return "; ".join(f"{check.name}: {check.found}" for check in checks)


@dataclass(frozen=True)
class Run:
    """A program that ended under wrap; ``status`` as Popen.returncode."""

    status: int
    stdout: bytes
    stderr: str
    summary: dict[str, Any]

    def file(self, path: Path) -> dict[str, Any]:
        """What the summary says of a file."""
        names = {entry["path"]: entry for entry in self.summary["files"]}
        real = os.path.realpath(data(path))
        assert real in names, f"{real} was not managed: {self.summary['refused']} {self.stderr}"
        return dict(names[real])


class Runner:
    """Runs programs in a directory of the test's own, plainly or under wrap."""

    def __init__(self, env: dict[str, str], cwd: Path) -> None:
        self.env = env
        self.cwd = cwd

    def plain(self, *words: str | Path, **variables: str) -> bytes:
        """stdout of a plain run that must succeed."""
        done = subprocess.run(
            [str(word) for word in words], env={**self.env, **variables}, cwd=self.cwd,
            capture_output=True, timeout=2 * HANG_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        return done.stdout

    def command(self, *words: str | Path, options: Sequence[str] = ()) -> list[str]:
        """The command line that runs ``words`` under wrap, its summary going to ``run``."""
        ours = uffdprefetch("wrap", "-q", "-f", "-o", str(self.cwd / "run"), *options, "--")
        return [*ours, *(str(word) for word in words)]

    def summary(self) -> dict[str, Any]:
        """The summary of the last run."""
        return dict(json.loads((self.cwd / "run.summary.json").read_text()))

    def wrapped(
        self,
        *words: str | Path,
        options: Sequence[str] = (),
        cold: Sequence[Path] = (),
        launcher: Sequence[str] = (),
        **variables: str,
    ) -> Run:
        """Run ``words`` under wrap, the data sets of ``cold`` out of the page cache before;
        ``launcher`` (an mpirun) runs the wrap."""
        if "fixed" in options:
            require(why_no_checkpoints() is None, f"no userfaultfd: {why_no_checkpoints()}")
        for path in cold:
            drop_cache(data(path))
        (self.cwd / "run.summary.json").unlink(missing_ok=True)
        done = subprocess.run(
            [*launcher, *self.command(*words, options=options)],
            env={**self.env, **variables}, cwd=self.cwd, capture_output=True,
            timeout=2 * HANG_SECONDS,
        )  # fmt: skip
        stderr = done.stderr.decode(errors="replace")
        assert (self.cwd / "run.summary.json").exists(), f"status {done.returncode}: {stderr}"
        return Run(done.returncode, done.stdout, stderr, self.summary())


@pytest.fixture
def runner(env: dict[str, str], tmp_path: Path) -> Runner:
    # the machine may be busy: time to lay checkpoints
    env["UFFDPREFETCH_TEST_PATIENCE"] = "1000"
    return Runner(env, tmp_path)


def python(code: str, *words: str | Path) -> list[str]:
    """A job of this interpreter."""
    return [sys.executable, "-c", code, *map(str, words)]


#: For Runner.wrapped(): mappings are small here, several checkpoints of each.
CHECKPOINTS = ("--policy", "fixed", "--size", "4MiB", "--distance", "4MiB")


def check_managed(run: Run, path: Path, *, prefetched: bool = True) -> dict[str, Any]:
    """Readers of ``path`` were followed by page tables, without a word of what could be better, or,
    with CHECKPOINTS, by those that lay over it and were touched; and something was prefetched. The
    file's entry.

    A job that reads once, as fast as the storage gives, may be past each place before a
    checkpoint lies there: the jobs here read twice.
    """
    summary = run.summary
    file, laid = run.file(path), summary["totals"]["checkpoints"]
    if summary["policy"] == "fixed":
        expected = 1, "checkpoints"
        assert laid["laid"] > 0 and laid["lost_events"] == 0
        assert summary["totals"]["fault_wait_ns"]["count"] > 0, "no checkpoint was touched"
    else:
        expected = 2, "page_tables"
        assert laid["laid"] == 0 and file["checkpoint_pages"] == 0
        assert file["path"] not in summary["coarse"], summary["coarse"]
    assert (summary["rung"], file["served_by"]) == expected, summary["degradations"]
    assert file["changed"] is None
    assert summary["streams"], "no walk was found"
    if prefetched:
        assert file["prefetched_bytes"] > 0
    return file


def ranks_of(run: Run) -> dict[int, int]:
    """rank -> number of its processes."""
    return {entry["rank"]: len(entry["processes"]) for entry in run.summary["ranks"]}


Start = Callable[..., "subprocess.Popen[bytes]"]
