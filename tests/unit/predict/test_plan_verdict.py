# SPDX-License-Identifier: Apache-2.0
"""predict/order/validator.py: which plans are found to be wrong; a right one never is."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import warnings_fail
from walked_orders import GIB, KIB, MIB, PAGE, fixed_records, shuffled

from uffdprefetch.predict.order.cursor import lookahead_bytes
from uffdprefetch.predict.order.seen import SeenCursor
from uffdprefetch.predict.storage import Storage

pytestmark = warnings_fail

SEEDS = range(6)


def workers(rng: random.Random, items: int, count: int, batch: int, prefetch: int) -> Iterator[int]:
    """The items as a DataLoader's workers read them: worker w the batches w, w + count ..., each
    in order, all at once, none more than ``prefetch`` batches of its own ahead of the slowest."""
    batches = -(-items // batch)
    at = [(worker, 0) for worker in range(count) if worker < batches]
    while at:
        oldest = min(number for number, _ in at)
        free = [i for i, (number, _) in enumerate(at) if number < oldest + count * prefetch]
        i = rng.choice(free)
        number, within = at[i]
        item = number * batch + within
        if item < items:
            yield item
        if within + 1 < batch and item + 1 < items:
            at[i] = (number, within + 1)
        elif number + count < batches:
            at[i] = (number + count, 0)
        else:
            del at[i]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_right_plan_is_never_wrong_however_many_workers_read_it(seed: int) -> None:
    rng = random.Random(seed)
    count, size = rng.choice((500, 5000, 20_000)), rng.choice((8, 100, 1000)) * KIB
    batch, prefetch = rng.choice((1, 8, 32, 256)), rng.choice((1, 2))
    many = rng.choice((1, 2, 4, 16))
    rows = shuffled(count, seed)
    walk = SeenCursor(fixed_records(rows, size), count * size)
    touches = rng.choice((1, 2))
    for turn, item in enumerate(workers(rng, count, many, batch, prefetch)):
        walk.due(lookahead_bytes(walk, Storage(), GIB))
        at = int(rows[item]) * size
        for touch in range(touches):
            walk.saw(at + touch * PAGE, at + touch * PAGE + PAGE, turn * 1_000_000)
        assert walk.wrong is None, (turn, item)
    assert walk.position == count


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_steady_workers_find_what_they_read_handed_out(seed: int) -> None:
    """After the first batches: what they are late by has been seen then."""
    rng = random.Random(seed)
    count, size, many, batch = 20_000, 100 * KIB, rng.choice((2, 4, 8)), 32
    rows = shuffled(count, seed)
    walk = SeenCursor(fixed_records(rows, size), count * size)
    handed = np.zeros(count * size // PAGE + 1, bool)
    missed = 0
    for turn, item in enumerate(workers(rng, count, many, batch, 2)):
        for piece in walk.due(lookahead_bytes(walk, Storage(), GIB)):
            handed[piece.start // PAGE : -(-piece.end // PAGE)] = True
        at = int(rows[item]) * size
        if turn > 4 * many * batch:
            missed += not handed[at // PAGE : -(-(at + size) // PAGE)].all()
        walk.saw(at, at + PAGE, turn * 1_000_000)
    assert missed == 0


def wasted_until_wrong(walk: SeenCursor, items: Iterator[int], rows: np.ndarray, size: int) -> int:
    """Bytes handed out until the plan is found to be wrong, of records that were never touched."""
    out: set[int] = set()
    touched: set[int] = set()
    for turn, item in enumerate(items):
        for piece in walk.due(16 * MIB):
            out.update(range(piece.start // size, -(-piece.end // size)))
        at = int(rows[item]) * size
        touched.add(int(rows[item]))
        walk.saw(at, at + PAGE, turn * 1_000_000)
        if walk.wrong:
            assert walk.due(GIB) == []
            return len(out - touched) * size
    pytest.fail(f"never found to be wrong; {len(out - touched) * size >> 20} MiB in vain")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["another shuffle", "in the file's order", "backward"])
def test_a_wrong_plan_is_found_within_the_cap(how: str, seed: int) -> None:
    rng = random.Random(seed)
    count, size = rng.choice((4000, 10_000)), rng.choice((64, 128)) * KIB
    rows = shuffled(count, seed)
    walk = SeenCursor(fixed_records(rows, size), count * size)
    place = np.argsort(rows)
    read = {
        "another shuffle": place[shuffled(count, seed + 1000)],
        "in the file's order": place,
        "backward": np.arange(count)[::-1],
    }[how]
    assert wasted_until_wrong(walk, iter(read.tolist()), rows, size) <= 80 * MIB
    assert walk.wrong is not None and "\n" not in walk.wrong


def test_a_plan_says_why_it_is_wrong_with_the_counts() -> None:
    rows = shuffled(10_000, 8)
    walk = SeenCursor(fixed_records(rows, 64 * KIB), GIB)
    for item in range(9980, 8000, -60)[:32]:
        assert walk.wrong is None
        at = int(rows[item]) * 64 * KIB
        walk.saw(at, at + PAGE, item)
        assert walk.stray
    assert walk.wrong == "0 of the last 32 records touched were to come near item 0 of 10,000"


def test_a_reader_that_goes_through_the_plan_elsewhere_is_followed() -> None:
    """A job that goes on from its own checkpoint, say."""
    rows, size = shuffled(100_000, 9), 128 * KIB
    walk = SeenCursor(fixed_records(rows, size), 100_000 * size)
    walk.due(16 * MIB)
    for item in range(70_000, 70_040):
        walk.saw(int(rows[item]) * size, int(rows[item]) * size + PAGE, item)
    assert 70_040 - 64 <= walk.position <= 70_040
    assert walk.wrong is None


def test_many_touches_of_one_record_are_one_vote() -> None:
    rows, size = shuffled(10_000, 10), MIB
    walk = SeenCursor(fixed_records(rows, size), 10_000 * size)
    for i in range(256):
        at = int(rows[9000]) * size + i * PAGE
        walk.saw(at, at + PAGE, i)
    assert walk.wrong is None


def test_an_early_stop_is_not_wrong_and_what_follows_fits_the_next_epoch() -> None:
    size = 64 * KIB
    first, second = shuffled(20_000, 11), shuffled(20_000, 12)
    walk = SeenCursor(fixed_records(first, size), 20_000 * size)
    for item, row in enumerate(first[:12_000].tolist()):
        walk.due(16 * MIB)
        walk.saw(row * size, row * size + PAGE, item)
    assert (walk.position, walk.wrong) == (12_000, None)
    after = SeenCursor(fixed_records(second, size), 20_000 * size)
    strays = fitting = 0
    for item, row in enumerate(second[:24].tolist()):
        walk.saw(row * size, row * size + PAGE, item)
        if walk.stray:
            strays += 1
            fitting += after.saw(row * size, row * size + PAGE, item) > 0
    assert fitting == strays >= 16
    assert after.wrong is None


def test_a_finished_stream_judges_nothing() -> None:
    rows, size = shuffled(1000, 13), MIB
    walk = SeenCursor(fixed_records(rows, size), 1000 * size)
    walk.said(1000, 1)
    for item in range(999, 0, -1):
        walk.saw(int(rows[item]) * size, int(rows[item]) * size + PAGE, item)
    assert walk.wrong is None


def test_records_that_lie_in_pages_touched_before_make_no_order_wrong() -> None:
    """Forty to a page: after the first ones no touch tells of the others."""
    rows = shuffled(1_000_000, 15)[:200_000]
    walk = SeenCursor(fixed_records(rows, 100), 100_000_000)
    mapped: set[int] = set()
    for item, row in enumerate(rows.tolist()):
        if item % 16 == 0:
            walk.due(MIB)
        page = row * 100 // PAGE
        if page not in mapped:
            mapped.add(page)
            walk.saw(page * PAGE, page * PAGE + PAGE, item)
    assert walk.wrong is None


# ---- where it is known of which records a touch would show --------------------------------------


def test_a_record_that_need_not_show_a_touch_is_not_waited_for() -> None:
    rows, size = shuffled(20_000, 21), 128 * KIB
    walk = SeenCursor(fixed_records(rows, size), 20_000 * size)
    for item in range(0, 20_000, 16):
        walk.due(16 * MIB)
        walk.saw(int(rows[item]) * size, int(rows[item]) * size + PAGE, item)
        assert walk.position == item + 1
    assert walk.wrong is None


def test_an_order_of_which_nothing_is_touched_is_wrong_and_one_that_begins_late_is_not() -> None:
    size = 64 * KIB
    never = SeenCursor(fixed_records(np.arange(1000), size), GIB)
    for i in range(1000, 1256):
        never.saw(i * size, i * size + size, i)
        assert never.stray
    assert never.wrong is None
    never.saw(1256 * size, 1257 * size, 1)
    assert never.wrong == "16 MiB were read, and 0 of its 1,000 items"
    looked = SeenCursor(fixed_records(np.arange(600, 1000), size), GIB)
    looked.saw(300 * size, 601 * size, 1)  # all that was read since the last look, in one range
    assert looked.wrong == "19 MiB were read, and 0 of its 400 items"
    looked = SeenCursor(fixed_records(np.arange(300, 601), size), GIB)
    looked.saw(300 * size, 601 * size, 1)
    assert looked.wrong is None
    late = SeenCursor(fixed_records(np.arange(1000), size), GIB)
    for i in range(8):
        late.saw(i * size, i * size + PAGE, i)
    for i in range(1000, 3000):  # what is validated in between, say
        late.saw(i * size, i * size + size, i)
    assert late.wrong is None


def test_a_reader_that_was_silent_for_long_is_found_again() -> None:
    """In a pool that holds much of the file most records are read without a touch."""
    rows, size = shuffled(20_000, 25), 128 * KIB
    walk = SeenCursor(fixed_records(rows, size), 20_000 * size)
    for item in (*range(100), *range(300, 400)):  # 25 MiB without a sign
        walk.due(4 * MIB)
        walk.saw(int(rows[item]) * size, int(rows[item]) * size + PAGE, item)
    assert (walk.position, walk.wrong) == (400, None)


@pytest.mark.parametrize(("what", "found"), [("another seed", True), ("the same", False)])
@pytest.mark.parametrize("seed", range(4))
def test_another_order_of_the_same_records_shows_in_page_tables(
    seed: int, what: str, found: bool
) -> None:
    """There is nothing but what is found mapped."""
    size, count = 80 << 10, 10_000
    rng = np.random.default_rng(seed)
    rows = rng.permutation(count)
    read = rng.permutation(count) if found else rows
    walk = SeenCursor(fixed_records(rows, size), count * size)
    for turn, part in enumerate(np.split(read[:4000], 400)):
        walk.due(16 * MIB)
        ranges = [(int(row) * size, (int(row) + 1) * size) for row in np.sort(part)]
        # beside one in four, what is cached of its neighbour is mapped with it
        ranges += [(int(row) * size // 2, int(row) * size // 2 + 32 * 1024) for row in part[::4]]
        walk.looked(ranges, walk.mapped(ranges, turn * 10**7))
        if walk.wrong:
            break
    assert (walk.wrong is not None) == found
    if found:
        assert turn * 10 * size < 48 * MIB
        assert "were not to come near item 0 of 10,000" in walk.wrong


def test_what_is_read_beside_an_order_before_it_begins_does_not_make_it_wrong() -> None:
    """As the keys of an LMDB: its leaf pages, one after the other."""
    size, count = 80 << 10, 10_000
    walk = SeenCursor(
        fixed_records(np.random.default_rng(1).permutation(count), size), 2 * count * size
    )
    keys = [(count * size + at, count * size + at + PAGE) for at in range(0, 10 * MIB, 2 * PAGE)]
    walk.looked(keys, walk.mapped(keys, 1))
    assert walk.wrong is None


def test_at_the_end_of_an_order_looks_judge_nothing() -> None:
    size, count = 80 << 10, 4000
    rows = np.random.default_rng(1).permutation(count)
    walk = SeenCursor(fixed_records(rows, size), count * size)
    walk.said(3001, 1)
    ahead = [(int(row) * size, (int(row) + 1) * size) for row in rows[3500:]]
    for at in range(0, len(ahead), 10):
        walk.looked(ahead[at : at + 10], ahead[at : at + 10])
    assert walk.wrong is None


def test_what_was_read_in_time_and_is_seen_late_does_not_make_an_order_wrong() -> None:
    size, count = 80 << 10, 4000
    rows = np.random.default_rng(1).permutation(count)
    walk = SeenCursor(fixed_records(rows, size), count * size)
    walk.said(2500, 1)
    behind = [(int(row) * size, (int(row) + 1) * size) for row in rows[:1500]]
    for at in range(0, len(behind), 10):
        part = behind[at : at + 10]
        walk.looked(part, walk.mapped(part, at))
    assert walk.wrong is None


def test_a_look_that_comes_too_late_judges_nothing() -> None:
    """The reader may have gone on by all that it finds."""
    size, count = 80 << 10, 4000
    rows = np.random.default_rng(1).permutation(count)
    walk = SeenCursor(fixed_records(rows, size), count * size)
    ahead = [(int(row) * size, (int(row) + 1) * size) for row in rows[1000:2000]]
    walk.looked(ahead, walk.mapped(ahead, 1))
    assert walk.wrong is None
