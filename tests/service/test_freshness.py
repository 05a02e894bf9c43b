# SPDX-License-Identifier: Apache-2.0
"""Copies of a file's pages never stay older than the file: rounds over real files and memfds, with
somebody who only notes what was told (service/freshness.py, csrc/service/compare.c)."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import require, wait_until
from harness import MIB, write_records

from uffdprefetch.demo.bed import SlowBed, why_no_bed
from uffdprefetch.native import uffd
from uffdprefetch.service import freshness
from uffdprefetch.service.freshness import Freshness, Times
from uffdprefetch.state.copies import mapped_by
from uffdprefetch.state.file_watch import FileWatch
from uffdprefetch.state.files import FileState
from uffdprefetch.state.guard import Guard
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import reopen
from uffdprefetch.state.region_state import CheckpointState

PAGE = uffd.PAGE_BYTES
SIZE_BYTES = 4 * MIB
PAGES = list(range(1, SIZE_BYTES // PAGE, 16))


class Rounds:
    """A Freshness over one file, whose rounds come when the test says so."""

    def __init__(self, path: Path, *, leased: bool = False, network: bool = False) -> None:
        self.path = path
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.file = FileState.open(reopen(fd), str(path))
        if leased:
            require(self.file.guard.leased, "no read lease on this file system")
        else:
            self.file.guard.release_lease(self.file.opened.fd)
        self.file.guard.network = network
        self.file.mappings.attached = 1
        self.told: list[str] = []
        self.clients: dict[int, Any] = {}
        self.ledger = Ledger()
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.freshness = Freshness(
            {self.file.key: self.file}, self.clients, self.ledger, self._give_up,
            lambda: freshness.READS_LEAST, self._event_fd,
        )  # fmt: skip

    def _give_up(self, file: FileState, why: str) -> None:
        file.guard.changed = why
        self.told.append(why)

    def copy(self, pages: list[int]) -> None:
        """Have pages of the file in the memfd, as a worker does."""
        memfd, _ = self.file.copies.fds()
        for page in pages:
            os.pwrite(memfd, os.pread(self.file.opened.page_fd, PAGE, page * PAGE), page * PAGE)
        self.file.copies.written.update(pages)

    def begin(self) -> FileWatch:
        """A round, which is under way then."""
        self.freshness.due_ns = 0
        self.freshness.step(1)
        assert self.file.guard.watched is not None
        return self.file.guard.watched

    def round(self) -> None:
        """One whole round."""
        self.end(self.begin())

    def end(self, state: FileWatch) -> None:
        """Wait for what has been begun."""
        while state.under_way:
            assert select.select([self._event_fd], [], [], 30)[0]
            os.read(self._event_fd, 8)
            self.freshness.due_ns = 1 << 62
            self.freshness.step(1)

    @contextlib.contextmanager
    def mapped(self) -> Iterator[mmap.mmap]:
        """The memfd as a job has it."""
        _, ro = self.file.copies.fds()
        with mmap.mmap(ro, SIZE_BYTES, mmap.MAP_PRIVATE, mmap.PROT_READ) as view:
            yield view

    def wrong(self, view: mmap.mmap) -> list[int]:
        """Copied pages that are not the file's."""
        data = self.path.read_bytes()
        pages = [p * PAGE for p in sorted(self.file.copies.written) if (p + 1) * PAGE <= len(data)]
        return [at for at in pages if view[at : at + PAGE] != data[at : at + PAGE]]

    def close(self) -> None:
        self.freshness.close()
        self.file.close()
        os.close(self._event_fd)


Make = Callable[..., Rounds]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_records(tmp_path / "file.bin", SIZE_BYTES)
    return tmp_path / "file.bin"


