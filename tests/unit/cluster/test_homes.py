# SPDX-License-Identifier: Apache-2.0
"""cluster/homes.py: the home of a block, and what a home says of it."""

from __future__ import annotations

import random

import pytest

from uffdprefetch.cluster import homes as module
from uffdprefetch.cluster.homes import (
    CHILDREN,
    RECENT_QUESTIONS,
    SENT_NS,
    Answer,
    Home,
    Word,
    homes,
)

FILE, MS = 0xFEDCBA9876543210, 1_000_000
ALL = range(8)


def test_every_member_finds_the_same_homes_in_whatever_order_it_knows_the_others() -> None:
    blocks = range(1000)
    found = homes(FILE, blocks, [3, 1, 4, 0, 2])
    assert found == homes(FILE, blocks, [0, 1, 2, 3, 4])
    assert found == homes(FILE, blocks, [4, 3, 2, 1, 0])


@pytest.mark.parametrize("nodes", [1, 2, 8, 100])
def test_each_node_is_the_home_of_its_part(nodes: int) -> None:
    blocks = 2000 * nodes
    found = homes(FILE, range(blocks), range(nodes))
    counts = [found.count(node) for node in range(nodes)]
    assert min(counts) > 0.85 * 2000 and max(counts) < 1.15 * 2000


def test_files_that_differ_in_one_bit_have_other_homes() -> None:
    one, two = (homes(file, range(1000), ALL) for file in (FILE, FILE ^ 1))
    same = sum(a == b for a, b in zip(one, two, strict=True))
    assert 60 < same < 200  # an eighth, by chance


def test_when_a_member_leaves_only_its_blocks_get_another_home_the_next_in_their_order() -> None:
    before = homes(FILE, range(1000), ALL)
    rest = [node for node in ALL if node != 5]
    for block, (old, new) in enumerate(zip(before, homes(FILE, range(1000), rest), strict=True)):
        if old == 5:
            second = module.weights(FILE, [block], ALL)[0].argsort()[-2]
            assert new == second
        else:
            assert new == old


@pytest.mark.parametrize("at_once", [False, True])
def test_disjoint_readers_keep_what_they_read(at_once: bool) -> None:
    """Nothing goes from node to node, of one file too."""
    home = Home()
    asks = [(node, 100 * node + block) for node in ALL for block in range(100)]
    if at_once:
        asks.sort(key=lambda ask: ask[1] % 100)
    for node, block in asks:
        assert home.ask(FILE, block, node, ALL, 0) == Answer(Word.KEEP)


def test_who_asks_later_is_sent_to_who_asked_first() -> None:
    home = Home()
    assert home.ask(FILE, 7, 2, ALL, 0).word is Word.KEEP
    assert home.ask(FILE, 7, 3, ALL, 1) == Answer(Word.ASK, 2)
    assert home.ask(FILE, 7, 2, ALL, 2).word is Word.KEEP, "it has lost it, and reads it again"


def test_where_all_read_all_each_reads_its_part_once() -> None:
    home, read = Home(), dict.fromkeys(ALL, 0)
    for block in range(800):
        for node in random.Random(block).sample(ALL, len(ALL)):
            said = home.ask(FILE, block, node, ALL, block * MS, together=block > 0)
            if said.word is Word.KEEP:
                read[node] += 1
    # Who is named and has not asked yet is told by the first who does ask there.
    kept = [hint.keeper for hint in home._hints.values()]
    assert len(kept) == 800 and set(map(kept.count, ALL)) <= set(range(85, 116))


def test_who_is_always_first_shares_its_reads_with_who_follows() -> None:
    """The first one comes to nobody's blocks, until the second one has some."""
    home, comes_to = Home(), dict.fromkeys((1, 2), 0)
    for block in range(100):
        for node in (1, 2):
            said = home.ask(FILE, block, node, ALL, block * MS, together=comes_to[node] > 0)
            comes_to[node] += said.word is Word.ASK
    kept = [hint.keeper for hint in home._hints.values()]
    assert 40 <= kept.count(1) <= 60 and kept.count(1) + kept.count(2) == 100


