# SPDX-License-Identifier: Apache-2.0
"""The start of `wrap`: what it loads before the job, and a job that runs beside a service that is
not up yet."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import HANG_SECONDS, process_gone, require, uffdprefetch, wait_until
from harness import Job, Records, Start, listener, python, service_socket
from paths import ROOT

from uffdprefetch.launch import nothing_reported, replay
from uffdprefetch.launch.service import START_TIMEOUT_SECONDS
from uffdprefetch.orders import profile_store
from uffdprefetch.orders.start_profile import StartProfile

pytest_plugins = ("harness_fixtures",)

#: Each of them takes longer than the launcher itself, by what it imports in turn.
DEAR = {
    "argparse", "ast", "contextlib", "dataclasses", "hashlib", "inspect", "json", "logging",
    "numpy", "pathlib", "re", "shutil", "socket", "subprocess", "tempfile", "threading", "tomllib",
    "typing",
}  # fmt: skip

#: Runs `wrap` as the console script does, without site-packages, and tells what was in memory at
#: each fork or spawn (the last one is the job's) and in the end.
LOADED = """
import os, sys
sys.path.insert(0, sys.argv.pop(1))
out = os.dup(1)
def tell():
    os.write(out, (" ".join(sys.modules) + "\\n").encode())
os.register_at_fork(before=tell)
spawn = os.posix_spawn
os.posix_spawn = lambda *words, **more: (tell(), spawn(*words, **more))[1]
launcher, end = os.getpid(), os._exit
def ended(status):
    if os.getpid() == launcher:
        tell()
    end(status)
os._exit = ended
from uffdprefetch.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    "options",
    [
        [],
        [
            "--policy",
            "fixed",
            "--size=8MiB",
            "--include",
            "*.mdb",
            "-o",
            "x.%r.%q{UFFDPREFETCH_RUN}",
        ],
        ["--learn"],
        ["--learn=none", "--learn-depth", "8"],
    ],
)
def test_nothing_dear_is_loaded_for_the_job(
    env: dict[str, str], tmp_path: Path, options: list[str]
) -> None:
    env["UFFDPREFETCH_RUN"] = "t"  # a long path of the socket would be hashed, by hashlib
    words = [sys.executable, "-I", "-S", "-c", LOADED, str(ROOT), "wrap", *options, "--", "true"]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    *forks, end = [set(line.split()) for line in done.stdout.decode().splitlines()]
    replays = bool(options) and options[0].startswith("--learn") and replay.why_not() is None
    assert len(forks) == 3 + replays  # the service, the bystander, the job
    assert "uffdprefetch.launch.launcher" in forks[-1]
    assert sorted(DEAR & forks[-1]) == []
    if "uffdprefetch.launch.nothing_reported" in end:  # the job had ended before its service was up
        assert sorted(DEAR & end) == []


def test_a_replay_is_started_before_the_rest_is_loaded(env: dict[str, str], tmp_path: Path) -> None:
    require(replay.why_not() is None, replay.why_not() or "")
    env["UFFDPREFETCH_RUN"], env["XDG_CACHE_HOME"] = "t", str(tmp_path)
    (tmp_path / "uffdprefetch" / "profiles").mkdir(parents=True)
    profile_store.store(f"{tmp_path}/uffdprefetch/profiles/some.upl", StartProfile())
    words = [sys.executable, "-I", "-S", "-c", LOADED, str(ROOT), "wrap", "--learn=some", "true"]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    first, *forks, _ = [set(line.split()) for line in done.stdout.decode().splitlines()]
    assert len(forks) == 3 and sorted(DEAR & first) == []
    assert "uffdprefetch.launch.launcher" in forks[0]
    assert "uffdprefetch.launch.launcher" not in first


# ---- a job beside a service that is not up yet --------------------------------------------------


