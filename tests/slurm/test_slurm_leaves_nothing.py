# SPDX-License-Identifier: Apache-2.0
"""Under Slurm: no process and no file is left, signals come once, a service belongs to its step."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest
from bed import TRACKINGS, VARIABLE, Bed, running
from conftest import HANG_SECONDS, uffdprefetch, wait_until

#: Not conftest.require(): where there is no bed, there is nothing to force.
if not os.environ.get(VARIABLE):
    pytest.skip(f"no Slurm to test with ({VARIABLE} is not set)", allow_module_level=True)


@pytest.fixture(scope="module", params=TRACKINGS)
def bed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    directory = tmp_path_factory.mktemp(request.param)
    with running(directory, request.param, uffdprefetch()) as bed:
        yield bed


def is_clean(bed: Bed) -> None:
    wait_until(lambda: not bed.processes(), lambda: f"the end of processes {bed.processes()}")
    assert bed.left() == []


def test_an_ordinary_run_leaves_nothing(bed: Bed) -> None:
    for _ in range(3):
        done = bed.slurm("srun", "-N2", "-n4", *bed.wrap("cksum", str(bed.data)))
        assert done.returncode == 0, done.stderr
        assert bed.left() == []  # at once: srun is back
    is_clean(bed)


def test_the_tasks_of_a_step_share_a_service_on_each_node(bed: Bed) -> None:
    step = bed.start(nodes=2, tasks=4)
    sockets = step.sockets()
    step.go()
    assert step.wait() == 0, step.errors()
    assert len(set(sockets)) == 2  # one a node, however the tasks are laid out
    is_clean(bed)


def test_a_service_outlives_the_task_that_started_it(bed: Bed) -> None:
    """One of a node's tasks ends long before the other: that one's service goes on."""
    script = (
        'test "$SLURM_PROCID" = 0 && { touch other; until test -e first; do sleep 0.05; done; '
        '"$@"; kill -0 "$(cat service)" && echo lives; exit; }; '
        "until test -e other; do sleep 0.05; done; "  # else its service may be nobody's and end
        'pgrep -f "serve --socket ${UFFDPREFETCH_SOCKET%+*}" > service; touch first'
    )
    for name in ("first", "other", "service"):
        (bed.directory / name).unlink(missing_ok=True)
    done = bed.slurm("srun", "-N1", "-n2", *bed.wrap("sh", "-c", script, "sh", "sleep", "1"))
    assert done.stdout == "lives\n", done.stderr
    is_clean(bed)


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_a_signal_to_the_step_comes_once_and_the_service_serves_on(bed: Bed, name: str) -> None:
    step = bed.start(nodes=1, tasks=1)
    step.signal(name.removeprefix("SIG"))
    wait_until(lambda: step.signals(0), "the signal")
    # Whatever wrap passes on later comes before the end of this one, which it takes after it.
    other = "SIGUSR2" if name == "SIGUSR1" else "SIGUSR1"
    step.signal(other.removeprefix("SIG"))
    wait_until(lambda: other in step.signals(0), "the second signal")
    step.go()
    assert step.wait() == 0, step.errors()
    assert step.signals(0) == [name, other]
    assert "service died" not in step.errors()
    assert list(step.directory.parent.glob("out.*.summary.json"))
    is_clean(bed)


def test_a_cancelled_job_leaves_nothing(bed: Bed) -> None:
    step = bed.start(nodes=2, tasks=2)
    step.cancel()
    assert step.wait() != 0
    is_clean(bed)


def test_a_killed_step_leaves_only_what_the_next_one_removes(bed: Bed) -> None:
    step = bed.start(nodes=2, tasks=2)
    step.signal("KILL")
    assert step.wait() != 0
    wait_until(lambda: not bed.processes(), lambda: f"the end of processes {bed.processes()}")
    assert all(".sock" in name for name in bed.left())
    done = bed.slurm("srun", "-N2", "-n2", *bed.wrap("true"))
    assert done.returncode == 0, done.stderr
    is_clean(bed)


def test_a_job_that_outlives_sigterm_is_served_until_it_is_killed(bed: Bed) -> None:
    step = bed.start(nodes=1, tasks=1, ignored="SIGTERM")
    sockets = step.sockets()
    step.cancel()
    wait_until(lambda: "SIGTERM" in step.signals(0), "the signal")
    assert step.process.poll() is None and os.path.exists(sockets[0])
    assert step.wait() != 0  # after KillWait
    assert step.signals(0).count("SIGTERM") == 1
    wait_until(lambda: not bed.processes(), lambda: f"the end of processes {bed.processes()}")
    done = bed.slurm("srun", "-N2", "-n2", *bed.wrap("true"))
    assert done.returncode == 0, done.stderr
    is_clean(bed)


def test_steps_in_control_groups_of_their_own_have_services_of_their_own(bed: Bed) -> None:
    """Both name the same run: what one reads must not be charged to the other, whose end would
    take the service away."""
    if bed.tracking != "cgroup":
        pytest.skip("only there a step is a control group")
    script = 'echo "$UFFDPREFETCH_SOCKET"'
    inner = " ".join(f"'{word}'" for word in bed.wrap("sh", "-c", script))
    batch = f"{inner}; srun --overlap -n1 {inner}; srun --overlap -n1 {inner}"
    bed.environment["UFFDPREFETCH_RUN"] = "same"
    try:
        done = bed.slurm("salloc", "-N1", "-n1", "srun", "--overlap", "-n1", "sh", "-c", batch)
    finally:
        del bed.environment["UFFDPREFETCH_RUN"]
    sockets = done.stdout.split()
    assert len(set(sockets)) == 3, done.stderr
    assert all("/same@" in path for path in sockets)
    is_clean(bed)


def test_what_is_said_of_a_wrap_around_srun_serves_the_ranks(bed: Bed) -> None:
    """The printed words are run as they stand."""
    ours = bed.directory / "uffdprefetch"  # on PATH, as where it is installed
    words = " ".join(map(shlex.quote, bed._program))
    ours.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    ours.chmod(0o755)
    environment = {
        **bed.environment,
        "PATH": f"{bed.directory}:{os.environ['PATH']}",
        "UFFDPREFETCH_MIN_SIZE": "1MiB",
        "XDG_STATE_HOME": str(bed.directory / "state"),
    }
    code = """
