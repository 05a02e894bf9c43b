# SPDX-License-Identifier: Apache-2.0
"""readers/known_order.PlannedReader by predict/order/epochs.Epochs: how a reader goes from epoch to
epoch by its
touches, and when its order is dropped. What looks find: test_planned_reader.py."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from conftest import warnings_fail
from planned_readers import (
    MS,
    RECORD,
    RECORDS,
    Orders,
    follows,
    found,
    order,
    place,
    reads,
)
from walked_orders import MIB, PAGE

from uffdprefetch.predict.bounds import ENTRIES_MAX
from uffdprefetch.predict.order.order import Order
from uffdprefetch.predict.sequences import AGREE, WAY
from uffdprefetch.readers.known_order import PlannedReader

pytestmark = warnings_fail


def test_the_coordinate_goes_on_from_epoch_to_epoch() -> None:
    reader = follows(Orders(range(100, 200), range(1000, 1100), range(2000, 2100)), rank=3)
    for epoch, first in enumerate((100, 1000, 2000)):
        reads(reader, range(first, first + 100), now=10 + epoch)
        assert place(reader) == (epoch, 100)
        assert reader.consumer.position_bytes == (epoch + 1) * 100 * RECORD
        assert reader.heard.active_ns == reader.heard.touched_ns == 10 + epoch
    assert reader.describe() == {
        "file": "/data/records", "rank": 3, "how": "a test", "epoch": 2, "items": 100,
        "read_items": 300, "sent_bytes": 300 * RECORD, "dropped": None,
    }  # fmt: skip


def test_four_records_of_the_next_order_begin_it_wherever_this_one_is() -> None:
    reader = follows(Orders(range(100, 200), range(1000, 1100), range(2000, 2100)))
    reads(reader, range(100, 110))
    reads(reader, range(1000, 1003))
    assert place(reader) == (0, 10)
    later = reader.consumer.last_ns + 7
    reads(reader, [1003], later)
    assert place(reader) == (1, 4)
    assert (reader.consumer.position_bytes, reader.consumer.last_ns) == (104 * RECORD, later)
    reads(reader, range(2000, 2004))
    assert place(reader) == (2, 4)
    assert reader.consumer.position_bytes == 204 * RECORD
    assert reader.describe()["read_items"] == 10 + 4 + 4


def test_what_this_order_explains_does_not_begin_the_next_one() -> None:
    source = Orders(range(100, 200), range(100, 200))
    reader = follows(source)
    reads(reader, range(100, 200))
    assert place(reader) == (0, 100) and 1 not in source.asked
    reads(reader, range(100, 104))
    assert place(reader) == (1, 4)


def test_touches_within_the_record_that_is_read_tell_nothing() -> None:
    reader = follows(Orders([100, 300, 100, 500]))
    reads(reader, [100])
    for page in (8, 4, 12, 2):
        at = 100 * RECORD + page * PAGE
        reader.saw(at, at + PAGE, 2)
    assert place(reader) == (0, 1) and reader.heard.active_ns == 1


def test_a_reader_is_followed_until_its_last_order_is_through() -> None:
    source = Orders(range(100, 110), epochs=2)
    reader = follows(source)
    assert reader.live
    reads(reader, range(100, 110))
    assert place(reader) == (0, 10) and reader.live, "the next order may come yet"
    source.epochs = 1
    assert not reader.live and not reader.over
    source.epochs = 0
    assert reader.over


def test_nothing_is_done_before_there_is_an_order() -> None:
    source = Orders(epochs=2)
    reader = follows(source)
    reads(reader, [100])
    reader.said(3, 9)
    assert reader.look() is None and not reader.live
    assert list(reader.epochs.due(64 * MIB)) == []
    assert reader.describe()["items"] is None and reader.describe()["read_items"] == 0
    source.come[0] = order(range(100, 200))
    assert reader.live and place(reader) == (0, 0)


def test_a_better_order_goes_on_where_the_guess_was() -> None:
    source = Orders(range(100, 200))
    reader = follows(source)
    reads(reader, range(100, 110))
    source.come[0] = order([*range(100, 110), *range(500, 600)])
    assert reader.look() is not None and place(reader) == (0, 10)
    reads(reader, range(500, 503))
    assert reader.cursor is not None and reader.cursor.items == 110
    assert place(reader) == (0, 13)


def test_what_is_said_counts_as_read() -> None:
    reader = follows(Orders(range(100, 200)))
    reader.said(30, 8)
    assert place(reader) == (0, 30) and reader.heard.active_ns == 8
    assert reader.consumer.position_bytes == 30 * RECORD


def test_an_order_that_nobody_reads_is_dropped_and_the_first_reason_stays() -> None:
    reader = follows(Orders(range(100, 200), range(1000, 1100)))
    assert reader.live
    reader.saw(2000 * RECORD, 2300 * RECORD, 5)
    assert reader.dropped is not None and not reader.live
    assert "0 of its 100 items" in reader.dropped
    reader.dropped = "an earlier reason"
    reader.saw(2300 * RECORD, 2600 * RECORD, 6)
    assert reader.dropped == "an earlier reason"


def test_what_the_next_order_explains_makes_this_one_no_wrong_one() -> None:
    """Its beginning is read, and of this one's nothing was."""
    for mapped in (False, True):
        reader = follows(Orders(range(100, 200), range(1000, 1400)))
        if mapped:
            assert reader.mapped([(1000 * RECORD, 1300 * RECORD)], 5)
        else:
            reader.saw(1000 * RECORD, 1300 * RECORD, 5)
        assert reader.epoch == 1 and reader.dropped is None


