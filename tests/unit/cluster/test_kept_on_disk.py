# SPDX-License-Identifier: Apache-2.0
"""What a node keeps for others, and has left its memory for its disk
(csrc/service/pool/pool_keep.c): it is there for them as before, and where it is not they hear of
it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import wait_until
from disks import run_with_such_a_disk
from fake_net import BLOCK_CHUNKS, CHUNK, FILE_ID, MIB, SIZE, Node, fake_net, make_data

from uffdprefetch.native import net
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.state.file_times import Times

BLOCK = BLOCK_CHUNKS * CHUNK
#: Of each node's memory, and what of it may hold what others ask for: a third of the file.
BUDGET, HOLD = 3 * MIB, 2 * MIB
COPIED = uffd_pool.HELD + 1
CHUNKS = -(-SIZE // CHUNK)
BLOCKS = -(-SIZE // BLOCK)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("net"))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Any]:
    with fake_net(2, budget_bytes=BUDGET, keep_bytes=HOLD, disk=tmp_path) as cluster:
        yield cluster


def bring(node: Node, file: int, first: int, count: int, data: bytes) -> None:
    """Have these chunks in memory, in the place of others; they are the file's."""
    give_up = time.monotonic() + 20
    others = [(f, 0, CHUNKS) for f in node.memfds if f != file]
    others += [(file, 0, first), (file, first + count, CHUNKS - first - count)]
    while True:
        node.pool.set_victims(others)
        assert node.pool.submit(1, file, first * CHUNK, count * CHUNK)
        while not node.pool.reap():
            assert time.monotonic() < give_up, "the pool says nothing"
            if node.pool.victims_left() <= 0:
                node.pool.set_victims(others)
            time.sleep(0.001)
        there = {*node.pool.books(file).state[first : first + count]}  # another job may bring them
        found = node.bytes(file, first * CHUNK, count * CHUNK)
        there |= {*node.pool.books(file).state[first : first + count]}
        if there == {uffd_pool.PRESENT}:
            assert found == data[first * CHUNK : (first + count) * CHUNK]
            return
        assert time.monotonic() < give_up, "there is never room"


def walk(node: Node, file: int, data: Path, waits: bool = True) -> None:
    """All of it, block by block; what is held may go to the disk before more comes, if it
    ``waits``."""
    whole = data.read_bytes()

    def has_written() -> bool:
        there = sum(node.pool.books(f).kept.tolist().count(COPIED) for f in node.memfds) * CHUNK
        size = node.pool.spill_counts().size_bytes
        return node.pool.kept_bytes() <= HOLD // 2 or there > size - 2 * MIB

    for first in range(0, CHUNKS, BLOCK_CHUNKS):
        wait_until(lambda: not waits or has_written(), "half of what may be held has gone")
        bring(node, file, first, min(BLOCK_CHUNKS, CHUNKS - first), whole)


def kept(node: Node, file: int) -> list[int]:
    found: list[int] = np.flatnonzero(np.asarray(node.pool.books(file).kept)).tolist()
    return found


def copied(node: Node, file: int) -> int:
    spilled = node.pool.books(file).spilled
    assert spilled is not None
    return int(spilled.mask().sum())


def told(node: Node, kind: int) -> int:
    return sum(len(m.blocks) for m in node.seen if m.kind == kind)


def has_been_late(*nodes: Node) -> bool:
    """Whether a busy machine's disk took so long that storage was read instead."""
    return any(node.pool.spill_counts().late_reads for node in nodes)


def test_what_has_gone_to_the_disk_no_other_node_reads_from_storage(two: Any, data: Path) -> None:
    one, other = two.nodes
    file, number = one.add(data), other.add(data)
    walk(one, file, data)
    assert kept(one, file) == list(range(CHUNKS)), "three times what memory may hold"
    assert one.pool.kept_bytes() <= HOLD and told(one, net.DROPPED) == 0
    walk(other, number, data)
    counts, its = one.pool.file_counts(file), other.pool.file_counts(number)
    assert counts.read_bytes == SIZE or has_been_late(one)
    assert counts.disk_read_bytes > SIZE // 2
    assert (its.read_bytes, its.others_bytes) == (0, SIZE)
    assert any(m.kind == net.READING for m in one.seen), "a disk is no answer at once"
    assert other.net.counts().late == 0 and told(one, net.DROPPED) == 0


