# SPDX-License-Identifier: Apache-2.0
"""csrc/service/net/: what a pool gets from other nodes and gives them, whatever the network
does."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from conftest import wait_until
from fake_net import (
    BLOCK_CHUNKS,
    CHUNK,
    FILE_ID,
    MIB,
    SIZE,
    FakeNet,
    Node,
    ahead,
    drop,
    fake_net,
    is_right,
    make_data,
    read_by,
)

from uffdprefetch.cluster.home_side import with_room
from uffdprefetch.native import net
from uffdprefetch.native.net import Layout, Message, NetRing
from uffdprefetch.state.file_times import Times


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("net"))


def test_what_one_node_has_read_no_other_one_reads(data: Path) -> None:
    with fake_net(3) as cluster:
        (one, file), *others = read_by(cluster, data, 0, 1, 2)
        assert one.pool.file_counts(file).read_bytes == SIZE
        for node, number in others:
            counts = node.pool.file_counts(number)
            assert (counts.read_bytes, counts.others_bytes) == (0, SIZE)
            assert node.net.counts().from_bytes == SIZE
        assert sum(n.net.counts().to_bytes for n in cluster.nodes) == 2 * SIZE


def test_disjoint_shards_move_no_byte(data: Path) -> None:
    block = BLOCK_CHUNKS * CHUNK
    with fake_net(3) as cluster:
        for i, node in enumerate(cluster.nodes):
            node.prefetch(node.add(data), 4 * i * block, 4 * block)
        assert [n.net.counts().asks for n in cluster.nodes] == [0, 0, 0]
        assert all(1 <= n.net.counts().questions <= 2 for n in cluster.nodes), "64 blocks at once"


def test_what_others_keep_is_held_back_from_windows_and_nothing_else_is(data: Path) -> None:
    with fake_net(2) as cluster:
        read_by(cluster, data, 0)
        one, two = cluster.nodes
        file, alone = two.add(data), two.add(data, identity=None)
        assert two.net.ahead(file, 0, 1, 1) == net.AHEAD_SOON
        assert [ahead(two, file, block) for block in range(4)] == [net.AHEAD_HELD] * 4
        assert ahead(two, alone, 0) == net.AHEAD_NOW == ahead(one, 0, 0)
        assert two.net.counts().asks == 0 == two.pool.counts().read_bytes
        two.tell(Message(net.NODE, node=0, status=0))
        end = time.monotonic() + 20
        while ahead(two, file, 0) != net.AHEAD_NOW:
            assert time.monotonic() < end, "it waits for a node that is gone"


def test_who_reads_a_block_as_a_whole_takes_it_from_who_wanted_a_part(data: Path) -> None:
    """A page of a tree that lies in another node's shard."""
    with fake_net(2) as cluster:
        one, two = cluster.nodes
        file, number = one.add(data), two.add(data)
        home = [node.home for node in cluster.nodes]
        for one_home in home:
            one_home.ask(FILE_ID[0], 0, 0, [0, 1], 0, part=True)
        assert ahead(two, number, 0) == net.AHEAD_NOW, "it is to keep it"
        two.prefetch(number, 0, BLOCK_CHUNKS * CHUNK)
        assert two.pool.file_counts(number).read_bytes == BLOCK_CHUNKS * CHUNK
        one.prefetch(file, 0, BLOCK_CHUNKS * CHUNK)
        assert one.pool.file_counts(file).others_bytes == BLOCK_CHUNKS * CHUNK


def test_what_a_node_was_told_to_keep_counts_before_it_has_come(data: Path) -> None:
    """The first to ask for each of many blocks would be told to keep more than it can."""
    block = BLOCK_CHUNKS * CHUNK
    with fake_net(1, keep_bytes=2 * block) as cluster:
        (one,) = cluster.nodes
        file = one.add(data)
        for number in range(4):
            one.prefetch(file, number * block, CHUNK)
        asked = [m.room for m in one.seen if m.kind == net.QUESTION]
        assert asked == [net.ROOM, net.ROOM, net.ROOM_STILL, net.ROOM_STILL]
        one.prefetch(file, 0, 2 * block)
        one.prefetch(file, 5 * block, CHUNK)
        assert [m.room for m in one.seen if m.kind == net.QUESTION][4:] == [net.ROOM_NONE]
    rooms = {0: net.ROOM_STILL, 1: net.ROOM, 2: net.ROOM_NONE}
    assert with_room(rooms) == {1} and with_room({**rooms, 1: net.ROOM_NONE}) == {0}


