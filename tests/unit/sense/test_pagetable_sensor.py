# SPDX-License-Identifier: Apache-2.0
"""sense/pagetables.py: how far a look goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.file_states import file_of
from uffdprefetch.base.clock import Clock
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.predict.bounds import CPU_PART
from uffdprefetch.predict.checkpoints import Span
from uffdprefetch.predict.streams import SETTLED_BYTES, Stream
from uffdprefetch.predict.window import Window
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.sense import pagetables
from uffdprefetch.sense.observation import Batch
from uffdprefetch.sense.pagetables import (
    GAPS_MAX,
    LOOK_CREDIT_NS,
    LOOK_FIRST_NS,
    LOOK_SLOWEST_NS,
    POLL_FASTEST_NS,
    RECENT_NS,
    PagetableScanner,
)
from uffdprefetch.state.region_state import ScanState

MIB, MS, SIZE, NOW = 1 << 20, 1_000_000, 1 << 30, 10**12


class Node:
    """A mapping of which a scanner looks at parts; nothing is mapped there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there: list[tuple[int, int]] = []  # what the next look finds
        self.looked: list[tuple[int, int]] = []
        self.news: list[list[tuple[int, int]]] = []  # that its reader has heard of
        self.cpu = self.cost = self.frontier = 0

        def new_touches(region: Any, start: int, end: int, tell: Any) -> tuple[list[Any], int]:
            self.looked.append((start, end))
            self.cpu += self.cost
            found = [one for one in self.there if start <= one[0] < end]
            for one in found:
                tell(*one)
            return found, 0

        monkeypatch.setattr(pagetables, "new_touches", new_touches)
        self.reader: Any = SimpleNamespace(
            order=SimpleNamespace(announced=False, followed=False), pid=7,
            file=None, looked=lambda region, news: self.news.append(news),
        )  # fmt: skip
        self.region: Any = SimpleNamespace(
            reader=self.reader, streams=[], file=file_of(SIZE),
            mode=ServingMode.CHECKPOINTS, offset_bytes=0,
            span=Span(0, SIZE, 4096), scan=ScanState(whole_ns=NOW - MS, news_ns=NOW),
        )  # fmt: skip
        windows: Any = SimpleNamespace(of=lambda _: Window(16 * MIB, self.frontier, 4 * MIB))
        publisher: Any = SimpleNamespace(active=False)
        clock = Clock(lambda: NOW, lambda: self.cpu)
        self.batches: list[Batch] = []
        self.scanner = PagetableScanner(windows, publisher, self.batches.append, clock)
        self.everywhere = PagetableScanner(
            windows, publisher, self.batches.append, clock, lambda *_: self.pace
        )
        self.pace: int | None = None

    def walk(self, at: int = 2 * SETTLED_BYTES, frontier: int = 0, rate: float = 0.0) -> Stream:
        """Of its reader, which was seen there just now."""
        stream = Stream(1, 0, 7, 0, at, NOW - MS, NOW - MS, active=True)
        self.frontier, stream.rate.bytes_per_second = frontier, rate
        self.region.streams = [stream]
        return stream

    def look(self, now: int = NOW, crowd: int = 1) -> int:
        """In how long the next one is due."""
        self.scanner.look(self.region, now, 1, crowd)
        return int(self.region.scan.due_ns - now)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(monkeypatch)


def test_its_reader_hears_what_a_look_has_found(node: Node) -> None:
    """Where nothing had been read ahead of that, it tells what a miss brings."""
    node.look()
    assert not node.news
    node.there = [(MIB, 2 * MIB)]
    node.look()
    assert node.news == [[(MIB, 2 * MIB)]]


@pytest.mark.parametrize("walks", [True, False])
def test_a_stream_narrows_the_look(node: Node, walks: bool) -> None:
    """A reader that jumps about has none (readers/reader_streams.py)."""
    if walks:
        node.walk()
    due = node.look()
    assert ((0, SIZE) in node.looked) is not walks
    assert (due == LOOK_FIRST_NS) is not walks


def test_a_stream_of_unknown_pace_is_looked_at_soon(node: Node) -> None:
    """All of its window may be gone before the next look, and storage rest."""
    stream = node.walk()
    assert node.look() == POLL_FASTEST_NS
    stream.last_ns = NOW - 10**9
    assert node.look() == RECENT_NS, "it stands"


def test_the_next_look_is_before_the_end_of_what_was_asked_for(node: Node) -> None:
    node.walk(32 * MIB, 512 * MIB, rate=40 * MIB)
    assert node.look() == 50 * MS, "an eighth of the window"
    node.walk(32 * MIB, 34 * MIB, rate=40 * MIB)
    assert node.look() == 25 * MS, "half way to the end of it"