def test_single_touches_by_chance_are_no_next_epoch() -> None:
    """A page of the tree, say, that the pool has evicted: it lies in some record's place there."""
    reader = follows(Orders(range(100, 1100), range(2000, 3000)))
    assert reader.live
    for turn in range(12):  # each where the next order soon is, one for every two that are right
        reads(reader, range(100 + 2 * turn, 102 + 2 * turn))
        reads(reader, [2000 + 17 * turn])
        assert reader.epoch == 0
    assert place(reader) == (0, 24) and reader.dropped is None
    assert list(reader.epochs.due(4 * MIB))
    reader.said(1000, 1)  # nothing of the next epoch is taken for read
    due = [start // RECORD for start, _, _ in reader.epochs.due(4 * MIB)]
    assert due and min(due) == 2000


def test_an_epoch_has_begun_when_its_items_are_touched_wherever_the_first_ones_are_mapped() -> None:
    for first, some in ((2000, AGREE), (2600, WAY)):
        # What lies before is mapped still, and is read without a touch.
        reader = follows(Orders(range(100, 200), range(2000, 3000)))
        reads(reader, range(100, 200))
        reads(reader, range(first, first + some - 1))
        assert reader.epoch == 0
        reads(reader, [first + some - 1])
        assert place(reader) == (1, first - 2000 + some) and reader.dropped is None
    # Far from each other, and here and there, they are no beginning.
    reader = follows(Orders(range(100, 200), range(2000, 4000)))
    reads(reader, range(100, 200))
    reads(reader, [2600, 3200, 3800, 2700, 3300, 3900, 2800, 3400, 2500, 3000])
    assert reader.epoch == 0


def test_a_worker_that_is_late_at_the_end_begins_no_epoch_and_shifts_none() -> None:
    first, second = (np.random.default_rng(n).permutation(RECORDS) for n in range(2))
    reader = follows(Orders(first, second))
    reads(reader, first[:-8])
    reads(reader, first[-4:])  # another worker has read the last ones
    for record in first[-8:-4]:  # and this one its pages, one after the other
        for page in range(4):
            reader.saw(
                int(record) * RECORD + page * PAGE, int(record) * RECORD + (page + 1) * PAGE, 1
            )
    assert reader.epoch == 0
    reads(reader, second[:40])
    assert place(reader) == (1, 40) and reader.dropped is None


def together(records: Iterable[int], workers: int, batch: int = 64) -> list[int]:
    """What so many workers read, each a batch, one record each in turn."""
    every = np.array([*records])
    return (
        every[: len(every) // (workers * batch) * workers * batch]
        .reshape(-1, workers, batch)
        .transpose(0, 2, 1)
        .ravel()
        .tolist()
    )


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_readers_that_begin_in_the_middle_are_found(workers: int) -> None:
    order_of = np.random.default_rng(5).permutation(RECORDS)
    reader = follows(Orders(order_of))
    assert reader.live
    reads(reader, together(order_of[2048:], workers)[:512])
    assert 2048 + 256 <= place(reader)[1] <= 2048 + 512 + workers * 64 and reader.dropped is None


def test_items_of_several_pieces_are_no_tree() -> None:
    """An image here, its label there."""

    def pairs(first: int) -> Order:
        images = np.arange(first, first + 400) * RECORD
        labels = 3000 * RECORD + np.arange(first, first + 400) * 16
        return Order(
            np.c_[images, labels].ravel(),
            np.c_[images + RECORD, labels + 16].ravel(),
            np.arange(400).repeat(2),
        )

    source = Orders(range(400), range(1000, 1400))
    source.come = {0: pairs(0), 1: pairs(1000)}
    reader = follows(source)
    for record in [*range(400), *range(1000, 1100)]:
        reads(reader, [record])
    assert place(reader) == (1, 99) and reader.dropped is None  # the last label is not touched


def test_a_reader_that_shows_seldom_is_followed_by_two_touches_and_never_by_one() -> None:
    def paced() -> PlannedReader:
        reader = follows(Orders(range(4000)))
        for record in range(1000):  # 1000 records a second
            reads(reader, [record], MS + record * MS)
        return reader

    reader = paced()
    reads(reader, [1300], 1200 * MS)  # beyond what is near, as far as its pace may have taken it
    assert place(reader) == (0, 1000)
    reads(reader, [1340], 1240 * MS)
    assert place(reader) == (0, 1341)
    reader = paced()  # and now a pause
    reads(reader, [1900], 5000 * MS)
    assert place(reader) == (0, 1000)
    reads(reader, [1000, 1001], 5001 * MS)
    assert place(reader) == (0, 1002)


def test_a_reader_that_shows_now_and_then_far_ahead_is_in_its_order() -> None:
    """Of what is mapped still a reader shows only where a page was armed again."""
    order_of = np.random.default_rng(6).permutation(RECORDS)
    reader = follows(Orders(order_of))
    assert reader.live
    reads(reader, order_of[:200])
    reads(reader, order_of[1000 : 1000 + 45 * 60 : 60])
    assert reader.dropped is None and 3000 < place(reader)[1] <= 1000 + 45 * 60
    # Another order's are not, however long they go on.
    wrong = follows(Orders(order_of))
    reads(wrong, order_of[:200])
    reads(wrong, np.random.default_rng(7).permutation(RECORDS)[:200])
    assert wrong.dropped is not None


def test_pages_of_the_tree_that_are_read_again_begin_no_epoch_and_drop_no_plan() -> None:
    """They lie in each order where they are needed first, and a pool evicts them after that."""

    def with_tree(records: range) -> Order:
        starts = np.array(records) * RECORD
        tree = np.arange(0, len(records), 50)  # a page of the tree before each 50th record
        at = np.arange(len(tree)) * RECORD
        return Order(
            np.insert(starts, tree, at),
            np.insert(starts + RECORD, tree, at + PAGE),
            np.insert(np.arange(len(records)), tree, tree),
        )

    source = Orders(range(100, 3300), range(800, 4000))
    source.come = {0: with_tree(range(100, 3300)), 1: with_tree(range(800, 4000))}
    reader = follows(source)
    assert reader.live
    reads(reader, range(100, 3100))
    for turn in range(60):
        reads(reader, [3100 + turn])
        reads(reader, [7 * turn % 40, (7 * turn + 3) % 40])  # of the tree, read long ago
    assert (place(reader), reader.dropped) == ((0, 3060), None)


def test_what_was_mapped_in_the_epoch_before_is_not_held_against_the_next_one() -> None:
    reader = follows(Orders(range(100, 1100), range(2000, 3000)))
    reads(reader, range(100, 1100))
    reads(reader, range(2000, 2000 + AGREE))
    assert reader.epoch == 1
    # A look that comes only now finds all of the first epoch, 62 MiB.
    reader.mapped([(100 * RECORD, 1100 * RECORD)], 9)
    assert reader.dropped is None and reader.live
    for start in range(0, 100, 20):  # but what is read from now on is
        reader.mapped([((3100 + start) * RECORD, (3120 + start) * RECORD)], 10 + start)
    for start in range(3200, 4000, 40):
        reader.mapped([(start * RECORD, (start + 40) * RECORD)], start)
    assert reader.dropped is not None


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_epoch_of_a_few_items_begins_as_any_other(count: int) -> None:
    later = range(1000, 1000 + count)
    touched, seen = (follows(Orders(range(100, 200), later, later)) for _ in range(2))
    for reader in (touched, seen):
        reads(reader, range(100, 200))
    reads(touched, later)
    assert place(touched) == ((1, count) if count > 1 else (0, 100)), "one is by chance"
    seen.mapped(found(later), 2)
    assert place(seen) == (1, count)


def test_a_long_item_begins_an_epoch_by_its_parts() -> None:
    source = Orders(range(100, 200), epochs=2)
    whole = np.array([1000 * RECORD])
    source.come[1] = Order(whole, whole + 64 * MIB, np.zeros(1, np.int64))
    reader = follows(source)
    reads(reader, range(100, 200))
    reads(reader, [1000, 1000 + 16])
    assert reader.epoch == 1 and reader.dropped is None


def test_one_long_item_that_is_mapped_does_not_begin_an_epoch() -> None:
    """It is read in pieces, of which there are more than four."""
    long = np.arange(20) * 128 * RECORD  # of 8 MiB
    source = Orders(epochs=2)
    for epoch, starts in enumerate((long[::-1], long)):
        source.come[epoch] = Order(starts, starts + 128 * RECORD, np.arange(20))
    reader = follows(source)
    reader.look()
    reads(reader, (long[::-1][:8, None] // RECORD + np.arange(0, 128, 16)).ravel())
    at = place(reader)
    assert at[0] == 0 and at[1] >= 7
    reader.mapped([(0, 128 * RECORD)], 3)
    assert place(reader) == at


def test_what_is_in_no_item_counts_where_the_first_items_are_of_other_files() -> None:
    """Their turns are numbered over all files."""
    source = Orders(epochs=2)
    starts = np.arange(500) * RECORD
    source.come[0] = Order(starts, starts + RECORD, 1000 + np.arange(500))
    reader = follows(source)
    assert place_of(reader) == 1000
    reads(reader, range(1000, 2000))
    assert reader.dropped is not None and "0 of its 1,500 items" in reader.dropped


def place_of(reader: PlannedReader) -> int:
    walk = reader.look()
    assert walk is not None
    return walk.position


def test_epochs_of_nothing_have_an_end() -> None:
    source = Orders(range(100, 200), epochs=1 << 62)
    source.come |= {epoch: order([]) for epoch in range(1, 2 * ENTRIES_MAX)}
    reader = follows(source)
    reads(reader, [*range(100, 200), 3000])
    assert max(source.asked) == ENTRIES_MAX


def test_items_without_bytes_do_not_begin_an_epoch() -> None:
    source = Orders(range(100, 200), epochs=2)
    some = np.arange(100)
    starts = (1000 + some) * RECORD
    source.come[1] = Order(starts, starts + RECORD * (some >= 10), some)  # a file that was cut
    reader = follows(source)
    reads(reader, range(100, 150))
    reader.mapped(found([3000]), 2)
    assert place(reader) == (0, 50)
    reads(reader, range(1010, 1014))
    assert place(reader) == (1, 14)


def test_epochs_of_nothing_are_passed_over() -> None:
    reader = follows(Orders(range(100, 200), [], [], range(1000, 1100), []))
    reads(reader, range(100, 200))
    assert reader.live
    reads(reader, range(1000, 1100))
    assert place(reader) == (3, 100) and reader.dropped is None
    assert reader.consumer.position_bytes == 200 * RECORD
    reads(reader, [3000])
    assert not reader.live


def test_what_is_read_beside_the_epochs_is_not_held_against_the_next_one() -> None:
    """A validation set in the same file, which looks find at the end of an epoch."""
    reader = follows(Orders(range(2000), range(2000, 3000)))
    reader.look()
    for first in range(0, 2000, 20):
        assert list(reader.epochs.due(16 * MIB)) or first
        reads(reader, range(first, first + 20))
    for first in range(3200, 3600, 20):  # 25 MiB
        reader.mapped(found(range(first, first + 20)), first)
    assert place(reader) == (0, 2000)
    reads(reader, range(2000, 2010))
    assert place(reader) == (1, 10) and reader.dropped is None


def test_items_that_no_touch_shows_are_read_all_the_same() -> None:
    said, looked = follows(Orders(range(2000))), follows(Orders(range(2000)))
    said.look()
    said.said(1000, 1)
    looked.look()
    for first in range(0, 1000, 20):
        list(looked.epochs.due(16 * MIB))
        looked.mapped(found(range(first, first + 20)), first)
    for reader in (said, looked):
        assert place(reader)[1] >= 980
        reader.saw(3000 * RECORD, 3300 * RECORD, 2000)  # 19 MiB
        assert reader.dropped is None
