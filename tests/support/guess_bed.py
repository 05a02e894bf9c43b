# SPDX-License-Identifier: Apache-2.0
"""A service without a kernel: its real core (service/coordinator.py) under a clock of our own, with
a storage of 300 MB/s and 1 ms whose reads are done when it is told so. A test module says
``pytest_plugins = ("guess_bed",)`` for the fixtures."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from uffdprefetch.base.clock import Clock
from uffdprefetch.base.config import Config
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.native import uffd
from uffdprefetch.native.memory_limits import Limits
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers.ahead import Ahead
from uffdprefetch.readers.predictor import Confidence, Predictor, RangeSource
from uffdprefetch.readers.stated import StatedRanges
from uffdprefetch.sense.observation import Batch, Observation
from uffdprefetch.service.coordinator import Coordinator
from uffdprefetch.state import processes
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import FLAGS, reopen
from uffdprefetch.state.pending import PendingMappings
from uffdprefetch.state.reader import Reader, Region, reader_of
from uffdprefetch.warm.scheduler import Scheduler
from uffdprefetch.warm.token_bucket import TokenBucket

MIB = 1 << 20
MS = 1_000_000
BLOCK = 65536
SIZE = 256 * MIB
#: What one miss brings.
AROUND = 128 << 10
#: One read, and 300 MB/s.
LATENCY_NS, NS_A_BYTE = 1 * MS, 1e9 / 300e6


S = TypeVar("S", bound=RangeSource)


def source(core: Coordinator, kind: type[S]) -> S:
    """Of who has ranges read in a core, the one of this kind; nothing, where --policy has none."""
    found: Any = [one for one in core.arbiter._listeners.steps if isinstance(one, kind)]
    return found[0] if found else SimpleNamespace()  # type: ignore[no-any-return]


class Followed(Predictor):
    """In charge of those whose order is said to be known."""

    name = "known order"
    policies = frozenset({"auto"})

    def confidence(self, reader: Reader, now_ns: int) -> Confidence:
        return Confidence.KNOWS if reader.order.followed else Confidence.NONE

    def demand(self, reader: Reader, now_ns: int) -> tuple[()]:
        return ()


class Bed:
    """The clock, the storage, and what page tables tell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.now = 10**12
        self.there: dict[int, IntervalSet] = {}  # by descriptor
        self.same: dict[int, int] = {}  # another descriptor of a file -> the first
        self.looked: list[tuple[int, int]] = []  # at what is there
        self.sent: list[tuple[int, int]] = []
        self.misses = 0
        self.again = False  # what is touched is found by a look that goes on
        self.latency_ns, self.ns_a_byte = LATENCY_NS, NS_A_BYTE
        self._under_way: list[tuple[int, int, int, int]] = []
        self._random = random.Random(3)
        workers: Any = self
        self.ledger, self.scheduler = Ledger(), Scheduler(workers, TokenBucket(None, MIB), 4 * MIB)
        opener: Any = SimpleNamespace(open=self._open, run=lambda *_: False)
        settings, clock = Config.of(**config), Clock(lambda: self.now)
        self.limits = Limits(settings.budget_bytes)
        self.core = Coordinator(
            settings, self.scheduler, self.ledger, opener=opener, clock=clock, limits=self.limits
        )
        self.ahead, self.stated = source(self.core, Ahead), source(self.core, StatedRanges)
        self.advice = self.core.attachments._advice
        self.windows, self.arbiter = self.core.windows, self.core.arbiter
        self.arbiter.add(Followed())
        self.clients: Any = self.core.mappings.clients
        monkeypatch.setattr(processes, "run_delay_ns", lambda pid: 0)
        monkeypatch.setattr(
            FileState, "resident_bytes", lambda file, *part: self._resident(file, *part)
        )

    def of(self, file: FileState) -> IntervalSet:
        """What is in memory of it."""
        return self.there.setdefault(self.same.get(file.opened.fd, file.opened.fd), IntervalSet())

    def missing(self, file: FileState, start: int = 0, end: int | None = None) -> int:
        end = file.size_bytes if end is None else end
        return sum(b - a for a, b in self.of(file).missing(start, end))

    def _resident(self, file: FileState, start: int, length: int) -> int:
        self.looked.append((start, start + length))
        return length - self.missing(file, start, start + length)

    @staticmethod
    def _open(what: Any, then: Any) -> None:
        try:
            found: Any = reopen(os.open(what() if callable(what) else what, FLAGS))
        except OSError as error:
            found = error
        then(found)

    # -- workers

    def submit(self, number: int, fd: int, start: int, length: int, **_: Any) -> bool:
        if length:
            self.sent.append((start, length))
        self._under_way.append((number, self.same.get(fd, fd), start, length))
        return True

    def start(self) -> None:
        pass

    def reap(self) -> list[uffd.WarmResult]:
        done = []
        for number, fd, start, length in self._under_way:
            began, there = self.now, self.there.setdefault(fd, IntervalSet())
            self.now += self.latency_ns + int(length * self.ns_a_byte)
            absent = sum(b - a for a, b in there.missing(start, start + length))
            there.add(start, start + length)
            done.append(
                uffd.WarmResult(
                    id=number, submit_ns=began, start_ns=began, done_ns=self.now,
                    resident_bytes=length - absent, bytes=absent, copied=0,
                    method=uffd.WARM_READAHEAD, chunk_bytes=MIB, error=0,
                )
            )  # fmt: skip
        self._under_way.clear()
        return done

    # -- the job

    def region(self, file: FileState, rank: int = 0, pid: int = 7) -> Region:
        """A mapping of a process, with nothing in its page table."""
        client = self.clients.setdefault(
            pid, SimpleNamespace(
                rank=rank, pid=pid, readers={}, regions={}, pending=PendingMappings(),
                page_table=SimpleNamespace(is_readable=True),
            ),
        )  # fmt: skip
        mapped = client.mapped = getattr(client, "mapped", IntervalSet())
        client.page_table.runs = lambda address, length: [
            (max(a, address), min(b, address + length) - max(a, address))
            for a, b in mapped
            if a < address + length and b > address
        ]
        file.mappings.attached += 1
        self.same[file.opened.page_fd] = file.opened.fd
        mode = ServingMode.CHECKPOINTS if file.pooled is None else ServingMode.POOL
        reader, number = reader_of(client, file), file.mappings.attached
        address = (file.opened.fd + 1) << 40
        region = Region(number, file, address, file.size_bytes, 0, mode, reader)
        client.regions[number] = region
        reader.add(region)
        return region

    def unmap(self, region: Region) -> None:
        """What a process has mapped of a file is gone from its page table, too."""
        client: Any = region.reader.client
        client.mapped.remove(region.address, region.address + region.length_bytes)
        self.core.mappings.detached(client, region.id)

    def touch(self, region: Region, at: int, length: int = BLOCK) -> None:
        """[at, at + length) is read, 2 ms later, and brings what the kernel reads around a miss."""
        self.now += 2 * MS
        file, client = region.file, region.reader.client
        low, high = at // AROUND * AROUND, -(-(at + length) // AROUND) * AROUND
        self.misses += self.missing(file, at, at + length) > 0
        self.of(file).add(low, min(high, file.size_bytes))
        told = region.mode == ServingMode.POOL
        if not told:
            mapped: Any = client
            mapped.mapped.add(region.address_of(at), region.address_of(at + length))
            file.blocks.mark_used(at, at + length)
            region.scan.mapped.add(at, at + length)
        batch = Batch(region, self.now, [], [] if told else [(at, at + length)])
        batch.touches.append(Observation(at, at + length, self.now, True, told, again=self.again))
        self.arbiter.observe(batch)
        self.turn()

    def walk(self, region: Region, start: int, end: int, step: int = AROUND) -> None:
        """[start, end) in order."""
        for at in range(start, end, step):
            self.touch(region, at, min(step, end - at))

    def visits(self, region: Region, count: int) -> None:
        """So many blocks, one after the other, from all over the file."""
        for _ in range(count):
            self.touch(region, self._random.randrange(region.file.size_bytes // BLOCK) * BLOCK)

    def order(self, region: Region, known: bool) -> None:
        """The reader's order becomes known; or is not followed any more."""
        region.reader.order.followed = known
        self.arbiter.due(region)
        self.arbiter.plan()

    def turn(self) -> None:
        """Turns of the service, of which the second is woken by reads that are done."""
        for _ in range(2):
            self.scheduler.reap()
            self.arbiter.plan()
            self.arbiter.step(self.now)
            self.scheduler.pump(self.now)

    def rest(self, turns: int = 400, step_ns: int = MS) -> None:
        """Turns in which nobody reads."""
        for _ in range(turns):
            self.now += step_ns
            self.turn()

    # -- what came of it

    @property
    def sent_bytes(self) -> int:
        return sum(length for _, length in self.sent)

    def read(self) -> IntervalSet:
        """What was asked of the storage."""
        found = IntervalSet()
        for start, length in self.sent:
            found.add(start, start + length)
        return found

    def said(self, file: FileState) -> dict[str, Any]:
        """Of one that is read here and there."""
        found = self.arbiter.describe_file(file.path)["whole"]
        assert found is not None
        return found


def opened(path: Path, size: int = SIZE) -> FileState:
    """A file as the service holds it; if there is none, it is made of holes."""
    if not path.exists():
        path.touch()
        os.truncate(path, size)
    state = FileState.open(reopen(os.open(path, os.O_RDONLY)), str(path))
    state.call.method, state.call.ahead_bytes = uffd.WARM_READAHEAD, AROUND
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


def streaming(bed: Bed, file: FileState, rank: int = 0, pid: int = 7) -> Region:
    """A region by whose misses the file has just begun to be read whole."""
    region = bed.region(file, rank, pid)
    for _ in range(3000):
        bed.visits(region, 1)
        found = bed.arbiter.describe_file(file.path)["whole"]
        if found is not None and found["state"] == "streamed":
            return region
    raise AssertionError(f"never streamed: {bed.arbiter.describe_file(file.path)}")


def ended(bed: Bed, file: FileState) -> None:
    """Nothing of it waits any more, and nothing more is asked for."""
    bed.rest(1)
    assert not bed.scheduler.queued_bytes
    before = len(bed.sent)
    bed.rest()
    assert len(bed.sent) == before and bed.missing(file)
