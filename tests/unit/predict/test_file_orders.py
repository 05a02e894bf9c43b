# SPDX-License-Identifier: Apache-2.0
"""Which files of a directory are wanted next, by what was opened there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
from listed_names import GivenNames

from uffdprefetch.predict.file_orders import WINDOW_MOST_FILES, DirectoryOrder
from uffdprefetch.predict.name_orders import (
    PROOF_BITS,
    WINDOW_FILES,
    DirectoryPass,
    NameOrder,
    OrderEvidence,
    suffix,
)


def mixed(number: int, suffixes: tuple[str, ...] = (".jpg",), seed: int = 1) -> GivenNames:
    """Names of which no two orders agree."""
    chance = random.Random(seed)
    names = [f"{n:06d}{end}" for n in range(number) for end in suffixes]
    chance.shuffle(names)
    inodes = list(range(len(names)))
    chance.shuffle(inodes)
    return GivenNames(names, inodes)


class Followed:
    """A directory whose opens are told one after the other."""

    def __init__(self, names: GivenNames, evidence: OrderEvidence | None = None) -> None:
        self.order = DirectoryOrder(names, evidence)
        self.wanted: dict[str, int] = {}  # name: how many were opened before
        self.opened: list[str] = []
        self.foreseen = 0

    def tell(self, names: Iterable[str]) -> Followed:
        for name in names:
            self.foreseen += name in self.wanted and name not in self.opened
            self.order.opened(name)
            self.opened.append(name)
            self.look()
        return self

    def look(self) -> list[str]:
        found = self.order.ahead()
        for name in found:
            assert name not in self.wanted, "asked for once"
            assert name not in self.opened
            self.wanted[name] = len(self.opened)
        return found

    @property
    def in_vain(self) -> set[str]:
        return set(self.wanted) - set(self.opened)


@pytest.mark.parametrize("order", NameOrder)
def test_each_order_is_followed_to_its_end(order: NameOrder) -> None:
    names = mixed(200)
    followed = Followed(names).tell(names.ordered(order))
    assert followed.order.order == order
    assert followed.foreseen >= 195 and not followed.in_vain and followed.order.lost == 0
    assert followed.order.used == followed.foreseen


def test_windows_double_up_to_the_largest() -> None:
    names = mixed(1000)
    followed, sizes = Followed(names), []
    for name in names.ordered(NameOrder.SORTED)[:400]:
        followed.tell([name])
        sizes.append(len(set(followed.wanted) - set(followed.opened)))
    first = next(size for size in sizes if size)
    assert first == WINDOW_FILES and max(sizes) == WINDOW_MOST_FILES
    steps = [size for size, before in zip(sizes, [0, *sizes], strict=False) if size > before]
    assert all(step <= 2 * WINDOW_FILES for step in steps[:2])
    assert sizes == sorted(sizes)


def test_of_a_shuffled_directory_hardly_anything_is_wanted() -> None:
    wanted = opens = 0
    for seed in range(40):
        names = mixed(200, seed=seed)
        shuffled = list(names.names)
        random.Random(seed).shuffle(shuffled)
        wanted += len(Followed(names).tell(shuffled).wanted)
        opens += len(shuffled)
    assert wanted < 0.03 * opens


def parts(names: list[str], number: int) -> list[str]:
    """A part of a walk each, side by side."""
    size = -(-len(names) // number)
    each = [names[at : at + size] for at in range(0, len(names), size)]
    return [part[at] for at in range(size) for part in each if at < len(part)]


def chunks(names: list[str], number: int, size: int = 20) -> list[str]:
    """Whoever is ready takes the next chunk: as `xargs -P -n`."""
    todo = [names[at : at + size] for at in range(0, len(names), size)]
    doing: list[list[str]] = []
    found = []
    chance = random.Random(1)
    while todo or doing:
        while todo and len(doing) < number:
            doing.append(list(todo.pop(0)))
        one = chance.choice(doing)
        found.append(one.pop(0))
        doing = [each for each in doing if each]
    return found


@pytest.mark.parametrize("number", [2, 4, 8])
@pytest.mark.parametrize("how", [parts, chunks])
def test_several_streams_are_followed(
    how: Callable[[list[str], int], list[str]], number: int
) -> None:
    names = mixed(1200)
    followed = Followed(names).tell(how(names.ordered(NameOrder.READDIR), number))
    assert followed.foreseen >= 0.9 * len(names) and len(followed.in_vain) == 0


def test_threads_that_overtake_each_other_are_one_stream() -> None:
    names = mixed(600)
    chance = random.Random(3)
    walk = sorted(
        enumerate(names.ordered(NameOrder.SORTED)), key=lambda x: x[0] + chance.random() * 8
    )
    followed = Followed(names).tell(name for _, name in walk)
    assert followed.foreseen >= 0.95 * len(names)


def test_one_open_proves_nothing() -> None:
    for number in (12, 1000, 20000):
        names = mixed(number)
        followed = Followed(names).tell(names.ordered(NameOrder.SORTED)[:1])
        assert followed.order.order is None and not followed.wanted


def test_two_wrong_of_eight_begin_anew() -> None:
    names = mixed(400)
    walk = names.ordered(NameOrder.SORTED)
    followed = Followed(names).tell(walk[:40])
    followed.tell(walk[200:201])
    assert followed.order.order == NameOrder.SORTED, "one may be wrong"
    followed.tell(walk[300:301])
    assert followed.order.order is None and followed.order.lost > 0
    followed.tell(walk[301:340])
    assert followed.order.order == NameOrder.SORTED and followed.foreseen >= 60


def test_what_was_given_up_and_is_opened_is_not_lost() -> None:
    names = mixed(400)
    walk = names.ordered(NameOrder.SORTED)
    followed = Followed(names).tell([*walk[:40], walk[200], walk[300]])
    lost = followed.order.lost
    assert lost == len(followed.in_vain) > 0
    followed.tell([sorted(followed.in_vain)[0]])
    assert followed.order.lost == lost - 1


def test_an_order_that_fails_each_time_is_asked_for_more() -> None:
    """Of each sixteen files four are this node's."""
    names = mixed(20000)
    walk = [name for at, name in enumerate(names.ordered(NameOrder.SORTED)) if at % 16 < 4]
    followed = Followed(names).tell(walk)
    assert len(followed.in_vain) <= 0.1 * len(walk)
    assert followed.order.evidence.needed_bits > 8 * PROOF_BITS


