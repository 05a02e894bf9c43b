# SPDX-License-Identifier: Apache-2.0
"""service/opened_files.py: files that are read by calls are opened by what /proc shows, followed by
sightings, and left when they are closed, gain nothing, or are something else by now."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from guess_bed import Bed

from uffdprefetch.base.clock import Clock
from uffdprefetch.base.file_systems import FILE_SYSTEMS, TMPFS, FileSystem
from uffdprefetch.base.procfs import file_readers
from uffdprefetch.native import uffd
from uffdprefetch.predict.bounds import LATELY_NS
from uffdprefetch.predict.storage import BLOCK_BYTES, MISS_BYTES
from uffdprefetch.protocol import wire
from uffdprefetch.sense import pagetables
from uffdprefetch.sense.read_calls import ReadSeen
from uffdprefetch.service.found import FoundMappings
from uffdprefetch.service.job_tree import Exits
from uffdprefetch.service.kept_reads import DROPPED, VAIN, VAIN_FILES, KeptReads
from uffdprefetch.service.opened_files import FIRST_READ, LOOK_NS, OpenedFiles, is_open, regular
from uffdprefetch.service.read_touches import ReadTouches
from uffdprefetch.state import opening
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState
from uffdprefetch.state.opening import Opened
from uffdprefetch.state.publisher import EventPublisher
from uffdprefetch.state.reader import Region

MIB, MS = 1 << 20, 1_000_000
SIZE = 64 * MIB
PID = os.getpid()


class Opens:
    """Files open when they are told to, and by what was asked for then."""

    def __init__(self) -> None:
        self.asked: list[tuple[Callable[[], int | str], Callable[[Opened | OSError], None]]] = []

    def open(self, what: Any, then: Any) -> None:
        self.asked.append((what, then))

    def end(self) -> None:
        """All of them."""
        asked, self.asked = self.asked, []
        for what, then in asked:
            try:
                then(opening._open(what))
            except OSError as error:
                then(error)


class ReadBed(Bed):
    """Files that this process has open, in the place of a job's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, **config: Any) -> None:
        super().__init__(monkeypatch, **config)
        monkeypatch.setitem(FILE_SYSTEMS, TMPFS, FileSystem("tmpfs"))
        self.directory, self.opens, self.has_ended = directory, Opens(), False
        hello = wire.Hello(wire.Role.AGENT, PID, 0, -1, -1, -1, 0, 0, 0, 0, 0, 0, "job")
        self.client = Client(None, hello, PID)
        self.clients[-PID] = self.client
        opener: Any = self.opens
        self.exits = Exits()
        self.touches = ReadTouches(
            self.arbiter, self.scheduler, self.windows, self.ledger, EventPublisher()
        )
        self.opened = OpenedFiles(
            lambda _: None if self.has_ended else self.client, self.core.mappings, self.core.table,
            opener, self.touches, KeptReads(self.ledger, Clock(lambda: self.now)), self.exits,
        )  # fmt: skip
        self._fds: list[int] = []

    def file_fd(self, name: str, size: int = SIZE) -> int:
        """A descriptor of the job's, of a file that is made of holes."""
        path = self.directory / name
        path.touch()
        os.truncate(path, size)
        return self.fd(path)

    def fd(self, path: Path, flags: int = os.O_RDONLY) -> int:
        """A descriptor of the job's."""
        self._fds.append(os.open(path, flags))
        return self._fds[-1]

    def saw(self, fd: int, start: int, end: int, asked_end: int = 0, **other: Any) -> ReadSeen:
        """A sighting, 1 ms after the last one."""
        self.now += MS
        status = os.stat(fd)
        values: dict[str, Any] = {
            "pid": PID, "tid": PID, "key": (status.st_dev, status.st_ino),
            "path": os.readlink(f"/proc/self/fd/{fd}"), "fd": fd, "size_bytes": status.st_size,
            "start": start, "end": end, "asked_end": max(end, asked_end), "proven": True,
            "at_ns": self.now, "waiting": True, **other,
        }  # fmt: skip
        one = ReadSeen(**values)
        self.opened.seen([one])
        return one

    def follow(self, fd: int) -> Region:
        """Its file is opened, and followed."""
        self.saw(fd, 0, 0)
        self.opens.end()
        (region,) = self.client.regions.values()
        region.file.call.method, region.file.call.ahead_bytes = uffd.WARM_READAHEAD, MISS_BYTES
        return region

    def close(self) -> None:
        self.client.close()
        self.exits.close()
        for file in self.core.table.all:
            file.close()
        for fd in self._fds:
            os.close(fd)


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ReadBed]:
    made = ReadBed(monkeypatch, tmp_path)
    yield made
    made.close()


