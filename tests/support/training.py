# SPDX-License-Identifier: Apache-2.0
"""A small data set as the demonstration's, and its job: ``pytest_plugins = ("training",)``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from uffdprefetch.demo import dataset, job

SIZE_BYTES = 6 << 20
SEED = 11
JOB = Path(job.__file__)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dataset.Manifest]:
    """A small data set: its directory and manifest."""
    directory = tmp_path_factory.mktemp("dataset")
    return directory, dataset.make_dataset(directory, SIZE_BYTES, SEED)


@pytest.fixture
def database(made: tuple[Path, dataset.Manifest]) -> Path:
    """The LMDB of the data set."""
    return made[0] / dataset.DATABASE_NAME


@pytest.fixture
def manifest(made: tuple[Path, dataset.Manifest]) -> dataset.Manifest:
    """What the LMDB holds."""
    return made[1]


def run_words(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run job.py as the plain script that it is: without this package in its path."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK")}
    return subprocess.run(
        [sys.executable, str(JOB), *map(str, words)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )


def run_job(database: Path, *words: str | Path) -> dict[str, Any]:
    """The JSON of a job that must end well and print one line."""
    ended = run_words("--db", database, *words)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 1
    result: dict[str, Any] = json.loads(lines[0])
    return result
