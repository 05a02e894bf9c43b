# SPDX-License-Identifier: Apache-2.0
"""service/job_tree.py: which processes a job consists of, and which of them have ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import subprocess
from collections.abc import Iterator

import pytest
from conftest import process_gone, wait_until

from uffdprefetch.base import procfs
from uffdprefetch.base.clock import Clock
from uffdprefetch.base.procfs import children
from uffdprefetch.predict.bounds import CPU_PART, LATELY_NS
from uffdprefetch.sense.pagetables import LOOK_SLOWEST_NS
from uffdprefetch.service import job_tree
from uffdprefetch.service.job_tree import LOOK_NS, Exits, JobTree


@pytest.fixture
def job() -> Iterator[subprocess.Popen[bytes]]:
    """A shell with a child."""
    words = ["sh", "-c", "sleep 1000 & wait"]
    with subprocess.Popen(words, start_new_session=True) as process:
        try:
            wait_until(lambda: children(process.pid), "the shell's child")
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def exits() -> Iterator[Exits]:
    made = Exits()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes come all the time."""
    numbers = itertools.count()
    monkeypatch.setattr(job_tree, "newest_pid", lambda: next(numbers))


def test_processes_come_and_go(job: subprocess.Popen[bytes]) -> None:
    tree, (child,) = JobTree(), children(job.pid)
    now = 10**12
    assert tree.look([job.pid], now) == ({job.pid, child}, frozenset())
    os.kill(child, signal.SIGKILL)
    job.wait()
    assert tree.look([job.pid], tree.due_ns - 1) == (frozenset(), frozenset()), "not due"
    assert tree.look([job.pid], tree.due_ns) == (frozenset(), {child})
    assert tree.look([], tree.due_ns) == (frozenset(), {job.pid})
    assert tree.seen == 2


def test_a_job_that_is_told_of_is_looked_at_at_once() -> None:
    """A service is up before its launcher has said what it runs."""
    tree, job = JobTree(Clock(lambda: 0, lambda: 0)), os.getpid()
    tree.look([], 10**12)
    come, _ = tree.look([job], 10**12 + 1)
    assert job in come
    assert tree.due_ns == 10**12 + 1 + LOOK_NS, "and its children soon after"
    assert tree.look([job], 10**12 + 2) == (frozenset(), frozenset()), "not due"


def test_who_is_to_come_again_does_if_it_is_there(job: subprocess.Popen[bytes]) -> None:
    tree, (child,) = JobTree(), children(job.pid)
    tree.look([job.pid], 10**12)
    tree.again([child, job.pid])
    os.kill(child, signal.SIGKILL)
    job.wait()
    assert tree.look([job.pid], tree.due_ns) == ({job.pid}, {child})
    assert tree.look([job.pid], tree.due_ns) == (frozenset(), frozenset())


@pytest.mark.parametrize("told", [7, None])
def test_where_no_process_was_made_it_is_not_looked_for_one(
    monkeypatch: pytest.MonkeyPatch, told: int | None
) -> None:
    """Of 64 processes with 8 threads a look takes 12 ms."""
    looked: list[int] = []
    monkeypatch.setattr(job_tree, "newest_pid", lambda: told)
    monkeypatch.setattr(job_tree, "descendants", lambda pid: looked.append(pid) or [pid])
    tree, now = JobTree(Clock(lambda: 0, lambda: 0)), 10**12
    while tree.due_ns < 10**12 + LATELY_NS - LOOK_SLOWEST_NS:
        tree.look([7], now)
        now = tree.due_ns
    assert (len(looked) == 1) == (told is not None)
    assert tree.look([7, 8], now) == ({8}, frozenset()), "of a job it may be told later"
    now = tree.due_ns
    tree.again([7])
    assert tree.look([7, 8], now) == ({7}, frozenset()), "it is looked for who is to come again"
    before = len(looked)
    tree.look([7, 8], now + 2 * LATELY_NS)
    assert len(looked) == before + 2, "and now and then for who has gone"


def test_a_look_costs_no_more_than_its_part_of_a_core() -> None:
    spent = iter([0, 40_000_000])
    tree = JobTree(Clock(lambda: 0, lambda: next(spent)))
    tree.look([], 1)
    assert tree.due_ns == 1 + CPU_PART * 40_000_000


def test_where_nobody_comes_it_is_looked_rarer() -> None:
    tree, now, waits = JobTree(Clock(lambda: 0, lambda: 0)), 10**12, []
    for _ in range(200):
        tree.look([os.getpid()], now)
        waits.append(tree.due_ns - now)
        now = tree.due_ns
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (LOOK_NS, LOOK_SLOWEST_NS)


def test_an_end_is_heard_of_at_once(exits: Exits) -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        exits.watch(process.pid)
        exits.watch(process.pid)
        assert exits.take() == []
        process.kill()
        ready, _, _ = select.select([exits], [], [])
        assert ready and exits.take() == [process.pid], "though nobody has waited for it yet"
        assert process_gone(process.pid)
        exits.forget(process.pid)
        assert exits.take() == []
        exits.forget(process.pid)


def test_who_is_gone_is_not_watched(exits: Exits) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    exits.watch(process.pid)
    assert exits.take() == []


def test_a_process_that_was_made_is_the_newest_or_one_that_was_made_since() -> None:
    before = procfs.newest_pid()
    with subprocess.Popen(["true"]):
        assert procfs.newest_pid() != before
