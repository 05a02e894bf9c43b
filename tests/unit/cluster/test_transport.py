# SPDX-License-Identifier: Apache-2.0
"""cluster/transport.py between real pools, with a loop in the place of MPI."""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_net import CHUNK, FILE_ID, SIZE, LoopNet, Node, fake_net, make_data

from uffdprefetch.cluster.fabric import FabricError
from uffdprefetch.cluster.peer_nodes import CONTROL, HELLO, SILENT_NS
from uffdprefetch.cluster.requests import ANSWER, IDLE_NAP_NS, NAP_MOST_NS
from uffdprefetch.native import net
from uffdprefetch.native.net import Message
from uffdprefetch.state.file_times import Times


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("transport"))


def read_by(cluster: LoopNet, data: Path, *numbers: int) -> list[tuple[Node, int]]:
    found = []
    for number in numbers:
        node = cluster.nodes[number]
        file = node.add(data)
        node.prefetch(file, 0, SIZE)
        assert node.bytes(file, 0, SIZE) == data.read_bytes()
        found.append((node, file))
    return found


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def test_all_read_all_and_storage_is_read_once(data: Path) -> None:
    with fake_net(4, LoopNet) as cluster:
        found = read_by(cluster, data, 0, 1, 2, 3)
        assert sum(node.pool.file_counts(file).read_bytes for node, file in found) == SIZE
        assert sum(cluster.loop.bytes_.values()) < 3.1 * SIZE, "and once to each node"
        assert all(len(transport.members) == 4 for transport in cluster.transports)


def test_who_does_not_know_the_key_is_not_listened_to(data: Path) -> None:
    class Stranger(LoopNet):
        def key_of(self, number: int) -> bytes:
            return self.key if number != 2 else b"x" * 32

    with fake_net(3, Stranger, patience_ms=20) as cluster:
        for transport, members in zip(cluster.transports, ([0, 1], [0, 1], [2]), strict=True):
            assert transport.members == members
        read_by(cluster, data, 0)
        ((node, file),) = read_by(cluster, data, 2)
        assert node.pool.file_counts(file).others_bytes == 0


def test_a_hello_that_was_heard_is_no_key(data: Path) -> None:
    """It is of one rank, one node and one generation."""
    with fake_net(3, LoopNet) as cluster:
        proof = cluster.transports[0].proof.of
        assert len({proof(0, 0), proof(1, 0), proof(0, 1)}) == 3
        cluster.transports[0].proof._generation += 1
        assert proof(0, 0) != cluster.transports[1].proof.of(0, 0)


@pytest.mark.parametrize("kind", ["answers", "messages", "all"])
def test_a_link_that_loses_costs_reads_and_no_byte(data: Path, kind: str) -> None:
    chance = random.Random(3)

    def carries(source: int, to: int, tag: int, message: bytes) -> bytes | None:
        lost = chance.random() < 0.2 and (kind == "all" or (tag == CONTROL) == (kind == "messages"))
        return None if lost else message

    with fake_net(3, LoopNet, patience_ms=20) as cluster:
        cluster.loop.carries = carries
        read_by(cluster, data, 0, 1, 2)


def test_bytes_that_were_spoiled_on_the_way_are_not_taken(data: Path) -> None:
    chance = random.Random(4)

    def carries(source: int, to: int, tag: int, message: bytes) -> bytes:
        if tag < ANSWER or chance.random() > 0.3:
            return message
        at = chance.randrange(len(message))
        return message[:at] + bytes([message[at] ^ 1 << chance.randrange(8)]) + message[at + 1 :]

    with fake_net(2, LoopNet) as cluster:
        cluster.loop.carries = carries
        (_, _), (node, _) = read_by(cluster, data, 0, 1)
        assert node.net.counts().corrupt > 0


def test_a_node_that_is_frozen_is_lost_and_found_again(data: Path) -> None:
    with fake_net(3, LoopNet, patience_ms=20) as cluster:
        read_by(cluster, data, 0)
        cluster.frozen.add(0)
        until(lambda: cluster.transports[1].members == [1, 2], SILENT_NS / 1e9 + 5)
        began = time.monotonic()
        ((node, file),) = read_by(cluster, data, 1)
        assert time.monotonic() - began < 3
        assert node.pool.file_counts(file).read_bytes == SIZE
        cluster.frozen.clear()
        until(lambda: cluster.transports[1].members == [0, 1, 2])
        until(lambda: not node.net.counts().lost_slots)
        assert node.bytes(file, 0, SIZE) == data.read_bytes(), "no late answer has come into it"