def test_who_is_to_read_all_of_a_block_keeps_it_whoever_wanted_some_bytes_of_it_before() -> None:
    """A tree page of an LMDB that lies in another node's shard."""
    home = Home()
    assert home.ask(FILE, 0, 1, ALL, 0, part=True) == Answer(Word.KEEP, part=True)
    assert home.ask(FILE, 0, 2, ALL, 0, part=True) == Answer(Word.ASK, 1, part=True)
    assert home.ask(FILE, 0, 3, ALL, 0) == Answer(Word.KEEP)
    assert home.ask(FILE, 0, 1, ALL, 0, part=True) == Answer(Word.ASK, 3)
    assert home.ask(FILE, 0, 1, ALL, 0) == Answer(Word.ASK, 3)
    assert home.ask(FILE, 1, 1, ALL, 0, part=True) == Answer(Word.KEEP, part=True)
    assert home.ask(FILE, 1, 1, ALL, 0) == Answer(Word.KEEP), "it reads on itself"


def test_windows_that_overlap_are_no_readers_of_the_same() -> None:
    """All ask for all; none has come to what another one keeps."""
    home = Home()
    for block in range(100):
        for node in ALL:
            said = home.ask(FILE, 1000 * (block % 2) + block, node, ALL, 0)
            assert (said.word is Word.KEEP) == (node == 0)


def test_a_node_without_room_is_sent_to_one_that_has_some_and_reads_itself_where_none_has() -> None:
    home = Home()
    assert home.ask(FILE, 0, 1, {1}, 0) == Answer(Word.KEEP)
    assert home.ask(FILE, 1, 1, {6}, 0) == Answer(Word.ASK, 6)
    assert home.ask(FILE, 2, 1, (), 0) == Answer(Word.READ)


def test_what_nobody_keeps_goes_from_who_reads_it_to_who_comes_within_a_second() -> None:
    """All read all, and none has room: one reads, two ask it, two ask each of these."""
    home = Home()
    said = [home.ask(FILE, 0, node, (), node * MS) for node in range(7)]
    assert said[0] == Answer(Word.READ)
    assert [one.node for one in said[1:]] == [0, 0, 1, 1, 2, 2]
    assert all(one.word is Word.ASK and one.copy for one in said[1:])
    assert home.ask(FILE, 0, 7, (), SENT_NS + 7 * MS) == Answer(Word.READ), "it may have gone"


def test_who_does_not_get_what_is_passing_reads_it_and_others_are_sent_there() -> None:
    home = Home()
    home.ask(FILE, 0, 1, (), 0)
    assert home.ask(FILE, 0, 2, (), 0) == Answer(Word.ASK, 1, copy=True)
    assert home.ask(FILE, 0, 2, (), 0, missing_at=1) == Answer(Word.READ)
    assert home.ask(FILE, 0, 3, (), 0) == Answer(Word.ASK, 2, copy=True)
    assert home.ask(FILE, 0, 2, (), 0) == Answer(Word.READ), "not its own copy"
    home.forget_node(2)
    assert home.ask(FILE, 0, 4, (), 0) == Answer(Word.ASK, 3, copy=True)


def test_who_wants_some_bytes_of_what_nobody_keeps_reads_them() -> None:
    home = Home()
    assert home.ask(FILE, 0, 1, (), 0, part=True) == Answer(Word.READ, part=True)
    assert home.ask(FILE, 0, 2, (), 0) == Answer(Word.READ)
    sent = Answer(Word.ASK, 2, copy=True, part=True)
    assert home.ask(FILE, 0, 1, (), 0, part=True) == sent
    assert home.ask(FILE, 0, 3, (), 0) == Answer(Word.ASK, 2, copy=True), "whom nobody is sent to"
    late = SENT_NS + MS
    assert home.ask(FILE, 0, 1, (), late, part=True) == Answer(Word.READ, part=True)


def test_what_was_passing_is_kept_when_there_is_room() -> None:
    home = Home()
    home.ask(FILE, 0, 1, (), 0)
    assert home.ask(FILE, 0, 2, {2}, 0) == Answer(Word.KEEP)
    assert home.ask(FILE, 0, 1, (), 0) == Answer(Word.ASK, 2)
    home.ask(FILE, 1, 1, (), 0)
    assert home.told(FILE, [1], 3) == []
    assert home.ask(FILE, 1, 1, (), 0) == Answer(Word.ASK, 3)


def test_a_wrong_hint_is_a_miss_and_another_is_named() -> None:
    home = Home()
    home.ask(FILE, 0, 1, ALL, 0)
    assert home.ask(FILE, 0, 2, ALL, 0) == Answer(Word.ASK, 1)
    said = home.ask(FILE, 0, 2, ALL, 0, missing_at=1)
    assert said == Answer(Word.KEEP)
    assert home.ask(FILE, 0, 3, ALL, 0) == Answer(Word.ASK, 2)


