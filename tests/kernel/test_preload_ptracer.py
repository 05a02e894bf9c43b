# SPDX-License-Identifier: Apache-2.0
"""Where Yama lets a process be looked at by its ancestors alone, each program of a job names its
service as one more (csrc/job/ptracer.c). tests/lustre/test_yama.py is of a kernel that has Yama."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from components import Runner
from conftest import require

pytest_plugins = ("harness_fixtures",)

#: Its value is read from this file: most kernels that tests run on have no Yama.
SCOPE_VARIABLE = "UFFDPREFETCH_TEST_PTRACE_SCOPE"
#: A program that forks a child that does nothing, and one that begins another program.
JOB = """
import os, subprocess, sys
if os.fork() == 0:
    os._exit(0)
os.wait()
subprocess.run([sys.executable, "-Sc", ""], check=True)
"""
#: It begins when its service is up (protocol/leftovers.py).
UP = """
import os, time
while not os.path.getsize(os.environ["UFFDPREFETCH_SOCKET"] + ".lock"):
    time.sleep(0.02)
"""
#: A program that says who holds its service's lock, and what that process is.
ASK = """
import fcntl, struct
with open(os.environ["UFFDPREFETCH_SOCKET"] + ".lock") as file:
    asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
    holder = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, asked))[4]
with open(f"/proc/{holder}/cmdline") as file:
    print(holder, file.read().split(chr(0))[3])
"""
NAMES = re.compile(r"^(\d+) +prctl\(PR_SET_PTRACER, (\d+)")


@pytest.fixture
def runner(env: dict[str, str], tmp_path: Path) -> Runner:
    require(shutil.which("strace") is not None, "strace is missing")
    (tmp_path / "scope").write_text("1\n")
    return Runner({**env, SCOPE_VARIABLE: str(tmp_path / "scope")}, tmp_path)


def calls(
    runner: Runner, *options: str, before: tuple[str, ...] = (), code: str = JOB
) -> list[str]:
    """The system calls of a job that may have to do with it, each behind the pid of its process;
    then what it prints."""
    log = runner.cwd / "calls"
    traced = ("strace", "-f", "-qq", "-e", "trace=prctl,fcntl,openat", "-o", log)
    words = [*traced, *before, sys.executable, "-Sc", code]
    run = runner.wrapped(*words, options=options)
    assert run.status == 0, run.stderr
    return [*log.read_text().splitlines(), *run.stdout.decode().splitlines()]


def named(lines: list[str]) -> list[tuple[int, int]]:
    """(who, whom) for each that has named somebody."""
    found = filter(None, map(NAMES.match, lines))
    return [(int(one[1]), int(one[2])) for one in found]


def test_each_program_and_each_forked_child_names_the_service(runner: Runner) -> None:
    *lines, said = calls(runner, code=UP + JOB + ASK)
    service, is_one = said.split()
    processes = {int(line.split()[0]) for line in lines}
    assert is_one == "serve" and len(processes) >= 3
    assert {who for who, _ in named(lines)} == processes
    assert {whom for _, whom in named(lines)} == {int(service)}


@pytest.mark.parametrize("scope", ["0", "2", "3", ""])
def test_nobody_is_named_where_it_would_change_nothing(runner: Runner, scope: str) -> None:
    path = runner.cwd / "scope"
    path.write_text(scope) if scope else path.unlink()
    lines = calls(runner)
    assert any(str(path) in line for line in lines), "it was asked"
    assert not named(lines)
    assert not any("F_GETLK" in line for line in lines)


def test_nobody_is_named_where_reads_are_not_followed(runner: Runner) -> None:
    lines = calls(runner, "--reads", "off")
    assert not named(lines) and not any("scope" in line for line in lines)


def test_what_the_job_says_itself_stands(runner: Runner) -> None:
    code = "import ctypes; ctypes.CDLL(None).prctl(0x59616d61, 1, 0, 0, 0)"
    (first, second) = named(calls(runner, code=code))
    assert first[0] == second[0] and first[1] != second[1] == 1


def test_who_has_given_up_rights_says_nothing_in_a_child(runner: Runner) -> None:
    """A filter of its own may know neither the call nor its number."""
    code = "import ctypes, os; ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)\n" + JOB  # NO_NEW_PRIVS
    lines = calls(runner, code=code)
    who = [one for one, _ in named(lines)]
    assert len(who) == 2 == len(set(who)), "the two programs"


@pytest.mark.root
def test_a_service_of_another_pid_namespace_is_not_named_by_its_number(runner: Runner) -> None:
    lines = calls(runner, before=("unshare", "--pid", "--fork"))
    assert any("l_pid=0" in line for line in lines), "it cannot be seen from there"
    assert os.geteuid() == 0 and len({who for who, _ in named(lines)}) == 1, "unshare itself"