def test_who_was_lost_by_one_alone_is_found_again_though_no_neighbour(data: Path) -> None:
    with fake_net(5, LoopNet) as cluster:
        one = cluster.transports[0]
        until(lambda: one.members == list(range(5)))
        one.peers.mark_down(one.peers.by_node[2])
        until(lambda: one.members == list(range(5)))


def test_a_network_that_fails_at_one_node_is_its_own_loss(data: Path) -> None:
    with fake_net(2, LoopNet, patience_ms=20) as cluster:
        read_by(cluster, data, 0)
        cluster.fabrics[1].failed = True
        until(lambda: 1 in cluster.failed)
        assert isinstance(cluster.failed[1], FabricError)
        read_by(cluster, data, 1)


def test_holders_tell_their_new_homes_what_they_keep(data: Path) -> None:
    """After a transport has been replaced nobody knows of anything."""
    with fake_net(2, LoopNet) as cluster:
        ((node, file),) = read_by(cluster, data, 0)
        kept = node.pool.kept_bytes()
        assert kept >= SIZE
        for transport in cluster.transports:
            transport.homes.home.dropped(FILE_ID[0], range(-(-SIZE // (8 * CHUNK))), 0)
        node.net.unshare(file)
        with data.open() as again:
            node.net.share(file, FILE_ID, Times.of(again.fileno()))
        until(lambda: sum(len(t.homes.home) for t in cluster.transports) == -(-SIZE // (8 * CHUNK)))
        ((other, number),) = read_by(cluster, data, 1)
        assert other.pool.file_counts(number).others_bytes == SIZE


def test_a_peer_that_says_anything_at_all_harms_nobody(data: Path) -> None:
    """It knows the key, and is broken."""
    with fake_net(2, LoopNet) as cluster:
        ((node, file),) = read_by(cluster, data, 0)
        chance, transport = random.Random(5), cluster.transports[0]
        (peer,) = transport.peers.by_rank.values()
        kinds = [*range(1, 9), *range(64, 73), 1001, HELLO, 0, 1 << 31]
        cluster._stop.set()
        cluster._thread.join()
        for _ in range(3000):
            message = Message(
                chance.choice(kinds), node=chance.choice([0, 1, 7, net.NONE, 1 << 31]),
                slot=chance.choice([0, 15, 16, 31, 99, net.NONE, 1 << 31]),
                theirs=chance.choice([0, 15, 16, net.NONE, 1 << 31]),
                file=chance.choice([FILE_ID, (0, 0)]),
                first=chance.choice([0, 5, 1 << 63, (1 << 64) - 1]),
                count=chance.choice([0, 1, 64, (1 << 64) - 1]),
                mask=chance.choice([0, 1, (1 << 64) - 1]), class_=chance.choice([0, 1, 9]),
                status=chance.choice([0, 1, 77]), missing_at=chance.choice([0, 1, net.NONE, 9]),
                room=chance.choice([0, 1, 2]),
            )  # fmt: skip
            sent = bytearray(net.encode(message))
            if chance.random() < 0.3:
                struct.pack_into("<Q", sent, 8 * chance.randrange(len(sent) // 8), 1 << 63)
            transport.heard(peer, bytes(sent))
            transport.step()
        time.sleep(0.2)
        assert node.bytes(file, 0, SIZE) == data.read_bytes()
        assert transport.members in ([0], [0, 1])


def test_naps_grow_and_a_demand_is_waited_for_without_one() -> None:
    with fake_net(2, LoopNet) as cluster:
        cluster._stop.set()
        cluster._thread.join()
        transport = cluster.transports[0]
        transport.naps.busy_ns = time.monotonic_ns()
        assert transport.nap_ns(0) < transport.nap_ns(1) <= transport.nap_ns(20) == NAP_MOST_NS
        transport.naps.busy_ns = 0
        assert transport.nap_ns(1) == IDLE_NAP_NS
        transport.naps.took_ns = 10**9
        demand = Message(net.ASK, node=1, slot=3, file=FILE_ID, count=1)
        transport.requests.ask(demand, time.monotonic_ns())
        assert transport.nap_ns(1) == 0
        transport.naps.spins = False
        assert transport.nap_ns(1) > 0
        transport.naps.busy_ns = 0
        assert transport.nap_ns(1) == IDLE_NAP_NS, "its answer may never come"


def test_what_is_no_message_is_said_to_be_none() -> None:
    with pytest.raises(ValueError, match="no message"):
        net.decode(b"short")
    message = Message(net.HINTS, mask=5, word={0: 7, 2: net.KEEP}, first=1 << 60)
    assert net.decode(net.encode(message)) == message
    assert os.path.basename(net.__file__) == "net.py"
