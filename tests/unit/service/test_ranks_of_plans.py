# SPDX-License-Identifier: Apache-2.0
"""service/planned_readers.py: which processes follow a plan's orders of files."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from conftest import wait_until

from uffdprefetch.base.procfs import environment, parent
from uffdprefetch.predict.bounds import LATELY_NS
from uffdprefetch.service import planned_readers
from uffdprefetch.service.planned_readers import PlannedReaders, RankedProcess, readers_of

PID = os.getpid()


def tree(*each: tuple[int, int, int | None]) -> dict[int, RankedProcess]:
    """Of (pid, parent, rank)."""
    return {pid: RankedProcess(rank, above, 0, 0) for pid, above, rank in each}


def test_the_first_process_stands_for_a_job_without_ranks() -> None:
    assert readers_of({}) == {}
    assert readers_of(tree((5, 1, None), (6, 5, None))) == {5: 0}


def test_each_ranks_first_process_stands_for_it() -> None:
    ranks = tree((5, 1, None), (6, 5, 0), (7, 5, 1), (8, 6, 0), (9, 8, 0))
    assert readers_of(ranks) == {6: 0, 7: 1}, "not the launcher, no worker"


def test_who_has_started_another_rank_is_a_launcher_be_it_one_itself() -> None:
    ranks = tree((5, 1, 0), (6, 5, 4), (7, 5, 0), (8, 7, 0))
    assert readers_of(ranks) == {6: 4, 7: 0}, "torchrun in a task of Slurm's"
    by_shell = tree((5, 1, 0), (6, 5, 0), (7, 6, 1))
    assert readers_of(by_shell) == {7: 1}, "and whatever is between it and its rank"


def test_a_rank_may_start_who_has_none() -> None:
    assert readers_of(tree((5, 1, 3), (6, 5, None))) == {5: 3}


def test_a_pid_that_was_given_again_makes_no_endless_tree() -> None:
    assert readers_of(tree((5, 6, 1), (6, 5, 1))) == {5: 1}


class Planned:
    """PlannedFiles, taking notes."""

    def __init__(self) -> None:
        self.ranks: dict[int, int | None] = {}
        self.steps = 0

    def begin(self, peer: int, rank: int | None) -> None:
        assert peer not in self.ranks
        self.ranks[peer] = rank

    def end(self, peer: int) -> None:
        del self.ranks[peer]

    def step(self) -> None:
        self.steps += 1


def child(**variables: str) -> Any:
    code = "import sys; print(flush=True); input()"
    made = subprocess.Popen(
        [sys.executable, "-S", "-c", code], env={**variables}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert made.stdout is not None
    made.stdout.readline()
    return made


def test_ranks_are_those_of_the_processes_environments() -> None:
    planned: Any = Planned()
    readers = PlannedReaders(planned)
    with child(RANK="3") as one, child(RANK="4") as two:
        readers.step(frozenset({one.pid, two.pid}), 0)
        assert planned.ranks == {one.pid: 3, two.pid: 4}
        assert (parent(one.pid), environment(one.pid)["RANK"]) == (PID, "3")
        readers.step(frozenset({two.pid}), 1)
        assert planned.ranks == {two.pid: 4} and planned.steps == 2
        for each in (one, two):
            each.communicate(b"\n")
    wait_until(lambda: not environment(one.pid), "its end")
    assert parent(one.pid) == 0


def test_processes_that_nobody_has_looked_for_again_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: Any = Planned()
    readers, looked, pids = PlannedReaders(planned), list[int](), frozenset({PID})

    def read(pid: int) -> dict[str, str]:
        looked.append(pid)
        return {}

    monkeypatch.setattr(planned_readers, "environment", read)
    for now_ns in range(3):
        readers.step(pids, now_ns)
    assert looked == [PID] and planned.steps == 3
    readers.step(frozenset([PID]), 3)
    assert looked == [PID, PID], "it may have become another program"


def test_a_rank_is_looked_for_again_until_a_process_is_no_copy_of_its_launcher() -> None:
    planned: Any = Planned()
    readers = PlannedReaders(planned)
    with child() as one:
        readers.step(frozenset({PID, one.pid}), 0)
        (peer,) = planned.ranks
        known = readers._processes
        seen = [known[one.pid].looked_ns]
        for now_ns in (1, LATELY_NS, 2 * LATELY_NS):
            readers.step(frozenset({PID, one.pid}), now_ns)
            seen.append(known[one.pid].looked_ns)
        assert seen == [0, 1, LATELY_NS, LATELY_NS]
        assert planned.ranks == {peer: 0}
        one.communicate(b"\n")
