# SPDX-License-Identifier: Apache-2.0
"""KnownOrders: whose a mapping is, what becomes of its touches, when that ends."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import warnings_fail
from planned_readers import (
    RECORD,
    SIZE,
    Notes,
    Orders,
    follows,
    found,
    order,
    place,
    reads,
    region_of,
)
from walked_orders import MIB, PAGE

from tests.support.file_states import file_of
from uffdprefetch.base.clock import Clock
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers import known_order
from uffdprefetch.readers.known_order import KnownOrders, PlannedReader
from uffdprefetch.readers.predictor import Confidence
from uffdprefetch.sense.observation import Batch, Observation
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.warm.consumer import PrefetchRange
from uffdprefetch.warm.meter import Meter

pytestmark = warnings_fail


class Needs(Notes):
    """... and for when they were wanted, by whom."""

    def __init__(self) -> None:
        super().__init__()
        self.needs: list[tuple[Any, Any, int]] = []
        self.meter: Any = None

    def want(self, consumer: Any, wanted: PrefetchRange) -> None:
        super().want(consumer, wanted)
        self.needs.append((wanted.file, consumer, wanted.need or 0))


class Owner:
    """See planned.Belongs: all mappings are of these readers."""

    def __init__(self, *readers: PlannedReader, pending: bool = False) -> None:
        self.its, self._pending = [*readers], pending
        self.told: list[Any] = []

    def readers(self, reader: Any) -> list[PlannedReader]:
        return self.its

    def pending(self, reader: Any) -> bool:
        return self._pending

    def mapped(self, client: Any) -> None:
        self.told.append(client)


class Service:
    """KnownOrders of some readers, and a mapping."""

    def __init__(
        self, *readers: PlannedReader, mode: ServingMode = ServingMode.CHECKPOINTS
    ) -> None:
        self.scheduler, self.ledger = Needs(), Ledger()
        self.known_orders = KnownOrders(
            self.scheduler, self.ledger, allowed_bytes=lambda _: 64 * MIB
        )  # type: ignore[arg-type]
        self.scheduler.meter = Meter()
        self.client: Any = SimpleNamespace(rank=0, pid=7, readers={})
        self.region = region_of(self.client, readers[0].file if readers else file_of(SIZE), mode)
        self.known_orders.sources.append(Owner(*readers))
        for reader in readers:
            self.known_orders.add(reader)

    def touch(self, start: int, end: int, now: int) -> None:
        seen = Observation(start, end, now)
        self.known_orders.observe(Batch(self.region, now, [seen]), [None])

    def scanned(self, found: list[tuple[int, int]], now: int) -> bool:
        return self.known_orders.observe(Batch(self.region, now, [], found), [])

    def touches(self, records: Iterable[int], now: int = 1) -> None:
        for record in records:
            self.touch(record * RECORD, record * RECORD + PAGE, now)

    def reader(self) -> PlannedReader | None:
        return self.known_orders.order_of(self.region.reader)

    def demands(self, reader: PlannedReader, now: int = 0) -> None:
        """What the arbiter does with the one in charge."""
        self.known_orders._followed[self.region.reader] = reader
        for consumer, wanted in self.known_orders.demand(self.region.reader, now):
            self.scheduler.want(consumer, wanted)


def test_of_several_readers_the_one_that_went_on_last_has_the_mapping() -> None:
    first, second = follows(Orders(range(100, 200))), follows(Orders(range(500, 600)))
    service = Service(first, second)
    first.heard.active_ns, second.heard.active_ns = 2, 3
    assert service.reader() is second
    first.said(1, 4)
    assert service.reader() is first
    first.dropped = "wrong"
    assert service.reader() is second


def test_a_mapping_is_of_the_first_source_that_knows_an_order_for_it() -> None:
    first, second = follows(Orders(range(100, 200))), follows(Orders(range(500, 600)))
    service = Service(first)
    service.known_orders.sources.append(Owner(second))
    first.heard.active_ns, second.heard.active_ns = 2, 3
    assert service.reader() is first
    first.ended = True
    assert service.reader() is second


def test_an_order_may_come_from_any_source() -> None:
    service = Service()
    assert not service.known_orders.pending(service.region.reader)
    service.known_orders.sources.append(Owner(pending=True))
    assert service.known_orders.pending(service.region.reader)
    service.known_orders.mapped(service.client)
    told = [source.told for source in service.known_orders.sources]  # type: ignore[attr-defined]
    assert told == [[service.client], [service.client]]


def test_a_touch_of_a_planned_reader_moves_it() -> None:
    reader = follows(Orders(range(100, 200)))
    service = Service(reader)
    service.touches(range(100, 103), now=4)
    assert place(reader) == (0, 3) and reader.heard.touched_ns == 4
    reader.ended = True
    service.touches([103])
    assert place(reader) == (0, 3)


@pytest.mark.parametrize("mode", [ServingMode.CHECKPOINTS, ServingMode.PAGE_TABLES])
def test_a_dropped_order_is_told_of_once_and_leaves_nothing_wanted(mode: ServingMode) -> None:
    reader = follows(Orders(range(100, 200)), rank=5)
    service = Service(reader, mode=mode)
    known_orders, wrong = service.known_orders, (2000 * RECORD, 2300 * RECORD)
    for _ in range(2):
        if mode == ServingMode.PAGE_TABLES:
            service.scanned([wrong], reader.heard.touched_ns)
        else:
            service.touch(*wrong, 3)
    assert service.scheduler.forgotten == [reader.consumer] and service.reader() is None
    (line,) = service.ledger.degradations
    assert line.startswith("/data/records: rank 5: the order known from a test is not followed")
    assert line.endswith(str(reader.dropped))
    assert [plan["dropped"] for plan in known_orders.describe()] == [reader.dropped]


@pytest.mark.parametrize("mode", [ServingMode.CHECKPOINTS, ServingMode.PAGE_TABLES])
def test_a_look_tells_at_once_also_where_a_checkpoint_has_just_told(mode: ServingMode) -> None:
    reader = follows(Orders(range(100, 200)))
    service = Service(reader, mode=mode)
    now = reader.heard.touched_ns
    assert service.scanned(found(range(100, 104)), now)
    assert place(reader) == (0, 4)
    assert not service.scanned([], now)


def test_in_the_pool_a_look_waits_while_faults_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_order, "ENTRIES_MAX", 3)
    reader = follows(Orders(range(100, 200)))
    service = Service(reader, mode=ServingMode.POOL)
    service.touches([100], now=10**12)
    later = 10**12 + 100_000_000  # 0.1 s
    reader.said(2, later - 1)  # no touch
    assert not service.scanned(found([101, 103, 104, 105]), later - 1)
    assert place(reader) == (0, 2) and reader.seen == found([103, 104, 105])
    reader.seen = found([102, 103, 104])
    assert service.scanned([], later)
    assert place(reader) == (0, 5)


def test_what_a_reader_needs_is_wanted_in_its_streams_coordinate() -> None:
    reader = follows(Orders(range(3000, 1000, -2)))
    service = Service(reader)
    service.demands(reader)
    assert service.scheduler.wanted == [], "its order has not come"
    reader.look()
    service.demands(reader)
    wanted, needs = service.scheduler.wanted, service.scheduler.needs
    assert needs == [(reader.file, reader.consumer, need) for _, _, need in needs]
    least = [need for _, _, need in needs]
    assert least[0] == 0 and least == sorted(least) and max(least) >= 8 * MIB
    few = sum(end - start for start, end in wanted)
    reader.consumer.feedback.boost = 3.0
    service.demands(reader)
    assert sum(end - start for start, end in wanted) > 1.5 * few


def test_a_lookahead_that_has_grown_is_asked_for_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handed_out = {}
    for at_once in (MIB, 64 * MIB):
        monkeypatch.setattr(known_order, "AT_ONCE_BYTES", at_once)
        reader = follows(Orders(range(3000, 0, -1)))
        service = Service(reader)
        walk, sent = reader.look(), [0]
        assert walk is not None
        while len(sent) < 2 or sent[-1] > sent[-2]:
            service.demands(reader)
            sent.append(walk.sent_bytes)
        assert reader.asks_on is None, "nothing more is to be had: nobody asks on"
        handed_out[at_once] = sent
    gradually, at_once_all = handed_out.values()
    assert len(at_once_all) == 3, "one call, and one more that had nothing to add"
    assert max(b - a for a, b in pairwise(gradually)) < at_once_all[-1] / 3
    assert gradually[-1] >= 16 * MIB


def test_of_what_is_in_the_page_cache_nothing_is_asked_for() -> None:
    reader = follows(Orders(range(3000, 0, -1)))
    reader.file.cache.all = cached = SimpleNamespace(answer=True)
    cached.ask = lambda _clock: cached.answer
    service = Service(reader)
    assert reader.look() is not None
    service.demands(reader)
    assert service.scheduler.wanted == [] and reader.asks_on is None
    reads(reader, range(3000, 2900, -1))
    cached.answer = False
    service.demands(reader)
    assert max(end for _, end in service.scheduler.wanted) == 2901 * RECORD, "from where it is"


def test_what_is_kept_back_of_a_lookahead_one_process_asks_for_though_nothing_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_order, "AT_ONCE_BYTES", 4 * MIB)
    reader = follows(Orders(range(3000, 0, -1)))
    service = Service(reader)
    one, orders = service.region.reader, service.known_orders
    other = region_of(SimpleNamespace(rank=0, pid=8, readers={}), reader.file).reader
    walk = reader.look()
    service.demands(reader)
    orders._followed[other] = reader
    assert walk is not None and walk.sent_bytes < 12 * MIB
    assert orders.has_more(one) and not orders.has_more(other)
    while orders.has_more(one):
        service.demands(reader)
    assert walk.sent_bytes >= 16 * MIB
    del orders._followed[one]
    assert not orders.has_more(one)


def test_a_reader_that_is_removed_is_told_of_and_wants_nothing_more() -> None:
    reader, other = follows(Orders(range(100, 200))), follows(Orders(range(500, 600)))
    service = Service(reader)
    service.touches(range(100, 103))
    service.known_orders.add(other)
    assert other.live
    for _ in range(2):
        service.known_orders.remove(reader)
    assert service.known_orders.all == [other] and reader.ended and not reader.live
    assert service.scheduler.forgotten == [reader.consumer]
    assert [plan["read_items"] for plan in service.known_orders.describe()] == [3, 0]


def test_the_summary_has_whose_order_has_come_and_the_last_that_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_order, "FILES_MAX", 2)
    waits = follows(Orders(epochs=1))
    service = Service(waits)
    assert service.known_orders.describe() == []
    for rank in range(4):
        service.known_orders.add(reader := follows(Orders(range(100, 200)), rank))
        service.known_orders.remove(reader)
    assert [plan["rank"] for plan in service.known_orders.describe()] == [2, 3]


# ---- an order that the job announces ------------------------------------------------------------


class Announced(Orders):
    exact = True


def read_on(service: Service, reader: PlannedReader, records: Iterable[int]) -> None:
    """The job says that it has read on, and a scan finds these records mapped."""
    region, mapped = service.region, found(records)
    service.demands(reader)
    for start, end in mapped:
        region.scan.mapped.add(start, end)
    reader.said(len(mapped) + place(reader)[1], 1)
    region.scan.known_ns = 2
    service.scanned(mapped, 2)


@pytest.mark.parametrize("right", [True, False])
def test_an_announced_order_is_wrong_when_what_is_prefetched_for_it_is_not_read(
    right: bool,
) -> None:
    reader = follows(Announced(range(2000)))
    service = Service(reader)
    service.known_orders.confidence(service.region.reader, 1)
    for first in range(0, 1600, 100):
        read_on(service, reader, range(first, first + 100) if right else range(4000 - first, 4096))
        if reader.dropped:
            break
    assert (reader.dropped is None) == right
    if not right:
        assert "ranges that were prefetched for it were touched" in str(reader.dropped)
        assert first * RECORD <= 2 * 64 * MIB
        assert service.scheduler.forgotten == [reader.consumer]


def test_touches_alone_do_not_make_it_wrong() -> None:
    """Where it is, is told exactly; what is read beside it is no sign."""
    reader = follows(Announced(range(100, 200)))
    service = Service(reader)
    service.touches(range(2000, 2300))
    assert reader.dropped is None


# ---- what was read before the order came --------------------------------------------------------


def test_what_was_touched_until_the_order_came_counts() -> None:
    source = Orders(epochs=1)
    reader = follows(source)
    service = Service(reader)
    service.known_orders.sources = [Owner(reader, pending=True)]
    seen, state = service.region.reader, service.region.reader.order
    service.scanned(found(range(50)), 1)
    assert not state.early, "before anybody has said that there is one"
    assert service.known_orders.confidence(seen, 2) is not Confidence.KNOWS
    apart = range(100, 4000, 40)
    service.scanned(found(apart[:30]), 3)
    service.scanned(found(apart[30:44]), 4)
    source.come[0] = order(apart)
    assert service.known_orders.confidence(seen, 5) is Confidence.KNOWS
    assert place(reader) == (0, 44) and not state.early
    service.demands(reader)
    assert service.scheduler.wanted[0][0] == apart[44] * RECORD


def test_of_what_was_touched_before_an_order_only_the_newest_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_order, "ENTRIES_MAX", 6)
    service = Service()
    service.known_orders.sources = [Owner(pending=True)]
    service.known_orders.confidence(service.region.reader, 1)
    service.scanned(found(range(5)), 2)
    service.scanned(found(range(5, 9)), 3)
    assert service.region.reader.order.early == found(range(3, 9))


# ---- where storage is near ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", [ServingMode.PAGE_TABLES, ServingMode.POOL])
def test_an_order_in_which_nothing_is_saved_is_left_to_the_kernel(mode: ServingMode) -> None:
    """But in the pool, from which all is read."""
    reader = follows(Orders(range(100, 2000)))
    reader.file.cache.all = SimpleNamespace(ask=lambda clock: False)  # type: ignore[assignment]
    service = Service(reader, mode=mode)
    service.known_orders.clock = Clock(lambda: 0, lambda: 0)
    reader.look()
    service.demands(reader)
    before, state = len(service.scheduler.wanted), service.region.reader.order
    assert before and not state.left_until_ns
    reader.consumer.feedback.came(1 << 30, 0, 1e-4)
    service.known_orders.clock = Clock(lambda: 0, lambda: 10**9)
    service.touches(range(100, 120))
    service.demands(reader, now=1)
    left = mode is not ServingMode.POOL
    assert bool(state.left_until_ns) is left
    assert (reader.consumer in service.scheduler.forgotten) is left
    assert (len(service.scheduler.wanted) == before) is left
    assert bool(service.ledger.noted.all) is left


def test_what_was_found_of_one_order_holds_for_the_next() -> None:
    first, then = follows(Orders(range(100, 2000))), follows(Orders(range(100, 2000)))
    service = Service(first, then)
    service.known_orders.clock = Clock(lambda: 0, lambda: 0)
    for reader in (first, then):
        reader.file.cache.all = SimpleNamespace(ask=lambda clock: False)  # type: ignore[assignment]
        reader.look()
    service.region.reader.order.left_until_ns = 100
    service.demands(then, now=99)
    assert not service.scheduler.wanted
    service.demands(then, now=100)
    assert service.scheduler.wanted
