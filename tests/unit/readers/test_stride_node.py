# SPDX-License-Identifier: Apache-2.0
"""From touches to an order and back to windows, with page tables and an index that are made up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import warnings_fail
from planned_readers import Notes
from strided_records import KIB, MIB, index_of, mapped_by, uneven

from tests.support.file_states import file_of
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.predict.randomness import Access
from uffdprefetch.predict.streams import Stream
from uffdprefetch.protocol import wire
from uffdprefetch.readers import strides
from uffdprefetch.readers.known_order import KnownOrders
from uffdprefetch.readers.strides import ATTEMPTS, AWAIT_NS, SURE_BYTES, Strides
from uffdprefetch.sense import pagetables
from uffdprefetch.sense.observation import Batch, Observation
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.reader import Reader, Region, reader_of, readers_of
from uffdprefetch.warm.meter import Meter

pytestmark = warnings_fail

MS = 1_000_000


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

    def __init__(self, index: RecordIndex, ranks: int, policy: str) -> None:
        self.index, self.now = index, 1000 * MS
        self.file = file_of(index.file_bytes, "/data/records")
        self.clients: list[Any] = []
        self.tables = {100 + rank: IntervalSet() for rank in range(ranks)}
        for rank in range(ranks):
            stream = Stream(1, rank, 100 + rank, 0, 0, self.now, self.now, active=True)
            client: Any = SimpleNamespace(rank=rank, pid=100 + rank, regions={}, readers={})
            reader = reader_of(client, self.file)
            reader.table = SimpleNamespace(  # type: ignore[assignment]
                active=lambda stream=stream: [stream] * (stream.position_bytes > 0), stream=stream
            )
            reader.jumps = SimpleNamespace(access=Access.WALKS)  # type: ignore[assignment]
            region = Region(
                1, self.file, 1 << 40, index.file_bytes, 0, wire.ServingMode.CHECKPOINTS, reader
            )
            client.regions[1] = region
            reader.add(region)
            self.clients.append(client)
        scheduler: Any = Notes()
        self.scheduler, self.ledger, self.shelf = scheduler, Ledger(), Shelf()
        self.known_orders = KnownOrders(scheduler, self.ledger, allowed_bytes=lambda _: 64 * MIB)
        self.strides = Strides(
            self.shelf, self.known_orders, self.ledger,
            lambda: readers_of(dict(enumerate(self.clients))), always=policy == "stride",
        )  # fmt: skip
        self.known_orders.sources.append(self.strides)

    def runs(self, region: Region, start: int, end: int) -> list[tuple[int, int]]:
        return [(a, b - a) for a, b in self.tables[region.reader.pid] if a < end and b > start]

    def of(self, rank: int = 0) -> Reader:
        (reader,) = self.clients[rank].readers.values()
        return reader

    def reads(self, rank: int, records: Iterable[int], pass_ms: int = 30) -> None:
        """A rank reads these, and its touch of the last one is told."""
        numbers = list(records)
        client, reader = self.clients[rank], self.of(rank)
        table = self.tables[client.pid]
        for start, length in mapped_by(self.index, numbers):
            table.add(start, start + length)
            self.file.blocks.mark_used(start, start + length)
        (end,) = self.index.extents(numbers[-1])[1]
        stream: Any = reader.table.stream  # type: ignore[attr-defined]
        self.now += pass_ms * MS
        stream.last_ns, before = self.now, stream.position_bytes
        stream.position_bytes = max(before, int(end))
        ends = [(max(a, before), min(b, stream.position_bytes)) for a, b in table]
        found = [(a, b - a) for a, b in ends if a < b]
        stream.passed.saw(stream.position_bytes - before, found)
        seen = Batch(client.regions[1], self.now, [Observation(0, 0, self.now)])
        self.strides.observe(seen, [stream])

    def touches(self, record: int) -> None:
        """A checkpoint tells of it."""
        (start,), (end,) = self.index.extents(record)
        seen = Observation(int(start), int(end), self.now)
        batch = Batch(self.clients[0].regions[1], self.now, [seen])
        self.known_orders.observe(batch, [None])

    def skips(self, ranks: Iterable[int], period: int, steps: range, pass_ms: int = 10) -> None:
        """They read record ``rank`` of each ``period``, in turn."""
        for step in steps:
            for rank in ranks:
                self.reads(rank, [step * period + rank], pass_ms)

    def reader(self, rank: int = 0) -> Any:
        return self.known_orders.order_of(self.of(rank))

    def holds(self, rank: int = 0) -> bool:
        return self.strides.confidence(self.of(rank), self.now) > 0


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def node(index: RecordIndex, ranks: int = 1, policy: str = "stride") -> Node:
        made = Node(index, ranks, policy)
        monkeypatch.setattr(pagetables, "runs", made.runs)
        return made

    yield node


def equal(count: int = 800) -> RecordIndex:
    return index_of([192 * KIB] * count)


def test_a_rank_that_skips_gets_no_windows_and_then_an_order(make: Any) -> None:
    node = make(equal())
    node.reads(0, range(3, 60, 8))
    assert node.shelf.asked == 1 and node.reader() is None
    assert node.holds()
    node.shelf.index = node.index
    node.reads(0, range(67, 100, 8))
    reader = node.reader()
    assert reader.how == "skipping, record 3 of each 8" and not node.holds()
    assert (reader.cursor.items, reader.cursor.position) == (100, 13)
    node.known_orders._followed[node.of()] = reader
    node.scheduler.meter = Meter()
    for consumer, wanted in node.known_orders.demand(node.of(), 0):
        node.scheduler.want(consumer, wanted)
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
    before = reader.consumer.position_bytes
    node.reads(0, range(107, 300, 8))
    assert reader.cursor.position == 38
    assert reader.consumer.position_bytes - before == 25 * 192 * KIB


@pytest.mark.parametrize("policy", ["auto", "stride"])
def test_some_ranks_of_many_have_an_order_each(make: Any, policy: str) -> None:
    node = make(equal(), ranks=4, policy=policy)
    node.shelf.index = node.index
    node.skips(range(4), 16, range(20))
    assert [node.reader(rank).how for rank in range(4)] == [
        f"skipping, record {rank} of each 16" for rank in range(4)
    ]


def test_policy_stride_asks_at_once_and_follows_even_where_all_ranks_are_here(make: Any) -> None:
    node = make(equal(), ranks=2)
    node.strides.mapped(node.clients[0])
    assert node.shelf.asked == 1
    node.shelf.index = node.index
    for step in range(0, 60, 2):
        for rank in range(2):
            node.reads(rank, [step + rank])
    assert [node.reader(rank).skipping.period for rank in range(2)] == [2, 2]


def test_a_contiguous_reader_is_held_by_policy_stride_only_until_it_shows(make: Any) -> None:
    node = make(index_of(uneven(400)))
    node.shelf.index = node.index
    node.reads(0, [0])
    assert node.holds()
    node.reads(0, range(1, 80))
    assert not node.holds() and node.reader() is None


def test_without_a_format_policy_stride_says_so_once_and_auto_nothing(make: Any) -> None:
    for policy in ("auto", "stride"):
        node = make(equal(), policy=policy)
        node.shelf.error = "no known format"
        node.skips([0], 8, range(50), pass_ms=100)
        assert node.shelf.asked == 1 and not node.holds() and node.reader() is None
        assert node.ledger.degradations == [
            "/data/records: --policy stride needs to know the records: no known format;"
            " prefetched by position"
        ] * (policy == "stride")  # fmt: skip


@pytest.mark.parametrize("policy", ["auto", "stride"])
def test_records_that_are_too_small_are_looked_at_once(make: Any, policy: str) -> None:
    node = make(index_of([3 * KIB] * 40_000), policy=policy)
    node.shelf.index = node.index
    node.skips([0], 64, range(250), pass_ms=100)
    assert node.shelf.asked == 1 and not node.holds() and node.reader() is None


def test_waiting_for_an_index_or_a_sequence_has_an_end(make: Any) -> None:
    node = make(equal())
    node.reads(0, range(3, 30, 8))
    assert node.holds()
    node.now += AWAIT_NS
    assert not node.holds()
    other = make(equal())
    other.shelf.index = other.index
    other.reads(0, [3, 9, 20])
    assert other.holds()
    other.now += AWAIT_NS
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
    assert [plan["dropped"] for plan in node.known_orders.describe()] == [
        "other records are read"
    ] * 3
    node.reads(0, range(at, at + 200, 8), pass_ms=5000)
    assert node.reader() is None
    assert not node.holds()


def test_the_next_epoch_begins_at_the_beginning(make: Any) -> None:
    node = make(equal(400))
    node.shelf.index = node.index
    node.reads(0, range(3, 100, 8))
    reader = node.reader()
    node.reads(0, range(107, 400, 8))
    assert (reader.epoch, reader.cursor.position) == (0, 50)
    for record in range(3, 60, 8):
        node.now += MS
        node.touches(record)
    assert (reader.epoch, reader.wrong) == (1, None)
    assert 0 < reader.cursor.position < 10


def test_what_is_read_again_does_not_begin_an_epoch(make: Any) -> None:
    """All epochs are alike: it would fit the next one's order as well."""
    node = make(equal(400))
    node.shelf.index = node.index
    node.reads(0, range(3, 150, 8))
    for record in range(3, 100, 8):
        node.touches(record)
    assert (node.reader().epoch, node.reader().cursor.position) == (0, 19)