# -------------------------------------------------------------- opened


def test_a_file_that_is_read_is_opened_and_followed_as_a_mapping_is(bed: ReadBed) -> None:
    region = bed.follow(fd := bed.file_fd("a"))
    assert (region.mode, region.id) == (wire.ServingMode.READS, FIRST_READ + 1)
    assert region.span.end_bytes == SIZE and region.file in bed.core.table.files.values()
    assert bed.ledger.serving.modes == {region.file.path: "reads"}
    for at in range(0, 8 * MIB, 128 << 10):
        bed.of(region.file).add(at, at + (128 << 10))
        bed.saw(fd, at, at + (128 << 10))
        bed.turn()
    assert bed.read().missing(8 * MIB, 11 * MIB) == [], "what follows is read ahead"
    assert bed.touches.read_bytes == 8 * MIB
    assert not bed.opens.asked, "it is opened once"


def test_it_is_opened_once_however_often_it_is_seen_meanwhile(bed: ReadBed) -> None:
    fd = bed.file_fd("a")
    for at in range(0, MIB, 128 << 10):
        bed.saw(fd, at, at + (128 << 10))
    assert len(bed.opens.asked) == 1
    bed.opens.end()
    assert bed.touches.read_bytes == 128 << 10, "of the last sighting; of the others nobody knows"


def test_a_file_that_does_not_open_as_too_many_do_is_opened_later(bed: ReadBed) -> None:
    """It was waited for for ever."""
    waits, fd = bed.opens.open, bed.file_fd("a")
    bed.opens.open = lambda what, then: then(OSError(errno.EAGAIN, "64 other files do not open"))  # type: ignore[method-assign]
    bed.saw(fd, 0, 0)
    bed.opens.open = waits  # type: ignore[method-assign]
    bed.follow(fd)


def test_a_descriptor_that_is_another_file_s_by_then_is_not_followed(bed: ReadBed) -> None:
    fd, other = bed.file_fd("a"), bed.file_fd("b")
    bed.saw(fd, 0, 0)
    os.dup2(other, fd)
    bed.opens.end()
    assert not bed.client.regions and not bed.core.table.files
    bed.saw(fd, 0, 0)
    bed.opens.end()
    (region,) = bed.client.regions.values()
    assert region.file.path == str(bed.directory / "b")


def test_a_pipe_that_has_the_descriptor_by_then_keeps_its_bytes(bed: ReadBed) -> None:
    fd = bed.file_fd("a")
    bed.saw(fd, 0, 0)
    os.mkfifo(bed.directory / "pipe")
    pipe = bed.fd(bed.directory / "pipe", os.O_RDWR)
    os.write(pipe, b"the job's")
    os.dup2(pipe, fd)
    bed.opens.end()
    assert os.read(pipe, 100) == b"the job's" and not bed.client.regions


@pytest.mark.parametrize("kind", ["directory", "device", "closed"])
def test_what_is_no_regular_file_is_not_opened(bed: ReadBed, tmp_path: Path, kind: str) -> None:
    if kind == "closed":
        fd = os.dup(bed.file_fd("a"))
        os.close(fd)
    else:
        fd = bed.fd(tmp_path if kind == "directory" else Path(os.devnull))
    with pytest.raises(OSError):
        regular(PID, fd)