@pytest.mark.parametrize("direction", [1, -1])
def test_where_a_stream_has_ended_its_reader_is_sought_everywhere(
    node: Node, direction: int
) -> None:
    """Who has come to the end of a file may begin at its beginning; no walk tells."""
    ends = SIZE if direction > 0 else 0
    stream = node.walk(ends - direction * MIB)
    stream.start_bytes, stream.direction = SIZE - ends, direction
    node.look()
    assert (0, SIZE) not in node.looked
    stream.position_bytes = ends - direction * 4096
    assert node.look() == LOOK_FIRST_NS
    assert (0, SIZE) in node.looked


def test_a_reader_that_begins_late_is_seen_late_by_a_part_of_that(node: Node) -> None:
    for waited_ms in (10, 320, 10_000):
        due = node.look(NOW + waited_ms * MS)
        assert due == min(LOOK_SLOWEST_NS, max(LOOK_FIRST_NS, waited_ms * MS // 16))


def test_looks_cost_a_part_of_a_core_but_for_the_first(node: Node) -> None:
    stream = node.walk(SETTLED_BYTES - 1)  # not sure: every LOOK_FIRST_NS
    node.cost = MS // 2
    dues = [node.look(NOW + turn * LOOK_FIRST_NS) for turn in range(20)]
    rested = dues.index(CPU_PART * 2 * node.cost)
    spent = 2 * node.cost * rested
    assert LOOK_CREDIT_NS - 2 * node.cost < spent <= LOOK_CREDIT_NS + 20 * LOOK_FIRST_NS
    assert set(dues[:rested]) == {LOOK_FIRST_NS}
    stream.last_ns = NOW + 10**9
    assert node.look(NOW + 10**9) == LOOK_FIRST_NS, "it has rested"


def test_a_crowd_that_nobody_reads_is_looked_at_for_a_part_of_a_core(node: Node) -> None:
    """A job that maps a thousand files reads one of them at a time."""
    node.cost = MS // 50
    assert node.look(crowd=10) == LOOK_FIRST_NS
    assert node.look(crowd=200) == CPU_PART * 200 * node.cost
    assert node.look(crowd=1000) == LOOK_SLOWEST_NS
    node.region.scan.mapped.add(0, MIB)
    assert node.look(crowd=1000) == LOOK_FIRST_NS, "one that is read"


def test_who_reads_ahead_everywhere_hears_of_what_is_behind_a_stream(node: Node) -> None:
    node.walk(32 * MIB, rate=40 * MIB)
    node.region.scan.mapped.add(0, 32 * MIB)
    node.look()
    assert all(start >= 31 * MIB for start, _ in node.looked)
    node.scanner, node.there = node.everywhere, [(512 * MIB, 513 * MIB)]
    node.region.scan.mapped.add(600 * MIB, 700 * MIB)
    assert node.look() == LOOK_FIRST_NS, "it may be the first touch of many"
    assert {(32 * MIB, 600 * MIB), (700 * MIB, SIZE)} <= set(node.looked)
    assert not any(start < 31 * MIB for start, _ in node.looked), "what is mapped costs nothing"


def test_a_mapping_of_many_touches_is_looked_at_in_one(node: Node) -> None:
    node.scanner = node.everywhere
    for place in range(100):
        node.region.scan.mapped.add(place * MIB, place * MIB + 4096)
    node.look()
    assert (0, SIZE) in node.looked and len(node.looked) < 4


def test_who_is_read_ahead_for_says_when_the_next_look_is_due(node: Node) -> None:
    node.scanner = node.everywhere
    node.walk(32 * MIB, 512 * MIB, rate=40 * MIB)
    for node.pace, due in ((30 * MS, 30 * MS), (MS, POLL_FASTEST_NS), (None, RECENT_NS)):
        assert node.look() == due


@pytest.mark.parametrize("runs", [2, GAPS_MAX, 2 * GAPS_MAX])
def test_of_many_gaps_no_list_is_made_and_one_look_goes_over_all(
    node: Node, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    for at in range(runs):
        node.region.scan.mapped.add((2 * at + 1) * MIB, (2 * at + 2) * MIB)
    listed, missing = [], IntervalSet.missing

    def noted(self: IntervalSet, start: int, end: int) -> list[tuple[int, int]]:
        listed.append((start, end))
        return missing(self, start, end)

    monkeypatch.setattr(IntervalSet, "missing", noted)
    node.everywhere.look(node.region, NOW, 1)
    many = runs >= GAPS_MAX  # one lies before the first, and one after the last
    assert len(node.looked) == (1 if many else runs + 1)
    assert len(listed) == (0 if runs > GAPS_MAX + 1 else 1)
