# SPDX-License-Identifier: Apache-2.0
"""service/small_reads.py: what of the files that were read ahead was opened, came late, or was for
nothing; and what is known of a mount."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_reading import DEVICE, FILE_BYTES, MOST_BYTES, SmallReading

from uffdprefetch.base.file_systems import PREAD, READAHEAD, FileSystem
from uffdprefetch.native.paths import Keeping, PathDone
from uffdprefetch.service.small_reads import (
    AHEAD_BYTES,
    AHEAD_PART,
    MEANS,
    READ_NS,
    UNMARKING_MOST,
    Mounts,
)
from uffdprefetch.state.ledger import Ledger

MIB = 1 << 20
GROUP = 5
HELD = FileSystem("held", call=PREAD, opens_held=True)


class Wanting:
    """NamesAhead: of a process that lives, or has ended."""

    def __init__(self) -> None:
        self.has_ended = False
        self.came_as: list[tuple[str, PathDone]] = []

    def path_of(self, name: str) -> str:
        if self.has_ended:
            raise FileNotFoundError(name)
        return f"/data/{name}"

    def came(self, name: str, done: PathDone) -> None:
        self.came_as.append((name, done))


@pytest.fixture
def bed(tmp_path: Path) -> SmallReading:
    return SmallReading(tmp_path)


@pytest.fixture
def reads(bed: SmallReading) -> Any:
    return bed.watching.reads


@pytest.fixture
def by() -> Wanting:
    return Wanting()


def test_a_file_that_is_opened_after_it_has_come_is_used(
    bed: SmallReading, reads: Any, by: Wanting
) -> None:
    assert reads.read(by, GROUP, "a")
    (request,) = bed.reader.asked
    assert (request.name, request.group, request.probe) == ("/data/a", GROUP, False)
    bed.reader.end()
    assert reads.reap() == [by] and [name for name, _ in by.came_as] == ["a"]
    assert (reads.counts.read, reads.counts.used) == (1, 0)
    assert (bed.account.asked, bed.account.used, bed.account.open) == (FILE_BYTES, 0, FILE_BYTES)
    reads.opened(GROUP, "a")
    reads.opened(GROUP, "a")
    assert (reads.counts.used, reads.counts.used_bytes) == (1, FILE_BYTES), "once"
    assert (bed.account.used, bed.account.open) == (FILE_BYTES, 0)


def test_a_file_that_is_opened_before_it_has_come_is_used_when_it_has(
    bed: SmallReading, reads: Any, by: Wanting
) -> None:
    reads.read(by, GROUP, "a")
    reads.opened(GROUP, "a")
    assert reads.counts.used == 0
    bed.reader.end()
    reads.reap()
    assert (reads.counts.read, reads.counts.used, bed.account.open) == (1, 1, 0)


def test_what_is_not_opened_before_its_group_is_left_is_lost(
    bed: SmallReading, reads: Any, by: Wanting
) -> None:
    for name in ("a", "b"):
        reads.read(by, GROUP, name)
    bed.reader.end()
    reads.reap()
    reads.opened(GROUP, "a")
    reads.read(by, GROUP, "late")
    reads.leave(GROUP)
    assert bed.reader.withdrawn == [GROUP] and bed.account.lost == FILE_BYTES
    bed.reader.end()
    reads.reap()
    assert bed.account.lost == 2 * FILE_BYTES, "that one came after it was left"
    assert bed.account.open == 0


@pytest.mark.parametrize("has_come", [True, False])
def test_what_is_thought_lost_is_lost_once_and_used_if_it_is_opened_after_all(
    bed: SmallReading, reads: Any, by: Wanting, has_come: bool
) -> None:
    for name in ("a", "b", "c"):
        reads.read(by, GROUP, name)
    for _ in range(2):
        for name in ("a", "b", "never asked for"):
            if not has_come:
                reads.lost(GROUP, name)
        bed.reader.end()
        reads.reap()
        for name in ("a", "b", "never asked for"):
            reads.lost(GROUP, name)
    assert (bed.account.lost, bed.account.open) == (2 * FILE_BYTES, FILE_BYTES)
    reads.opened(GROUP, "a")
    assert (bed.account.used, bed.account.lost) == (FILE_BYTES, FILE_BYTES)
    reads.leave(GROUP)
    assert (bed.account.lost, bed.account.open) == (2 * FILE_BYTES, 0)


def test_a_group_has_counts_of_its_own_until_it_is_left(
    bed: SmallReading, reads: Any, by: Wanting
) -> None:
    for group, name in ((GROUP, "a"), (GROUP, "b"), (GROUP + 1, "c")):
        reads.read(by, group, name)
    bed.reader.end()
    reads.reap()
    reads.opened(GROUP, "a")
    assert (reads.counts_of(GROUP).read, reads.counts_of(GROUP).used) == (2, 1)
    assert (reads.counts_of(GROUP + 1).read, reads.counts_of(GROUP + 1).used) == (1, 0)
    reads.leave(GROUP)
    assert reads.counts_of(GROUP).read == 0 and reads.counts.read == 3


def test_what_was_in_memory_or_is_not_there_is_not_lost(
    bed: SmallReading, reads: Any, by: Wanting
) -> None:
    for name, how in (("a", {"missing": True}), ("b", {"waited": False})):
        reads.read(by, GROUP, name)
        bed.reader.end(**how)  # type: ignore[arg-type]
        reads.reap()
        reads.lost(GROUP, name)
    reads.leave(GROUP)
    assert (bed.account.lost, bed.account.open) == (0, 0)


def test_what_is_no_guess_is_not_in_the_account(bed: SmallReading, reads: Any, by: Wanting) -> None:
    for name in ("a", "b"):
        reads.read(by, GROUP, name, is_guess=False)
    bed.reader.end()
    reads.reap()
    reads.opened(GROUP, "a", is_guess=False)
    reads.leave(GROUP, is_guess=False)
    assert (reads.counts.read, reads.counts.used) == (2, 1)
    assert (bed.account.asked, bed.account.used, bed.account.lost) == (0, 0, 0)


def test_what_was_in_memory_was_not_read(bed: SmallReading, reads: Any, by: Wanting) -> None:
    reads.read(by, GROUP, "a")
    bed.reader.end(waited=False)
    reads.reap()
    reads.opened(GROUP, "a")
    counts = reads.counts
    assert (counts.there, counts.read, counts.used, bed.account.asked) == (1, 0, 0, 0)


def test_a_file_that_is_not_there_is_nothing(bed: SmallReading, reads: Any, by: Wanting) -> None:
    reads.read(by, GROUP, "a")
    bed.reader.end(missing=True)
    reads.reap()
    reads.leave(GROUP)
    counts = reads.counts
    assert (counts.there, counts.read, bed.account.asked, bed.account.lost) == (0, 0, 0, 0)
    assert len(by.came_as) == 1, "who wanted it hears of it"


def test_a_probe_is_no_file(bed: SmallReading, reads: Any, by: Wanting) -> None:
    reads.read(by, GROUP, "a", probe=True)
    bed.reader.end(Keeping.PAGES)
    reads.reap()
    reads.opened(GROUP, "a")
    assert (reads.counts.read, reads.counts.used, reads.counts.there) == (0, 0, 0)
    ((_, done),) = by.came_as
    assert done.probe is not None and done.probe.keeping is Keeping.PAGES


def test_where_it_helps_a_file_is_held_until_its_job_has_opened_it(
    bed: SmallReading, reads: Any, by: Wanting
) -> None:
    for name in ("a", "b", "c", "late"):
        reads.read(by, GROUP, name, on=HELD)
    reads.read(by, GROUP, "probed", probe=True, on=HELD)
    reads.read(by, GROUP, "other", on=FileSystem("other", call=READAHEAD))
    asked = [(one.hold, one.method) for one in bed.reader.asked]
    assert asked == [(True, PREAD)] * 4 + [(False, PREAD), (False, READAHEAD)]
    reads.opened(GROUP, "late")
    number = {one.name: one.id for one in bed.reader.asked}
    assert bed.reader.released == [(number["/data/late"], READ_NS)], "so it is not held at all"
    bed.reader.end(Keeping.PAGES)
    reads.reap()
    for _ in range(2):
        reads.opened(GROUP, "a")
        reads.opened(GROUP, "other")
    assert bed.reader.released[1:] == [(number["/data/a"], READ_NS)]
    assert not bed.reader.released_groups
    reads.leave(GROUP)
    assert bed.reader.released_groups == [GROUP], "nobody opens b and c any more"


def test_a_file_that_was_in_memory_is_held_too(bed: SmallReading, reads: Any, by: Wanting) -> None:
    """Its bytes are, and the server is asked for an open all the same."""
    for name in ("a", "b"):
        reads.read(by, GROUP, name, on=HELD)
    bed.reader.end(waited=False)
    reads.reap()
    reads.opened(GROUP, "a")
    assert bed.reader.released == [(bed.reader.asked[0].id, READ_NS)]
    assert (reads.counts.there, reads.counts.used, bed.account.asked) == (2, 0, 0)
    reads.leave(GROUP)
    assert bed.reader.released_groups == [GROUP] and bed.account.lost == 0


def test_nothing_is_asked_for_of_who_has_ended_or_where_too_much_is(
    bed: SmallReading, reads: Any, by: Wanting
) -> None:
    by.has_ended = True
    assert not reads.read(by, GROUP, "a")
    by.has_ended = False
    bed.reader.room = 1
    assert reads.read(by, GROUP, "a") and not reads.read(by, GROUP, "b")
    assert [one.name for one in bed.reader.asked] == ["/data/a"]


def test_no_file_is_read_much_further_than_those_before_it(
    bed: SmallReading, reads: Any, by: Wanting
) -> None:
    reads.counts.read, reads.counts.read_bytes = 2, 2 * MIB
    reads.read(by, GROUP, "a")
    reads.counts.read_bytes = 2 * MOST_BYTES
    reads.read(by, GROUP, "b")
    reads.counts.read_bytes = 2
    reads.read(by, GROUP, "c")
    most = [one.most_bytes for one in bed.reader.asked]
    assert most == [MEANS * MIB, MOST_BYTES, MIB]


def test_what_is_under_way_takes_of_the_accounts_room(
    bed: SmallReading, reads: Any, by: Wanting
) -> None:
    assert reads.room_files
    reads.counts.read, reads.counts.read_bytes = 1, 1 << 40
    reads.read(by, GROUP, "a")
    assert not reads.room_files
    bed.reader.end()
    reads.reap()
    reads.opened(GROUP, "a")
    assert reads.room_files


def test_what_lies_ahead_and_may_be_lost_is_bounded(
    bed: SmallReading, reads: Any, by: Wanting
) -> None:
    reads.counts.read, reads.counts.read_bytes = 100, 100 * FILE_BYTES
    most = AHEAD_BYTES // FILE_BYTES
    assert reads.room_files == most > 2
    reads.read(by, GROUP + 1, "known", is_guess=False)
    for name in ("a", "b"):
        reads.read(by, GROUP, name)
    bed.reader.end()
    reads.reap()
    assert reads.room_files == most - 2, "what is told by the job is no guess"
    reads.read(by, GROUP, "c")
    assert reads.room_files == most - 3
    reads.opened(GROUP, "a")
    assert reads.room_files == most - 2
    reads.counts.used_bytes = 4 * AHEAD_PART * FILE_BYTES
    assert reads.room_files == most + 2, "more than would be lost has been used"
    reads.lost(GROUP, "b")
    assert reads.room_files == most + 3, "it is not ahead of anybody"
    reads.leave(GROUP)
    bed.reader.end()
    reads.reap()
    reads.counts.used_bytes, reads.counts.read_bytes = 0, reads.counts.read * 2 * AHEAD_BYTES
    assert reads.room_files == 1, "a large one, while the one before is read"
    reads.read(by, GROUP, "d")
    assert reads.room_files == 0


@pytest.mark.parametrize(
    ("keeping", "keeps"),
    [(Keeping.PAGES, True), (Keeping.UNKNOWN, True), (Keeping.WHILE_OPEN, False),
     (Keeping.NOTHING, False)],
)  # fmt: skip
def test_what_a_mount_keeps_is_noted_and_told(keeping: Keeping, keeps: bool) -> None:
    ledger = Ledger()
    mounts = Mounts(ledger)
    assert not (mounts.is_known(DEVICE) or mounts.keeps(DEVICE) or mounts.drops(DEVICE))
    mounts.asked(DEVICE)
    assert mounts.is_known(DEVICE) and not (mounts.keeps(DEVICE) or mounts.drops(DEVICE))
    probe: Any = SimpleNamespace(keeping=keeping, file_system=HELD)
    mounts.note(DEVICE, probe, "/data")
    assert (mounts.file_system(DEVICE), mounts.file_system(DEVICE + 1).opens_held) == (HELD, False)
    assert (mounts.keeps(DEVICE), mounts.drops(DEVICE)) == (keeps, not keeps)
    told = [note.line for note in ledger.noted.left_alone]
    assert len(told) == (not keeps) and all(keeping.value in line for line in told)


def test_each_who_leaves_a_directory_unmarks_it_though_all_do_at_once(bed: SmallReading) -> None:
    watching, keys = bed.watching, list(range(5 * UNMARKING_MOST))
    for key in keys:
        watching.leave(key)
    assert bed.opener.waiting == UNMARKING_MOST and watching.active
    while bed.opener.waiting:
        bed.opener.end()
    assert bed.unmarked == keys and not watching.active


def test_what_could_not_be_unmarked_while_others_wait_is_when_they_do_not(
    bed: SmallReading,
) -> None:
    bed.opener.is_full = True
    bed.watching.leave(3)
    assert bed.watching.active and not bed.opener.waiting
    bed.opener.is_full = False
    bed.watching.step()
    bed.opener.end()
    assert bed.unmarked == [3] and not bed.watching.active


def test_no_more_lies_ahead_than_memory_allows(bed: SmallReading, reads: Any, by: Wanting) -> None:
    bed.allowed_bytes = FILE_BYTES
    assert reads.read(by, GROUP, "a", is_guess=False)
    bed.reader.end()
    reads.reap()
    assert not reads.read(by, GROUP, "b", is_guess=False), "it is yet to be opened"
    reads.opened(GROUP, "a", is_guess=False)
    assert reads.read(by, GROUP, "b", is_guess=False)
    bed.reader.end()
    reads.reap()
    reads.leave(GROUP, is_guess=False)
    assert reads.read(by, GROUP, "c", is_guess=False), "nobody opens it any more"


def test_no_more_is_read_than_max_rate_allows(bed: SmallReading, reads: Any, by: Wanting) -> None:
    bed.bucket.rate = 1  # byte/s
    bed.bucket.wait_ns(0)
    assert not reads.read(by, GROUP, "a")
    bed.bucket.rate = None
    assert reads.read(by, GROUP, "a")


def test_what_is_asked_for_counts_by_the_mean_and_what_comes_by_its_bytes(
    bed: SmallReading, reads: Any, by: Wanting
) -> None:
    """Of what was in memory, or is not there, nothing was read."""
    taken: list[int] = []
    bed.bucket.take = taken.append  # type: ignore[method-assign]
    reads.counts.read, reads.counts.read_bytes = 2, 600
    for how, bytes_read in (({}, FILE_BYTES), ({"waited": False}, 0), ({"missing": True}, 0)):
        mean_bytes = reads.mean_bytes
        assert reads.read(by, GROUP, "a")
        assert taken == [mean_bytes]
        bed.reader.end(**how)  # type: ignore[arg-type]
        reads.reap()
        assert sum(taken) == bytes_read
        taken.clear()
