# SPDX-License-Identifier: Apache-2.0
"""The start of `wrap`: what it loads before the job, and a job that runs beside a service that is
not up yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import HANG_SECONDS, process_gone, require, uffdprefetch, wait_until
from harness import Job, Records, Start, listener, python, service_socket
from paths import ROOT

from uffdprefetch.launch import nothing_reported, replay
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