def test_what_both_disks_hold_is_read_from_storage_once(two: Any, data: Path) -> None:
    """What does not fit onto the first one's the other keeps."""
    one, other = two.nodes
    file, number = one.add(data), other.add(data)
    for node in two.nodes:
        node.pool.fit_spill(3 * MIB)

    def both() -> list[list[int]]:
        return [kept(one, file), kept(other, number)]

    def all_are_kept() -> bool:
        walk(one, file, data)
        walk(other, number, data)
        mine, its = both()
        return sorted(mine + its) == list(range(CHUNKS))

    wait_until(all_are_kept, "each chunk has one keeper")
    assert all(both()) and len(both()[0]) * CHUNK <= 3 * MIB + HOLD
    before = [node.pool.counts().read_bytes for node in two.nodes]
    for _ in range(2):
        walk(one, file, data)
        walk(other, number, data)
    after = [node.pool.counts().read_bytes for node in two.nodes]
    assert after == before or has_been_late(*two.nodes)


def test_a_block_for_which_there_is_no_room_after_all_another_node_keeps(
    two: Any, data: Path
) -> None:
    """A node that reads one chunk of each is told to keep them all, and then there is no room."""
    one, other = two.nodes
    file, number = one.add(data), other.add(data)
    for block in range(BLOCKS):
        bring(one, file, block * BLOCK_CHUNKS, 1, data.read_bytes())
        bring(other, number, block * BLOCK_CHUNKS, 1, data.read_bytes())
    assert one.net.map(file, BLOCKS) == [0] * BLOCKS == other.net.map(number, BLOCKS)
    for node in two.nodes:
        node.pool.fit_spill(3 * MIB)

    def is_read_no_more() -> bool:
        before = [node.pool.counts().read_bytes for node in two.nodes]
        for _ in range(2):
            walk(one, file, data, waits=False)
            walk(other, number, data, waits=False)
        return [node.pool.counts().read_bytes for node in two.nodes] == before

    wait_until(is_read_no_more, "the disks hold all of it")
    assert told(one, net.DROPPED) > 0 and kept(one, file) and kept(other, number)
    assert not {*kept(one, file)} & {*kept(other, number)}


def test_a_node_says_that_it_has_the_room_of_its_disk_for_what_it_was_told_to_keep(
    two: Any, data: Path
) -> None:
    one, _ = two.nodes
    file = one.add(data)
    for block in range(BLOCKS):
        bring(one, file, block * BLOCK_CHUNKS, 1, data.read_bytes())
    asked = [m.room for m in one.seen if m.kind == net.QUESTION]
    assert BLOCKS * BLOCK > HOLD and asked == [net.ROOM] * BLOCKS


def test_copies_that_nobody_else_asks_for_make_room_for_what_is_kept(two: Any, data: Path) -> None:
    one, other = two.nodes
    other.pool.fit_spill(4 * MIB)
    walk(one, one.add(data), data)
    number = other.add(data)

    def is_full() -> bool:
        walk(other, number, data)
        return other.pool.spill_counts().used_bytes == 4 * MIB

    wait_until(is_full, "copies have filled it")
    assert not kept(other, number)
    own = other.add(data, identity=(5, 5))
    walk(other, own, data)
    assert len(kept(other, own)) * CHUNK > 3 * MIB, "more than memory could hold"
    assert copied(other, own) * CHUNK > 2 * MIB and not kept(other, number)


def spoil(node: Node) -> None:
    """All that lies on its disk is something else now."""
    end = os.fstat(node.spill_fd).st_size
    buffered = os.open(f"/proc/self/fd/{node.spill_fd}", os.O_RDWR)
    for at in range(0, end, CHUNK):
        os.pwrite(buffered, b"\0" * 4096, at)
    os.fsync(buffered)
    os.close(buffered)


def test_what_the_disk_has_spoiled_is_read_from_storage_in_its_stead(two: Any, data: Path) -> None:
    one, other = two.nodes
    file, number = one.add(data), other.add(data)
    walk(one, file, data)
    spoil(one)
    walk(other, number, data)
    counts, its = one.pool.spill_counts(), other.pool.file_counts(number)
    assert counts.error[0] == errno.EBADMSG and counts.ended == errno.EBADMSG
    assert its.read_bytes + its.others_bytes == SIZE and its.others_bytes > 0


