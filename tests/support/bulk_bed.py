# SPDX-License-Identifier: Apache-2.0
"""A clock of our own and workers that only take notes, for readers/bulk.py. A test module says
``pytest_plugins = ("bulk_bed",)`` for the fixtures."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from uffdprefetch.base.clock import Clock
from uffdprefetch.base.config import Config
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.native import uffd
from uffdprefetch.predict.bulk import Pace
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers import file_stream
from uffdprefetch.readers.arbiter import Arbiter
from uffdprefetch.readers.bulk import Bulk
from uffdprefetch.readers.file_stream import Room
from uffdprefetch.readers.predictor import Observation, Predictor
from uffdprefetch.readers.stated import StatedRanges
from uffdprefetch.readers.walks import Walks
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import reopen
from uffdprefetch.state.publisher import EventPublisher
from uffdprefetch.state.reader import Reader, forget_unmapped, reader_of, readers_of
from uffdprefetch.state.region import Region
from uffdprefetch.warm.limits import Limits, TokenBucket
from uffdprefetch.warm.placement import CheckpointPlacer
from uffdprefetch.warm.scheduler import Scheduler

MIB = 1 << 20
MS = 1_000_000
BLOCK = 65536
SIZE = 256 * MIB
#: What one miss brings.
AROUND = 128 << 10
#: One read, and 300 MB/s.
LATENCY_NS, NS_A_BYTE = 1 * MS, 1e9 / 300e6


class Followed(Predictor):
    """In charge of those whose order is said to be known."""

    name = "known order"
    policies = frozenset({"auto"})

    def confidence(self, reader: Reader, now_ns: int) -> float:
        return float(reader.order.followed)

    def demand(self, reader: Reader, now_ns: int) -> tuple[()]:
        return ()


class Bed:
    """A clock, workers whose reads are done when it is told so, and the engine's part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, paced: bool = False, **config: Any) -> None:
        """``paced``: what is touched brings what lies around it, and streams keep pace with that;
        else touches bring nothing, and streams wait for nobody."""
        self.now = 10**12
        self.there: dict[int, IntervalSet] = {}  # by descriptor
        self.same: dict[int, int] = {}  # another descriptor of a file -> the first
        self.looked: list[tuple[int, int]] = []  # at what is there
        self.sent: list[tuple[int, int]] = []
        self.most_bytes = 0
        self.latency_ns = LATENCY_NS
        self._under_way: list[tuple[int, int, int, int]] = []
        self.ledger = Ledger()
        settings = Config(**config)
        self.scheduler = Scheduler(self, TokenBucket(None, MIB), 4 * MIB)  # type: ignore[arg-type]
        self.layout = CheckpointPlacer(settings, self.scheduler, self.ledger)
        clock = Clock(lambda: self.now)
        self.limits = Limits(settings.budget_bytes)
        self.room = Room(settings, self.layout, self.limits)
        self.stated = StatedRanges(settings, self.scheduler, self.ledger, self.room, clock)
        self.bulk = Bulk(self.scheduler, self.ledger, self.room, self.stated, clock)
        self.clients: dict[int, Any] = {}
        tap = EventPublisher()
        self.walks = Walks(settings.policy, self.scheduler, self.ledger, tap, self.layout, clock)
        self.arbiter = Arbiter(
            settings.policy, self.scheduler, self.layout, self.walks, clock,
            lambda: readers_of(self.clients),
        )  # fmt: skip
        self.arbiter.add(self.bulk)
        self.arbiter.add(Followed())
        self._random = random.Random(3)
        self.paced = paced
        if not paced:
            monkeypatch.setattr(Pace, "may_stream_bytes", lambda *_: None)
        monkeypatch.setattr(file_stream, "missing_bytes", self.missing)

    def of(self, fd: int) -> IntervalSet:
        return self.there.setdefault(self.same.get(fd, fd), IntervalSet())

    def missing(
        self, file: FileState, start: int = 0, end: int | None = None, pooled: object = None
    ) -> int:
        end = file.size_bytes if end is None else end
        self.looked.append((start, end))
        gaps = self.of(file.fd).missing(start, end)
        return sum(b - a for a, b in gaps)

    # -- workers

    def submit(self, number: int, fd: int, start: int, length: int, **_: Any) -> bool:
        if length:
            self.sent.append((start, length))
        self._under_way.append((number, fd, start, length))
        return True

    def start(self) -> None:
        pass

    def reap(self) -> list[uffd.WarmResult]:
        done = []
        for number, fd, start, length in self._under_way:
            began = self.now
            self.now += self.latency_ns + int(length * NS_A_BYTE)
            absent = sum(b - a for a, b in self.of(fd).missing(start, start + length))
            self.of(fd).add(start, start + length)
            done.append(
                uffd.WarmResult(
                    id=number, submit_ns=began, start_ns=began, done_ns=self.now,
                    resident_bytes=length - absent, bytes=absent, copied=0,
                    method=uffd.WARM_READAHEAD, chunk_bytes=MIB, error=0,
                )
            )  # fmt: skip
        self._under_way.clear()
        return done

    # -- the engine

    def region(self, file: FileState, rank: int = 0, pid: int = 7) -> Region:
        """A mapping of a process, with nothing in its page table."""
        client = self.clients.setdefault(
            pid, SimpleNamespace(rank=rank, pid=pid, readers={}, pagemap_fd=0)
        )
        mapped = client.mapped = getattr(client, "mapped", IntervalSet())
        client.touched_runs = lambda address, length: [
            (max(a, address), min(b, address + length) - max(a, address))
            for a, b in mapped
            if a < address + length and b > address
        ]
        file.attached += 1
        self.same[file.page_fd] = file.fd
        verdict = ServingMode.CHECKPOINTS if file.pooled is None else ServingMode.POOL
        reader, number = reader_of(client, file), file.attached
        address = (file.fd + 1) << 40
        region = Region(number, file, address, file.size_bytes, 0, verdict, reader)
        reader.add(region)
        return region

    def unmap(self, region: Region) -> None:
        region.file.attached -= 1
        region.reader.remove(region)
        if not region.reader.regions:
            for old in forget_unmapped(region.reader.client):
                self.arbiter.left(old)
        self.arbiter.unmapped(region)

    def touch(self, region: Region, at: int) -> bool:
        """One miss."""
        self.now += 2 * MS
        if self.paced:
            around = at - at % AROUND
            self.of(region.file.fd).add(around, around + AROUND)
        client: Any = region.reader.client
        client.mapped.add(region.address_of(at), region.address_of(at + BLOCK))
        region.file.mark_used(at, at + BLOCK)
        self.arbiter.observe(region, Observation(at, at + BLOCK, self.now))
        self.turn()
        return region.reader.random

    def order(self, region: Region, known: bool) -> None:
        """The reader's order becomes known; or is not followed any more."""
        order: Any = SimpleNamespace(inferred=False)
        region.reader.order.reader, region.reader.order.followed = order, known
        self.arbiter.due(region)
        self.arbiter.plan()

    def turn(self) -> None:
        """Turns of the service, of which the second is woken by reads that are done."""
        for _ in range(2):
            self.scheduler.reap()
            self.arbiter.plan()
            self.stated.step(self.now)
            self.bulk.step(self.now)
            self.scheduler.pump(self.now)
        waiting = self.scheduler.queued_bytes + self.scheduler.under_way_bytes
        self.most_bytes = max(self.most_bytes, waiting)

    def crops(self, region: Any, count: int) -> None:
        for _ in range(count):
            self.touch(region, self._random.randrange(region.file.size_bytes // BLOCK) * BLOCK)

    def rest(self, turns: int = 400, step_ns: int = MS) -> None:
        """Turns in which nobody reads."""
        for _ in range(turns):
            self.now += step_ns
            self.turn()

    def said(self, file: FileState) -> dict[str, Any]:
        found = self.bulk.describe(file.path)
        assert found is not None
        return found


def opened(path: Path) -> FileState:
    """A file as the service holds it; if there is none, it is made of holes."""
    if not path.exists():
        path.touch()
        os.truncate(path, SIZE)
    state = FileState.open(reopen(os.open(path, os.O_RDONLY)), str(path))
    state.method = uffd.WARM_READAHEAD
    return state


@pytest.fixture
def file(tmp_path: Path) -> Iterator[FileState]:
    state = opened(tmp_path / "tokens.bin")
    yield state
    state.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[FileState]:
    state = opened(tmp_path / "validation.bin")
    yield state
    state.close()


def until(bed: Bed, file: FileState, state: str) -> Any:
    """A region whose reader has just brought its file into a state, by one miss after another."""
    region = bed.region(file)
    for _ in range(600):
        bed.crops(region, 1)
        found = bed.bulk.describe(file.path)
        if found is not None and found["state"] == state:
            return region
    raise AssertionError(f"never {state}: {bed.bulk.describe(file.path)}")


def streaming(bed: Bed, file: FileState) -> Any:
    """A region of which the file is just being streamed."""
    region = until(bed, file, "streamed")
    assert bed.missing(file) > SIZE // 2
    return region


def ended(bed: Bed, file: FileState) -> None:
    """Nothing of it waits any more, and nothing more is asked for."""
    bed.rest(1)
    assert not bed.scheduler.queued_bytes
    before = len(bed.sent)
    bed.rest()
    assert len(bed.sent) == before and bed.missing(file)