def test_a_copy_that_has_gone_does_not_cost_the_hint_of_the_keeper() -> None:
    home = Home()
    home.ask(FILE, 0, 0, ALL, 0)
    asked = [home.ask(FILE, 0, node, ALL, node).node for node in (1, 2, 3)]
    assert asked == [0, 0, 1]
    assert home.ask(FILE, 0, 3, ALL, 4, missing_at=1) == Answer(Word.ASK, 0)
    assert home.ask(FILE, 0, 4, ALL, 5) == Answer(Word.ASK, 2, copy=True), "1 is named no more"


def test_a_tree_grows_where_all_ask_at_once() -> None:
    home, nodes = Home(), range(64)
    home.ask(FILE, 0, 0, nodes, 0)
    parent = {node: home.ask(FILE, 0, node, nodes, node).node for node in range(1, 64)}
    children = list(parent.values())
    assert max(map(children.count, nodes)) == CHILDREN

    def depth(node: int) -> int:
        return 1 + depth(parent[node]) if node else 0

    assert max(map(depth, nodes)) == 6


def test_who_asks_again_is_sent_to_the_keeper_so_that_no_two_wait_for_each_other() -> None:
    for seed in range(50):
        home, chance, waits = Home(), random.Random(seed), dict[int, int]()
        home.ask(FILE, 0, 0, ALL, 0)
        for at in range(40):
            node = chance.choice(range(1, 8))
            missing_at = chance.choice([-1, waits.get(node, 0) or -1])
            waits[node] = home.ask(FILE, 0, node, ALL, at, missing_at).node
            seen = {node}
            while node := waits.get(node, 0):
                assert node not in seen
                seen.add(node)


def test_after_a_while_it_is_the_keeper_that_is_asked() -> None:
    home = Home()
    home.ask(FILE, 0, 0, ALL, 0)
    for node in (1, 2):
        home.ask(FILE, 0, node, ALL, 0)
    assert home.ask(FILE, 0, 3, ALL, SENT_NS + 1) == Answer(Word.ASK, 0)


def test_what_is_dropped_is_nowhere_and_only_its_keeper_says_so() -> None:
    home = Home()
    home.ask(FILE, 0, 1, ALL, 0)
    home.dropped(FILE, [0], 2)
    assert home.ask(FILE, 0, 3, ALL, 0) == Answer(Word.ASK, 1)
    home.dropped(FILE, [0, 99], 1)
    assert home.ask(FILE, 0, 3, [3], 0) == Answer(Word.KEEP)


def test_holders_tell_a_new_home_and_a_second_one_is_told_that_it_need_not_keep_it() -> None:
    home = Home()
    assert home.told(FILE, [0, 1, 2], 4) == []
    assert home.told(FILE, [2, 3], 5) == [2]
    assert home.told(FILE, [0], 4) == []
    assert [home.ask(FILE, block, 7, ALL, 0).node for block in range(4)] == [4, 4, 4, 5]


def test_a_node_that_has_left_is_named_no_more() -> None:
    home = Home()
    for block in range(4):
        home.ask(FILE, block, block % 2, [block % 2], 0)
    home.forget_node(1)
    rest = [node for node in ALL if node != 1]
    for block in range(4):
        assert home.ask(FILE, block, 5, rest, 0).node != 1


def test_files_that_nobody_asks_about_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uffdprefetch.cluster.homes.FILES_MAX", 3)
    home = Home()
    for file in range(10):
        home.ask(file, 0, 1, ALL, 0, together=True)
        home.ask(0, 1, 2, ALL, 0, together=True)
    assert set(home._files) == {0, 8, 9}


def test_the_oldest_hints_go(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(most=10)
    for block in range(25):
        home.ask(FILE, block, 1, ALL, 0)
    assert len(home) == 10
    assert home.ask(FILE, 24, 2, ALL, 0) == Answer(Word.ASK, 1)
    assert home.ask(FILE, 0, 2, [2], 0) == Answer(Word.KEEP)


def test_that_a_few_blocks_are_read_by_several_makes_no_file_one_that_all_read() -> None:
    """The tree pages of an LMDB, and the ends of shards."""
    home = Home()
    for block in range(3):
        for node in ALL:
            home.ask(FILE, block, node, ALL, 0, together=True)
    for block in range(10, 10 + RECENT_QUESTIONS):
        home.ask(FILE, block, 1, ALL, 0)
    for block in range(100, 200):
        assert home.ask(FILE, block, block % 8, ALL, 0) == Answer(Word.KEEP)


def test_a_million_blocks_are_looked_up_in_time() -> None:
    assert len(homes(FILE, range(64), range(512))) == 64
    assert module.HINTS_MAX * module.BLOCK_BYTES == 4 * 10**6 * (1 << 20)