# ---- --policy auto ------------------------------------------------------------------------------


def asked(node: Node, records: Iterable[int], pass_ms: int = 10) -> bool:
    """Whether the index has been asked for, once rank 0 has read these; it holds no window back."""
    for record in records:
        node.reads(0, [record], pass_ms)
        assert not node.holds()
    return node.shelf.asked > 0


def test_auto_has_its_windows_until_there_is_a_sequence(make: Any) -> None:
    node = make(equal(), policy="auto")
    upto = SURE_BYTES // (192 * KIB)
    node.strides.mapped(node.clients[0])
    assert not asked(node, range(3, upto, 8))
    assert asked(node, range(upto // 8 * 8 + 3, 2 * upto, 8)) and node.reader() is None
    node.shelf.index = node.index
    asked(node, range(2 * upto // 8 * 8 + 3, 2 * upto + 40, 8))
    assert node.reader().how == "skipping, record 3 of each 8"


def test_a_wrong_guess_of_auto_gives_the_windows_back_at_once(make: Any) -> None:
    node = make(equal(4000), policy="auto")
    node.shelf.index = node.index
    assert asked(node, range(0, 800, 8), pass_ms=100) and node.reader() is not None
    for at in range(800, 1000, 20):
        node.reads(0, range(at, at + 20), pass_ms=100)
        assert not node.holds()
    assert node.reader() is None and node.ledger.degradations == []


def test_auto_asks_for_nothing_where_a_stream_only_begins_with_a_gap(make: Any) -> None:
    node = make(equal(), policy="auto")
    assert not asked(node, [0, *range(160, 800)])
    node = make(equal(), policy="auto")  # nor where there is one now and then
    assert not asked(node, [record for record in range(800) if record % 90 < 60])


def test_auto_asks_for_nothing_where_it_is_no_stream_for_sure(make: Any) -> None:
    node = make(equal(), policy="auto")
    node.of().jumps.access = Access.UNKNOWN  # type: ignore[misc]
    assert not asked(node, range(3, 800, 8))


@pytest.mark.parametrize("known", [True, False])
def test_auto_asks_for_nothing_where_an_order_is_known_or_will_be(make: Any, known: bool) -> None:
    node = make(equal(), policy="auto")
    reader = SimpleNamespace(live=True, heard=SimpleNamespace(active_ns=0))
    node.known_orders.sources.insert(0, SimpleNamespace(
        readers=lambda _: [reader] if known else [],
        pending=lambda _: not known,
    ))  # fmt: skip
    for record in range(3, 800, 8):
        node.reads(0, [record])
    assert node.shelf.asked == 0


def test_auto_leaves_windows_to_the_ranks_of_a_node_that_read_all_of_it(make: Any) -> None:
    node = make(equal(), ranks=4, policy="auto")
    node.shelf.index = node.index
    node.skips(range(4), 4, range(100), pass_ms=1)
    # one that runs ahead does not make it look otherwise
    node.skips([2], 4, range(100, 190), pass_ms=1)
    assert node.shelf.asked == 0
    assert [node.reader(rank) for rank in range(4)] == [None] * 4


def test_auto_waits_for_the_other_ranks_of_the_node_to_begin(make: Any) -> None:
    node = make(equal(), ranks=4, policy="auto")
    node.skips([0], 4, range(150))
    assert node.shelf.asked == 0
    for rank in range(1, 4):  # they were not to read it
        node.of(rank).regions.clear()
    node.skips([0], 4, range(150, 200))
    assert node.shelf.asked > 0


def test_auto_knows_what_other_ranks_read_that_nobody_has_told_of(make: Any) -> None:
    """Their touches come late, or never, where they are far behind the walk's furthest."""
    node = make(equal(), ranks=2, policy="auto")
    for at in range(0, 800, 40):
        node.reads(0, range(at, at + 40, 2), pass_ms=1)
        node.reads(1, range(at + 1, at + 40, 2), pass_ms=1)
        node.file.blocks.flags = bytearray(len(node.file.blocks.flags))
    assert node.shelf.asked == 0


def test_looks_do_not_judge_an_order_that_was_inferred(make: Any) -> None:
    """They are compared with it anyway, and a look over a large file comes late."""
    node = make(equal(4000))
    node.shelf.index = node.index
    node.reads(0, range(3, 100, 8))
    reader = node.reader()
    ahead = [tuple(int(edge[0]) for edge in node.index.extents(at)) for at in range(2403, 4000, 8)]
    for at in range(0, len(ahead), 10):
        reader.mapped(ahead[at : at + 10], node.now)
    assert (reader.dropped, reader.wrong) == (None, None) and reader.live


def test_who_has_touched_more_stretches_than_are_remembered_is_not_sought_an_order(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make(equal())
    node.shelf.index = node.index
    monkeypatch.setattr(strides, "ENTRIES_MAX", 5)
    node.skips([0], 4, range(60))
    assert node.reader() is None
    monkeypatch.setattr(strides, "ENTRIES_MAX", 400)
    node.skips([0], 4, range(60, 80))
    assert node.reader() is not None