def test_what_is_opened_twice_is_told_once() -> None:
    names = mixed(200)
    walk = [name for each in names.ordered(NameOrder.SORTED) for name in (each, each)]
    followed = Followed(names).tell(walk)
    assert followed.order.used >= 190 and not followed.in_vain
    assert not DirectoryOrder(names).opened("none of them")


def test_a_second_pass_is_wanted_again() -> None:
    names = mixed(200)
    walk = names.ordered(NameOrder.INODE)
    first = Followed(names).tell(walk)
    second = Followed(names)
    second.order = first.order
    second.tell(walk)
    assert second.foreseen >= 198 and not second.in_vain


@pytest.mark.parametrize("suffixes", [(".jpg", ".json"), (".json", ".jpg", ".txt", ".npy")])
def test_suffixes_that_nobody_opens_are_left_out(suffixes: tuple[str, ...]) -> None:
    names = mixed(200, suffixes)
    walk = [name for name in names.ordered(NameOrder.SORTED) if name.endswith(".jpg")]
    followed = Followed(names).tell(walk)
    assert followed.foreseen >= 0.9 * len(walk)
    assert len(followed.in_vain) <= WINDOW_FILES * (len(suffixes) - 1)
    everything = Followed(names).tell(names.ordered(NameOrder.SORTED))
    assert everything.foreseen >= 0.95 * len(names)


def test_numbers_at_the_end_are_no_suffixes() -> None:
    assert suffix("a.jpg") == ".jpg".lstrip(".") and suffix("a") == "" == suffix("a.")
    assert suffix("a.0001") == suffix("a.12") == "#"
    assert suffix("a.mp3") == suffix("a.mp4") != suffix("a.mp")
    names = GivenNames([f"part.{n:04d}" for n in range(200)])
    followed = Followed(names).tell(names.names)
    assert followed.foreseen >= 190


def test_a_long_stretch_that_is_left_out_is_gone_over_in_steps() -> None:
    texts = [f"{letter}{n:02d}.txt" for letter in "ac" for n in range(12)]
    names = GivenNames([*texts[:12], *(f"b{n:05d}.bin" for n in range(3000)), *texts[12:]])
    followed = Followed(names).tell(names.names[:12])
    while not any(name.startswith("c") for name in followed.look()):
        cursor = followed.order.cursors[0]
        assert cursor.end < len(names)
    assert len(followed.in_vain) <= 2 * WINDOW_FILES


def test_the_first_files_of_a_directory_are_wanted_in_the_order_of_its_tree() -> None:
    evidence = OrderEvidence()
    before = Followed(mixed(200), evidence).tell(mixed(200).ordered(NameOrder.SORTED))
    assert before.order.order == NameOrder.SORTED
    names = mixed(100, seed=2)
    after = Followed(names, evidence)
    assert after.look() == []
    after.order.begin(5)
    assert after.look() == names.ordered(NameOrder.SORTED)[:5]
    (stream,) = before.order.cursors
    after.order.begin(8, stream)
    assert after.look() == names.ordered(NameOrder.SORTED)[5:8]
    (there,) = after.order.cursors
    assert (there.window, stream.window) == (8, WINDOW_MOST_FILES)
    after.tell(names.ordered(NameOrder.SORTED)[:1])
    assert there.window == WINDOW_MOST_FILES, "it is the same stream"
    after.tell(names.ordered(NameOrder.SORTED))
    assert after.foreseen == 100
    untold = DirectoryOrder(names)
    untold.begin(5)
    assert untold.ahead() == [], "nothing is proven"


def test_what_is_left_behind_is_lost() -> None:
    names = mixed(200)
    followed = Followed(names).tell(names.ordered(NameOrder.SORTED)[:50])
    assert followed.order.lost == 0
    followed.order.leave()
    assert followed.order.lost == len(followed.in_vain) > 0 and followed.order.ahead() == []


def test_how_many_are_wanted_at_a_time_is_bounded() -> None:
    names = mixed(1000)
    order = DirectoryOrder(names)
    wanted: set[str] = set()
    for name in names.ordered(NameOrder.SORTED)[:500]:
        order.opened(name)
        wanted.discard(name)
        wanted.update(order.ahead(most=10))
        assert len(wanted) <= 10
    assert wanted


def test_an_empty_directory_has_nothing_to_want() -> None:
    order = DirectoryOrder(GivenNames([]), OrderEvidence())
    order.begin(5)
    assert not order.opened("a") and order.ahead() == [] and order.leaving is None


def test_opens_are_of_a_pass() -> None:
    opened = DirectoryPass(GivenNames([f"{n:02d}" for n in range(20)]))
    assert opened.add(3) and not opened.add(3) and opened.age(3) == 1 and opened.left == 19
    for index in range(20):
        opened.add(index)
    assert opened.left == 0 and opened.age(3) == 20 and opened.begins_anew(3)
    assert not opened.begins_anew(19), "twice in a row"
    assert opened.add(3) and opened.number == 1 and 5 not in opened
