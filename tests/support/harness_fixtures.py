# SPDX-License-Identifier: Apache-2.0
"""Fixtures over harness.py: a test module says ``pytest_plugins = ("harness_fixtures",)``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import HANG_SECONDS
from harness import MIB, Records, Start, jobs, programs, write_records
from paths import SUPPORT


@pytest.fixture
def job(env: dict[str, str], tmp_path: Path) -> Iterator[Start]:
    """Start jobs that share one service (see :func:`jobs`)."""
    with jobs(env, tmp_path) as start:
        yield start


@pytest.fixture
def patient(env: dict[str, str]) -> None:
    """The job waits 5 s for our threads and the service instead of 50 ms: on a busy machine a
    mapping is unmanaged otherwise, which is right and not what most tests are about."""
    env["UFFDPREFETCH_TEST_PATIENCE"] = "1000"


@pytest.fixture
def auto(env: dict[str, str]) -> None:
    """The test's jobs have the default policy, by which nothing lies over what they map and none
    waits for the service: so it is up before them."""
    env.update(UFFDPREFETCH_POLICY="auto", UFFDPREFETCH_STRICT="1")


@pytest.fixture(params=["cache", "pool"])
def engine(request: pytest.FixtureRequest, env: dict[str, str]) -> str:
    """The engine of the test's jobs, each in its turn: the cache engine with checkpoints; the pool
    holds a quarter of ``records``."""
    env["UFFDPREFETCH_ENGINE"] = request.param
    if request.param == "pool":
        env["UFFDPREFETCH_BUDGET"] = "6MiB"
    return str(request.param)


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """24 MiB and a bit, on a local disk; nobody writes it."""
    path = tmp_path_factory.mktemp("records") / "records.bin"
    size = 24 * MIB + 1234
    return Records(path, write_records(path, size), size)


@pytest.fixture
def own_records(tmp_path: Path) -> Records:
    """12 MiB for a test that changes its file."""
    path = tmp_path / "own.bin"
    return Records(path, write_records(path, 12 * MIB, seed=2), 12 * MIB)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """compiled(NAME, *FLAGS): tests/programs/NAME.c as a program, made once a session."""
    directory = tmp_path_factory.mktemp("programs")
    return lambda name, *flags: programs(directory, name, *flags)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 MiB and a part of a page: the arena holds it once and a half."""
    path = tmp_path_factory.mktemp("model") / "small.bin"
    write_records(path, (4 << 20) + 1234, seed=3)
    return path


@pytest.fixture
def hammer(small: Path, tmp_path: Path) -> Iterator[Callable[[int], Callable[[], dict[str, int]]]]:
    """Start tests/support/hammer.py on a file (``small`` or another) with a seed and further
    arguments; the
    function that is returned ends it and gives its counts."""
    started: list[subprocess.Popen[bytes]] = []

    def start(seed: int, *more: str, file: Path = small) -> Callable[[], dict[str, int]]:
        paths = [str(SUPPORT), os.environ.get("PYTHONPATH", "")]
        process = subprocess.Popen(
            [sys.executable, "-m", "hammer", str(tmp_path / "s"), str(file), str(seed), *more],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"

        def stop() -> dict[str, int]:
            out, _ = process.communicate(timeout=HANG_SECONDS)
            assert process.returncode == 0
            return dict(json.loads(out))

        return stop

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()