@pytest.fixture
def rounds(path: Path) -> Iterator[Make]:
    made: list[Rounds] = []

    def make(**options: bool) -> Rounds:
        made.append(Rounds(path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def overwrite(path: Path, *, times_back: bool = False) -> None:
    with open(path, "r+b") as file:
        before = os.fstat(file.fileno())
        file.write(os.urandom(SIZE_BYTES))
        file.flush()
        if times_back:
            os.utime(file.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))


both_ways = pytest.mark.parametrize("network", [False, True], ids=["by reading", "by mapping"])


@both_ways
def test_pages_that_nobody_wrote_are_compared_and_left(rounds: Make, network: bool) -> None:
    one = rounds(network=network)
    one.copy(PAGES)
    with one.mapped() as view:
        one.round()
        one.round()
        assert not one.wrong(view)
    assert one.file.guard.compared_pages == 2 * len(PAGES)
    assert (one.file.guard.rewritten_pages, one.told) == (0, [])


@both_ways
@pytest.mark.parametrize("times_back", [False, True])
def test_every_mapping_has_the_files_bytes_after_the_next_round(
    rounds: Make, path: Path, network: bool, times_back: bool
) -> None:
    one = rounds(network=network)
    one.copy(PAGES)
    one.round()
    with one.mapped() as view:
        overwrite(path, times_back=times_back)
        assert one.wrong(view) == [page * PAGE for page in PAGES]
        one.round()
        assert not one.wrong(view)
    assert one.file.guard.rewritten_pages == len(PAGES)
    assert one.told == ["its bytes have changed" if times_back else "modified"]
    assert one.ledger.freshness.old_at_most.count == 1


@both_ways
def test_a_store_through_a_mapping_that_moves_no_time_is_found(
    rounds: Make, path: Path, network: bool
) -> None:
    fd = os.open(path, os.O_RDWR)
    with mmap.mmap(fd, SIZE_BYTES) as writer:
        os.close(fd)
        for page in PAGES:
            writer[page * PAGE] ^= 1  # dirty from here on
        one = rounds(network=network)
        one.copy(PAGES)
        with one.mapped() as view:
            one.round()
            before = Times.of(one.file.opened.fd)
            writer[PAGES[7] * PAGE + 5] ^= 0xFF
            assert Times.of(one.file.opened.fd) == before
            one.round()
            assert not one.wrong(view)
    assert one.told == ["its bytes have changed"]
    assert one.file.guard.rewritten_pages == 1


def test_what_was_given_back_is_compared_as_long_as_somebody_maps_it(
    rounds: Make, path: Path
) -> None:
    """A child that nobody saw fork cannot be told, and its parent's mapping is gone."""
    one = rounds()
    one.copy(PAGES)
    one.file.mappings.attached = 0
    with one.mapped() as view:
        for _ in range(3):
            overwrite(path)
            one.round()
            assert not one.wrong(view)
        assert not one.freshness.may_end()
    assert one.told == ["modified"]
    assert one.freshness.may_end()
    compared = one.file.guard.compared_pages
    one.round()
    one.round()
    assert one.file.guard.compared_pages == compared


def test_pages_that_nobody_maps_are_copied_anew_before_they_are_laid_again(rounds: Make) -> None:
    """Without a lease; in another epoch they may be old."""
    one = rounds()
    one.copy(PAGES)
    one.file.mappings.attached = 0
    with one.mapped():
        one.round()
        assert one.file.copies.written == set(PAGES)
    one.round()
    assert one.file.copies.written == set()


def test_without_room_for_a_mapping_of_the_copies_they_are_compared_all_the_same(
    rounds: Make, path: Path
) -> None:
    one = rounds(network=True)
    one.copy(PAGES)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with one.mapped() as view:
        overwrite(path)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * PAGE + SIZE_BYTES // 2, limits[1]))
        try:
            one.round()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert not one.wrong(view)


def test_a_file_that_is_closed_during_a_round_is_compared_when_it_is_opened_again(
    rounds: Make, path: Path
) -> None:
    """Its last process has ended: that ended the service once."""
    one = rounds(network=True)
    one.copy(PAGES)
    state = one.begin()
    assert state.under_way
    one.file.park()
    one.end(state)
    assert not one.told
    with one.mapped() as view:
        assert one.file.unpark(reopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC)))
        one.file.guard.network, before = True, one.file.guard.compared_pages
        one.round()
        assert one.file.guard.compared_pages > before
        assert not one.wrong(view)


