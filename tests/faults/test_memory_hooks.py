# SPDX-License-Identifier: Apache-2.0
"""Ranks of an MPI whose memory hooks overwrite our functions: Open MPI with UCX."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import HANG_SECONDS, require, uffdprefetch
from harness import MIB, listener, service_pid
from paths import PROGRAMS

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

RANKS = 4
#: The last page is not whole, and each half ends with a word.
BYTES = 96 * MIB + 304
#: Of each engine, for the randomized test; `make campaign` has 100.
TRIALS = int(os.environ.get("UFFDPREFETCH_TEST_HOOK_TRIALS", "2"))
#: Acts of our threads, and seconds of a job that is not slowed, among which a moment is drawn.
STEPS, SECONDS = 12, 1.5
KEY = 0x5555555555555555
#: In the field UCX takes InfiniBand or shared memory by itself; here it takes what is there.
UCX = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ucx", "OMPI_MCA_pml_ucx_tls": "any", "OMPI_MCA_pml_ucx_devices": "any",
    "UCX_TLS": "self,sm,tcp",
}  # fmt: skip
ENGINES = {
    "cache": ("--policy", "fixed", "--size", "4MiB", "--distance", "4MiB"),
    "pool": ("--engine", "pool", "--budget", "48MiB"),
}


@pytest.fixture(scope="session")
def hooked_ranks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The program, built with the MPI's own compiler."""
    require(shutil.which("mpicc"), "mpicc is missing: install libopenmpi-dev")
    require(shutil.which("mpirun"), "mpirun is missing: install openmpi-bin")
    out = tmp_path_factory.mktemp("hooked") / "hooked_ranks"
    source = PROGRAMS / "hooked_ranks.c"
    subprocess.run(["mpicc", "-O1", "-o", out, source, "-ldl"], check=True)
    return str(out)


@pytest.fixture(scope="session")
def words_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each word tells its own place."""
    path = tmp_path_factory.mktemp("words") / "words"
    (np.arange(0, BYTES, 8, dtype=np.uint64) ^ np.uint64(KEY)).tofile(path)
    return path


class Ranks:
    """Four ranks under one wrap."""

    def __init__(self, words: list[str], env: dict[str, str], cwd: Path) -> None:
        self.env = env
        self.cwd = cwd
        self.process = subprocess.Popen(
            words, env=env, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def walking(self) -> None:
        """Until all of them have mapped after MPI_Init and read half."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line == "walking\n":
                return
        pytest.fail(f"never walked: {lines} {self.process.stderr and self.process.stderr.read()}")

    def end(self) -> dict[str, int]:
        """Let them go on: what they have counted."""
        out, err = self.process.communicate("go on\n", timeout=2 * HANG_SECONDS)
        assert self.process.returncode == 0, err
        counts = re.search(r"overwritten (\d+) wrong (\d+) own (\d+) ranks (\d+)", out)
        assert counts is not None, (out, err)
        names = ("overwritten", "wrong", "own", "ranks")
        return dict(zip(names, map(int, counts.groups()), strict=True))

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.cwd / "run.summary.json").read_text())
        return found


@pytest.fixture
def ranks(
    env: dict[str, str], tmp_path: Path, hooked_ranks: str, words_file: Path
) -> Iterator[Callable[..., Ranks]]:
    """ranks(ENGINE, NAME=VALUE...): start them."""
    started: list[Ranks] = []

    def start(engine: str | None, **more: str) -> Ranks:
        words = ["mpirun", "--oversubscribe", "-n", str(RANKS), hooked_ranks, str(words_file)]
        if engine is not None:
            options = ("-q", "-f", "-o", "run", *ENGINES[engine])
            words = uffdprefetch("wrap", *options, "--", *words)
        environment = {**env, **UCX, "UFFDPREFETCH_RUN": "hooks", **more}
        started.append(Ranks(words, environment, tmp_path))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


def without_hooks_there_is_nothing_to_test(counts: dict[str, int]) -> None:
    require(counts["overwritten"] == RANKS, "this MPI's UCX overwrites nothing (ucx is missing?)")


