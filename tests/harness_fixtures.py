# SPDX-License-Identifier: Apache-2.0
"""Fixtures over tests/harness.py: a test module says ``pytest_plugins = ("harness_fixtures",)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import MIB, Records, Start, jobs, programs, write_records


@pytest.fixture
def job(env: dict[str, str], tmp_path: Path) -> Iterator[Start]:
    """Start jobs that share one service (see :func:`jobs`)."""
    with jobs(env, tmp_path) as start:
        yield start


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
