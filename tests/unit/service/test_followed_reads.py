# SPDX-License-Identifier: Apache-2.0
"""service/reads.py: who is looked at, which of what was seen goes where, and what is said of it."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import wait_until
from guess_bed import Bed

from uffdprefetch.base.clock import CLOCK
from uffdprefetch.base.config import Config
from uffdprefetch.native.reads import LookCounts
from uffdprefetch.sense.read_calls import LeftAlone
from uffdprefetch.service import job_tree
from uffdprefetch.service import reads as module
from uffdprefetch.service.reads import FollowedReads
from uffdprefetch.state.publisher import EventPublisher

MIB = 1 << 20
PID = os.getpid()


class Calls:
    """sense/read_calls.py, which sees what it is told to."""

    def __init__(self, written: Any, *, event_fd: int) -> None:
        self.written, self.added, self.full = written, [0], False
        self.sees: list[Any] = []
        self.left_alone = {"/data/log": LeftAlone.WRITTEN}
        self.closed = False

    def add(self, pid: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "too many")
        self.added.append(pid)

    def remove(self, pid: int) -> None:
        if pid in self.added:
            self.added.remove(pid)

    def reap(self) -> list[Any]:
        sees, self.sees = self.sees, []
        return sees

    def counts(self) -> LookCounts:
        return LookCounts(7, 3, 1, 0, 0, 0, 0, 0)

    def close(self) -> None:
        self.closed = True


class Reads:
    """A service's, of which this process is the job."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(job_tree, "newest_pid", lambda: None)  # each step is a look
        monkeypatch.setattr(module, "ReadCalls", Calls)
        monkeypatch.setattr(module, "OpenedFiles", self._opened_files)
        self.bed, self.jobs, self.met = Bed(monkeypatch), [PID], list[int]()
        self.opened = SimpleNamespace(
            seen=lambda some: self.seen.extend(some), ended=self._ended, step=lambda now_ns: None,
        )  # fmt: skip
        self.seen: list[Any] = []
        self.gone: set[int] = set()
        self.ended_ns = 0
        self.poll, self.clients = select.epoll(), self.bed.clients
        found: Any = SimpleNamespace(meet=self._meet)
        opener: Any = SimpleNamespace()
        self.reads = FollowedReads(
            Config.of(), self.bed.core, found, opener, self.bed.ledger, EventPublisher(),
            lambda: self.jobs, -1, "", self.poll,
        )  # fmt: skip
        self.calls: Any = self.reads._calls

    def _opened_files(self, client_of: Any, *_: Any) -> Any:
        self.client_of = client_of
        return self.opened

    def _meet(self, pid: int) -> Any:
        self.met.append(pid)
        return SimpleNamespace(pid=pid)

    def _ended(self, pids: Any) -> None:
        self.gone.update(pids)
        self.ended_ns = CLOCK.now_ns()

    def step(self) -> None:
        self.reads._tree.due_ns = 0
        self.reads.step(self.bed.now)

    def close(self) -> None:
        self.reads.close()
        self.poll.close()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    made = Reads(monkeypatch)
    yield made
    made.close()


def seen(size_bytes: int = 64 * MIB) -> Any:
    return SimpleNamespace(pid=PID, size_bytes=size_bytes, waiting=False)


def test_who_has_come_is_looked_at_until_it_has_gone(service: Reads) -> None:
    service.step()
    assert PID in service.calls.added
    with subprocess.Popen(["sleep", "1000"]) as child:
        service.step()
        assert child.pid in service.calls.added
        child.kill()
    service.step()
    assert child.pid not in service.calls.added and child.pid in service.gone


def test_too_many_are_not_looked_at_and_nothing_else_comes_of_it(service: Reads) -> None:
    service.calls.full = True
    service.step()
    assert service.calls.added == [0]
    service.jobs = []
    service.step()
    assert PID in service.gone


def test_who_could_not_be_looked_at_is_when_there_is_room(service: Reads) -> None:
    service.calls.full = True
    service.step()
    service.calls.full = False
    service.step()
    assert PID in service.calls.added


def test_who_has_a_file_followed_is_heard_of_at_its_end(service: Reads) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        service.reads._exits.watch(child.pid)
        service.reads.step(service.bed.now)
        assert not service.gone
        assert child.stdin is not None
        child.stdin.close()
        ((fd, _),) = service.poll.poll()
        assert service.reads.hears(fd) and not service.reads.hears(fd + 1)
        service.reads.step(service.bed.now)
        assert service.gone == {child.pid}, "though it is not waited for yet"
        service.reads._exits.forget(child.pid)


def test_files_of_who_has_gone_are_closed_in_the_same_turn(
    service: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were to be closed from then on, by a turn that had begun before: 50 ms later."""
    looks: list[int] = []
    monkeypatch.setattr(service.bed.core.table, "look", looks.append)
    service.step()
    assert not looks
    service.jobs = []
    service.step()
    (at_ns,) = looks
    assert at_ns >= service.ended_ns


def test_small_files_are_not_followed_as_large_ones(service: Reads) -> None:
    large, small = seen(), seen(16 * MIB - 1)
    service.calls.sees = [large, small]
    service.step()
    assert service.seen == [large]


def test_a_process_is_that_of_its_agent_if_it_has_one(service: Reads) -> None:
    agent = SimpleNamespace(gone=False)
    client = service.clients[3] = SimpleNamespace(pid=PID, agent=agent)
    assert service.client_of(PID) is client and not service.met
    agent.gone = True
    assert service.client_of(PID) is not client and service.met == [PID]


def test_a_process_that_has_ended_is_none(service: Reads) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert service.client_of(child.pid) is None and not service.met


def test_a_file_that_the_job_writes_is_said_to_be_written(service: Reads) -> None:
    guard = SimpleNamespace(writer=True)
    service.bed.core.table.files[1, 2, 3, 4] = SimpleNamespace(guard=guard)  # type: ignore[assignment]
    assert service.calls.written((1, 2)) and not service.calls.written((1, 3))
    guard.writer = False
    assert not service.calls.written((1, 2))


def test_the_summary_counts_what_was_read_and_names_what_was_left_alone(service: Reads) -> None:
    service.calls.sees = [seen()]
    service.reads._touches.read_bytes = 5 * MIB
    said = service.reads.describe()
    assert len(service.seen) == 1, "what was seen last is in it"
    assert said["left_alone"] == [{"path": "/data/log", "why": "open for writing"}]
    assert (said["read_bytes"], said["looks"], said["lost_sightings"]) == (5 * MIB, 7, 1)
    assert said["small_files"] is None


def test_its_end_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    service = Reads(monkeypatch)
    service.reads._exits.watch(PID)
    service.close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, "the descriptors' end")
    assert service.calls.closed
