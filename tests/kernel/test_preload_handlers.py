# SPDX-License-Identifier: Apache-2.0
"""Handlers of signals that leave our calls half done or come into the middle of them, and children
that look like their parents: the same answers as plain, and no hang."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from components import Runner
from conftest import require
from harness import CHECKPOINTS, Records, both_engines, programs

pytest_plugins = ("harness_fixtures",)

SMALL = ("--min-size", "1MiB")


@both_engines
@pytest.mark.parametrize(("what", "rounds"), [("jump", 1500), ("map", 150), ("pid1", 20)])
def test_the_program_comes_to_its_end(
    env: dict[str, str], own_records: Records, tmp_path: Path, engine: str, what: str, rounds: int
) -> None:
    """jump: out of munmap by siglongjmp; map: a handler that maps while its thread does, for the
    first time; pid1: a child with its parent's number, in a namespace of its own."""
    words: list[str | Path] = [programs(tmp_path, "handlers"), what, own_records.path, str(rounds)]
    if what == "pid1":
        require(os.geteuid() == 0, "only root makes PID namespaces everywhere")
        words = ["unshare", "-pf", "--mount-proc", *words]
    runner = Runner(env, tmp_path)
    plain = runner.plain(*words)
    laid = CHECKPOINTS if engine == "cache" else ()
    run = runner.wrapped(*words, options=(*SMALL, *laid))
    assert (run.status, run.stdout, run.stderr) == (0, plain, "")
