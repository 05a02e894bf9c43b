# SPDX-License-Identifier: Apache-2.0
"""A thread of ours does not keep the scheduling and the rights of the thread that made it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from conftest import require
from harness import programs
from paths import ROOT

CSRC = ROOT / "csrc"
SCHED_OTHER, SCHED_IDLE = 0, 5
EPERM = 1
NONE = "0000000000000000"


@pytest.fixture
def settle(tmp_path: Path) -> str:
    return programs(tmp_path, "settle", f"-I{CSRC}", str(CSRC / "job" / "ambient.c"))


def lines(*words: str) -> list[str]:
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("how", ["idle", "batch", "fifo", "nice", "other"])
def test_it_becomes_an_ordinary_thread_on_every_cpu(settle: str, how: str) -> None:
    require(os.geteuid() == 0, "an ordinary user may not leave SCHED_IDLE, nor enter SCHED_FIFO")
    cpus, nice = len(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)
    settled, dropped, leader = lines(settle, how)
    assert settled == f"settled 0 policy {SCHED_OTHER} nice {nice} cpus {cpus}"
    assert dropped == f"dropped 0 to {NONE} {NONE} {NONE}"
    assert leader == f"leader as before policy {SCHED_OTHER}"


def test_an_ordinary_user_s_idle_thread_is_told_that_it_may_not(settle: str) -> None:
    require(os.geteuid() == 0, "only root can become another user with no nice limit")
    limited = ["prlimit", "--nice=0", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    # not in pytest's own directory: each run of pytest that begins takes others' rights there
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        settled, dropped, _ = lines(*limited, shutil.copy(settle, directory), "idle")
    assert settled.startswith(f"settled -{EPERM} policy {SCHED_IDLE} ")
    assert dropped == f"dropped 0 to {NONE} {NONE} {NONE}"
