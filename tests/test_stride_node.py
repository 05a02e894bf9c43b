# SPDX-License-Identifier: Apache-2.0
"""From touches to an order and back to windows, with page tables and an index that are made up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import warnings_fail
from test_stride_records import KIB, MIB, index_of, mapped_by, uneven

from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.node import pagetables, wire
from uffdprefetch.node.files import BLOCK_BYTES
from uffdprefetch.node.ledger import Ledger
from uffdprefetch.node.planned import Plans
from uffdprefetch.node.strided import ATTEMPTS, CLAIM_NS, HOLD_INDEX_NS, HOLD_NS, Strides
from uffdprefetch.progress.streams import Stream

pytestmark = warnings_fail

MS = 1_000_000


class Notes:
    """A scheduler: the streams whose windows were taken away, the ranges that were wanted."""

    def __init__(self) -> None:
        self.forgotten: list[Stream] = []
        self.wanted: list[tuple[int, int]] = []

    def forget(self, stream: Stream) -> None:
        self.forgotten.append(stream)

    def want(self, file: Any, stream: Stream, start: int, end: int, need: int) -> None:
        self.wanted.append((start, end))


class Shelf:
    """Indices: what is put there."""

    def __init__(self) -> None:
        self.index: RecordIndex | None = None
        self.error: str | None = None
        self.asked = 0

    def get(self, file: Any) -> RecordIndex | None:
        self.asked += 1
        return self.index

    def why_not(self, file: Any) -> str | None:
        return self.error


class Node:
    """A file and the ranks of a node that read it."""

    def __init__(self, index: RecordIndex, ranks: int, always: bool) -> None:
        self.index, self.now, self.used = index, 1000 * MS, set[int]()
        self.file = SimpleNamespace(
            key=(1, 2, index.file_bytes, 4), path="/data/records", size_bytes=index.file_bytes,
            block_counts=self._block_counts,
        )  # fmt: skip
        self.clients: list[Any] = []
        self.read: list[list[int]] = [[] for _ in range(ranks)]
        self.tables: dict[int, list[tuple[int, int]]] = {}
        for rank in range(ranks):
            stream = Stream(1, rank, 100 + rank, 0, 0, self.now, self.now, active=True)
            region = SimpleNamespace(
                file=self.file, verdict=wire.Verdict.CHECKPOINTS, detaching=False, stream=stream,
                table=SimpleNamespace(active=lambda stream=stream: [stream], rank=rank),
            )  # fmt: skip
            self.clients.append(SimpleNamespace(rank=rank, pid=100 + rank, regions={1: region}))
        self.scheduler, self.ledger, self.shelf = Notes(), Ledger(), Shelf()
        self.plans = Plans(self.scheduler, self.ledger)  # type: ignore[arg-type]
        self.strides = Strides(
            self.shelf, self.plans, self.scheduler, self.ledger, lambda: self.clients,  # type: ignore[arg-type]
            always,
        )  # fmt: skip
        self.plans.sources.append(self.strides)

    def _block_counts(self, first: int, last: int) -> tuple[int, int, int]:
        return sum(first <= block < last for block in self.used) * BLOCK_BYTES, 0, 0

    def runs(self, client: Any, region: Any, start: int, end: int) -> list[tuple[int, int]]:
        found = self.tables.get(client.pid, [])
        return [(a, n) for a, n in found if a < end and a + n > start]

    def reads(self, rank: int, records: Iterable[int], pass_ms: int = 30) -> None:
        """A rank reads these, and its touch of the last one is told."""
        self.read[rank] += records
        client = self.clients[rank]
        region = client.regions[1]
        table = self.tables[client.pid] = mapped_by(self.index, self.read[rank])
        for start, length in table:
            self.used.update(range(start // BLOCK_BYTES, (start + length - 1) // BLOCK_BYTES + 1))
        (end,) = self.index.extents(self.read[rank][-1])[1]
        stream = region.stream
        self.now += pass_ms * MS
        stream.last_ns, before = self.now, stream.position_bytes
        stream.position_bytes = max(before, int(end))
        ends = [(max(a, before), min(a + n, stream.position_bytes)) for a, n in table]
        found = [(a, b - a) for a, b in ends if a < b]
        stream.saw(stream.position_bytes - before, found)
        self.strides.touch(client, region, stream, self.now)

    def reader(self, rank: int = 0) -> Any:
        return self.plans.reader(self.clients[rank], self.clients[rank].regions[1])

    def holds(self, rank: int = 0) -> bool:
        region = self.clients[rank].regions[1]
        return self.strides.holds(region, region.stream, self.now)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def node(index: RecordIndex, ranks: int = 1, always: bool = False) -> Node:
        made = Node(index, ranks, always)
        monkeypatch.setattr(pagetables, "runs", made.runs)
        return made

    yield node


def equal(count: int = 800) -> RecordIndex:
    return index_of([192 * KIB] * count)


def test_a_rank_that_skips_gets_no_windows_and_then_an_order(make: Any) -> None:
    node = make(equal())
    node.reads(0, range(3, 60, 8))
    assert node.shelf.asked == 1 and node.reader() is None
    assert node.holds() and len(node.scheduler.forgotten) == 1
    node.shelf.index = node.index
    node.reads(0, range(67, 100, 8))
    reader = node.reader()
    assert reader.how == "skipping, record 3 of each 8" and not node.holds()
    assert (reader.walk.items, reader.walk.position) == (100, 13)
    node.plans.plan(reader, SimpleNamespace(latency_seconds=0.0), 64 * MIB)
    theirs = {tuple(int(edge) for edge in pair) for pair in zip(
        *node.index.extents(range(107, 800, 8)), strict=True)}  # fmt: skip
    for start, end in node.scheduler.wanted:
        assert any(start <= a and b <= end <= start + 200 * KIB for a, b in theirs)
    assert sum(b - a for a, b in node.scheduler.wanted) >= 16 * MIB


def test_it_is_followed_by_page_tables_where_no_checkpoint_tells(make: Any) -> None:
    node = make(equal())
    node.shelf.index = node.index
    node.reads(0, range(3, 100, 8))
    reader = node.reader()
    before = reader.stream.position_bytes
    node.reads(0, range(107, 300, 8))
    assert reader.walk.position == 38
    assert reader.stream.position_bytes - before == 25 * 192 * KIB


def test_the_ranks_of_a_node_that_read_all_of_it_keep_their_windows(make: Any) -> None:
    node = make(equal(), ranks=4)
    node.shelf.index = node.index
    for step in range(0, 100, 4):
        for rank in range(4):
            node.reads(rank, [step + rank], pass_ms=1)
    assert not any(node.holds(rank) for rank in range(4))
    assert [node.reader(rank) for rank in range(4)] == [None] * 4
    # one that runs ahead does not make it look otherwise
    node.reads(2, range(102, 200, 4))
    assert not node.holds(2) and node.reader(2) is None


def test_some_ranks_of_many_have_an_order_each(make: Any) -> None:
    node = make(equal(), ranks=4)
    node.shelf.index = node.index
    for step in range(0, 16 * 12, 16):
        for rank in range(4):
            node.reads(rank, [step + rank], pass_ms=10)
    assert [node.reader(rank).how for rank in range(4)] == [
        f"skipping, record {rank} of each 16" for rank in range(4)
    ]


def test_policy_stride_asks_at_once_and_follows_even_where_all_ranks_are_here(make: Any) -> None:
    node = make(equal(), ranks=2, always=True)
    node.strides.mapped(node.clients[0])
    assert node.shelf.asked == 1
    node.shelf.index = node.index
    for step in range(0, 60, 2):
        for rank in range(2):
            node.reads(rank, [step + rank])
    assert [node.reader(rank).skipping.period for rank in range(2)] == [2, 2]


def test_a_contiguous_reader_is_held_by_policy_stride_only_until_it_shows(make: Any) -> None:
    node = make(index_of(uneven(400)), always=True)
    node.shelf.index = node.index
    node.reads(0, [0])
    assert node.holds()
    node.reads(0, range(1, 80))
    assert not node.holds() and node.reader() is None


def test_without_a_format_policy_stride_says_so_once_and_auto_nothing(make: Any) -> None:
    for always in (False, True):
        node = make(equal(), always=always)
        node.shelf.error = "no known format"
        for first in (3, 67, 131):
            node.reads(0, range(first, first + 60, 8))
        assert not node.holds() and node.reader() is None
        assert node.ledger.degradations == [
            "/data/records: --policy stride needs to know the records: no known format;"
            " prefetched by position"
        ] * always  # fmt: skip


def test_waiting_for_an_index_or_a_sequence_has_an_end(make: Any) -> None:
    node = make(equal())
    node.reads(0, range(3, 30, 8))
    assert node.holds()
    region = node.clients[0].regions[1]
    assert node.strides.seeks(region, node.now)
    node.now += CLAIM_NS
    assert node.holds() and not node.strides.seeks(region, node.now)
    node.now += HOLD_INDEX_NS
    assert not node.holds()
    other = make(equal())
    other.shelf.index = other.index
    other.reads(0, [3, 9, 20])
    assert other.holds()
    other.now += HOLD_NS
    assert not other.holds()


def test_a_wrong_guess_is_dropped_without_a_word_and_not_made_for_ever(make: Any) -> None:
    node = make(equal(4000))
    node.shelf.index = node.index
    at = 0
    for attempt in range(ATTEMPTS):
        period = 8 + attempt
        for _ in range(12):
            node.reads(0, range(at, at + 10 * period, period), pass_ms=2000)
            at += 10 * period
            if node.reader() is not None:
                break
        assert node.reader().skipping.period == period
        node.reads(0, range(at, at + 200), pass_ms=2000)  # all of them, now
        at += 200
        assert node.reader() is None
    assert node.ledger.degradations == []
    assert [plan["dropped"] for plan in node.plans.describe()] == ["other records are read"] * 3
    node.reads(0, range(at, at + 200, 8), pass_ms=5000)
    assert node.reader() is None
    assert not node.holds()


def test_the_next_epoch_begins_at_the_beginning(make: Any) -> None:
    node = make(equal(400))
    node.shelf.index = node.index
    node.reads(0, range(3, 100, 8))
    reader = node.reader()
    node.reads(0, range(107, 400, 8))
    assert (reader.epoch, reader.walk.position) == (0, 50)
    client, region = node.clients[0], node.clients[0].regions[1]
    for record in range(3, 60, 8):
        (start,), (end,) = node.index.extents(record)
        node.now += MS
        node.plans.touch(client, region, int(start), int(end), node.now)
    assert (reader.epoch, reader.wrong) == (1, None)
    assert 0 < reader.walk.position < 10


def test_what_is_read_again_does_not_begin_an_epoch(make: Any) -> None:
    """All epochs are alike: it would fit the next one's order as well."""
    node = make(equal(400))
    node.shelf.index = node.index
    node.reads(0, range(3, 150, 8))
    client, region = node.clients[0], node.clients[0].regions[1]
    for record in range(3, 100, 8):
        (start,), (end,) = node.index.extents(record)
        node.plans.touch(client, region, int(start), int(end), node.now)
    assert (node.reader().epoch, node.reader().walk.position) == (0, 19)
