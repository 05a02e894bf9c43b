# SPDX-License-Identifier: Apache-2.0
"""A job that gives up rights has no thread left in it that did not: ours ends first."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
from components import Runner
from conftest import require
from harness import CHECKPOINTS, Records, Start, programs, python

pytest_plugins = ("harness_fixtures",)

SMALL = ("--min-size", "1MiB", *CHECKPOINTS)
NO_LANDLOCK = 77


@pytest.mark.parametrize(
    "how", ["prctl", "syscall", "tsync", "privileges", "landlock", "capabilities"]
)
def test_no_thread_keeps_what_the_job_gave_up(
    env: dict[str, str], records: Records, tmp_path: Path, how: str
) -> None:
    runner = Runner(env, tmp_path)
    program = programs(tmp_path, "rights")
    run = runner.wrapped(program, how, records.path, options=SMALL)
    require(run.status != NO_LANDLOCK, "this kernel has no Landlock")
    assert (run.status, run.stderr) == (0, "")
    assert run.stdout == runner.plain(program, how, records.path)
    assert run.stdout.count(b"thread") == 1


def test_a_job_that_keeps_its_rights_keeps_our_threads(
    env: dict[str, str], records: Records, tmp_path: Path
) -> None:
    """Else nothing would have been seen above."""
    run = Runner(env, tmp_path).wrapped(
        programs(tmp_path, "rights"), "nothing", records.path, options=SMALL
    )
    # one more where checkpoints were not there in time
    assert run.status == 0 and run.stdout.count(b"thread") in (1 + 1, 1 + 2)


def test_where_we_may_ring_no_bell_the_job_goes_on(
    env: dict[str, str], records: Records, tmp_path: Path
) -> None:
    """A filter of the job's own, set past every library, refuses us our call."""
    runner = Runner(env, tmp_path)
    words = [programs(tmp_path, "rights"), "refused", records.path]
    run = runner.wrapped(*words, options=SMALL)
    assert (run.status, run.stdout) == (0, runner.plain(*words))


@pytest.mark.parametrize("number", ["prctl", "setresuid"])
def test_rights_given_up_past_every_library_end_our_thread(
    job: Start, records: Records, number: str
) -> None:
    """By an instruction of the program's own: nothing tells us but the kernel, once a second."""
    calls = {"prctl": (157, 38, 1, 0), "setresuid": (117, 65534, 65534, 65534)}
    require(platform.machine() == "x86_64", "the numbers and the code are of x86-64")
    require(number != "setresuid" or os.geteuid() == 0, "only root has rights to give up so")
    code = f"""
        m = Mapping(sys.argv[1]).managed()
        before = len(agents()) > 0
        status = by_instruction{calls[number]}
        until(lambda: not agents(), "the end of our thread")
        say(before=before, status=status, digest=m.digest(), left=m.checkpoints())
    """
    done = job(python(code, records.path)).finish().good()
    assert done.lines == [{"before": True, "status": 0, "digest": records.digest, "left": 0}]


@pytest.mark.parametrize("managed", [False, True])
def test_we_make_no_call_that_plain_would_not(
    env: dict[str, str], records: Records, tmp_path: Path, managed: bool
) -> None:
    """The program kills itself for any other system call than its own; with a file under management
    or without."""
    words: list[str | Path] = [programs(tmp_path, "frugal")]
    if managed:
        words.append(records.path)
    runner = Runner(env, tmp_path)
    run = runner.wrapped(*words, options=SMALL)
    assert (run.status, run.stdout) == (0, runner.plain(*words))
