# SPDX-License-Identifier: Apache-2.0
"""state/touch_book.py: whose touches of which files are kept, and what bounds that."""

from __future__ import annotations

from conftest import warnings_fail

from tests.support.file_states import file_of
from uffdprefetch.predict.first_touches import RankOf
from uffdprefetch.state.touch_book import RUN_BYTES, TouchBook

pytestmark = warnings_fail

BLOCK = 64 << 10
ALONE = RankOf(0, 0)


def test_a_book_gives_up_whose_runs_find_no_room() -> None:
    book, file = TouchBook(10 * RUN_BYTES), file_of(100 * BLOCK)
    one, other = RankOf(0, 2), RankOf(1, 2)
    book.came(file, one, [(2 * n * BLOCK, (2 * n + 1) * BLOCK) for n in range(8)])
    book.came(file, other, [(2 * n * BLOCK, (2 * n + 1) * BLOCK) for n in range(8)])
    assert [rank for _, _, rank, _ in book] == [one]
    book.came(file, other, [(0, BLOCK)])
    assert [rank for _, _, rank, _ in book] == [one], "once and for all"
    book.came(file, RankOf(2, 3), [(0, BLOCK)])
    assert len(list(book)) == 2, "there is room again"


def test_a_file_that_has_changed_is_not_told_of() -> None:
    book, file = TouchBook(), file_of(100 * BLOCK)
    book.came(file, ALONE, [(0, BLOCK)])
    assert len(list(book)) == 1
    file.guard.give_up("it was written")
    assert list(book) == []


def test_a_file_that_is_opened_again_is_the_same() -> None:
    book = TouchBook()
    for block in (5, 3):
        book.came(file_of(100 * BLOCK), ALONE, [(block * BLOCK, (block + 1) * BLOCK)])
    ((_, _, _, touches),) = book
    assert list(touches.spans[::2]) == [5 * BLOCK, 3 * BLOCK]


def test_no_more_files_than_are_managed_are_kept() -> None:
    book = TouchBook()
    for number in range(300):
        book.came(file_of(BLOCK, "/data", number), ALONE, [(0, BLOCK)])
    assert len(list(book)) == 256