def test_no_more_blocks_are_asked_for_at_once_than_there_is_room_for(data: Path) -> None:
    """Who asks first for each of them would be told to keep them all."""
    with fake_net(1, keep_bytes=3 * BLOCK_CHUNKS * CHUNK) as cluster:
        ((one, _),) = read_by(cluster, data, 0)
        asked = [m for m in one.seen if m.kind == net.QUESTION]
        assert len(asked[0].blocks) == 3 and asked[0].room == net.ROOM
        assert all(len(m.blocks) == 1 for m in asked if m.room == net.ROOM_STILL)


def test_who_is_asked_for_what_it_keeps_knows_that_others_read_the_same(data: Path) -> None:
    def asks(node: Node, block: int, chunks: int, kind: int) -> None:
        node.tell(
            Message(
                net.REQUEST, node=1, theirs=block, file=FILE_ID, first=block * BLOCK_CHUNKS,
                count=chunks, class_=kind, useful_ms=1000, serial=1,
            )
        )  # fmt: skip
        end = time.monotonic() + 20
        while sum(m.kind in (net.SEND, net.REFUSE) for m in node.seen) <= block:
            assert time.monotonic() < end, "a request without an answer"
            time.sleep(0.001)

    for chunks, kind, alike in (
        (1, net.DEMAND, False),
        (2, net.DEMAND, True),
        (1, net.AHEAD, True),
    ):
        with fake_net(2) as cluster:
            ((one, file),) = read_by(cluster, data, 0)
            assert not one.net.reads_alike(file) and not one.net.reads_alike(99)
            for block in range(8):
                asks(one, block, chunks, kind)
            assert one.net.reads_alike(file) is alike, "the pages of a tree all come to"


def test_a_file_that_is_not_shared_is_read_by_each(data: Path) -> None:
    with fake_net(2) as cluster:
        for node in cluster.nodes:
            file = node.add(data, identity=None)
            node.prefetch(file, 0, SIZE)
            assert node.pool.file_counts(file).read_bytes == SIZE
            assert not node.seen


