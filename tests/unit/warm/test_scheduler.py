# SPDX-License-Identifier: Apache-2.0
"""Which extent goes to storage next, with a pool that only takes notes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from uffdprefetch.base import file_systems
from uffdprefetch.base.cache_call import choose
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.base.record import replace
from uffdprefetch.native import uffd
from uffdprefetch.predict.storage import Storage
from uffdprefetch.predict.streams import Stream
from uffdprefetch.readers.fixed_windows import FollowedStream
from uffdprefetch.state.files import FileState
from uffdprefetch.state.opening import reopen
from uffdprefetch.warm.consumer import OrderConsumer, PrefetchRange, Priority
from uffdprefetch.warm.depth import MAX_SECONDS
from uffdprefetch.warm.meter import Meter
from uffdprefetch.warm.scheduler import (
    GUESSED_EXTENT_BYTES,
    READAHEAD_EXTENT_BYTES,
    Scheduler,
    _cells,
)
from uffdprefetch.warm.token_bucket import TokenBucket

MIB = 1 << 20
NOW = 10**12


class Notes:
    """A pool: (start, length) of each job in order; finish() lets all of them have been read."""

    def __init__(self, came_share: float = 1.0, **more: int) -> None:
        """``came_share``: of what was asked for; ``more``: of the results."""
        self.came_share, self.more = came_share, more
        self.methods: list[int] = []
        self.sent: list[tuple[int, int]] = []
        self._under_way: list[tuple[int, int, int]] = []
        self.took_ns = 7_000_000

    def submit(
        self, number: int, fd: int, start: int, length: int, method: int = 0, **_: Any
    ) -> bool:
        self.sent.append((start, length))
        self.methods.append(method)
        self._under_way.append((number, length, method))
        return True

    def start(self) -> None:
        pass

    def reap(self) -> list[uffd.WarmResult]:
        done = [
            uffd.WarmResult(
                id=number, submit_ns=NOW, start_ns=NOW, done_ns=NOW + self.took_ns,
                resident_bytes=0, bytes=length, copied=0, method=method or uffd.WARM_READAHEAD,
                chunk_bytes=MIB, error=0, asked_bytes=length,
                came_bytes=int(length * self.came_share),
                **self.more,
            )
            for number, length, method in self._under_way
        ]  # fmt: skip
        self._under_way.clear()
        return done


class PoolNotes:
    """The pool's own queue."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def submit(self, job_id: int, file: int, offset: int, length: int, **_: Any) -> bool:
        return self.notes.submit(job_id, file, offset, length)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[FileState]:
    path = tmp_path / "records"
    with open(path, "wb") as sparse:
        sparse.truncate(1 << 30)
    state = FileState.open(reopen(os.open(path, os.O_RDONLY)), str(path))
    yield state
    state.close()


def reader(number: int, position: int, rate: float) -> FollowedStream:
    stream = Stream(number, number, 1, position - 64 * MIB, position, 1, NOW, active=True)
    stream.rate.bytes_per_second = rate
    return FollowedStream(stream)


def test_a_rank_that_has_waited_is_not_served_less_for_it(file: FileState) -> None:
    """Its measured rate is low because it waited; by rates it would fall behind further."""
    notes = Notes()
    scheduler = Scheduler(notes, TokenBucket(None, MIB), 4 * MIB)  # type: ignore[arg-type]
    places = (100 * MIB, 500 * MIB, 800 * MIB)
    for number, (place, rate) in enumerate(zip(places, (300e6, 40e6, 150e6), strict=True)):
        stream = reader(number, place, rate)
        assert scheduler.want(stream, PrefetchRange(file, place, place + 40 * MIB)) == 40 * MIB
    while scheduler.queued_bytes:
        scheduler.pump(NOW)
        scheduler.reap()
    got = dict.fromkeys(places, 0)
    for start, length in notes.sent:
        place = max(p for p in places if p <= start)
        got[place] += length
        assert max(got.values()) - min(got.values()) <= READAHEAD_EXTENT_BYTES * 2
    assert set(got.values()) == {40 * MIB}


