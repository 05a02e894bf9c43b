# SPDX-License-Identifier: Apache-2.0
"""Random memory calls over managed mappings, with a plain run of the same calls as the model.

The agent is driven by tests/hammer.py, which lays, takes and arms checkpoints without end, and
once more by the real service. What every page shows (its bytes, SIGSEGV, SIGBUS, what the kernel
reads from it) and what every call returns must be the same.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_SECONDS, clean_environment, uffdprefetch
from harness import OPTIONS, both_engines, hammered

pytest_plugins = ("harness_fixtures",)

#: CI's size; the campaign's by UFFDPREFETCH_TEST_MODEL_OPERATIONS.
OPERATIONS = int(os.environ.get("UFFDPREFETCH_TEST_MODEL_OPERATIONS", "5000"))
SEEDS = (1, 2)


def run(words: list[str], env: dict[str, str], cwd: Path) -> tuple[list[str], dict[str, Any]]:
    """The lines that a program printed, and the JSON of its last line on stderr."""
    done = subprocess.run(words, env=env, cwd=cwd, capture_output=True, timeout=3 * HANG_SECONDS)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    err = done.stderr.decode().strip().splitlines()
    return done.stdout.decode().splitlines(), json.loads(err[-1]) if err else {}


def compare(managed: list[str], plain: list[str]) -> None:
    for got, expected in zip(managed, plain, strict=False):
        assert got == expected, "the managed run shows something else"
    assert len(managed) == len(plain)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_call_and_every_page_is_as_without_us(
    seed: int, small: Path, tmp_path: Path, compiled: Callable[..., str], hammer: Any
) -> None:
    words = [compiled("model"), str(small), str(seed), str(OPERATIONS)]
    plain, _ = run(words, clean_environment(), tmp_path)
    stop = hammer(seed)
    managed, met = run(words, hammered(tmp_path), tmp_path)
    counts = stop()
    compare(managed, plain)
    assert len(plain) > 1.5 * OPERATIONS
    # not vacuous: most calls met checkpoints, in every state, also in forked children
    assert met["over_checkpoints"] > OPERATIONS / 3
    assert all(counts.values()), counts
    assert counts["faults"] > OPERATIONS / 2


@both_engines
def test_the_same_with_the_real_service(
    small: Path, tmp_path: Path, compiled: Callable[..., str], env: dict[str, str]
) -> None:
    operations = OPERATIONS // (8 if env["UFFDPREFETCH_ENGINE"] == "pool" else 4)
    words = [compiled("model"), str(small), "77", str(operations)]
    plain, _ = run(words, clean_environment(), tmp_path)
    options = [*OPTIONS, "--min-size", "16KiB", "--distance", "64KiB"]
    if env["UFFDPREFETCH_ENGINE"] == "pool":
        options += ["--budget", "1MiB"]
    managed, met = run(uffdprefetch("wrap", *options, "--", *words), env, tmp_path)
    compare(managed, plain)
    assert met["over_checkpoints"] > operations / 100
    summary = json.loads((tmp_path / "run.summary.json").read_text())
    assert summary["rung"] == 1
    if env["UFFDPREFETCH_ENGINE"] == "pool":
        assert summary["pool"]["faults"] > 100 and summary["pool"]["evicted_bytes"] > 0
    else:
        assert summary["totals"]["checkpoints"]["laid"] > 100


def test_threads_read_right_bytes_from_a_pool_of_a_quarter_of_the_file(
    small: Path, tmp_path: Path, compiled: Callable[..., str], env: dict[str, str]
) -> None:
    words = [compiled("threads"), str(small), "5", "8", str(OPERATIONS // 250)]
    options = [*OPTIONS, "--min-size", "16KiB", "--engine", "pool", "--budget", "1MiB"]
    lines, _ = run(uffdprefetch("wrap", *options, "--", *words), env, tmp_path)
    assert json.loads(lines[-1]) == {"wrong": 0, "rounds": OPERATIONS // 250}
    pool = json.loads((tmp_path / "run.summary.json").read_text())["pool"]
    assert pool["evicted_bytes"] > 0 and pool["waiters"] == 0


@pytest.mark.parametrize("threads", [2, 8])
def test_threads_that_map_fork_and_unmap_at_once_read_right_bytes(
    threads: int, small: Path, tmp_path: Path, compiled: Callable[..., str], hammer: Any
) -> None:
    rounds = OPERATIONS // 30
    words = [compiled("threads"), str(small), "5", str(threads), str(rounds)]
    stop = hammer(5)
    lines, _ = run(words, hammered(tmp_path), tmp_path)
    assert json.loads(lines[-1]) == {"wrong": 0, "rounds": rounds}
    counts = stop()
    assert all(counts.values()), counts