def test_what_is_opened_reads_nothing() -> None:
    with open(__file__, "rb") as file:
        found = regular(PID, file.fileno())
    try:
        assert stat.S_ISREG(os.fstat(found).st_mode)
        with pytest.raises(OSError):
            os.read(found, 1)
    finally:
        os.close(found)


def test_a_process_that_ends_while_its_file_opens_leaves_nothing(bed: ReadBed) -> None:
    bed.saw(bed.file_fd("a"), 0, 0)
    bed.has_ended = True
    bed.opened.ended([PID])
    bed.opens.end()
    assert not bed.client.regions
    (file,) = bed.core.table.files.values()
    bed.core.table.look(bed.now)
    assert not bed.core.table.files, f"{file.path} is held for nobody"


def test_files_that_are_left_out_are_not_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bed = ReadBed(monkeypatch, tmp_path, exclude=("*.tar",))
    for name in ("a.tar", "libx.so.1", "lock.mdb"):
        bed.saw(bed.file_fd(name), 0, 0)
    assert not bed.opens.asked
    bed.close()


# -------------------------------------------------------------- what a call asks for


def test_the_rest_of_a_large_call_is_read_from_where_it_is(bed: ReadBed) -> None:
    bed.follow(fd := bed.file_fd("a"))
    bed.saw(fd, MIB, MIB, asked_end=9 * MIB)
    bed.turn()
    bed.turn()
    assert bed.read().missing(MIB + 2 * MISS_BYTES, 9 * MIB) == []
    assert bed.sent_bytes <= 9 * MIB + 2 * MISS_BYTES, "and nothing beyond"


def test_what_the_kernel_brings_by_itself_is_left_to_it(bed: ReadBed) -> None:
    """The window that a call waits for, and the one that the kernel reads when that has come: who
    finds there what others have read goes on behind it no more."""
    bed.follow(fd := bed.file_fd("a"))
    for at in (40 * MIB, 3 * MIB, 21 * MIB):
        for windows in (1, 2, 3):
            bed.saw(fd, at, at, asked_end=at + windows * MISS_BYTES, proven=False)
            bed.turn()
            assert bed.read().within(at, at + 2 * MISS_BYTES) == []
        assert bed.read().missing(at + 2 * MISS_BYTES, at + 3 * MISS_BYTES) == []


def test_a_call_that_has_ended_asks_for_nothing_more(bed: ReadBed) -> None:
    bed.follow(fd := bed.file_fd("a"))
    bed.saw(fd, 0, 0, asked_end=48 * MIB)
    assert bed.scheduler.queued_bytes
    bed.saw(fd, 50 * MIB, 50 * MIB, asked_end=50 * MIB + 4096, proven=False)
    assert not bed.scheduler.queued_bytes


# -------------------------------------------------------------- left


def wait_in_vain(bed: ReadBed, fd: int, times: int = VAIN) -> None:
    """It waits so many times, always for what was read ahead and has come before that."""
    for region in bed.client.regions.values():
        region.file.cache.recent.add(0, SIZE)
        bed.of(region.file).add(0, SIZE)
    for i in range(times + 1):  # by the first one is known what has come
        bed.saw(fd, i * MIB, i * MIB, asked_end=i * MIB + BLOCK_BYTES)


def test_who_waits_for_what_was_read_ahead_gains_nothing_by_it(bed: ReadBed) -> None:
    bed.follow(fd := bed.file_fd("a"))
    wait_in_vain(bed, fd)
    assert not bed.client.regions and not bed.scheduler.queued_bytes
    (note,) = bed.ledger.noted.all
    assert note.path == str(bed.directory / "a") and "is not kept" in note.text
    bed.saw(fd, 0, 0)
    bed.saw(fd, 0, 0, pid=PID + 1)
    assert not bed.opens.asked, "nor is it opened for another process"


def test_of_a_file_system_that_keeps_nothing_no_more_files_are_opened(bed: ReadBed) -> None:
    """One file may be dropped by its job; of several it is the file system."""
    for i in range(VAIN_FILES):
        bed.saw(fd := bed.file_fd(f"{i}"), 0, 0)
        assert bed.opens.asked
        bed.opens.end()
        wait_in_vain(bed, fd)
    bed.saw(bed.file_fd("another"), 0, 0)
    assert not bed.opens.asked