RIGHT = {"overwritten": RANKS, "wrong": 0, "own": 0, "ranks": RANKS}


def test_ranks_with_hooks_are_served_before_and_after_mpi_init(
    ranks: Callable[..., Ranks], words_file: Path
) -> None:
    plain = ranks(None)
    plain.walking()
    without_hooks_there_is_nothing_to_test(plain.end())
    for engine in ENGINES:
        job = ranks(engine)
        job.walking()
        assert job.end() == RIGHT, engine
        summary = job.summary()
        assert any("without libc's functions" in line for line in summary["degradations"])
        assert [Path(f["path"]).name for f in summary["files"]] == [words_file.name]
        streams = [s for s in summary["streams"] if s["rank"] in range(RANKS)]
        assert {s["rank"] for s in streams} == set(range(RANKS)), (engine, summary["streams"])


@pytest.mark.parametrize("engine", list(ENGINES))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_service_dies_or_stands_still_under_ranks_with_hooks(
    ranks: Callable[..., Ranks], engine: str, number: signal.Signals
) -> None:
    job = ranks(engine)
    job.walking()
    service = service_pid(job.env)
    os.kill(service, number)
    try:
        counts = job.end()
    finally:
        if number == signal.SIGSTOP:
            os.kill(service, signal.SIGCONT)
    without_hooks_there_is_nothing_to_test(counts)
    assert counts == RIGHT


@pytest.mark.parametrize("engine", list(ENGINES))
@pytest.mark.parametrize("step", [1, 3, 6])
def test_our_threads_end_under_ranks_with_hooks(
    ranks: Callable[..., Ranks], engine: str, step: int, tmp_path: Path
) -> None:
    log = tmp_path / "exits"
    job = ranks(
        engine,
        UFFDPREFETCH_TEST_AGENT_EXIT=str(step),
        UFFDPREFETCH_TEST_AGENT_EXIT_ALL="1",
        UFFDPREFETCH_TEST_AGENT_EXIT_LOG=str(log),
    )
    job.walking()
    counts = job.end()
    without_hooks_there_is_nothing_to_test(counts)
    assert counts == RIGHT
    assert log.stat().st_size, "no thread of ours came to that step"


def kill_service_at(job: Ranks, moment: float, killed: list[int]) -> None:
    """So many seconds from now, or as soon as there is one."""
    time.sleep(moment)
    while job.process.poll() is None:
        service = listener(job.env)
        if service is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(service, signal.SIGKILL)
                killed.append(service)
            return
        time.sleep(0.001)


@pytest.mark.parametrize("engine", list(ENGINES))
def test_kills_and_ends_at_random_moments_under_ranks_with_hooks(
    ranks: Callable[..., Ranks], engine: str, tmp_path: Path
) -> None:
    seed = os.environ.get("UFFDPREFETCH_TEST_SEED") or str(time.time_ns())
    source, log = random.Random(f"{seed} {engine}"), tmp_path / "exits"
    ends, killed = 0, list[int]()
    for trial in range(TRIALS):
        how: dict[str, str] = {}
        if trial % 2:
            how["UFFDPREFETCH_TEST_AGENT_EXIT"] = str(source.randint(1, STEPS))
            how["UFFDPREFETCH_TEST_AGENT_EXIT_ALL"] = source.choice("01")
            how["UFFDPREFETCH_TEST_AGENT_EXIT_LOG"] = str(log)
            log.unlink(missing_ok=True)
        moment = source.uniform(0, SECONDS)
        job = ranks(engine, **how)
        killer = threading.Thread(target=kill_service_at, args=(job, moment, killed))
        if not how:
            killer.start()
        job.walking()
        counts = job.end()
        if how:
            ends += log.stat().st_size if log.exists() else 0
        else:
            killer.join()
        without_hooks_there_is_nothing_to_test(counts)
        assert counts == RIGHT, (seed, engine, trial, moment, how)
    print(
        f"hooks: seed {seed}, {engine}: {TRIALS} trials, {len(killed)} services killed, "
        f"{ends} threads ended"
    )
