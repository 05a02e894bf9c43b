# SPDX-License-Identifier: Apache-2.0
"""service/ordered_files.py: files in an order that is known are read by name ahead of who opens
them, epoch after epoch, and what is opened moves the order on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_reading import SmallReading

from uffdprefetch.base.file_systems import FileSystem
from uffdprefetch.job.channel import packed
from uffdprefetch.native.paths import HOLD_SECONDS, THREADS, Keeping
from uffdprefetch.orders.file_order import FileOrder, PathColumn, PathOrder, of_items
from uffdprefetch.orders.key_lists import KeyList
from uffdprefetch.predict.bounds import ENTRIES_MAX
from uffdprefetch.sense.opens import DirectoryGone, NameOpened, Overflow
from uffdprefetch.service.ordered_files import AHEAD_FILES, HELD_FILES, PACE_OPENS, OrderedFiles

PID = os.getpid()
FILES = 3 * AHEAD_FILES


class Following(SmallReading):
    """Orders of files below a directory, of which this process is the reader."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.is_slow = False
        self.files = OrderedFiles(lambda: self.watching)

    def order(
        self, numbers: Sequence[int], directory: str = "", after: FileOrder | None = None
    ) -> FileOrder:
        """Of files with these numbers for names."""
        root = os.path.normpath(os.path.join(self.directory, directory))
        os.makedirs(root, exist_ok=True)
        names = [f"{root}/{i}".encode() for i in numbers]
        column = PathColumn(KeyList.parse("n", "bytes", packed(names)))
        each = np.arange(len(names))
        made = FileOrder(of_items([column], [each], each, len(names)), "--plan")
        self.files.follow(PID, made, after)
        return made

    def step(self, *events: Any) -> list[str]:
        """A step; the names of what was asked for meanwhile."""
        self.watching.reads.reap()
        before = len(self.reader.asked)
        self.files.step(self.watching, events)
        if not self.is_slow:
            self.opener.end()
        return [os.path.basename(one.name) for one in self.reader.asked[before:]]

    def begin(self, keeping: Keeping = Keeping.PAGES) -> list[str]:
        """Find out what the mount keeps; what is asked for then."""
        self.step()  # marks
        assert len(set(self.step())) == 1 and self.reader.asked[-1].probe
        self.reader.end(keeping)
        return self.step()

    def opens(self, name: int | str, directory: str = "", ours: bool = False) -> NameOpened:
        key = self.opens_of[os.path.normpath(os.path.join(self.directory, directory))]
        return NameOpened(key, str(name), False, ours, 0, 0)


@pytest.fixture
def bed(tmp_path: Path) -> Following:
    return Following(tmp_path)


def names(first: int, end: int) -> list[str]:
    return [str(i) for i in range(first, end)]


def test_so_many_files_are_read_ahead_and_more_as_they_are_opened(bed: Following) -> None:
    order = bed.order(range(FILES))
    assert sorted(bed.begin(), key=int) == names(0, AHEAD_FILES)
    bed.reader.end()
    assert bed.step(*map(bed.opens, range(3))) == names(AHEAD_FILES, AHEAD_FILES + 3)
    assert order.position == 3
    assert bed.watching.reads.counts.used == 3


def test_files_are_held_open_where_the_mount_is_one_on_which_that_helps(bed: Following) -> None:
    bed.reader.file_system = FileSystem("held", opens_held=True)
    bed.order(range(FILES))
    bed.begin()
    assert [one.hold for one in bed.reader.asked] == [False, *[True] * HELD_FILES]
    bed.reader.end()
    bed.step(bed.opens(0))
    (first,) = (one.id for one in bed.reader.asked[1:] if one.name.endswith("/0"))
    assert [number for number, _ in bed.reader.released] == [first]


