# SPDX-License-Identifier: Apache-2.0
"""No file and no process is left, whoever is killed; the service heeds its own signals only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import HANG_SECONDS, process_gone, uffdprefetch, wait_until
from harness import Start, python, service_pid

from uffdprefetch.base import cgroup
from uffdprefetch.base.rundir import is_of_node, socket_path
from uffdprefetch.protocol import leftovers

pytest_plugins = ("harness_fixtures",)

WAITS = "say(ready=True); hear()"
Children = Callable[..., "subprocess.Popen[bytes]"]


def left(env: dict[str, str]) -> list[str]:
    return sorted(os.listdir(env["UFFDPREFETCH_RUNDIR"]))


@pytest.mark.parametrize("up", [False, True], ids=["before its service is up", "after"])
def test_an_ordinary_run_leaves_nothing_when_wrap_is_back(
    env: dict[str, str], tmp_path: Path, up: bool
) -> None:
    words = uffdprefetch("wrap", "-q", "-f", *["--strict"][:up], "-o", "run", "--", "true")
    for _ in range(3):
        subprocess.run(words, env=env, cwd=tmp_path, check=True, timeout=HANG_SECONDS)
        assert left(env) == []


def test_wrap_removes_what_a_killed_service_left(env: dict[str, str], job: Start) -> None:
    work = job(python(WAITS))
    work.line()
    work.kill_service()
    assert any(name.endswith(".lock") for name in left(env))
    work.tell()
    work.finish()
    assert left(env) == []


def test_the_service_ends_and_tidies_when_wrap_and_job_are_killed(
    env: dict[str, str], job: Start
) -> None:
    work = job(python(WAITS))
    work.line()
    service = work.service()
    os.killpg(work.process.pid, signal.SIGKILL)
    wait_until(lambda: process_gone(service), "the service's end")
    assert left(env) == []


def test_a_service_whose_launcher_died_before_it_came_does_not_wait_for_it(
    env: dict[str, str], children: Children, tmp_path: Path
) -> None:
    # one that waits for a first client does so for ever here
    (tmp_path / "sitecustomize.py").write_text(
        "from uffdprefetch.service import serve\nserve.FIRST_CLIENT_SECONDS = 1e9\n"
    )
    env["PYTHONPATH"] = str(tmp_path)
    path = str(tmp_path / "s.sock")
    service = uffdprefetch("serve", "--socket", path, "--log", f"{path}.log")
    script = '"$@" --starter $$ > /dev/null & echo $!; until test -e "$0"; do sleep 0.01; done'
    words = ["sh", "-c", script, path, *service]
    started = children(words, env=env, stdout=subprocess.PIPE)
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    wait_until(lambda: process_gone(pid), "the end of a service whose launcher is dead")
    assert not os.path.exists(path)


def test_the_next_service_removes_what_is_nobodys(
    env: dict[str, str], tmp_path: Path, job: Start
) -> None:
    rundir = Path(env["UFFDPREFETCH_RUNDIR"])
    rundir.mkdir(mode=0o700)
    dead, other, used = (
        Path(socket_path(str(rundir), key, node, "12345678"))
        for key, node in (("dead", None), ("other", "elsewhere"), ("used", None))
    )
    for path in (dead, other, used):
        for suffix in ("", ".lock", ".away", ".trace", ".live"):
            Path(f"{path}{suffix}").touch()
        Path(f"{path}.plan").mkdir()
        Path(f"{path}.plan/1.progress").touch()
        Path(f"{path}.log").write_text("words")
    os.utime(f"{dead}.log", (0, 0))  # nobody has come to read it
    Path(rundir, f"watched@{os.uname().nodename}").touch()
    with open(f"{used}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job(python("say(ok=True)"), options=("--strict",)).finish().good()
        names = left(env)
    assert not any(name.startswith(("dead", "watched")) for name in names)
    for path in (other, used):
        assert len([name for name in names if name.startswith(path.name)]) == 7


def test_a_mark_that_somebody_holds_stays(tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    fd = leftovers.hold(path + leftovers.TRACE)
    assert fd is not None
    assert leftovers.tidy(path)
    assert os.listdir(tmp_path) == ["a.sock.trace"]
    leftovers.release(path + leftovers.TRACE, fd)
    assert os.listdir(tmp_path) == []


def test_a_lock_that_was_removed_while_it_was_opened_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "lock")
    removed = []

    def remove_once(fd: int, how: int) -> None:
        if not removed:
            removed.append(True)
            os.unlink(path)

    monkeypatch.setattr(leftovers.fcntl, "flock", remove_once)
    fd = leftovers.hold(path)
    assert fd is not None
    assert os.path.samestat(os.fstat(fd), os.stat(path))
    os.close(fd)


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGALRM", "SIGXCPU"])
def test_the_jobs_signals_do_not_end_the_service(job: Start, name: str) -> None:
    work = job(python(WAITS))
    work.line()
    os.kill(work.service(), getattr(signal, name))
    work.tell()
    assert work.finish().good().summary is not None


def test_sigterm_ends_the_service_with_its_last_client(env: dict[str, str], job: Start) -> None:
    work = job(python(WAITS))
    work.line()
    service = work.kill_service(signal.SIGTERM)
    work.tell()
    assert work.finish().good().summary is not None  # it answered
    wait_until(lambda: process_gone(service), "the service's end")
    assert left(env) == []


def test_a_second_sigterm_ends_the_service_at_once(env: dict[str, str], job: Start) -> None:
    work = job(python(WAITS))
    work.line()
    service = work.service()

    def ended() -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(service, signal.SIGTERM)
        return process_gone(service)

    wait_until(ended, "the service's end")
    assert [name for name in left(env) if not name.endswith(".log")] == []
    work.tell()
    done = work.finish()
    assert done.status == 0 and "service died" in done.stderr


def test_sigterm_ends_a_service_that_nobody_uses(
    env: dict[str, str], children: Children, tmp_path: Path
) -> None:
    env["UFFDPREFETCH_RUN"] = "test"
    path = socket_path(str(tmp_path / "hub"), "test")
    os.mkdir(tmp_path / "hub", 0o700)
    service = children(uffdprefetch("serve", "--socket", path, "--log", f"{path}.log"), env=env)
    assert service_pid(env) == service.pid
    service.terminate()
    assert service.wait(HANG_SECONDS) == 0
    assert os.listdir(tmp_path / "hub") == []


# ---- control groups -----------------------------------------------------------------------------

V1 = (
    "6:freezer:/slurm/uid_0/job_7/step_{0}\n4:memory:/slurm/uid_0/job_7/step_{0}/task_{1}\n"
    "3:cpuset:/x{1}\n"
)
V2 = "0::/system.slice/slurmstepd.scope/job_7/step_{0}/user/task_{1}\n"


@pytest.mark.parametrize("text", [V1, V2])
def test_tasks_of_a_slurm_step_are_one_group_and_steps_are_not(text: str) -> None:
    marks = {(s, t): cgroup.mark(text.format(s, t), "") for s in "01" for t in "05"}
    assert marks["0", "0"] == marks["0", "5"] != marks["1", "0"] == marks["1", "5"]


def test_a_group_of_ones_own_below_a_step_is_another() -> None:
    step = "0::/slurm/job_7/step_0"
    assert cgroup.mark(step, "") != cgroup.mark(step + "/container", "")
    assert cgroup.mark(step, "") == cgroup.mark(step + "/user/task_special", "")


def test_a_namespace_tells_groups_of_the_same_name_apart() -> None:
    assert cgroup.mark("0::/", "cgroup:[1]") != cgroup.mark("0::/", "cgroup:[2]")


def test_our_own_socket_is_of_this_node() -> None:
    assert is_of_node(os.path.basename(socket_path("/run", "key")))
    assert sys.platform == "linux" and len(cgroup.own_mark()) == 8