def children_of(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("closed", ["", "<&-", "<&- >&- 2>&-"])
def test_a_job_that_ends_before_its_service_is_up_does_not_wait_for_it(
    env: dict[str, str], tmp_path: Path, gate: Callable[[], None], closed: str
) -> None:
    words = uffdprefetch("wrap", "-f", "-o", "run", "--", "sh", "-c", "exit 3")
    shell = ["sh", "-c", f'"$@" {closed}', "sh", *words]
    done = subprocess.run(shell, env=env, cwd=tmp_path, capture_output=True, timeout=HANG_SECONDS)
    assert done.returncode == 3
    assert done.stderr.count(b"uffdprefetch: ") == (0 if "2>" in closed else 1)
    summary = json.loads((tmp_path / "run.summary.json").read_text())
    assert summary["rung_reason"] == nothing_reported.WHY
    assert os.listdir(env["UFFDPREFETCH_RUNDIR"]) == []


EARLY = """
m = Mapping(sys.argv[1])
say(digest=m.digest(), checkpoints=m.checkpoints())
hear()
say(again=m.digest())
"""


def test_a_mapping_made_before_the_service_is_up_is_told_to_it_later(
    job: Start, records: Records, gate: Callable[[], None]
) -> None:
    work = job(python(EARLY, records.path), UFFDPREFETCH_TEST_PATIENCE="10")
    assert work.line() == {"digest": records.digest, "checkpoints": 0}  # and it was not held up
    assert listener(work.env) is None
    gate()
    work.service()
    settle_in(work, records)
    work.tell()
    done = work.finish().good()
    assert done.lines == [{"again": records.digest}]
    assert done.summary is not None
    (file,) = done.summary["files"]
    assert file["path"] == str(records.path)
    assert done.summary["totals"]["checkpoints"]["laid"] == 0
    assert file["served_by"] == "page_tables"
    assert len(done.summary["ranks"]) == 1


def test_a_service_whose_socket_somebody_removes_is_not_waited_for(
    job: Start, records: Records, gate: Callable[[], None]
) -> None:
    """What cleans up /tmp may do so before the launcher has come to it."""
    work = job(python(EARLY, records.path), UFFDPREFETCH_TEST_PATIENCE="10")
    work.line()
    (service,) = (pid for pid in children_of(work.process.pid) if is_service(pid))
    os.unlink(service_socket(work.env))
    gate()
    work.tell()
    done = work.finish()
    assert (done.status, done.lines) == (0, [{"again": records.digest}])
    assert "somebody has removed" in done.stderr
    wait_until(lambda: process_gone(service), "the end of a service that nobody can reach")
    assert os.listdir(work.env["UFFDPREFETCH_RUNDIR"]) == []


@pytest.mark.parametrize("stopped", [False, True])
def test_a_job_that_is_over_does_not_wait_for_a_start_that_does_not_get_on(
    job: Start, records: Records, gate: Callable[[], None], stopped: bool
) -> None:
    """Its mapping has called the service, which has not said a word to anybody."""
    work = job(python(EARLY, records.path), UFFDPREFETCH_TEST_PATIENCE="10")
    work.line()
    (service,) = (pid for pid in children_of(work.process.pid) if is_service(pid))
    if stopped:
        os.kill(service, signal.SIGSTOP)
    work.tell()
    done = work.finish()
    assert (done.status, done.lines) == (0, [{"again": records.digest}])
    stood = ", for it stood still (SIGSTOP)" if stopped else ""
    said = f"the service was not up when the job ended, and did not get on{stood}"
    assert done.stderr.count("\n") == 1 and said in done.stderr
    assert done.summary is not None and done.summary["service"]["silent"]
    assert done.summary["rung_reason"] == said
    gate()
    wait_until(lambda: process_gone(service), "the end of a service that nobody waits for")
    assert os.listdir(work.env["UFFDPREFETCH_RUNDIR"]) == []


def test_a_job_that_is_over_waits_for_a_start_that_gets_on(
    env: dict[str, str], job: Start, records: Records
) -> None:
    """Longer than one may stand still."""
    site = Path(env["UFFDPREFETCH_RUNDIR"]).parent / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SLOW)
    work = job(python(EARLY, records.path), UFFDPREFETCH_TEST_PATIENCE="10", PYTHONPATH=str(site))
    work.line()
    work.tell()
    done = work.finish().good()
    assert done.summary is not None and not done.summary["service"]["silent"]


#: In the service's interpreter: a start of two seconds of a processor.
SLOW = """
import sys, time
while "serve" in sys.orig_argv and time.process_time() < 2.0:
    pass
"""


def is_service(pid: int) -> bool:
    return b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def settle_in(work: Job, records: Records) -> None:
    """Until the service has opened the job's file."""

    def has_opened() -> bool:
        links = Path(f"/proc/{work.service()}/fd").iterdir()
        return any(os.path.realpath(link) == str(records.path) for link in links)

    wait_until(has_opened, "the service to take the mapping")


def test_a_mapping_waits_for_a_service_that_comes_in_time(
    job: Start, patient: None, records: Records, gate: Callable[[], None]
) -> None:
    work = job(python(EARLY, records.path))
    wait_until(lambda: len(children_of(work.process.pid)) == 3, "service, bystander and job")
    gate()
    line = work.line()
    assert line["digest"] == records.digest and line["checkpoints"] > 0
    work.tell()
    work.finish().good()


POOLED = """
say(begins=True)
m = Mapping(sys.argv[1])
say(digest=m.digest())
"""


def test_a_mapping_of_the_pools_waits_for_its_service_and_the_job_does_not(
    job: Start, records: Records, gate: Callable[[], None]
) -> None:
    """It is the pool's from its beginning or never."""
    options = ("--engine", "pool")
    work = job(python(POOLED, records.path), options=options, UFFDPREFETCH_TEST_PATIENCE="10")
    assert work.line() == {"begins": True}
    time.sleep(0.2)  # more than is waited for a service that is up
    assert listener(work.env) is None
    gate()
    done = work.finish().good()
    assert done.lines == [{"digest": records.digest}]
    assert done.summary is not None and done.summary["files"][0]["served_by"] == "pool"