def test_of_a_file_that_changed_while_it_was_read_nothing_is_handed_on(data: Path) -> None:
    with fake_net(2) as cluster:
        one, two = cluster.nodes
        file = one.add(data)
        one.prefetch(file, 0, SIZE // 2)
        os.utime(data, ns=(0, 0))
        one.prefetch(file, SIZE // 2, SIZE // 2)  # sees it
        ((two, number),) = read_by(cluster, data, 1)
        assert two.pool.file_counts(number).others_bytes == 0 == one.net.counts().to_bytes
        ((one, file),) = read_by(cluster, data, 0)  # opened anew
        assert one.pool.file_counts(file).others_bytes == SIZE


def test_of_a_file_that_changed_while_no_transport_was_there_nothing_is_handed_on(
    data: Path,
) -> None:
    """A new transport is told the stamp of its opening."""
    with fake_net(2) as cluster:
        ((one, file),) = read_by(cluster, data, 0)
        with data.open("rb") as opened:
            stamp = Times.of(opened.fileno())
        os.utime(data, ns=(0, 0))
        one.net.share(file, FILE_ID, stamp)
        ((two, number),) = read_by(cluster, data, 1)
        assert two.pool.file_counts(number).others_bytes == 0 == one.net.counts().to_bytes


def test_who_is_thought_to_have_a_copy_does_not_read_for_others(data: Path) -> None:
    with fake_net(3) as cluster:
        read_by(cluster, data, 0)
        cluster.nodes[1].add(data)  # it has asked for nothing, and is named all the same
        cluster.hints = lambda asker, word: 1 | net.COPY if (asker, word) == (2, 0) else word
        ((two, _),) = read_by(cluster, data, 2)
        assert two.net.counts().refused > 0 and cluster.nodes[1].net.counts().served_reads == 0
        assert cluster.nodes[1].pool.counts().read_bytes == 0


@pytest.mark.parametrize(
    "kind", [net.ASK, net.SEND, net.QUESTION, net.REFUSE], ids=["ask", "send", "question", "refuse"]
)
def test_what_is_lost_on_the_way_is_read_from_storage(data: Path, kind: int) -> None:
    with fake_net(2, patience_ms=20) as cluster:
        read_by(cluster, data, 0)
        cluster.carries = lambda node, message: message.kind != kind
        ((node, file),) = read_by(cluster, data, 1)
        counts = node.pool.file_counts(file)
        assert counts.read_bytes + counts.others_bytes == SIZE
        if kind != net.REFUSE:
            assert counts.read_bytes >= SIZE - 4 * MIB


def test_the_pieces_that_came_are_taken_and_the_rest_is_read(data: Path) -> None:
    half = BLOCK_CHUNKS // 2
    with fake_net(2, patience_ms=20) as cluster:
        read_by(cluster, data, 0)
        cluster.carries = lambda _, m: m.kind != net.ASK or m.first % BLOCK_CHUNKS < half
        ((two, number),) = read_by(cluster, data, 1)
        counts, blocks = two.pool.file_counts(number), SIZE // (BLOCK_CHUNKS * CHUNK)
        assert counts.others_bytes + counts.read_bytes == SIZE
        assert 0 < counts.others_bytes <= (blocks + 1) * half * CHUNK
        assert two.net.counts().unanswered_bytes > 0


def test_it_is_told_who_keeps_what_and_what_went_at_which_rate(data: Path) -> None:
    with fake_net(3) as cluster:
        (one, file), (two, number) = read_by(cluster, data, 0, 1)
        assert one.net.map(file, 4) == [0] * 4 == two.net.map(number, 4)
        assert two.net.map(99, 4) == [None] * 4, "no file"
        assert (two.net.node(0).from_bytes, one.net.node(1).to_bytes) == (SIZE, SIZE)
        assert two.net.node(0).corrupt == 0 == two.net.node(2).from_bytes
        assert two.net.rates()[0] and one.net.rates()[0] is None
        assert one.ring.out == 0 == two.ring.out


def test_a_request_that_has_no_answer_is_out(data: Path) -> None:
    with fake_net(2, patience_ms=20) as cluster:
        read_by(cluster, data, 0)
        cluster.carries = lambda _, m: m.kind != net.SEND
        ((two, _),) = read_by(cluster, data, 1)
        assert two.ring.out > 0 == cluster.nodes[0].ring.out


def requests(node: Node, file: int, due_ms: list[int]) -> list[int]:
    """Asked of it all at once, what somebody comes to after so long; in the order in which it
    answers."""
    node.seen.clear()
    with node.telling:  # the carrier and a test
        for slot, due in enumerate(due_ms):
            assert node.ring.put(
                Message(
                    net.REQUEST, node=1, theirs=slot, file=FILE_ID, first=slot, count=1,
                    class_=net.AHEAD, useful_ms=20_000, due_ms=due,
                )
            )  # fmt: skip
    os.eventfd_write(node.from_fd, 1)
    answers = (net.SEND, net.REFUSE)
    end = time.monotonic() + 20
    while len(found := [m.theirs for m in node.seen if m.kind in answers]) < len(due_ms):
        assert time.monotonic() < end, "a request without an answer"
        time.sleep(0.001)
    return found


def test_who_comes_first_is_answered_first(data: Path) -> None:
    with fake_net(2, serve_threads=1) as cluster:
        ((one, file), _) = read_by(cluster, data, 0, 1)
        due = [900, 0, 500, 100, 700, 300]
        # the service may look when some of them are there: not three times
        orders = [[due[slot] for slot in requests(one, file, due)] for _ in range(3)]
        assert sorted(due) in orders


def test_serving_takes_no_more_of_the_cpus_than_it_may(data: Path) -> None:
    with fake_net(2, serve_cpu=0.01) as cluster:
        ((one, file),) = read_by(cluster, data, 0)
        end = time.monotonic() + 20
        while not one.net.counts().declined:
            assert time.monotonic() < end, "it serves without end"
            requests(one, file, [0] * 14)
        assert one.net.counts().declined > 0 and one.net.counts().serve_cpu_ns > 0
        assert any(m.kind == net.REFUSE and m.status == net.BUSY for m in one.seen)
    with fake_net(2) as cluster:
        ((one, file),) = read_by(cluster, data, 0)
        for _ in range(20):
            requests(one, file, [0] * 14)
        assert one.net.counts().declined == 0


def test_bytes_that_were_spoiled_are_never_taken(data: Path) -> None:
    chance = random.Random(1)

    def spoil(message: bytearray) -> None:
        if chance.random() < 0.3:
            message[chance.randrange(len(message))] ^= 1 << chance.randrange(8)

    with fake_net(2) as cluster:
        read_by(cluster, data, 0)
        cluster.spoils = spoil
        ((node, file),) = read_by(cluster, data, 1)
        assert node.net.counts().corrupt > 0
        assert node.pool.file_counts(file).read_bytes > 0


def test_a_holder_whose_storage_fails_has_not_sent_other_bytes(data: Path) -> None:
    with fake_net(2) as cluster:

        def fails(number: int, message: Message) -> bool:
            if message.kind != net.SEND:
                return True
            cluster.refuse(message, net.FAILED)
            cluster.nodes[number].tell(Message(net.SENT, slot=message.slot))
            return False

        read_by(cluster, data, 0)
        cluster.carries = fails
        ((node, file),) = read_by(cluster, data, 1)
        counts = node.net.counts()
        assert (counts.corrupt, node.net.node(0).corrupt) == (0, 0) and counts.refused > 0
        assert node.pool.file_counts(file).read_bytes == SIZE


def test_a_holder_that_has_lost_it_says_so_and_the_next_one_reads_it(data: Path) -> None:
    with fake_net(3) as cluster:
        ((one, file),) = read_by(cluster, data, 0)
        one.net.unshare(file)
        ((two, number),) = read_by(cluster, data, 1)
        assert two.pool.file_counts(number).read_bytes == SIZE
        assert two.net.counts().refused > 0 and two.net.counts().late == 0
        ((three, number),) = read_by(cluster, data, 2)
        assert three.pool.file_counts(number).others_bytes == SIZE, "from the second"


def test_a_holder_reads_what_it_is_to_keep_and_says_so(data: Path) -> None:
    """Who asks has no room: another one reads, keeps and serves it."""
    with fake_net(2) as cluster:
        one, two = cluster.nodes
        numbers = [one.add(data), two.add(data)]
        for block in range(SIZE // CHUNK // BLOCK_CHUNKS + 1):
            for node in cluster.nodes:
                node.home.told(FILE_ID[0], [block], 0)
        two.prefetch(numbers[1], 0, SIZE)
        assert is_right(two, numbers[1], data)
        assert two.pool.file_counts(numbers[1]).others_bytes == SIZE
        assert one.pool.file_counts(numbers[0]).read_bytes == SIZE
        assert one.net.counts().served_reads > 0
        assert one.pool.kept_bytes() >= SIZE - CHUNK
        assert any(message.kind == net.READING for message in one.seen)


def keepers_are_told(cluster: FakeNet, number: int) -> None:
    """Homes think that a node keeps all, of which it has not heard."""
    for node in cluster.nodes:
        node.home.told(FILE_ID[0], list(range(SIZE // CHUNK // BLOCK_CHUNKS + 1)), number)


def test_who_is_asked_for_what_it_has_not_heard_that_it_keeps_asks_home(data: Path) -> None:
    """What it is to keep counts, and when it goes home hears of it."""
    with fake_net(2) as cluster:
        one, two = cluster.nodes
        file, number = one.add(data), two.add(data)
        keepers_are_told(cluster, 0)
        two.prefetch(number, 0, SIZE)
        asked = [block for m in one.seen if m.kind == net.QUESTION for block in m.blocks]
        assert sorted(asked) == list(range(SIZE // CHUNK // BLOCK_CHUNKS + 1))
        assert one.net.map(file, 4) == [0] * 4
        one.pool.set_budget(64 * MIB, 0)
        wait_until(
            lambda: sum(m.kind == net.DROPPED for m in one.seen) == len(asked), "home hears of it"
        )


def test_who_has_no_room_for_what_it_is_said_to_keep_does_not_read_it(data: Path) -> None:
    with fake_net(2) as cluster:
        one, two = cluster.nodes
        file, number = one.add(data), two.add(data)
        one.pool.set_budget(64 * MIB, 0)
        keepers_are_told(cluster, 0)
        two.prefetch(number, 0, SIZE)
        assert two.pool.file_counts(number).read_bytes == SIZE
        assert one.pool.file_counts(file).read_bytes == 0
        wait_until(lambda: two.pool.kept_bytes() >= SIZE, "it keeps all of it")
        blocks = SIZE // CHUNK // BLOCK_CHUNKS + 1
        assert two.net.counts().questions == 1 + blocks, "of each once more, by whichever thread"


def test_a_node_that_does_not_answer_is_passed_over(data: Path) -> None:
    with fake_net(2, patience_ms=20) as cluster:
        read_by(cluster, data, 0)
        cluster.carries = lambda node, message: message.kind not in (net.SEND, net.REFUSE)
        began = time.monotonic()
        ((node, _),) = read_by(cluster, data, 1)
        took = time.monotonic() - began
        assert took < 5
        # a second at least lies between one time and the next, and 1.5 before the first
        assert 1 <= node.net.counts().passed_over <= 1 + max(0, took - 1.5)
        assert node.net.counts().asks < 40


def test_nobody_waits_for_a_node_that_has_gone(data: Path) -> None:
    with fake_net(2, patience_ms=60_000) as cluster:
        read_by(cluster, data, 0)
        cluster.carries = lambda node, message: message.kind not in (net.SEND, net.REFUSE)
        node = cluster.nodes[1]
        file = node.add(data)
        assert node.pool.submit(1, file, 0, SIZE)
        end = time.monotonic() + 20
        while not node.ring.out:
            assert time.monotonic() < end
            time.sleep(0.001)
        node.tell(Message(net.NODE, node=0, status=0))
        while not node.pool.reap():
            assert time.monotonic() < end, "it waits for it"
            time.sleep(0.001)
        assert is_right(node, file, data)


def test_a_file_that_is_no_longer_shared_makes_nobody_a_liar(data: Path) -> None:
    """It has changed while answers were on their way: they are not what it is now."""
    with fake_net(2, patience_ms=60_000) as cluster:
        read_by(cluster, data, 0)
        held = cluster.hold_answers()
        node = cluster.nodes[1]
        file = node.add(data)
        assert node.pool.submit(1, file, 0, SIZE)
        end = time.monotonic() + 20
        while not held or len(held) < node.ring.out:
            assert time.monotonic() < end
            time.sleep(0.001)
        node.net.unshare(file)
        cluster.let_go(held)
        while not node.pool.reap():
            assert time.monotonic() < end, "it waits for it"
            time.sleep(0.001)
        assert is_right(node, file, data)
        assert node.pool.file_counts(file).others_bytes == 0
        assert (node.net.counts().corrupt, node.net.node(0).failures) == (0, 0)


def test_answers_that_never_leave_need_another_transport(data: Path) -> None:
    with fake_net(3, slots=4, patience_ms=20) as cluster:
        ((one, _),) = read_by(cluster, data, 0)
        cluster.carries = lambda node, message: message.kind != net.SEND
        for node in cluster.nodes[1:]:  # each may have a quarter of the slots
            its = node.add(data)
            node.prefetch(its, 0, SIZE)
            assert is_right(node, its, data)
        end = time.monotonic() + 20
        while not one.net.counts().failed:
            assert time.monotonic() < end, "it keeps slots that nobody gives back"
            time.sleep(0.01)


def test_a_slot_is_free_again_when_its_answer_has_come_and_not_before(data: Path) -> None:
    with fake_net(2, patience_ms=20) as cluster:
        read_by(cluster, data, 0)
        held = cluster.hold_answers()
        ((node, _),) = read_by(cluster, data, 1)
        end = time.monotonic() + 5
        while node.net.counts().lost_slots > len(held) and time.monotonic() < end:
            time.sleep(0.001)
        lost = node.net.counts().lost_slots
        assert lost == len({message.theirs for _, message in held}) > 0
        cluster.let_go(held)
        end = time.monotonic() + 5
        while node.net.counts().lost_slots and time.monotonic() < end:
            time.sleep(0.001)
        assert node.net.counts().lost_slots == 0


def test_when_half_of_the_slots_are_lost_another_transport_is_needed(data: Path) -> None:
    with fake_net(2, patience_ms=20, slots=4) as cluster:
        one, two = cluster.nodes
        files = [node.add(data) for node in cluster.nodes]
        one.prefetch(files[0], 0, SIZE)
        cluster.carries = lambda node, message: message.kind not in (net.SEND, net.REFUSE)
        end = time.monotonic() + 30
        while not two.net.counts().failed and time.monotonic() < end:  # it is passed over meanwhile
            drop(two, files[1])
            two.prefetch(files[1], 0, SIZE)
        assert two.net.counts().failed
        asks = two.net.counts().asks
        drop(two, files[1])
        two.prefetch(files[1], 0, SIZE)
        assert is_right(two, files[1], data) and two.net.counts().asks == asks


def test_a_network_that_ends_lets_nobody_wait(data: Path) -> None:
    """A stop while requests are under way."""
    with fake_net(2, patience_ms=20) as cluster:
        read_by(cluster, data, 0)
        cluster.carries = lambda node, message: message.kind != net.SEND
        two = cluster.nodes[1]
        file = two.add(data)
        assert two.pool.submit(1, file, 0, SIZE)
        while not any(message.kind == net.ASK for message in two.seen):
            time.sleep(0.001)
        began = time.monotonic()
        two.net.close()
        assert time.monotonic() - began < 1
        while not two.pool.reap():
            time.sleep(0.001)
        assert is_right(two, file, data)
        service = NetRing.create(Layout(MIB, 4, 4))
        os.close(service.fd)
        two.net = net.Net(
            two.pool, service, 1, two.to_fd, two.from_fd, chunks_per_block=BLOCK_CHUNKS,
        )  # fmt: skip


def test_what_others_ask_for_here_stays_when_room_is_needed(tmp_path: Path, data: Path) -> None:
    with fake_net(2, budget_bytes=12 * MIB, keep_bytes=8 * MIB) as cluster:
        one, two = cluster.nodes
        ((_, file),) = read_by(cluster, data, 0)
        large = tmp_path / "large.bin"
        large.write_bytes(os.urandom(24 * MIB))
        own = one.add(large, identity=None)
        one.pool.set_victims([(file, 0, SIZE // CHUNK)])
        for start in range(0, 24 * MIB, 2 * MIB):
            one.pool.set_victims([(file, 0, 4096), (own, 0, 4096)])
            one.prefetch(own, start, 2 * MIB)
        assert one.pool.kept_bytes() >= SIZE
        assert one.pool.file_counts(file).evicted_bytes == 0
        number = two.add(data)
        two.prefetch(number, 0, SIZE)
        assert two.pool.file_counts(number).others_bytes == SIZE


def test_a_pool_that_is_to_keep_less_lets_go_and_says_so(tmp_path: Path, data: Path) -> None:
    """A budget that shrinks, or a network that does not come back."""
    with fake_net(2, budget_bytes=12 * MIB, keep_bytes=8 * MIB) as cluster:
        one, _ = cluster.nodes
        ((_, file),) = read_by(cluster, data, 0)
        assert one.pool.kept_bytes() >= SIZE
        one.pool.set_budget(12 * MIB, 2 * MIB)
        assert one.pool.kept_bytes() == 2 * MIB == sum(one.pool.books(file).kept) * CHUNK
        assert one.pool.file_counts(file).resident_bytes >= SIZE, "it is there as long as it may be"
        one.pool.set_budget(12 * MIB, 0)
        large = tmp_path / "large.bin"
        large.write_bytes(os.urandom(12 * MIB))
        own = one.add(large, identity=None)
        one.pool.set_victims([(file, 0, SIZE // CHUNK)])
        one.prefetch(own, 0, 8 * MIB)
        assert one.pool.file_counts(file).evicted_bytes >= SIZE - 4 * MIB


def test_a_peer_that_asks_for_nonsense_is_refused_and_nothing_else_happens(data: Path) -> None:
    with fake_net(2) as cluster:
        ((one, file),) = read_by(cluster, data, 0)
        chance, most = random.Random(2), (1 << 64) - 1
        good = Message(
            net.REQUEST, node=1, theirs=3, file=FILE_ID, first=0, count=1, useful_ms=1000
        )
        wrong = [
            {"file": (1, 2)}, {"count": 0}, {"count": 5}, {"count": most}, {"first": most},
            {"first": 97, "count": 1}, {"first": most - 3, "count": 4}, {"useful_ms": 0},
        ]  # fmt: skip
        for change in wrong:
            one.tell(Message(**{**good.__dict__, **change}))
        for _ in range(300):
            values = {
                "kind": chance.choice([*range(64, 74), 0, most & 0xFFFFFFFF]),
                "node": chance.choice([0, 1, 5, net.NODES, net.NONE, 1 << 31]),
                "slot": chance.choice([0, 15, 16, 31, 32, net.NONE, 1 << 31]),
                "theirs": chance.choice([0, 3]),
                "first": chance.choice([0, 96, most]),
                "count": chance.choice([0, 1, 4, 64, most]),
                "mask": chance.choice([0, 1, most]),
                "class_": chance.choice([0, 1, 77]),
                "word": {},
            }
            if values["kind"] in (net.REQUEST, net.HURRIED):
                values["node"] = 1
            one.tell(Message(**{**good.__dict__, **values}))
        end = time.monotonic() + 5
        refused = 0
        while refused < len(wrong) and time.monotonic() < end:
            refused = sum(message.kind == net.REFUSE for message in one.seen)
            time.sleep(0.01)
        assert refused >= len(wrong)
        assert is_right(one, file, data)


def test_a_memfd_that_is_no_ring_is_refused() -> None:
    fd = os.memfd_create("no-ring")
    os.truncate(fd, 4 * MIB)
    with pytest.raises(OSError):
        NetRing.open(fd)
    os.close(fd)
    with pytest.raises(OSError):
        NetRing.create(Layout(0, 1, 1))


def test_a_queue_whose_other_side_has_lost_its_memory_says_nothing() -> None:
    service = NetRing.create(Layout(MIB, 4, 4))
    transport = NetRing.open(service.fd)
    assert transport.put(Message(net.NODE, node=1)) and service.take() is not None
    # of each queue, head and tail are the first words of a line each (csrc/service/net/ring.c)
    one = (1).to_bytes(8, "little")
    (head,) = [
        at for at in range(0, MIB, 64)
        if os.pread(service.fd, 8, at) == one == os.pread(service.fd, 8, at + 64)
    ]  # fmt: skip
    os.pwrite(service.fd, (7_000_000).to_bytes(8, "little"), head)
    assert service.take() is None and transport.take() is None
    os.close(service.fd)
    service.close()
    transport.close()


def test_a_queue_that_nobody_empties_is_full() -> None:
    service = NetRing.create(Layout(MIB, 4, 4))
    count = 0
    while service.put(Message(net.HURRY, first=count)):
        count += 1
    assert count == 1024
    transport = NetRing.open(service.fd)
    os.close(service.fd)
    assert [transport.take().first for _ in range(count)] == list(range(count))
    assert transport.take() is None and service.put(Message(net.HURRY))
    with pytest.raises(ValueError):
        transport.slot(8)
    service.close()
    transport.close()