def scheduler_of(notes: Notes, **more: Any) -> Scheduler:
    return Scheduler(notes, TokenBucket(None, MIB), 4 * MIB, **more)  # type: ignore[arg-type]


def run_through(scheduler: Scheduler) -> None:
    while scheduler.queued_bytes:
        scheduler.pump(NOW)
        scheduler.reap()


def test_what_is_held_back_waits_and_keeps_nobody_else_waiting(file: FileState) -> None:
    """Bytes of a window that other nodes keep (service/cluster.py)."""
    notes, asked, held = Notes(), list[tuple[int, ...]](), list[int | None]((5, 0))

    def hold(*where: int) -> int | None:
        asked.append(where)
        return held[0] if where[1] == 100 * MIB else None

    scheduler = scheduler_of(notes, defer=hold)
    file.pooled = SimpleNamespace(
        pool=PoolNotes(notes), number=7, in_flight=IntervalSet(), absent=lambda *_: True
    )  # type: ignore[assignment]
    try:
        one, two = reader(0, 100 * MIB, 1e8), reader(1, 500 * MIB, 1e8)
        scheduler.want(one, PrefetchRange(file, 100 * MIB, 116 * MIB, pooled=True))
        scheduler.want(two, PrefetchRange(file, 500 * MIB, 516 * MIB, pooled=True))
        assert scheduler.pump(NOW) == 5, "it says when to look again"
        assert asked[0] == (7, 100 * MIB, 102 * MIB, 116 * MIB)
        assert {start // (100 * MIB) for start, _ in notes.sent} == {5}
        held[0] = 0
        scheduler.forget(two)
        scheduler.reap()
        assert scheduler.pump(NOW) == 0, "until readers have moved"
        known = OrderConsumer(2, NOW)
        scheduler.want(known, PrefetchRange(file, 100 * MIB, 101 * MIB, need=0, pooled=True))
        scheduler.pump(NOW)
        assert (100 * MIB, MIB) in notes.sent, "what is known to be read is not held"
        held[0] = None
        scheduler.reap()
        scheduler.pump(NOW)
        assert (102 * MIB, 2 * MIB) in notes.sent
    finally:
        file.pooled = None


def test_what_was_held_back_until_its_reader_was_beyond_it_is_not_read(file: FileState) -> None:
    """It does not hold up what lies before the reader, either."""
    notes = Notes()
    scheduler = scheduler_of(notes, defer=lambda _part, start, *_: 0 if start < 104 * MIB else None)
    file.pooled = SimpleNamespace(
        pool=PoolNotes(notes), number=7, in_flight=IntervalSet(), absent=lambda *_: True
    )  # type: ignore[assignment]
    try:
        one = reader(0, 100 * MIB, 1e8)
        scheduler.want(one, PrefetchRange(file, 100 * MIB, 108 * MIB, pooled=True))
        scheduler.pump(NOW)
        assert not notes.sent
        one.stream.position_bytes = 103 * MIB
        scheduler.pump(NOW)
        assert not notes.sent, "it has not passed all of what is held back"
        one.stream.position_bytes = 104 * MIB
        for _ in range(4):
            scheduler.pump(NOW)
            scheduler.reap()
        assert [start for start, _ in notes.sent] == [104 * MIB, 106 * MIB]
    finally:
        file.pooled = None


# ---- devices ------------------------------------------------------------------------------------


class Deaf(Notes):
    """A pool in which reads of one device never end, nor begin when so many are queued."""

    def __init__(self, deaf: int, most: int = 1024) -> None:
        super().__init__()
        self.deaf, self.most, self.queued = deaf, most, 0

    def submit(
        self, number: int, fd: int, start: int, length: int, method: int = 0, **how: Any
    ) -> bool:
        if how["device"] != self.deaf:
            return super().submit(number, fd, start, length, method)
        self.queued += 1
        return self.queued <= self.most


@pytest.fixture
def elsewhere(tmp_path: Path, file: FileState) -> Iterator[FileState]:
    """A file of another device, as far as is said."""
    state = FileState.open(reopen(os.open(file.path, os.O_RDONLY)), file.path)
    state.key = (state.key[0] + 1, *state.key[1:])
    yield state
    state.close()


@pytest.mark.parametrize("most", [1024, 0], ids=["never ends", "is not taken"])
@pytest.mark.parametrize("priority", [Priority.NEEDED, Priority.BACKGROUND])
def test_a_device_that_does_not_answer_holds_up_no_other(
    file: FileState, elsewhere: FileState, most: int, priority: Priority
) -> None:
    """Though its reader stands nearer to what is missing, and as much as ever is read at a time."""
    notes = Deaf(elsewhere.key[0], most)
    notes.took_ns = int(1e9 * MAX_SECONDS)
    scheduler = scheduler_of(notes)
    deaf, other = reader(1, 100 * MIB, 3e8), reader(2, 500 * MIB, 3e8)
    at = 100 * MIB
    scheduler.want(deaf, PrefetchRange(elsewhere, at, at + 400 * MIB))
    at = 540 * MIB
    scheduler.want(other, PrefetchRange(file, at, at + 100 * MIB, priority=priority))
    device = scheduler.device_of(file)
    for _ in range(100):
        scheduler.pump(NOW)
        scheduler.reap()
    assert device.queued_bytes == device.under_way_bytes == 0
    assert sum(length for _, length in notes.sent) == 100 * MIB
    assert scheduler.queued_bytes == scheduler.device_of(elsewhere).queued_bytes > 300 * MIB
    assert (scheduler.under_way_bytes > 0) == (most > 0)
    assert scheduler.meter.busy.bandwidth > 0, "what was read is measured"


def test_of_each_device_as_much_is_under_way_as_keeps_that_one_busy(
    file: FileState, elsewhere: FileState
) -> None:
    scheduler = scheduler_of(Deaf(elsewhere.key[0]))
    fast, slow = scheduler.device_of(file), scheduler.device_of(elsewhere)
    fast.depth.bytes = 4 * slow.depth.bytes
    for number, of in enumerate((elsewhere, file)):
        scheduler.want(reader(number, 0, 3e8), PrefetchRange(of, 0, 400 * MIB))
    scheduler.pump(NOW)
    assert (fast.under_way_bytes, slow.under_way_bytes) == (fast.depth.bytes, slow.depth.bytes)
    assert scheduler.under_way_bytes == scheduler.target_bytes == 5 * slow.depth.bytes
    assert fast.queued_bytes == 400 * MIB - fast.under_way_bytes


def test_a_device_rests_from_the_end_of_its_last_request_on(file: FileState) -> None:
    notes = Notes()
    scheduler = scheduler_of(notes)
    device = scheduler.device_of(file)
    scheduler.want(reader(1, 0, 3e8), PrefetchRange(file, 0, MIB))
    scheduler.pump(NOW)
    assert device.under_way_bytes and device.idle_ns(NOW + 5) == 0
    scheduler.reap()
    assert device.idle_ns(NOW + notes.took_ns + 5) == 5


# ---- the call that fills the cache --------------------------------------------------------------


@pytest.mark.parametrize("came_share", [1.0, 0.0])
def test_a_call_that_does_not_bring_what_is_asked_for_is_changed_and_that_is_said(
    file: FileState, came_share: float
) -> None:
    file.call.use(choose(0xEF53, 128 << 10, True), file.opened.fd)
    said: list[str] = []
    notes = Notes(came_share)
    scheduler = scheduler_of(notes, on_finding=said.append)
    scheduler.want(reader(0, 0, 1e9), PrefetchRange(file, 0, 100 * MIB))
    run_through(scheduler)
    if came_share:
        assert set(notes.methods) == {uffd.WARM_READAHEAD} and not said
        return
    changed = notes.methods.index(uffd.WARM_PREAD)
    assert 16 <= changed <= 20, "32 MiB of 2 MiB each, and what was under way"
    assert set(notes.methods[changed:]) == {uffd.WARM_PREAD}
    assert said[0] == f"{file.path}: {file.call.reason}"
    assert "readahead(2) brought 0 of 32 MiB" in said[0]


def test_pages_that_do_not_stay_are_told_of_once(file: FileState) -> None:
    file.call.use(choose(file_systems.LUSTRE, 0, True), file.opened.fd)
    said: list[str] = []
    scheduler = scheduler_of(Notes(0.0), on_finding=said.append)
    scheduler.want(reader(0, 0, 1e9), PrefetchRange(file, 0, 200 * MIB))
    run_through(scheduler)
    assert len(said) == 1 and "stayed in the page cache" in said[0]


# ---- who may not ask what is resident -----------------------------------------------------------


@pytest.mark.parametrize("waited_bytes", [0, 1 * MIB, 2 * MIB])
def test_where_nobody_tells_what_was_cached_what_our_reads_waited_for_was_prefetched(
    file: FileState, waited_bytes: int
) -> None:
    file.call.counts_reads = False
    scheduler = scheduler_of(Notes(sensor=-1, storage_bytes=0, waited_bytes=waited_bytes))
    scheduler.want(reader(0, 0, 1e9), PrefetchRange(file, 0, 8 * MIB))  # four extents
    run_through(scheduler)
    assert file.account.prefetched_bytes == scheduler.results.prefetched_bytes == 4 * waited_bytes
    assert file.account.already_resident_bytes == 8 * MIB - 4 * waited_bytes


@pytest.mark.parametrize("storage_bytes", [0, 1 * MIB, 2 * MIB])
def test_where_the_kernel_counts_what_it_read_for_us_that_is_what_was_prefetched(
    file: FileState, storage_bytes: int
) -> None:
    file.call.counts_reads = True
    scheduler = scheduler_of(Notes(sensor=-1, storage_bytes=storage_bytes))
    scheduler.want(reader(0, 0, 1e9), PrefetchRange(file, 0, 8 * MIB))  # four extents
    run_through(scheduler)
    assert file.account.prefetched_bytes == 4 * storage_bytes
    assert file.account.already_resident_bytes == 8 * MIB - 4 * storage_bytes


# ---- storage of which a request costs more than its bytes ---------------------------------------


@pytest.fixture
def lustre(file: FileState) -> FileState:
    """The file, as if it lay there."""
    file.call.unit_bytes = file_systems.LUSTRE_RPC_BYTES
    file.call.use(choose(file_systems.LUSTRE, 0, True), file.opened.fd)
    return file


def test_windows_of_a_stream_become_whole_requests(lustre: FileState) -> None:
    notes = Notes()
    scheduler = scheduler_of(notes)
    lustre.copies.written.update(range(1 << 18))
    stream = reader(0, 0, 1e9)
    at = 0
    for end in (1, 3, 4, 9, 17, 18, 40):
        scheduler.want(stream, PrefetchRange(lustre, at, end * MIB))
        run_through(scheduler)
        at = end * MIB
    assert notes.sent == [(n * 4 * MIB, 4 * MIB) for n in range(10)]


def test_records_of_an_order_that_reads_all_bring_their_surroundings_once(
    lustre: FileState,
) -> None:
    notes = Notes()
    scheduler = scheduler_of(notes)
    lustre.copies.written.update(range(1 << 18))  # no checkpoint page is to be copied
    order = [(5 * n + 3) % 64 for n in range(64)]
    for need, n in enumerate(order):
        start = n * 256 << 10
        wanted = PrefetchRange(lustre, start, start + (256 << 10), need << 18, whole=True)
        scheduler.want(reader(0, 0, 1e9), wanted)
    run_through(scheduler)
    assert sorted(notes.sent) == [(n * 4 * MIB, 4 * MIB) for n in range(4)]


def test_records_of_an_order_that_leaves_most_out_bring_themselves_only(lustre: FileState) -> None:
    notes = Notes()
    scheduler = scheduler_of(notes)
    for n in range(8):
        scheduler.want(
            reader(0, 0, 1e9), PrefetchRange(lustre, n * 8 * MIB, n * 8 * MIB + 4096, n << 12)
        )
    run_through(scheduler)
    assert sorted(notes.sent) == [(n * 8 * MIB, 4096) for n in range(8)]


def test_a_checkpoint_page_is_no_request_of_its_own(
    lustre: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes with the window that brings what lies around it."""
    notes = Notes()
    scheduler = scheduler_of(notes)
    there = {1024}
    monkeypatch.setattr(FileState, "has", lambda _, at: at // uffd.PAGE_BYTES in there)
    scheduler.copy(lustre, [1024, 2048])
    assert lustre.copies.pending == {1024}
    there.add(2048)
    scheduler.copy(lustre, [1024, 2048])
    assert lustre.copies.pending == {1024, 2048}
    lustre.call.unit_bytes = 0
    there.clear()
    scheduler.copy(lustre, [4096])
    assert 4096 in lustre.copies.pending


def test_checkpoint_pages_are_copied_side_by_side(file: FileState) -> None:
    """The job waits in mmap(2) for the last of them, and each is a wait for storage."""
    notes = Notes()
    scheduler = scheduler_of(notes)
    scheduler.copy(file, [16, 1024, 2048])
    assert notes.sent == [(0, 0)] * 3
    scheduler.copy(file, [2048, 4096])
    assert len(notes.sent) == 4


def test_the_first_request_of_a_mapping_goes_out_before_its_reader_comes_and_once(
    lustre: FileState,
) -> None:
    notes = Notes()
    scheduler = scheduler_of(notes)
    for start in (0, 4096, 9 * MIB):
        scheduler.begin(lustre, start)
        scheduler.reap()
    assert notes.sent == [(0, 4 * MIB), (8 * MIB, 4 * MIB)]
    lustre.cache.forget_recent()  # as each second
    scheduler.begin(lustre, 0)
    lustre.call.unit_bytes = 0
    scheduler.begin(lustre, 100 * MIB)
    assert len(notes.sent) == 2


@pytest.mark.parametrize(("length", "of_an_order", "metered"), [
    (64 << 10, True, True), (64 << 10, False, False), (16 << 10, True, False), (MIB, False, True),
])  # fmt: skip
def test_bandwidth_shows_where_a_mib_is_under_way_for_an_order(
    file: FileState, length: int, of_an_order: bool, metered: bool
) -> None:
    """Of 32 that are under way at a time, for longer than bandwidth is taken over."""
    notes = Notes()
    notes.took_ns = int(2e9 * MAX_SECONDS)
    scheduler = scheduler_of(notes)
    for n in range(32):
        start = n * 2 * length
        need = start if of_an_order else None
        scheduler.want(reader(0, 0, 1e9), PrefetchRange(file, start, start + length, need))
    run_through(scheduler)
    assert (scheduler.meter.busy.bandwidth > 0) == metered
    assert scheduler.meter._of_all.bandwidth > 0, "of all that is read it is told, guesses included"


@pytest.mark.parametrize("others", [0, 5])
def test_for_the_books_the_quickest_read_tells_be_it_alone_or_not(
    file: FileState, others: int
) -> None:
    notes = Notes()
    scheduler = scheduler_of(notes)
    for n in range(1 + others):
        start = 2 * n * MIB
        scheduler.want(reader(0, 0, 1e9), PrefetchRange(file, start, start + MIB))
    run_through(scheduler)
    assert scheduler.meter.quickest.all == [(MIB, notes.took_ns / 1e9)]
    assert scheduler.meter.quickest.count(2 * MIB) == 1 + others


def guess(file: FileState, start: int, end: int, depth: int) -> PrefetchRange:
    return PrefetchRange(file, start, end, yield_bytes=depth, guess=True)


@pytest.mark.parametrize("depth", [MIB, 4 * MIB])
def test_no_more_of_guesses_is_under_way_than_they_may_delay_a_miss_by(
    file: FileState, depth: int
) -> None:
    notes = Notes()
    scheduler = scheduler_of(notes)
    for number in range(2):
        place = (1 + 4 * number) * 100 * MIB
        scheduler.want(reader(number, place, 1e8), guess(file, place, place + 16 * MIB, depth))
    scheduler.pump(NOW)
    assert depth // 2 < scheduler.under_way_bytes <= depth
    run_through(scheduler)
    assert sum(length for _, length in notes.sent) == 32 * MIB
    assert max(length for _, length in notes.sent) <= GUESSED_EXTENT_BYTES


@pytest.mark.parametrize(
    ("says", "own", "sent"), [(MIB, 4 * MIB, MIB), (4 * MIB, MIB, MIB), (2 * MIB, 4 * MIB, 2 * MIB)]
)
def test_of_a_guess_no_more_goes_than_of_its_own_and_of_all_is_allowed(
    file: FileState, says: int, own: int, sent: int
) -> None:
    notes = Notes()
    scheduler = scheduler_of(notes)
    one = reader(0, 100 * MIB, 1e8)
    one.depth_of_all_bytes = says
    scheduler.want(one, guess(file, 100 * MIB, 116 * MIB, own))
    scheduler.pump(NOW)
    assert scheduler.under_way_bytes == sent


def test_one_that_is_short_goes_beside_what_long_ones_have_under_way(file: FileState) -> None:
    notes = Notes()
    scheduler = scheduler_of(notes)
    for number, own in enumerate((4 * MIB, MIB)):
        one = reader(number, (1 + number) * 100 * MIB, 1e8)
        one.depth_of_all_bytes, start = 4 * MIB, (1 + number) * 100 * MIB + (2 - number) * MIB
        scheduler.want(one, guess(file, start, start + 16 * MIB, own))
    scheduler.pump(NOW)
    assert sum(length for at, length in notes.sent if at >= 200 * MIB) == MIB
    assert scheduler.under_way_bytes == min(4 * MIB, scheduler.target_bytes)


@pytest.mark.parametrize(("link", "sent"), [(None, MIB), (Storage(300e6, 1e-3), 3 * MIB)])
def test_beside_a_little_a_file_that_is_read_whole_goes_on_once_the_link_is_known(
    file: FileState, monkeypatch: pytest.MonkeyPatch, link: Storage | None, sent: int
) -> None:
    """Who reads here and there never keeps it busy: what was read alone tells what does."""
    notes = Notes()
    scheduler = scheduler_of(notes)
    monkeypatch.setattr(Meter, "link", link)
    scheduler.want(reader(0, 100 * MIB, 1e8), guess(file, 100 * MIB, 101 * MIB, 8 * MIB))
    whole = replace(guess(file, 0, 16 * MIB, 3 * MIB), priority=Priority.BACKGROUND)
    scheduler.want(reader(1, 0, 0.0), whole)
    scheduler.pump(NOW)
    assert scheduler.under_way_bytes == sent


def test_a_guess_that_its_reader_has_passed_is_not_read(file: FileState) -> None:
    notes = Notes()
    scheduler = scheduler_of(notes)
    one = reader(0, 100 * MIB, 1e8)
    scheduler.want(one, guess(file, 100 * MIB, 116 * MIB, 4 * MIB))
    one.stream.position_bytes = 110 * MIB
    run_through(scheduler)
    assert min(start for start, _ in notes.sent) == 110 * MIB
    assert sum(length for _, length in notes.sent) == 6 * MIB


def test_what_is_sent_is_told_of_then_and_what_is_taken_back_never(file: FileState) -> None:
    notes, told = Notes(), list[tuple[int, int]]()
    scheduler = scheduler_of(notes)
    scheduler.on_sent = lambda extent: told.append((extent.start, extent.end - extent.start))
    one = reader(0, 100 * MIB, 1e8)
    scheduler.want(one, guess(file, 100 * MIB, 116 * MIB, 4 * MIB))
    assert told == []
    scheduler.pump(NOW)
    assert told == notes.sent != []
    scheduler.forget(one)
    run_through(scheduler)
    assert told == notes.sent


def test_ranges_are_rounded_to_whole_requests_within_the_file() -> None:
    assert _cells(5 * MIB, 6 * MIB, 4 * MIB, 100 * MIB) == (4 * MIB, 8 * MIB)
    assert _cells(4 * MIB, 8 * MIB, 4 * MIB, 100 * MIB) == (4 * MIB, 8 * MIB)
    assert _cells(97 * MIB, 98 * MIB, 4 * MIB, 98 * MIB + 1) == (96 * MIB, 98 * MIB + 1)
    assert _cells(5, 6, 0, 100) == (5, 6)
