# SPDX-License-Identifier: Apache-2.0
"""readers/arbiter.py: of several predictors the one that is surest is asked, and nobody else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from paths import ROOT

from tests.support.file_states import file_of
from uffdprefetch.base.clock import Clock
from uffdprefetch.base.config import Config
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.predict.streams import MIB, Stream
from uffdprefetch.protocol import wire
from uffdprefetch.readers.predictor import Confidence, Predictor
from uffdprefetch.sense.observation import Batch, Observation
from uffdprefetch.service.coordinator import Coordinator
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.reader import UNMAPPED_MAX, Reader, Region, forget_unmapped, reader_of
from uffdprefetch.warm.consumer import Consumer, FileConsumer, PrefetchRange
from uffdprefetch.warm.meter import Meter
from uffdprefetch.warm.scheduler import Device

SIZE = 256 * MIB


class Notes:
    """A scheduler: what was wanted, by whom; whose queue was forgotten."""

    def __init__(self) -> None:
        self.meter, self.device = Meter(), Device()
        self.under_way_bytes = 1  # so that nothing is read to measure the link
        self.wanted: list[tuple[Any, PrefetchRange]] = []
        self.forgotten: list[Any] = []

    def device_of(self, file: Any) -> Device:
        return self.device

    def want(self, consumer: Any, wanted: PrefetchRange) -> None:
        self.wanted.append((consumer, wanted))

    def forget(self, consumer: Any) -> None:
        self.forgotten.append(consumer)


class Oracle(Predictor):
    """A predictor that is as sure as it is told to be, and wants the next MiB each time."""

    name = "oracle"
    policies = frozenset({"auto"})

    def __init__(self) -> None:
        self.sure, self.seen, self.gone = Confidence.NONE, list[Observation](), 0
        self.lost: list[int] = []
        self.more = 0  # times that it has more
        self.consumer, self.at = FileConsumer(0, 7), 0

    def observe(self, batch: Batch, streams: Sequence[Stream | None]) -> bool:
        self.seen += batch.touches
        return False

    def confidence(self, reader: Reader, now_ns: int) -> Confidence:
        return self.sure

    def demand(self, reader: Reader, now_ns: int) -> Iterator[tuple[Consumer, PrefetchRange]]:
        self.at += MIB
        yield self.consumer, PrefetchRange(reader.file, self.at, self.at + MIB)

    def has_more(self, reader: Reader) -> bool:
        self.more -= 1
        return self.more >= 0

    def dismissed(self, reader: Reader) -> None:
        self.gone += 1

    def left(self, reader: Reader) -> None:
        self.lost.append(reader.pid)


class Node:
    """A mapping that is read from its beginning on, and an oracle beside what guesses."""

    def __init__(self, **options: Any) -> None:
        self.now, self.notes, self.oracle = 10**9, Notes(), Oracle()
        notes: Any = self.notes
        clock = Clock(lambda: self.now)
        self.coordinator = Coordinator(Config.of(**options), notes, Ledger(), clock=clock)
        self.coordinator.arbiter.add(self.oracle)
        file = file_of(SIZE)
        file.mappings.attached, file.there = 1, 0
        self.client: Any = SimpleNamespace(
            page_table=SimpleNamespace(is_readable=True, runs=lambda address, length: []),
            rank=0,
            pid=7,
            regions={},
            readers={},
        )
        self.coordinator.mappings.clients[1] = self.client
        self.region = self.maps(file, 1)
        self.at = 0

    def maps(self, file: Any, number: int) -> Region:
        reader = reader_of(self.client, file)
        region = Region(
            number, file, number << 40, SIZE, 0, wire.ServingMode.PAGE_TABLES, reader
        )  # fmt: skip
        self.client.regions[number] = region
        reader.add(region)
        return region

    def reads(self, mib: int) -> None:
        """So much in order, as page tables tell, with a turn of the service after each MiB."""
        for _ in range(mib):
            self.now += 10**7
            seen = Observation(self.at, self.at + MIB, self.now, told=False)
            found = [(self.at, self.at + MIB)]
            self.at += MIB
            self.coordinator.arbiter.observe(Batch(self.region, self.now, [seen], found))
            self.coordinator.plan()

    def by(self) -> set[Any]:
        return {type(consumer).__name__ for consumer, _ in self.notes.wanted}


def test_who_knows_nothing_is_told_and_not_asked() -> None:
    node = Node()
    node.reads(8)
    assert node.by() == {"Head"}
    assert [seen.start for seen in node.oracle.seen] == [n * MIB for n in range(8)]


def test_the_surest_is_asked_alone_and_what_the_others_wanted_is_taken_back() -> None:
    node = Node()
    node.reads(8)
    (walk,) = node.region.reader.table.active()
    (head,) = {consumer for consumer, _ in node.notes.wanted}
    node.notes.wanted.clear()
    node.oracle.sure = Confidence.AWAITS
    node.reads(8)
    assert node.by() == {"FileConsumer"} and len(node.notes.wanted) == 8
    assert node.notes.forgotten.count(head) == 1 and not node.oracle.gone
    assert walk.position_bytes == 16 * MIB, "its walk is followed on"


def test_who_has_more_is_asked_again_though_nothing_is_touched() -> None:
    node = Node()
    node.oracle.sure, node.oracle.more = Confidence.AWAITS, 3
    node.reads(1)
    for _ in range(6):
        node.now += 10**7
        node.coordinator.plan()
    assert len(node.notes.wanted) == 4 and node.coordinator.arbiter.idle


def test_after_a_short_takeover_windows_ask_again_for_what_they_lost() -> None:
    node = Node()
    node.reads(12)
    node.oracle.sure = Confidence.AWAITS
    node.reads(1)
    node.oracle.sure = Confidence.NONE
    node.notes.wanted.clear()
    node.reads(2)
    starts = [wanted.start for _, wanted in node.notes.wanted]
    assert min(starts) <= 15 * MIB, "nothing between the reader and its window is left out"


def test_so_do_fixed_windows() -> None:
    node = Node(policy="fixed", size_bytes=50 * MIB)
    node.oracle.policies = frozenset({"fixed"})
    node.reads(2)
    node.oracle.sure = Confidence.AWAITS
    node.reads(1)
    node.oracle.sure = Confidence.NONE
    node.notes.wanted.clear()
    node.reads(2)
    assert [wanted.start for _, wanted in node.notes.wanted] == [4 * MIB]


def test_a_predictor_is_not_asked_under_another_policy() -> None:
    node = Node(policy="fixed")
    node.oracle.sure = Confidence.KNOWS
    node.reads(8)
    assert node.by() == {"FollowedStream"} and len(node.oracle.seen) == 8
    none = Node(policy="none")
    none.reads(8)
    assert none.notes.wanted == []


def test_one_that_knows_nothing_any_more_is_told_so_and_windows_are_back() -> None:
    node = Node()
    node.oracle.sure = Confidence.AWAITS
    node.reads(4)
    node.oracle.sure = Confidence.NONE
    node.notes.wanted.clear()
    node.reads(8)
    assert node.by() == {"Head"} and node.oracle.gone == 1


def test_a_mapping_that_is_gone_is_nobodys() -> None:
    node = Node()
    node.oracle.sure = Confidence.AWAITS
    node.reads(1)
    node.coordinator.arbiter.due(node.region)
    node.region.reader.remove(node.region)
    node.coordinator.arbiter.unmapped(node.region)
    node.notes.wanted.clear()
    node.coordinator.plan()
    assert node.notes.wanted == [] and node.coordinator.arbiter.idle
    assert node.oracle.lost == []
    node.coordinator.mappings.left(node.client)
    assert node.oracle.lost == [7]


def test_a_file_that_is_mapped_piece_by_piece_has_one_reader() -> None:
    """Each piece is unmapped before the next one is mapped."""
    node = Node()
    file = node.region.file
    node.reads(8)
    for number in (2, 3):
        del node.client.regions[node.region.id]
        node.region.reader.remove(node.region)
        node.coordinator.arbiter.unmapped(node.region)
        node.region = node.maps(file, number)
        node.reads(8)
    (walk,) = node.region.reader.table.active()
    assert (walk.start_bytes, walk.position_bytes) == (0, 24 * MIB)
    asked = IntervalSet()
    for _, wanted in node.notes.wanted:
        asked.add(wanted.start, wanted.end)
    left_out = sum(end - start for start, end in asked.missing(0, 24 * MIB))
    assert left_out <= 6 * MIB, "what has shown that it is read, of each piece"


def test_a_reader_that_was_touched_through_a_mapping_that_is_gone_is_asked_of_by_another() -> None:
    node = Node()
    node.oracle.sure = Confidence.AWAITS
    gone = node.maps(node.region.file, 2)
    seen = Observation(0, MIB, node.now)
    node.coordinator.arbiter.observe(Batch(gone, node.now, [seen]))
    del node.client.regions[2]
    gone.reader.remove(gone)
    node.coordinator.arbiter.unmapped(gone)
    node.coordinator.plan()
    assert node.by() == {"FileConsumer"}


def test_of_files_that_are_not_mapped_the_one_mapped_longest_ago_is_forgotten() -> None:
    client: Any = SimpleNamespace(rank=0, pid=7, readers={})
    files: list[Any] = [SimpleNamespace(key=n, size_bytes=SIZE) for n in range(UNMAPPED_MAX + 1)]
    for file in [*files, files[0]]:
        reader_of(client, file)
    assert [reader.file for reader in forget_unmapped(client)] == [files[1]]


# ---- what is left to the kernel -----------------------------------------------------------------


def near(node: Node, readahead_bytes: int) -> None:
    """Its file lies on a disk at hand, of which the kernel reads so much ahead."""
    node.region.file.call.ahead_bytes = readahead_bytes
    node.client.page_table.runs = lambda address, length: [(address, length)]
    for latency_ns in (900_000, 250_000):
        took: Any = SimpleNamespace(start_ns=0, done_ns=latency_ns)
        node.notes.meter.note_pages(took, 1)


def test_streams_are_left_to_the_kernel_where_its_readahead_suffices() -> None:
    node = Node()
    near(node, 8 * MIB)
    node.reads(64)
    assert not node.notes.wanted
    (said,) = node.coordinator.ledger.degradations
    assert said == "/data: left to the kernel, whose readahead of 8 MiB suffices"


@pytest.mark.parametrize("readahead_bytes", [0, 128 << 10])
def test_and_not_where_it_does_not(readahead_bytes: int) -> None:
    node = Node()
    near(node, readahead_bytes)
    node.reads(64)
    assert node.by() == {"Head"} and not node.coordinator.ledger.degradations


def test_nor_where_the_user_has_chosen_windows() -> None:
    node = Node(policy="fixed", size_bytes=8 * MIB)
    near(node, 8 * MIB)
    node.reads(64)
    assert node.by() == {"FollowedStream"}


def test_nor_of_a_job_that_says_that_it_reads_at_random() -> None:
    """The kernel reads nothing ahead for it, where the advice has reached it."""
    node = Node()
    near(node, 8 * MIB)
    node.region.reads = wire.Stated.RANDOM
    node.reads(64)
    assert node.by() == {"Head"}


def test_and_a_stream_that_leaves_something_out_within_what_a_miss_brings() -> None:
    """That reads the gap as well, and the run behind it."""
    node = Node()
    near(node, 8 * MIB)
    node.reads(4)
    assert not node.notes.wanted
    node.client.page_table.runs = lambda address, length: [(address + length - MIB, MIB)]
    for _ in range(8):
        node.at += MIB
        node.reads(1)
    assert not node.notes.wanted


def test_nobody_but_the_arbiter_asks_for_reading() -> None:
    """Who goes past it is in nobody's charge (readers/arbiter.py, want())."""
    asks = re.compile(r"scheduler\.(want|begin)\(")
    found = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "uffdprefetch").rglob("*.py")
        if asks.search(path.read_text())
    ]
    assert found == ["uffdprefetch/readers/arbiter.py"]
