# SPDX-License-Identifier: Apache-2.0
"""readers/known_order.PlannedReader: what looks into page tables tell, and what it needs next. From
epoch
to epoch: test_epochs.py."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from conftest import warnings_fail
from planned_readers import (
    RECORD,
    Orders,
    follows,
    found,
    order,
    place,
    reads,
)
from walked_orders import MIB

from uffdprefetch.predict.used import Blocks
from uffdprefetch.readers import known_order

pytestmark = warnings_fail


# ---- page tables --------------------------------------------------------------------------------


def test_what_is_mapped_moves_the_reader_and_is_looked_at_once() -> None:
    reader = follows(Orders(range(100, 200)))
    reader.look()
    assert list(reader.epochs.due(4 * MIB))
    before = reader.heard.touched_ns
    assert reader.mapped(found(range(100, 110)), before + 5)
    assert place(reader) == (0, 10) and reader.seen == []
    assert (reader.heard.active_ns, reader.heard.touched_ns) == (before + 5, before)
    assert reader.consumer.position_bytes == 10 * RECORD
    assert not reader.mapped([], before + 9)
    assert reader.heard.active_ns == before + 5


def test_what_was_found_mapped_before_the_order_came_is_kept() -> None:
    source = Orders(epochs=1)
    reader = follows(source)
    assert not reader.mapped(found([100, 101]), 2)
    assert not reader.mapped(found([102, 103]), 3)
    source.come[0] = order(range(100, 200))
    assert reader.mapped([], 4) and place(reader) == (0, 4)


def test_of_what_was_found_mapped_only_the_newest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_order, "ENTRIES_MAX", 6)
    reader = follows(Orders(epochs=1))
    reader.mapped(found(range(5)), 2)
    reader.mapped(found(range(5, 9)), 3)
    assert reader.seen == found(range(3, 9))


def test_the_next_epoch_begins_by_what_is_mapped_too() -> None:
    reader = follows(Orders(range(100, 200), range(1000, 1100)))
    reads(reader, range(100, 110), now=2)
    assert not reader.mapped(found(range(1000, 1003)), 3), "three are too few"
    assert reader.mapped(found([1003]), 4) and place(reader) == (1, 4)
    assert reader.heard.active_ns == 4 and reader.consumer.position_bytes == 104 * RECORD


def test_what_is_mapped_of_a_next_order_that_has_not_come_is_kept() -> None:
    source = Orders(range(100, 200), epochs=2)
    reader = follows(source)
    reads(reader, range(100, 110))
    assert not reader.mapped(found([1000, 1001]), 3) and not reader.mapped(found([1002]), 4)
    source.come[1] = order(range(1000, 1100))
    assert reader.mapped(found([1003]), 5) and place(reader) == (1, 4)


def test_an_epoch_of_as_many_items_as_the_last_ones_position_is_a_move() -> None:
    reader = follows(Orders(range(100, 200), range(1000, 1100)))
    reads(reader, range(100, 104))
    assert reader.mapped(found(range(1000, 1004)), 3), "epoch 1, at the same place in it"
    assert place(reader) == (1, 4)


def test_what_began_an_epoch_does_not_begin_the_one_after_it() -> None:
    reader = follows(Orders(range(100, 200), range(1000, 1100), range(1000, 1100)))
    assert reader.mapped(found(range(1000, 1004)), 3)
    assert not reader.mapped([], 4) and place(reader) == (1, 4)


def test_a_wrong_order_is_dropped_by_what_is_mapped() -> None:
    reader = follows(Orders(range(100, 200)))
    reader.mapped([(2000 * RECORD, 2300 * RECORD)], 5)
    assert reader.dropped is not None and not reader.live


# ---- what is needed -----------------------------------------------------------------------------


def spans(pieces: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """In records."""
    return [(start // RECORD, -(-end // RECORD), need // RECORD) for start, end, need in pieces]


def test_with_the_end_of_an_epoch_comes_the_beginning_of_the_next() -> None:
    source = Orders(range(100, 110), range(1000, 1100, 4), range(2000, 2100))
    reader = follows(source)
    reader.look()
    due = spans(reader.epochs.due(10 * RECORD))
    assert [need for _, _, need in due] == [first - 100 for first, _, _ in due]
    assert (due[0][0], due[-1][1]) == (100, 110)
    assert source.asked == {0}, "the next order is not asked for before it is needed"
    reads(reader, range(100, 104))
    assert spans(reader.epochs.due(8 * RECORD)) == [(1000, 1001, 10), (1004, 1005, 11)]
    assert reader.describe()["sent_bytes"] == 10 * RECORD
    reads(reader, range(104, 110))
    reads(reader, range(1000, 1016, 4))
    assert place(reader) == (1, 4)
    assert spans(reader.epochs.due(4 * RECORD))[-1] == (1028, 1029, 17)
    assert reader.describe()["sent_bytes"] == (10 + 8) * RECORD
    assert spans(reader.epochs.due(22 * RECORD))[-1] == (2000, 2001, 35)


def test_of_a_wrong_order_nothing_more_is_needed() -> None:
    source = Orders(range(100, 110), epochs=2)
    reader = follows(source)
    reader.saw(2000 * RECORD, 2300 * RECORD, 5)
    source.come[1] = order(range(1000, 1100))
    assert list(reader.epochs.due(64 * MIB)) == []


def test_how_far_away_a_block_is_goes_on_in_the_next_order() -> None:
    reader = follows(Orders(range(100, 110), [1000, 100, 1001]))
    reads(reader, range(100, 104))
    blocks = np.array([105, 1000, 1001, 100, 3000])
    away = reader.epochs.future(blocks, RECORD) / RECORD
    assert away.tolist() == [1.0, 6.0, 8.0, 7.0, np.inf]
    assert reader.epochs.knows(blocks, RECORD).tolist() == [True] * 4 + [False]
    alone = follows(Orders(range(100, 110)))
    alone.look()
    assert alone.epochs.future(blocks, RECORD)[1] == np.inf
    assert alone.epochs.knows(blocks, RECORD).tolist() == [True, False, False, True, False]


# ---- books --------------------------------------------------------------------------------------


def test_what_a_job_has_said_to_have_read_was_used_whoever_has_ended_since() -> None:
    """Of 33 MiB that a loader's workers had read 28 MiB were told as read for nothing: they had
    ended before the next look at their page tables."""
    exact, seen = Orders(range(100, 200)), Orders(range(100, 200))
    exact.exact = True
    for source, used_bytes in ((exact, 40 * RECORD), (seen, 0)):
        reader = follows(source)
        blocks = reader.file.blocks = Blocks(reader.file.size_bytes)
        reader.look()
        reader.note_read()
        assert blocks.counts() == (0, 0, 0), "nothing was said"
        blocks.mark_prefetched(100 * RECORD, 150 * RECORD)
        reader.said(40, 2)
        reader.note_read()
        assert blocks.counts()[0] == used_bytes
