# SPDX-License-Identifier: Apache-2.0
"""The guest's kernel has Yama: where it lets a plain user's process be looked at by its ancestors
alone, the service may look at the job's all the same (csrc/job/ptracer.c)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lustre.test_doctor_and_users import USER
from uffdprefetch.native.preload import preload_object

SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
#: Has a service's lock, and starts a process that is no descendant of its own, which forks: whether
#: the system calls of both show.
LOOKER = """
import fcntl, json, os, subprocess, sys
child = '''
import os, sys, time
if os.fork():
    print(os.getpid(), flush=True)
else:
    print(os.getpid(), flush=True)
time.sleep(1000)
'''
lock = open(os.environ["UFFDPREFETCH_SOCKET"] + ".lock", "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
reader, writer = os.pipe()
if os.fork() == 0:
    environment = {**os.environ, "LD_PRELOAD": sys.argv[1]}
    subprocess.Popen([sys.executable, "-Sc", child], stdout=writer, env=environment)
    os._exit(0)
os.wait()
os.close(writer)
shown = []
with open(reader) as pipe:
    pids = [int(pipe.readline()) for _ in range(2)]
for pid in pids:
    try:
        shown.append(bool(open(f"/proc/{pid}/syscall").read()))
    except PermissionError:
        shown.append(False)
    os.kill(pid, 9)
print(json.dumps(shown))
"""


@pytest.fixture
def scope() -> Iterator[Path]:
    before = SCOPE.read_text()
    yield SCOPE
    SCOPE.write_text(before)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of the plain user's."""
    os.chown(tmp_path, 1000, 1000)
    tmp_path.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("value", "is_preloaded", "is_shown"),
    [("0", False, True), ("1", False, False), ("1", True, True), ("2", True, False)],
)
def test_the_service_is_let_look(
    scope: Path, directory: Path, value: str, is_preloaded: bool, is_shown: bool
) -> None:
    scope.write_text(value)
    words = [*USER, sys.executable, "-c", LOOKER, preload_object() if is_preloaded else ""]
    # a 9p share holds no locks of another's
    environment = {**os.environ, "UFFDPREFETCH_SOCKET": f"/tmp/yama-{value}-{is_preloaded}"}
    done = subprocess.run(
        words, cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [is_shown] * 2