def test_nobody_waits_for_a_pool_whose_service_ends_at_its_start(
    job: Start, records: Records, env: dict[str, str], gate: Callable[[], None]
) -> None:
    options = ("--engine", "pool")
    work = job(python(POOLED, records.path), options=options, UFFDPREFETCH_TEST_PATIENCE="10")
    assert work.line() == {"begins": True}
    (service,) = (pid for pid in children_of(work.process.pid) if is_service(pid))
    time.sleep(0.1)  # it is waited for
    os.kill(service, signal.SIGKILL)
    done = work.finish()
    assert (done.status, done.lines) == (0, [{"digest": records.digest}])
    assert "it ended with status -9" in done.stderr


SIGNALLED = """
import signal
calls = []
signal.signal(signal.SIGALRM, lambda *_: calls.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.2)
m = Mapping(sys.argv[1])
say(calls=calls)
hear()
say(digest=m.digest())
"""


def test_who_waits_for_a_pools_start_does_not_keep_a_signal_waiting(
    job: Start, records: Records, gate: Callable[[], None]
) -> None:
    """The service stands still: the handler runs, and the mapping is done without."""
    options = ("--engine", "pool")
    work = job(python(SIGNALLED, records.path), options=options, UFFDPREFETCH_TEST_PATIENCE="10")
    assert work.line() == {"calls": [1]}
    assert listener(work.env) is None, "it is not up yet"
    gate()
    settle_in(work, records)
    work.tell()
    done = work.finish().good()
    assert done.lines == [{"digest": records.digest}] and done.summary is not None
    assert done.summary["files"][0]["served_by"] != "pool"


def test_a_mapping_waits_for_a_start_as_long_as_a_launcher_does() -> None:
    header = (ROOT / "csrc" / "job" / "job.h").read_text()
    (steps,) = re.findall(r"#define UP_START_STEPS (\d+)", header)
    (step_ns,) = re.findall(r"#define UP_WAIT_STEP_NS \((\d+) \* 1000 \* 1000\)", header)
    assert int(steps) * int(step_ns) / 1000 == START_TIMEOUT_SECONDS


def test_a_pool_that_stands_still_at_its_start_is_done_without(
    job: Start, records: Records, gate: Callable[[], None]
) -> None:
    options = ("--engine", "pool")
    again = "many = [Mapping(sys.argv[1]) for _ in range(50)]\nsay(all=len(many))\n"
    code = python(POOLED + again, records.path)
    work = job(code, options=options, UFFDPREFETCH_TEST_PATIENCE="10")
    assert work.line() == {"begins": True}
    assert work.line() == {"digest": records.digest}  # after ten seconds ...
    assert work.line() == {"all": 50}  # ... and of fifty more nobody waits as long, 500 s
    (lock,) = Path(work.env["UFFDPREFETCH_RUNDIR"]).glob("*.sock.lock")
    assert lock.stat().st_size == 0 and time.time() - lock.stat().st_mtime > 10
    gate()
    assert work.finish().status == 0


def test_who_came_to_a_service_that_another_rank_starts_has_it(
    job: Start, gate: Callable[[], None], env: dict[str, str]
) -> None:
    first = job(python("say(pid=os.getpid()); hear()"))
    first.line()
    second = job(python("say(pid=os.getpid()); hear()"))
    second.line()
    assert len(children_of(first.process.pid)) == 3 and len(children_of(second.process.pid)) == 2
    first.tell()
    wait_until(lambda: len(children_of(first.process.pid)) == 1, "the end of its job")
    gate()
    assert first.finish().good().summary is None  # the other one is still there
    second.tell()
    summary = second.finish().good().summary
    assert summary is not None and summary["rung_reason"] != nothing_reported.WHY


@pytest.mark.parametrize("strict", [False, True])
def test_a_service_that_ends_at_its_start_is_told(
    env: dict[str, str], tmp_path: Path, strict: bool
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'serve' in sys.orig_argv: os._exit(5)\n"
    )
    env["PYTHONPATH"] = str(tmp_path)
    options = ["--strict"] if strict else []
    words = uffdprefetch("wrap", *options, "--", "sh", "-c", "echo begins; cat; echo ran")
    with subprocess.Popen(
        words, env=env, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        if not strict:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begins\n"
            wait_until(lambda: len(children_of(process.pid)) == 2, "the service's end")
        out, err = process.communicate(timeout=HANG_SECONDS)
    assert b"it ended with status 5" in err and err.count(b"\n") == 1
    assert (process.returncode, out) == ((125, b"") if strict else (0, b"ran\n"))