@pytest.mark.parametrize(
    ("per_second", "ahead"), [(1, THREADS), (20, 20 * HOLD_SECONDS // 2), (1000, AHEAD_FILES)]
)
def test_no_more_are_held_open_than_are_opened_before_that_ends(
    bed: Following, per_second: int, ahead: int
) -> None:
    bed.reader.file_system = FileSystem("held", opens_held=True)
    order = bed.order(range(FILES))
    bed.begin()
    bed.reader.end()
    for number in range(4 * PACE_OPENS):
        bed.step(bed.opens(number)._replace(at_ns=number * 1_000_000_000 // per_second))
        bed.reader.end()
    assert len(bed.reader.asked) - 1 - order.position == pytest.approx(ahead, abs=1)


def test_a_batch_of_each_of_two_workers_tells_how_fast_a_reader_is(bed: Following) -> None:
    bed.reader.file_system = FileSystem("held", opens_held=True)
    bed.order(range(FILES))
    bed.begin()
    bed.reader.end()
    opens = iter(bed.opens(i)._replace(at_ns=i * 1_000_000_000) for i in range(FILES))
    for _ in range(2 * THREADS - 1):
        assert len(bed.step(next(opens))) == 1, "as many are held as where nothing is known"
        bed.reader.end()
    assert bed.step(next(opens)) == [], "it is slow: there are more than it will come to"


def test_who_opens_a_batch_at_once_and_then_computes_is_as_slow_as_that(bed: Following) -> None:
    bed.reader.file_system = FileSystem("held", opens_held=True)
    order, batch, seconds = bed.order(range(FILES)), HELD_FILES, HOLD_SECONDS
    bed.begin()
    bed.reader.end()
    for number in range(3 * batch):
        at_ns = number // batch * seconds * 1_000_000_000 + number % batch
        bed.step(bed.opens(number)._replace(at_ns=at_ns))
        bed.reader.end()
    assert len(bed.reader.asked) - 1 - order.position <= batch, "what it opens in that time"


def test_what_we_open_ourselves_moves_nothing(bed: Following) -> None:
    order = bed.order(range(FILES))
    bed.begin()
    assert bed.step(bed.opens(0, ours=True)) == []
    assert order.position == 0
    key = bed.opens_of[bed.directory]
    assert bed.expected[:2] == [(key, "0"), (key, "0")], "first to see what the mount keeps"


def test_a_reader_that_has_overtaken_us_is_not_read_behind(bed: Following) -> None:
    order = bed.order(range(FILES))
    bed.begin()
    order.said(2 * AHEAD_FILES)
    assert bed.step() == names(2 * AHEAD_FILES, FILES)


def test_the_next_epoch_gets_what_the_present_one_leaves(bed: Following) -> None:
    first = bed.order(range(FILES))
    second = bed.order([*reversed(range(FILES))], after=first)
    bed.begin()
    for number in range(2 * AHEAD_FILES):
        assert bed.step(bed.opens(number)) == [str(number + AHEAD_FILES)]
        bed.reader.end()
    assert (first.position, second.position) == (2 * AHEAD_FILES, 0)
    assert bed.step(bed.opens("x")) == []
    probed = bed.step(bed.opens(2 * AHEAD_FILES))
    assert probed == [str(FILES - 1)], "each order finds out what its mount keeps"
    bed.reader.end(Keeping.PAGES)
    assert bed.step() == [str(FILES - 1)], "one file was opened, so one is read"
    for number in range(2 * AHEAD_FILES + 1, FILES - 1):
        bed.step(bed.opens(number))
    assert second.position == 0
    bed.step(bed.opens(FILES - 1))
    assert first.done and second.position == 0
    bed.step(bed.opens(FILES - 1))
    assert second.position == 1


def test_an_epoch_that_is_left_near_its_end_is_over_when_the_next_goes_on(bed: Following) -> None:
    first = bed.order(range(FILES))
    second = bed.order(range(FILES), after=first)
    bed.begin()
    for number in range(FILES - 4):  # an incomplete batch is left out
        bed.step(bed.opens(number))
    for number in range(AHEAD_FILES):
        bed.step(bed.opens(number))
    assert (first.position, second.position) == (FILES - 4, AHEAD_FILES)
    bed.files.forget(PID, [second])
    assert not bed.files.active, "the first is not kept"


def test_two_loaders_of_a_process_are_followed_side_by_side(bed: Following) -> None:
    first = bed.order(range(FILES), "a")
    second = bed.order(range(1000, 1000 + FILES), "b")
    bed.step()
    assert bed.step() == ["0", "1000"]
    bed.reader.end(Keeping.PAGES)
    bed.step(bed.opens(0, "a"), bed.opens(1000, "b"))
    assert (first.position, second.position) == (1, 1)
    assert {one.group for one in bed.reader.asked[2:]} == {1 << 32 | 1, 1 << 32 | 2}
    assert len(bed.reader.asked) == 2 + 2 * (AHEAD_FILES + 1)


def test_nothing_is_read_where_a_mount_does_not_keep_it(bed: Following) -> None:
    bed.order(range(FILES))
    assert bed.begin(Keeping.WHILE_OPEN) == []
    assert bed.step(bed.opens(0)) == []
    (note,) = bed.ledger.noted.left_alone
    assert "its file system keeps" in note.line


def test_a_file_that_is_not_there_says_nothing_of_the_mount(bed: Following) -> None:
    bed.order(range(FILES))
    bed.step()
    assert bed.step() == ["0"]
    bed.reader.end(missing=True)
    assert bed.step() == ["1"]
    bed.reader.end(Keeping.PAGES)
    assert bed.step() == names(1, AHEAD_FILES)


def test_files_wait_for_the_mark_of_their_directory(bed: Following) -> None:
    bed.is_slow = True
    bed.order(range(4), "a")
    assert bed.step() == bed.step() == []
    bed.opener.end()
    assert bed.step() == ["0"]


def test_a_directory_that_cannot_be_watched_is_read_all_the_same(bed: Following) -> None:
    bed.refuses = True
    bed.order(range(4))
    assert len(bed.begin()) == 4
    assert not bed.files.watch(PID, [bed.directory]) and bed.expected == []


def test_a_queue_that_is_full_is_tried_again(bed: Following) -> None:
    bed.order(range(FILES))
    bed.reader.room = 11
    assert bed.begin() == names(0, 11)
    expected = len(bed.expected)
    assert bed.step() == [] and len(bed.expected) == expected, "nothing is opened"
    bed.reader.end()
    assert bed.step() == names(11, 22), "none is left out, and the next one first"


def test_who_has_overtaken_what_waits_for_room_does_not_get_it(bed: Following) -> None:
    order = bed.order(range(FILES))
    bed.reader.room = 11
    bed.begin()
    order.said(2 * AHEAD_FILES)
    bed.reader.end()
    assert bed.step() == names(2 * AHEAD_FILES, 2 * AHEAD_FILES + 11)


def test_a_subdirectory_that_is_opened_is_no_file(bed: Following) -> None:
    order = bed.order(range(FILES))
    bed.begin()
    assert bed.step(bed.opens(0)._replace(is_dir=True)) == [] and order.position == 0


def test_of_an_order_that_is_forgotten_nothing_more_is_read_nor_remembered(bed: Following) -> None:
    first, second = bed.order(range(FILES), "a"), bed.order(range(FILES), "b")
    bed.step()
    bed.step()
    bed.reader.end(Keeping.PAGES)
    bed.step(bed.opens(0, "a"))
    group = bed.reader.asked[-1].group
    bed.files.forget(PID, [second])
    assert bed.reader.withdrawn == [group] and bed.files.opened(PID) == []
    before = len(bed.reader.asked)
    bed.step(bed.opens(0, "b"), bed.opens(1, "a"))
    assert first.position == 2 and second.position == 0
    assert {one.group for one in bed.reader.asked[before:]} == {group - 1}


def test_after_an_overflow_what_was_opened_is_seen_anew(bed: Following) -> None:
    bed.order(range(FILES))
    assert not bed.files.watch(PID, [bed.directory]), "it is being marked"
    bed.opener.end()
    assert bed.files.watch(PID, [bed.directory])
    bed.step(bed.opens("x"), bed.opens(0))
    assert bed.files.opened(PID) == [f"{bed.directory}/x", f"{bed.directory}/0"]
    bed.step(Overflow(0), bed.opens("y"))
    assert bed.files.opened(PID) == [f"{bed.directory}/y"]
    assert not bed.files.watch(PID, [bed.directory])
    assert bed.files.watch(PID, [bed.directory])


def test_a_directory_that_is_gone_is_not_watched(bed: Following) -> None:
    bed.files.watch(PID, [bed.directory])
    bed.opener.end()
    assert bed.files.watch(PID, [bed.directory])
    key = bed.opens_of[bed.directory]
    bed.step(DirectoryGone(key))
    assert bed.unmarked == [key]
    assert not bed.files.watch(PID, [bed.directory])


def test_a_directory_that_is_named_in_two_ways_is_marked_for_one(bed: Following) -> None:
    other = f"{bed.directory}/link"
    bed.opens_of[bed.directory] = bed.opens_of[other] = 1
    bed.files.watch(PID, [bed.directory, other])
    bed.opener.end()
    bed.opener.end()
    assert bed.unmarked == [1] and bed.files.watch(PID, [bed.directory, other])
    bed.files.forget(PID, [])
    bed.opener.end()
    assert bed.unmarked == [1, 1]


def test_no_more_directories_are_watched_for_a_process_than_a_service_may(bed: Following) -> None:
    directories = [f"{bed.directory}/{number}" for number in range(ENTRIES_MAX + 10)]
    bed.files.watch(PID, directories)
    bed.opener.end()
    assert len(bed.opens_of) == ENTRIES_MAX


def test_a_directory_is_unmarked_when_nobody_wants_it(bed: Following) -> None:
    other = os.getppid()
    for pid in (PID, other):
        bed.files.watch(pid, [bed.directory])
    bed.opener.end()
    key = bed.opens_of[bed.directory]
    bed.files.forget(PID, [])
    bed.opener.end()
    assert bed.unmarked == [key] and bed.files.active, "the other has marked it, too"
    bed.files.forget(other, [])
    bed.opener.end()
    assert bed.unmarked == [key, key] and not bed.files.active


def test_a_mark_that_comes_after_the_end_is_taken_back(bed: Following) -> None:
    bed.files.watch(PID, [bed.directory])
    bed.files.forget(PID, [])
    bed.opener.end()  # the mark
    bed.opener.end()
    assert bed.unmarked == [bed.opens_of[bed.directory]]


def test_nothing_is_read_for_a_process_that_has_ended(bed: Following) -> None:
    pid = 1 << 22  # above any
    column = PathColumn(KeyList.parse("n", "bytes", packed([b"/d/1"])))
    one = np.arange(1)
    order = FileOrder(of_items([column], [one], one, 1), "--plan")
    bed.files.follow(pid, order)
    assert bed.step() == bed.step() == []
    bed.files.forget(pid, [order])
    assert not bed.files.active


def test_files_by_a_link_are_booked_by_their_own_names(bed: Following, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    column = PathColumn(KeyList.parse("n", "bytes", packed([b"%d" % i for i in range(4)])),
                        f"{tmp_path}/link/".encode())  # fmt: skip
    each = np.arange(4)
    plain = of_items([column], [each], each, 4)
    linked = PathOrder(
        plain.table, plain.numbers, plain.item, 4, [(f"{real}/", f"{tmp_path}/link/")]
    )
    order = FileOrder(linked, "--plan")
    bed.files.watch(PID, [str(real)])
    bed.files.follow(PID, order)
    assert bed.begin() == names(0, 4)
    bed.reader.end()
    bed.step(bed.opens(0, "real"))
    assert bed.watching.reads.counts.used == 1 and order.position == 1


def test_where_nothing_can_be_watched_nothing_is_followed(bed: Following) -> None:
    none: Callable[[], None] = lambda: None  # noqa: E731
    files = OrderedFiles(none)
    assert not files.watch(PID, [bed.directory])
    files.follow(PID, bed.order([1]))
    files.forget(PID, [])