import mmap, subprocess, sys, time
with open(sys.argv[1], "rb") as file:
    found = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
look, end = ["uffdprefetch", "top", "--once", "--json"], time.monotonic() + 30
while "_preload" in open("/proc/self/maps").read() and time.monotonic() < end:
    if sys.argv[1] in subprocess.run(look, capture_output=True, text=True).stdout:
        break  # the service knows of the mapping
print(sum(found[::4096]))
"""
    reader = bed.directory / "served.py"
    reader.write_text(code)
    # nodes of the bed share processes: without its variables a rank is as far away as on another
    names = "PATH,UFFDPREFETCH_RUNDIR,UFFDPREFETCH_MIN_SIZE,XDG_STATE_HOME"
    step = ["srun", f"--export={names}", "-N2", "-n2", sys.executable, str(reader), str(bed.data)]

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=bed.directory,
            timeout=HANG_SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    around = run("uffdprefetch", "wrap", "-v", "--", *step)
    assert around.returncode == 0, around.stderr
    assert "served nothing: srun runs its programs outside of this wrap" in around.stderr
    (told,) = (line.partition("try: ")[2] for line in around.stderr.splitlines() if "try: " in line)
    inside = run("sh", "-c", told)
    assert (inside.returncode, inside.stdout) == (0, around.stdout), inside.stderr
    assert "outside of this wrap" not in inside.stderr and "try:" not in inside.stderr
    found = [json.loads(path.read_text()) for path in (bed.directory / "state").rglob("*.json")]
    served = [one for one in found if [file["path"] for file in one["files"]] == [str(bed.data)]]
    assert len(served) == 2, inside.stderr  # one service on each node
    for name in bed.left():
        assert name.endswith(".log")  # -v has named it
        (bed.run_directory / name).unlink()
    is_clean(bed)
