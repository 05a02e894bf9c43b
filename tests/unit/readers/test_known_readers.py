# SPDX-License-Identifier: Apache-2.0
"""What the engine does for a reader whose order is to become known, and for one whose order is."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import warnings_fail

from tests.support.file_states import file_of
from uffdprefetch.base.clock import Clock
from uffdprefetch.base.config import Config
from uffdprefetch.predict.bounds import DECIDE_NS
from uffdprefetch.predict.randomness import Access
from uffdprefetch.predict.streams import MIB, Stream
from uffdprefetch.protocol import wire
from uffdprefetch.readers.known_order import KnownOrders, LastHeard
from uffdprefetch.sense import pagetables
from uffdprefetch.sense.observation import Batch
from uffdprefetch.sense.pagetables import LOOK_SLOWEST_NS, SILENT_NS
from uffdprefetch.service.coordinator import Coordinator
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.reader import Reader, Region, reader_of
from uffdprefetch.warm.consumer import PrefetchRange
from uffdprefetch.warm.meter import Meter
from uffdprefetch.warm.scheduler import Device

pytestmark = warnings_fail

SIZE = 1 << 30
#: For so long an order is waited for (docs/plans.md).
AWAIT_NS = 2_000_000_000
BLOCK = 1 << 16


class Notes:
    """A scheduler: what was wanted, whose queue was forgotten."""

    def __init__(self) -> None:
        self.meter, self.device = Meter(), Device()
        for size in (MIB, BLOCK, BLOCK, BLOCK):  # 300 MB/s, 5 ms
            took: Any = SimpleNamespace(
                bytes=size, resident_bytes=0, sensor=0, took_ns=5_000_000 + int(size / 0.3)
            )
            self.meter.note_alone(took)
        self.under_way_bytes = 1  # so that nothing is read to measure it
        self.wanted: list[tuple[int, int]] = []
        self.forgotten: list[str] = []

    def device_of(self, file: Any) -> Device:
        return self.device

    def want(self, consumer: Any, wanted: PrefetchRange) -> None:
        self.wanted.append((wanted.start, wanted.end))

    def forget(self, consumer: Any) -> None:
        self.forgotten.append(type(consumer).__name__)


class Orders(KnownOrders):
    """Of the one reader."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.known: Any = None
        self.awaited = False
        self.planned = 0
        self.touches = 0

    def order_of(self, reader: Reader) -> Any:
        return self.known

    def pending(self, reader: Reader) -> bool:
        return self.awaited

    def demand(self, reader: Reader, now_ns: int) -> Any:
        self.planned += 1
        return []

    def observe(self, batch: Batch, streams: Any) -> bool:
        self.touches += sum(seen.told for seen in batch.touches)
        return False