def read_on(bed: ReadBed, fd: int, file: FileState, looks: int, *, kept: bool) -> None:
    """In order, 1 MiB between two looks; ``kept``: what was read stays in memory."""
    for at in range(0, looks * MIB, MIB):
        if kept:
            bed.of(file).add(at, at + MIB)
        bed.saw(fd, at, at + MIB)


@pytest.mark.parametrize("waiting", [True, False])
def test_what_a_reader_drops_behind_itself_is_left_to_it(bed: ReadBed, waiting: bool) -> None:
    """It was read twice: what it did not wait for was dropped when it came."""
    region = bed.follow(fd := bed.file_fd("a"))
    for at in range(0, DROPPED * MIB, MIB):
        assert bed.client.regions
        bed.saw(fd, at, at + MIB, waiting=waiting)
    assert not bed.client.regions and not bed.scheduler.queued_bytes
    bed.saw(fd, 9 * MIB, 10 * MIB)
    assert not bed.opens.asked and region.file.path in bed.ledger.noted.all[0].line


def test_what_is_dropped_before_it_is_read_is_left(bed: ReadBed) -> None:
    """By a job that drops all of its file now and then."""
    region = bed.follow(fd := bed.file_fd("a"))
    region.file.cache.recent.add(0, SIZE)
    for at in range(0, DROPPED * MIB, MIB):
        assert bed.client.regions
        bed.of(region.file).add(at, at + MIB)
        bed.saw(fd, at, at + MIB)
    assert not bed.client.regions


def test_a_reader_whose_reads_are_kept_is_followed(bed: ReadBed) -> None:
    region = bed.follow(fd := bed.file_fd("a"))
    read_on(bed, fd, region.file, 8, kept=True)
    read_on(bed, fd, region.file, DROPPED - 1, kept=False)
    read_on(bed, fd, region.file, 8, kept=True)
    assert bed.client.regions


