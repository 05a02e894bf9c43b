# SPDX-License-Identifier: Apache-2.0
"""Which directory of a tree comes next, and its first files before anybody opens one."""

from __future__ import annotations

import random

import pytest
from listed_names import GivenNames

from uffdprefetch.predict.bounds import ENTRIES_MAX
from uffdprefetch.predict.file_orders import WINDOW_MOST_FILES
from uffdprefetch.predict.name_orders import WINDOW_FILES, NameOrder
from uffdprefetch.predict.tree_order import TreeOrder

NOTHING = GivenNames([])


def names(number: int, seed: int, prefix: str = "") -> GivenNames:
    chance = random.Random(seed)
    found = [f"{prefix}{n:04d}" for n in range(number)]
    chance.shuffle(found)
    inodes = list(range(number))
    chance.shuffle(inodes)
    return GivenNames(found, inodes)


class Followed:
    """A tree of which a directory is listed when it is opened, or asked for."""

    def __init__(self, tree: dict[str, tuple[GivenNames, GivenNames]]) -> None:
        self.tree = tree
        self.order = TreeOrder()
        self.wanted: set[tuple[str, str]] = set()
        self.opened: set[tuple[str, str]] = set()
        self.given_up: list[tuple[str, str]] = []
        self.foreseen = 0

    def list(self, path: str) -> None:
        if not self.order.is_listed(path):
            self.order.listed(path, *self.tree[path])

    def open(self, path: str, name: str) -> None:
        self.foreseen += (path, name) in self.wanted
        self.opened.add((path, name))
        above = path
        while above:
            above = above.rpartition("/")[0]
            self.list(above)
        self.list(path)
        self.order.opened(path, name)
        self.given_up += self.order.given_up()
        self.wanted.update(self.order.ahead())
        while asked := self.order.to_list():
            for each in asked:
                self.list(each)
            self.wanted.update(self.order.ahead())


def flat(directories: int, files: int) -> dict[str, tuple[GivenNames, GivenNames]]:
    below = names(directories, 1, "d")
    return {
        "": (NOTHING, below),
        **{d: (names(files, n), NOTHING) for n, d in enumerate(below.names)},
    }


@pytest.mark.parametrize("inner", NameOrder)
@pytest.mark.parametrize("outer", NameOrder)
def test_directories_and_files_have_an_order_each(outer: NameOrder, inner: NameOrder) -> None:
    tree = flat(20, 30)
    followed = Followed(tree)
    for directory in tree[""][1].ordered(outer):
        for name in tree[directory][0].ordered(inner):
            followed.open(directory, name)
    assert followed.foreseen >= 0.9 * 600 and not followed.wanted - followed.opened
    assert followed.order.used == followed.foreseen and not followed.given_up


def test_small_directories_prove_an_order_together() -> None:
    tree = flat(60, 3)
    followed = Followed(tree)
    for directory in tree[""][1].ordered(NameOrder.SORTED):
        for name in tree[directory][0].ordered(NameOrder.SORTED):
            followed.open(directory, name)
    assert followed.foreseen >= 0.6 * 180 and not followed.wanted - followed.opened