def test_a_lease_that_the_kernel_has_broken_is_given_back_without_a_word(rounds: Make) -> None:
    """It does so when the service was too slow for a writer (fs.lease-break-time)."""
    one = rounds(leased=True)
    fcntl.fcntl(one.file.opened.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    one.file.guard.release_lease(one.file.opened.fd)
    assert not one.file.guard.leased


def test_while_a_lease_holds_nothing_is_compared(rounds: Make) -> None:
    one = rounds(leased=True)
    one.copy(PAGES)
    one.round()
    one.round()
    assert (one.file.guard.compared_pages, one.told) == (0, [])


@pytest.mark.parametrize("how", ["chmod", "link", "rename"])
def test_when_only_ctime_has_moved_pages_are_compared_once_and_nothing_is_given_back(
    rounds: Make, path: Path, how: str
) -> None:
    one = rounds(leased=True)
    one.copy(PAGES)
    one.round()
    if how == "chmod":
        path.chmod(0o640)
    elif how == "link":
        os.link(path, path.with_suffix(".2"))
    else:
        path.rename(path.with_suffix(".3"))
    for _ in range(4):
        one.round()
    assert one.file.guard.compared_pages == len(PAGES)
    assert one.told == []


@pytest.mark.parametrize("network", [False, True])
def test_when_only_ctime_has_moved_the_pool_s_pages_go_if_somebody_may_have_written(
    rounds: Make, path: Path, network: bool
) -> None:
    """Who maps it from then on, here or on another node, would see what was written."""
    one, dropped = rounds(leased=True, network=network), list[tuple[FileState, str]]()
    one.copy(PAGES)
    state = one.begin()
    one.end(state)
    one.freshness._pool = SimpleNamespace(
        files=SimpleNamespace(drop=lambda *what: dropped.append(what))
    )
    path.chmod(0o640)
    one.freshness._look(one.file, state, Times.of(one.file.opened.fd))
    assert dropped == ([(one.file, "its ctime has moved")] if network else [])
    assert one.told == []


@both_ways
def test_a_file_that_was_cut_is_no_sigbus_and_its_pages_stay(
    rounds: Make, path: Path, network: bool
) -> None:
    one = rounds(network=network)
    one.copy(PAGES)
    one.round()
    one.round()  # now by what our own page table holds
    with one.mapped() as view:
        os.truncate(path, SIZE_BYTES // 2 + 100)
        one.round()
        one.round()
        assert not one.wrong(view)
    assert one.told == [f"size {SIZE_BYTES} -> {SIZE_BYTES // 2 + 100}"]


def test_a_forked_child_keeps_the_checkpoints_in_use_until_it_ends(rounds: Make) -> None:
    one = rounds()
    one.copy(PAGES)
    ready, go = os.pipe(), os.pipe()
    with one.mapped():
        child = os.fork()
        if not child:
            os.closerange(3, ready[1])
            os.write(ready[1], b"x")
            os.close(go[1])
            os.read(go[0], 1)
            os._exit(0)
    os.close(go[0])
    os.read(ready[0], 1)
    inode = os.fstat(one.file.copies.rw).st_ino
    assert one.file.in_use() and mapped_by(inode) == child
    os.close(go[1])
    os.waitpid(child, 0)
    wait_until(lambda: not one.file.in_use(), "the end of the last mapping")
    assert mapped_by(inode) is None
    assert one.file.copies.fds()[1] >= 0  # can be had again
    os.close(ready[0])
    os.close(ready[1])


def test_more_pages_than_a_round_takes_are_copied_anew_before_they_are_laid(
    rounds: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freshness, "PAGES_MAX", 10)
    monkeypatch.setattr(freshness, "LOOSE_AT_ONCE", 16)
    one = rounds()
    one.copy(PAGES)
    laid = set(PAGES[:5])
    region = SimpleNamespace(file=one.file, checkpoints=CheckpointState(laid=laid))
    one.clients[1] = SimpleNamespace(regions={1: region})
    one.round()
    assert one.file.copies.written == laid
    with one.mapped() as view:
        overwrite(path)
        for _ in range(len(PAGES) // 16 + 1):
            one.round()
        one.file.copies.written.update(PAGES)
        assert not one.wrong(view)  # those that an unseen child may have, too


@pytest.fixture
def shared_bed(path: Path) -> Iterator[SlowBed]:
    require(why_no_bed() is None, why_no_bed() or "")
    with SlowBed(path.parent, bandwidth=0, latency_us=0, writers_behind=True) as mounted:
        yield mounted


@pytest.fixture
def shared(shared_bed: SlowBed) -> Iterator[Rounds]:
    """The file as it is seen through the bed, whose times say nothing from here on."""
    one = Rounds(shared_bed.path("file.bin"), network=True)
    shared_bed.freeze_times(True)
    yield one
    one.close()


def test_another_machines_write_is_found_without_a_request_for_the_other_pages(
    shared_bed: SlowBed, shared: Rounds
) -> None:
    """The page that was written has left our page table."""
    shared.copy(PAGES)
    shared.round()
    with shared.mapped() as view:
        shared_bed.reset()
        shared.round()
        assert shared_bed.counters()["requests"] == 0
        shared_bed.write_behind("file.bin", PAGES[9] * PAGE + 11, b"another machine")
        shared.round()
        assert shared_bed.counters()["requests"] == 1
        assert not shared.wrong(view)
    assert shared.told == ["its bytes have changed"]
    assert shared.file.guard.rewritten_pages == 1


def test_what_is_read_again_in_one_round_is_bounded_and_the_rest_comes_next(
    shared_bed: SlowBed, shared: Rounds
) -> None:
    """The cache was dropped: every page is a request."""
    shared.freshness._reads = lambda: 5
    shared_bed.set(latency_us=2000)  # a read from storage shows in its time
    shared.copy(PAGES)
    shared_bed._command(f"invalidate=0 {SIZE_BYTES} file.bin")
    rounds = compared = 0
    while compared < len(PAGES):  # a round that does not come to its turn in time reads less
        requests, before = shared_bed.counters()["requests"], shared.file.guard.compared_pages
        shared.round()
        assert shared_bed.counters()["requests"] - requests <= 5
        compared = shared.file.guard.compared_pages - before
        rounds += 1
    assert compared == len(PAGES) and rounds > len(PAGES) // 5
    assert not shared.told


def test_a_file_system_that_is_not_known_to_be_local_may_be_written_elsewhere(
    shared_bed: SlowBed, path: Path
) -> None:
    for where, elsewhere in ((shared_bed.path("file.bin"), True), (path, False)):
        file = FileState.open(reopen(os.open(where, os.O_RDONLY | os.O_CLOEXEC)), str(where))
        assert file.guard.network is elsewhere, file.call.file_system
        assert ("compared" in file.guard.describe(pooled=False)) is (
            elsewhere or bool(file.guard.no_lease)
        )
        file.close()


def test_files_that_wait_for_their_device_are_asked_about_when_it_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a thousand that have just been read each turn went over all."""
    files = {}
    for name in "abcde":
        write_records(tmp_path / name, PAGE)
        file = FileState.open(reopen(os.open(tmp_path / name, os.O_RDONLY)), name)
        file.guard.network = True
        files[file.key] = file
    event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    one = Freshness(files, {}, Ledger(), lambda *_: None, lambda: 1, event_fd)
    begun, looks = list[str](), list[str]()
    begin = one._begin

    def counted(file: FileState, now: int) -> bool:
        looks.append(file.path)
        if not begin(file, now):
            return False
        begun.append(file.path)
        return True

    monkeypatch.setattr(one, "_begin", counted)
    reap, held = one._checker.reap, list[bool]([True])
    monkeypatch.setattr(one._checker, "reap", lambda: [] if held[0] else reap())
    for _ in range(50):
        one.step(1)
    assert (len(begun), len(looks)) == (freshness.PER_DEVICE, freshness.PER_DEVICE + 1)
    held[0] = False
    wait_until(lambda: one.step(1) or len(begun) == 5, "the others' turn")  # type: ignore[func-returns-value]
    one.close()
    for file in files.values():
        file.close()
    os.close(event_fd)


def test_what_moved_says_what_ends_the_service_of_a_file() -> None:
    was = Times(10, 20, 30)
    assert freshness.what_moved(was, was) is None
    assert freshness.what_moved(was, Times(10, 20, 31)) == ""
    assert freshness.what_moved(was, Times(10, 21, 31)) == "modified"
    assert freshness.what_moved(was, Times(11, 21, 31)) == "size 10 -> 11"


@pytest.mark.parametrize("compared", [False, True])
def test_only_a_lease_on_a_local_file_system_makes_comparing_needless(compared: bool) -> None:
    def must(leased: bool, network: bool) -> bool:
        return freshness.must_compare(Guard(network, leased=leased), compared=compared)

    assert must(False, False) and must(True, True) and must(False, True)
    assert must(True, False) is not compared


def test_reads_are_one_percent_of_the_bandwidth() -> None:
    assert freshness.reads_allowed(0) == freshness.READS_LEAST
    bandwidth = 2e9
    pages = freshness.reads_allowed(bandwidth)
    assert pages * PAGE <= 0.01 * bandwidth * freshness.PERIOD_NS / 1e9 < (pages + 1) * PAGE


def test_nodes_that_share_read_together_what_one_reads() -> None:
    for bandwidth in (0, 2e9):
        alone = freshness.reads_allowed(bandwidth)
        assert 0.99 * alone < 8 * freshness.reads_allowed(bandwidth, 8) <= alone
    assert freshness.reads_allowed(0, 10_000) == 1


def test_a_round_comes_so_often_that_nothing_is_a_second_old() -> None:
    assert freshness.PERIOD_NS + freshness.READ_NS // 4 <= 1_000_000_000


def test_pages_in_turn_are_all_of_them_in_the_end() -> None:
    pages = list(range(0, 100, 3))
    seen: set[int] = set()
    for at in range(0, 40, 8):
        some = freshness.some_of(pages, at, 8)
        assert some == sorted(some) and len(some) == 8
        seen.update(some)
    assert seen == set(pages)