def test_where_nobody_says_what_is_kept_it_is_followed(
    bed: ReadBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel does not say who neither owns the file nor may write it."""
    region = bed.follow(fd := bed.file_fd("a"))
    monkeypatch.setattr(FileState, "resident_bytes", lambda *_: None)
    read_on(bed, fd, region.file, 8, kept=False)
    assert bed.client.regions


def test_a_wait_for_what_had_not_come_is_not_in_vain(bed: ReadBed) -> None:
    bed.follow(fd := bed.file_fd("a"))
    for _ in range(3):
        wait_in_vain(bed, fd, VAIN - 1)
        for region in bed.client.regions.values():
            region.file.cache.forget_recent()
        bed.saw(fd, 0, 0, asked_end=BLOCK_BYTES)
    assert bed.client.regions


@pytest.mark.parametrize("kept", [True, False])
def test_what_came_in_an_epoch_before_says_nothing_of_this_one(bed: ReadBed, kept: bool) -> None:
    """A file that is larger than memory is read again and again: all of it was read ahead once."""
    region = bed.follow(fd := bed.file_fd("a"))
    region.file.blocks.mark_prefetched(0, SIZE)
    region.file.blocks.mark_used(0, SIZE)
    read_on(bed, fd, region.file, 3 * VAIN, kept=True)
    if not kept:
        bed.of(region.file).remove(0, SIZE)
    for at in range(0, 3 * VAIN * MIB, MIB):
        bed.of(region.file).add(at, at + BLOCK_BYTES)
        bed.saw(fd, at + BLOCK_BYTES, at + BLOCK_BYTES, asked_end=at + 2 * BLOCK_BYTES)
    assert bed.client.regions


def test_what_came_after_the_sighting_is_not_waited_for_in_vain(bed: ReadBed) -> None:
    """It is told of later than it was seen."""
    region = bed.follow(fd := bed.file_fd("a"))
    for i in range(3 * VAIN):
        seen_ns = bed.now
        region.file.cache.recent.add(i * MIB, i * MIB + MIB)
        bed.of(region.file).add(i * MIB, i * MIB + MIB)
        bed.saw(fd, i * MIB, i * MIB, asked_end=i * MIB + BLOCK_BYTES, at_ns=seen_ns)
    assert bed.client.regions


def test_a_large_call_may_wait_for_its_end(bed: ReadBed) -> None:
    """It was taken for one that waits for its beginning."""
    region = bed.follow(fd := bed.file_fd("a"))
    for i in range(3 * VAIN):
        at = i * 2 * MIB
        region.file.cache.recent.add(at, at + MIB)
        bed.of(region.file).add(at, at + MIB)
        bed.saw(fd, at, at, asked_end=at + 2 * MIB)
    assert bed.client.regions


def test_a_file_that_is_closed_is_left(bed: ReadBed) -> None:
    region = bed.follow(fd := bed.file_fd("a"))
    bed.now += 2 * LATELY_NS
    bed.opened.step(bed.now)
    assert bed.client.regions, "it is open still"
    os.dup2(other := bed.file_fd("b"), fd)
    bed.now += LOOK_NS
    bed.opened.step(bed.now)
    assert not bed.client.regions and not region.file.mappings.attached
    bed.saw(other, 0, 0)
    assert bed.opens.asked


def test_files_of_a_process_that_has_ended_are_closed_at_once(bed: ReadBed) -> None:
    """Somebody may wait for its end to unmount or delete them."""
    bed.follow(bed.file_fd("a"))
    bed.opened.ended([PID])
    bed.core.table.look(bed.now)
    assert not bed.client.regions and not bed.core.table.files


def test_a_file_that_was_given_up_is_followed_anew(bed: ReadBed) -> None:
    region = bed.follow(fd := bed.file_fd("a"))
    bed.core.mappings.give_up(region.file, "truncated")
    assert not bed.client.regions
    os.truncate(bed.directory / "a", SIZE // 2)
    bed.saw(fd, 0, 0)
    bed.opens.end()
    (again,) = bed.client.regions.values()
    assert again.file is not region.file and again.file.size_bytes == SIZE // 2


def test_a_descriptor_is_known_by_what_it_shows(bed: ReadBed) -> None:
    fd = bed.file_fd("a")
    assert is_open(PID, fd, str(bed.directory / "a"))
    assert not is_open(PID, fd, str(bed.directory / "b"))
    (bed.directory / "a").unlink()
    assert not is_open(PID, fd, str(bed.directory / "a"))


# -------------------------------------------------------------- no mapping


def test_nobody_looks_for_it_in_page_tables(bed: ReadBed) -> None:
    region = bed.follow(bed.file_fd("a"))
    assert pagetables.runs(region, 0, SIZE) == []


def test_a_look_at_its_process_s_mappings_does_not_end_it(bed: ReadBed) -> None:
    region = bed.follow(bed.file_fd("a"))
    opener: Any = bed.opens
    found = FoundMappings(
        bed.clients, bed.core.mappings, lambda *_: None, bed.core.table, opener, bed.ledger
    )
    for _ in range(3):
        found.reconcile(bed.client, file_readers("", 0))
    assert bed.client.regions == {region.id: region}


def test_what_a_call_reads_before_it_was_read_ahead_is_missed(bed: ReadBed) -> None:
    """For a watcher. What is being read meanwhile is late, and no miss."""
    fd = bed.file_fd("data")
    region = bed.follow(fd)
    blocks, before = region.file.blocks, bed.ledger.jobs.missed_blocks.get(0, 0)
    blocks.mark_prefetched(4 * MIB, 8 * MIB)
    region.file.cache.in_flight.add(8 * MIB, 12 * MIB)
    bed.saw(fd, 2 * MIB, 14 * MIB, waiting=False)
    assert bed.ledger.jobs.missed_blocks[0] - before == 2 * 2 * MIB // BLOCK_BYTES