def test_when_the_tier_has_ended_others_hear_what_is_kept_no_longer(two: Any, data: Path) -> None:
    one, other = two.nodes
    file, number = one.add(data), other.add(data)
    walk(one, file, data)
    spoil(one)
    for first in range(0, CHUNKS, 16):  # three errors
        if not one.pool.spill_counts().ended:
            bring(one, file, first, min(16, CHUNKS - first), data.read_bytes())
    one.pool.fit_spill(16 * MIB)
    assert one.pool.spill_counts().ended
    left = kept(one, file)
    assert len(left) * CHUNK == one.pool.kept_bytes() <= HOLD, "what memory has"
    blocks = {chunk // BLOCK_CHUNKS for chunk in left}
    wait_until(lambda: told(one, net.DROPPED) == BLOCKS - len(blocks), "homes have heard of it")
    walk(other, number, data)
    its = other.pool.file_counts(number)
    assert its.read_bytes + its.others_bytes == SIZE
    assert set(range(BLOCKS)) - blocks <= {c // BLOCK_CHUNKS for c in kept(other, number)}


def test_who_asks_goes_on_when_the_node_dies_that_has_it_on_its_disk(two: Any, data: Path) -> None:
    one, other = two.nodes
    walk(one, one.add(data), data)
    number = other.add(data)
    two.carries = lambda node, message: node != 0 or message.kind not in (net.SEND, net.REFUSE)
    whole = data.read_bytes()
    assert other.pool.submit(1, number, 0, BLOCK)
    wait_until(lambda: any(m.kind == net.ASK for m in other.seen), "it has asked")
    other.tell(net.Message(net.NODE, node=0, status=0))
    bring(other, number, 0, BLOCK_CHUNKS, whole)
    assert other.pool.file_counts(number).read_bytes == BLOCK


def test_a_file_that_has_changed_is_kept_nowhere(two: Any, data: Path) -> None:
    one, _ = two.nodes
    file = one.add(data)
    walk(one, file, data)
    one.net.unshare(file)
    one.pool.drop_file(file)
    wait_until(lambda: not one.pool.file_counts(file).resident_bytes, "it has gone")
    assert not kept(one, file) and not copied(one, file) and one.pool.kept_bytes() == 0


def test_a_new_transport_is_told_of_what_lies_on_the_disk(two: Any, data: Path) -> None:
    one, _ = two.nodes
    file = one.add(data)
    walk(one, file, data)
    one.net.unshare(file)
    one.seen.clear()
    with data.open("rb") as opened:
        one.net.share(file, FILE_ID, Times.of(opened.fileno()))
        one.tell(net.Message(net.NODE, node=1, status=1))
    wait_until(lambda: told(one, net.KEPT) == BLOCKS, "it hears of all blocks")


def test_what_is_kept_goes_when_there_are_no_others_any_more(two: Any, data: Path) -> None:
    one, _ = two.nodes
    file = one.add(data)
    walk(one, file, data)
    one.pool.set_budget(BUDGET, 0)
    assert not kept(one, file)
    wait_until(lambda: told(one, net.DROPPED) == BLOCKS, "homes have heard of it")
    assert copied(one, file) > 0, "the copies are its own"


STOPPED = """
import os, sys
from pathlib import Path
import test_kept_on_disk as here
from fake_net import fake_net, make_data
where, stopped = Path(sys.argv[1]), Path(os.environ["STOPPED"])
data = make_data(where)
with fake_net(2, budget_bytes=here.BUDGET, keep_bytes=here.HOLD, disk=where) as two:
    one, other = two.nodes
    here.walk(one, one.add(data), data)
    stopped.touch()
    here.walk(other, other.add(data), data)
    assert one.pool.spill_counts().late_reads > 0 < other.pool.counts().others_bytes
    stopped.unlink()
    one.seen.clear()
    for _ in range(2):
        here.walk(other, 0, data)
print("ended")
"""


BEFORE_ITS_ROOM = """
import os, sys
from pathlib import Path
from conftest import wait_until
from fake_net import CHUNK, MIB, fake_net, make_data
from test_kept_on_disk import BLOCK, BUDGET, kept
where, stopped = Path(sys.argv[1]), Path(os.environ["STOPPED_WRITES"])
data = make_data(where)
with fake_net(1, budget_bytes=BUDGET, keep_bytes=MIB, disk=where) as cluster:
    (one,) = cluster.nodes
    file = one.add(data)
    stopped.touch()
    for first in range(0, BUDGET, BLOCK):
        one.prefetch(file, first, CHUNK)
    one.prefetch(file, 0, BUDGET)
    assert len(kept(one, file)) * CHUNK == MIB, "as much as memory may hold"
    stopped.unlink()
    one.pool.set_victims([(file, 0, BUDGET // CHUNK)])
    wait_until(lambda: len(kept(one, file)) * CHUNK == BUDGET, "there is room now")
    assert one.pool.counts().read_bytes == BUDGET
print("ended")
"""


def test_what_came_before_the_disk_had_taken_the_rest_is_kept_when_it_is_written(
    tmp_path: Path,
) -> None:
    stopped = str(tmp_path / "stopped")
    assert run_with_such_a_disk(BEFORE_ITS_ROOM, tmp_path, STOPPED_WRITES=stopped) == "ended\n"


def test_a_disk_that_does_not_answer_holds_nobody_up_elsewhere(tmp_path: Path) -> None:
    """Nor is the buffer used again into which it still reads."""
    said = run_with_such_a_disk(STOPPED, tmp_path, STOPPED=str(tmp_path / "stopped"))
    assert said == "ended\n"