class Node:
    """A process that has mapped a file, in a service where nothing else happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 10**9
        scheduler: Any = Notes()
        clock, ledger = Clock(lambda: self.now), Ledger()
        self.coordinator = Coordinator(Config(), scheduler, ledger, clock=clock)
        self.scheduler = scheduler
        self.orders = Orders(scheduler, ledger, clock, begins=self.coordinator.arbiter.add)
        self.coordinator.use_known_orders(self.orders)
        self.orders.begin()
        file = file_of(SIZE, "/data/records")
        file.mappings.attached, file.there = 1, 0
        self.client: Any = SimpleNamespace(
            rank=0,
            pid=100,
            regions={},
            readers={},
            page_table=SimpleNamespace(is_readable=False, runs=lambda address, length: []),
        )
        self.reader = reader_of(self.client, file)
        self.region = Region(
            id=1, file=file, address=1 << 40, length_bytes=SIZE, offset_bytes=0,
            mode=wire.ServingMode.PAGE_TABLES, reader=self.reader,
        )  # fmt: skip
        self.client.regions[1] = self.region
        self.reader.add(self.region)
        self.coordinator.mappings.clients[1] = self.client

    def walks(self, density: float, length: int = 16 * MIB, at: int = 0) -> Stream:
        """A walk of the reader has gone over so much, of which it has touched a part."""
        stream = Stream(1, 0, 100, at, at + length, self.now, self.now, active=True)
        touched = int(length * density)
        stream.passed.saw(length, [(at, touched)])
        self.reader.table.streams = [stream]
        self.coordinator.arbiter.observe(Batch(self.region, self.now, [], [(at, at + touched)]))
        return stream

    def plan(self, pass_ns: int = 0) -> None:
        """What happens in a turn of the service after something was touched."""
        self.now += pass_ns
        for region in self.reader.regions.values():
            self.coordinator.arbiter.due(region)
        self.coordinator.plan()


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(monkeypatch)


def test_a_chance_stream_gets_no_window_while_the_order_is_awaited(node: Node) -> None:
    node.orders.awaited = True
    node.walks(density=0.02)
    node.plan()
    node.plan(AWAIT_NS - DECIDE_NS)
    assert node.scheduler.wanted == []
    node.plan(DECIDE_NS)
    assert node.scheduler.wanted, "but not for ever"


def test_one_that_leaves_little_out_gets_its_window(node: Node) -> None:
    node.orders.awaited = True
    node.walks(density=0.9)
    node.plan()
    assert node.scheduler.wanted[0][0] == -(-int(16 * MIB * 0.9) // BLOCK) * BLOCK


def test_a_stream_that_may_be_anything_waits_too(node: Node) -> None:
    """Its first touches: nothing is known of what lies between."""
    node.orders.awaited = True
    node.walks(1.0, 4096)
    node.plan()
    assert node.scheduler.wanted == []
    node.orders.awaited = False
    node.plan(DECIDE_NS)
    assert node.scheduler.wanted


def test_what_is_awaited_anew_is_waited_for_anew(node: Node) -> None:
    node.walks(density=0.02)
    node.orders.awaited = True
    node.plan()
    node.orders.awaited = False
    node.plan(AWAIT_NS)
    assert node.scheduler.wanted
    node.scheduler.wanted.clear()
    node.orders.awaited = True
    node.plan(DECIDE_NS)
    node.walks(density=0.02, at=512 * MIB)
    node.plan(DECIDE_NS)
    assert node.scheduler.wanted == []
    node.orders.awaited = False
    node.plan(DECIDE_NS)
    node.walks(density=0.04, at=512 * MIB)
    node.plan(DECIDE_NS)
    assert node.scheduler.wanted, "and when it is not any more what it does counts"


def known(inferred: bool = False, touched_ns: int = 0) -> Any:
    return SimpleNamespace(
        inferred=inferred,
        heard=LastHeard(touched_ns, touched_ns, touched_ns),
        dropped=None,
        trial=None,
        asks_on=None,
    )


def test_windows_of_before_are_taken_away_once(node: Node) -> None:
    node.walks(density=0.9)
    node.plan()
    assert node.scheduler.wanted and not node.scheduler.forgotten
    asked = len(node.scheduler.wanted)
    node.orders.known = known()
    node.plan()
    node.plan(DECIDE_NS)
    assert node.scheduler.forgotten.count("Head") == 1 and node.orders.planned == 2
    assert len(node.scheduler.wanted) == asked


def test_its_touches_are_no_streams(node: Node) -> None:
    node.orders.known = known()
    node.plan()
    event = SimpleNamespace(region=1, page=512, time_ns=node.now, handle_ns=1, tid=100)
    node.coordinator.events.take(node.client, [event])  # type: ignore[list-item]
    assert node.reader.table.streams == [] and node.orders.touches == 1
    assert (2 * MIB, 2 * MIB + 4096) in list(node.region.scan.mapped)


def test_what_is_mapped_between_two_places_later_is_found_by_a_later_look(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, mapped, told = 4096, [0, 64, 128], []
    monkeypatch.setattr(pagetables, "runs", lambda *_: [(at * page, page) for at in sorted(mapped)])
    monkeypatch.setattr(node.coordinator.arbiter, "observe", lambda batch: told.extend(batch.found))
    node.orders.known = known()
    node.plan()
    for more in ([], [32], [32]):
        mapped = sorted({*mapped, *more})
        node.now = node.region.scan.due_ns = node.now + 10**9
        node.coordinator.look(node.now)
    assert [start // page for start, _ in told] == [0, 64, 128, 32]


@pytest.mark.parametrize("has_a_plan", [False, True])
def test_only_who_jumps_about_without_a_plan_is_told_to_need_one(
    node: Node, has_a_plan: bool
) -> None:
    node.orders.known = known(touched_ns=1)
    if has_a_plan:
        node.plan()
    node.orders.known = None  # it has come to its end
    node.plan(DECIDE_NS)
    for place in range(64):
        at = place * 37 % 64 * 16 * MIB
        node.reader.jumps.saw(at, at + 1, node.now + place)
    assert node.reader.access is Access.JUMPS
    node.coordinator.ledger.note_streams(node.reader, lambda walk: 0)
    told = [line for line in node.coordinator.ledger.degradations if "needs a plan" in line]
    assert len(told) == (not has_a_plan)


def test_who_ends_before_its_plan_was_of_use_is_not_told_to_need_one(node: Node) -> None:
    node.orders.known = known(touched_ns=0)
    node.plan()
    assert not node.reader.order.last_progress_ns and node.reader.order.followed
    for place in range(64):
        at = place * 37 % 64 * 16 * MIB
        node.reader.jumps.saw(at, at + 1, node.now + place)
    node.coordinator.ledger.note_streams(node.reader, lambda walk: 0)
    assert not [line for line in node.coordinator.ledger.degradations if "needs a plan" in line]


@pytest.mark.parametrize("dropped", [None, "of 16 MiB that were read 16 were not to come"])
def test_only_where_the_order_was_a_wrong_one_what_was_touched_before_counts(
    node: Node, dropped: str | None
) -> None:
    source = random.Random(1)
    order = node.orders.known = known()
    node.plan()
    for _ in range(100):
        node.now += 10**6
        page = source.randrange(SIZE // 4096)
        event = SimpleNamespace(region=1, page=page, time_ns=node.now, handle_ns=1, tid=100)
        node.coordinator.events.take(node.client, [event])  # type: ignore[list-item]
    node.orders.known, order.dropped = None, dropped
    node.plan(DECIDE_NS)
    assert (node.reader.access is Access.JUMPS) == (dropped is not None)


def test_one_whose_order_was_inferred_from_its_stream_is_watched_on(node: Node) -> None:
    node.orders.known = known(inferred=True)
    node.plan()
    event = SimpleNamespace(region=1, page=512, time_ns=node.now, handle_ns=1, tid=100)
    node.coordinator.events.take(node.client, [event])  # type: ignore[list-item]
    assert len(node.reader.table.streams) == 1


def test_a_known_order_is_looked_at_now_and_then_and_the_last_touch_is_not_lost(
    node: Node,
) -> None:
    node.orders.known = known()
    node.plan()
    node.plan(DECIDE_NS - 1)
    assert node.orders.planned == 1
    assert node.coordinator.due_ns == node.now + 1, "the service has to wake up by itself"
    node.now += 1
    node.coordinator.plan()
    assert node.orders.planned == 2 and node.coordinator.due_ns is None


def test_an_order_that_has_come_is_asked_for_at_once(node: Node) -> None:
    """A file of many small ones is read in less than DECIDE_NS."""
    node.orders.known = known()
    node.plan()
    node.coordinator.arbiter.orders_came()
    node.coordinator.plan()
    assert node.orders.planned == 2


@pytest.mark.parametrize(("heard", "every"), [(True, LOOK_SLOWEST_NS), (False, SILENT_NS)])
def test_its_page_table_is_looked_at_often_only_when_nothing_else_tells(
    node: Node, heard: bool, every: int
) -> None:
    node.orders.known = known()
    node.plan(10**9)
    node.orders.known.heard.progress_ns = node.now if heard else 0
    node.plan(DECIDE_NS)
    node.region.scan.due_ns = node.now
    node.coordinator.look(node.now)
    assert node.region.scan.due_ns == node.now + every


@pytest.mark.parametrize(("apart_bytes", "places"), [(8 * MIB, 1), (80 * MIB, 2)])
def test_streams_near_each_other_share_one_window(
    node: Node, apart_bytes: int, places: int
) -> None:
    """As ranks do that slice each tensor: what lies ahead of one lies ahead of all."""
    one = node.walks(1.0)
    at = one.position_bytes + apart_bytes
    node.reader.table.streams.append(Stream(2, 0, 100, 0, at, node.now, node.now, active=True))
    node.coordinator.arbiter.due(node.region)
    node.coordinator.plan()
    assert node.coordinator.windows.places.all == places