@pytest.mark.parametrize("files", [4, 10, 40])
def test_a_window_grows_over_directories_that_are_smaller(files: int) -> None:
    """A walk is a stream through them all: not as many wait for each directory's first files."""
    tree = flat(1200 // files, files)
    followed, ahead = Followed(tree), []
    for directory in tree[""][1].ordered(NameOrder.SORTED):
        for name in tree[directory][0].ordered(NameOrder.SORTED):
            followed.open(directory, name)
            ahead.append(len(followed.wanted - followed.opened))
    assert ahead[:2] == [0, 0]
    assert min(ahead[200:-WINDOW_MOST_FILES]) >= WINDOW_MOST_FILES - files
    assert max(ahead) <= WINDOW_MOST_FILES + files
    assert not followed.wanted - followed.opened


def test_who_comes_into_a_directory_before_it_is_wanted_there_goes_on_with_its_window() -> None:
    """Its listing may have taken long."""
    tree = flat(20, 200)
    order, asked = TreeOrder(), list[str]()
    first, second, *_ = tree[""][1].ordered(NameOrder.SORTED)
    order.listed("", *tree[""])
    order.listed(first, *tree[first])
    for name in tree[first][0].ordered(NameOrder.SORTED):
        order.opened(first, name)
        order.ahead()
        asked += [each for each in order.to_list() if each not in asked]
    assert asked == [second]
    order.listed(second, *tree[second])
    assert order.ahead(0) == order.to_list() == [], "where there is no room none is listed after it"
    names = tree[second][0].ordered(NameOrder.SORTED)
    order.opened(second, names[0])
    assert order.ahead() == [(second, name) for name in names[1:][:WINDOW_MOST_FILES]]


@pytest.mark.parametrize("room", [1, 40, 1000])
def test_where_there_is_little_room_the_files_that_come_first_have_it(room: int) -> None:
    """Who has left a directory wants nothing more beyond it."""
    tree = flat(12, 100)
    order, todo = TreeOrder(), list[tuple[str, str]]()
    for directory in ("", *tree[""][1].names):
        order.listed(directory, *tree[directory])
    for directory in tree[""][1].ordered(NameOrder.SORTED):
        todo += [(directory, name) for name in tree[directory][0].ordered(NameOrder.SORTED)]
    ahead, unforeseen = set[tuple[str, str]](), 0
    for number, (directory, name) in enumerate(todo):
        unforeseen += (directory, name) not in ahead
        ahead.discard((directory, name))
        order.opened(directory, name)
        ahead.update(order.ahead(max(0, room - len(ahead))))
        assert ahead <= set(todo[number + 1 :][: 2 * WINDOW_MOST_FILES])
        assert len(ahead) <= WINDOW_MOST_FILES
    assert unforeseen <= 6


@pytest.mark.parametrize(
    ("files", "opened"),
    [(10, slice(0, 3)), (10, slice(0, 5)), (30, slice(0, 30, 2))],
    ids=["3-of-10", "5-of-10", "each-second"],
)
def test_who_leaves_out_what_was_wanted_does_not_take_its_window_along(
    files: int, opened: slice
) -> None:
    """In a directory that is smaller than a window it shows nowhere else."""
    tree = flat(2000 // files, files)
    followed = Followed(tree)
    for directory in tree[""][1].ordered(NameOrder.SORTED):
        for name in tree[directory][0].ordered(NameOrder.SORTED)[opened]:
            followed.open(directory, name)
    assert len(followed.wanted - followed.opened) <= 0.1 * len(followed.opened)


def test_what_there_is_no_room_for_is_wanted_the_next_time() -> None:
    tree = flat(20, 10)
    walk = tree[""][1].ordered(NameOrder.SORTED)
    one, other = Followed(tree), Followed(tree)
    for directory in walk[:8]:
        for name in tree[directory][0].ordered(NameOrder.SORTED):
            one.open(directory, name)
    for directory in walk:
        other.list(directory)
    other.list("")
    for directory in walk[:8]:
        for name in tree[directory][0].ordered(NameOrder.SORTED):
            other.order.opened(directory, name)
            other.wanted.update(found := other.order.ahead(1))
            assert len(found) <= 1
    while found := other.order.ahead(3):
        assert len(found) <= 3
        other.wanted.update(found)
    assert len(one.wanted) > 130 and other.wanted >= one.wanted - one.opened


@pytest.mark.parametrize(("files", "listings"), [(4, WINDOW_FILES), (16, 4), (100, 1)])
def test_so_many_directories_are_listed_at_a_time_as_a_window_holds(
    files: int, listings: int
) -> None:
    """A listing takes some requests one after the other; meanwhile small directories are over."""
    tree = flat(2000 // files, files)
    followed = Followed(tree)
    walk = tree[""][1].ordered(NameOrder.SORTED)
    half = len(walk) // 2
    for directory in walk[:half]:
        for name in tree[directory][0].ordered(NameOrder.SORTED):
            followed.open(directory, name)
    order, asked = followed.order, list[str]()
    for directory in (each for each in walk[half:] if order.is_listed(each)):
        for name in tree[directory][0].ordered(NameOrder.SORTED):
            order.opened(directory, name)
            order.ahead()
            asked += [each for each in order.to_list() if each not in asked]
    first = next(number for number, each in enumerate(walk) if not order.is_listed(each))
    assert asked == walk[first : first + listings]


def test_after_the_last_subdirectory_comes_what_is_beside_its_parent() -> None:
    above = names(4, 9, "s")
    tree = {"": (NOTHING, above)}
    for number, split in enumerate(above.names):
        below = names(10, number, "d")
        tree[split] = (names(3, number), below)
        tree |= {f"{split}/{d}": (names(12, n), NOTHING) for n, d in enumerate(below.names)}
    followed = Followed(tree)
    order = NameOrder.SORTED
    for split in above.ordered(order):
        for path in (split, *(f"{split}/{d}" for d in tree[split][1].ordered(order))):
            for name in tree[path][0].ordered(order):
                followed.open(path, name)
    number = len(followed.opened)
    assert followed.foreseen >= 0.9 * number and len(followed.wanted - followed.opened) == 0


def test_where_no_order_of_directories_is_known_the_one_that_was_listed_comes_next() -> None:
    tree = flat(20, 40)
    followed = Followed(tree)
    chance = random.Random(5)
    walk = list(tree[""][1].names)
    chance.shuffle(walk)
    for directory in walk:
        followed.order.opened_directory(directory)
    for directory in walk:
        for name in tree[directory][0].ordered(NameOrder.SORTED):
            followed.open(directory, name)
    assert followed.foreseen >= 0.9 * 800


def test_of_files_of_all_directories_at_random_nothing_is_wanted() -> None:
    tree = flat(20, 60)
    followed = Followed(tree)
    todo = [(path, name) for path in tree for name in tree[path][0].names]
    random.Random(2).shuffle(todo)
    for path, name in todo:
        followed.open(path, name)
    assert len(followed.wanted) <= 0.03 * len(todo)


def test_what_is_given_up_is_said_once() -> None:
    tree = flat(3, 200)
    followed = Followed(tree)
    (first, *_) = tree[""][1].names
    walk = tree[first][0].ordered(NameOrder.SORTED)
    chance = random.Random(3)
    for name in walk[:20] + chance.sample(walk[20:], 100):
        followed.open(first, name)
    assert 0 < len(followed.given_up) == len(set(followed.given_up))
    assert set(followed.given_up) <= followed.wanted
    assert followed.wanted - followed.opened <= set(followed.given_up)
    assert followed.order.given_up() == []


def test_what_is_not_watched_any_more_is_forgotten() -> None:
    tree = flat(3, 200)
    followed = Followed(tree)
    (first, *_) = tree[""][1].names
    for name in tree[first][0].ordered(NameOrder.SORTED)[:100]:
        followed.open(first, name)
    followed.order.forget(first)
    assert not followed.order.is_listed(first)
    followed.order.forget(first)
    followed.order.opened(first, "0001")
    assert followed.order.ahead() == followed.order.given_up() == []


def test_what_is_remembered_is_bounded() -> None:
    order = TreeOrder()
    for number in range(ENTRIES_MAX + 10):
        order.listed(str(number), NOTHING, NOTHING)
    assert not order.is_listed("9") and order.is_listed("10")
