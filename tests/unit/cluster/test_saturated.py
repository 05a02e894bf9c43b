# SPDX-License-Identifier: Apache-2.0
"""csrc/service/net/ and cluster/transport.py where processors are short: what another node has is
not read again because its answers take longer than they did."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import require
from fake_net import (
    BLOCK_CHUNKS,
    CHUNK,
    MIB,
    SIZE,
    LoopNet,
    drop,
    fake_net,
    is_right,
    make_data,
    read_by,
)

from uffdprefetch.cluster.requests import ANSWER
from uffdprefetch.cluster.shortage import Shortage
from uffdprefetch.native import net
from uffdprefetch.native.net import Message

BLOCK = BLOCK_CHUNKS * CHUNK


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("saturated"))


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


class Said(Shortage):
    """What a test says."""

    def __init__(self, is_short: bool) -> None:
        self._is_short = is_short

    def look(self) -> bool:
        return self._is_short


@pytest.mark.parametrize("short", [None, 0, 1], ids=["nobody", "holder", "asker"])
def test_storage_that_is_quicker_is_read_unless_processors_are_short(
    short: int | None, data: Path, tmp_path: Path
) -> None:
    class Slow(LoopNet):
        def shortage_of(self, number: int) -> Shortage:
            return Said(number == short)

    own = tmp_path / "own.bin"
    own.write_bytes(os.urandom(16 * MIB))
    with own.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with fake_net(2, Slow) as cluster:
        _, two = cluster.nodes
        until(lambda: short is None or two.net.node(short).cpu_short)

        def carries(source: int, to: int, tag: int, message: bytes) -> bytes:
            time.sleep(0.05 if tag >= ANSWER and len(message) > CHUNK else 0)
            return message

        cluster.loop.carries = carries
        number = two.add(own, identity=None)
        two.prefetch(number, 0, 16 * MIB)
        require(two.net.rates()[1] is not None, f"{tmp_path} is memory, and no storage")
        read_by(cluster, data, 0)
        number = two.add(data)
        for _ in range(2):
            drop(two, number)
            two.prefetch(number, 0, SIZE)
            assert is_right(two, number, data)
        assert (two.net.counts().quicker_bytes > 0) == (short is None)
        assert (two.net.rates()[0] is None) == (short is not None), "it is the processors' rate"


def test_a_thread_is_short_of_processors_when_it_waits_longer_than_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "schedstat"
    path.write_text("1000 5000 7\n")
    shortage = Shortage(str(path))
    path.write_text("3000 6000 9\n")
    assert not shortage.look(), "1000 of waiting, 2000 of running"
    path.write_text("4000 9000 9\n")
    assert shortage.look() and not shortage.look(), "since the last look"
    assert not Shortage("/no/such/file").look()


def test_answers_that_take_longer_and_longer_are_waited_for(data: Path) -> None:
    """Those of homes, of who has the bytes, and slots that answers leave."""
    with fake_net(2, patience_ms=0, slots=8) as cluster:
        ((one, _),) = read_by(cluster, data, 0)
        two = cluster.nodes[1]
        file = two.add(data)
        for number, seconds in enumerate((0.05, 0.12, 0.12, 0.3, 0.3)):
            cluster.delay_seconds = seconds
            two.prefetch(file, number * BLOCK, BLOCK)
        counts = two.net.counts()
        assert (counts.unknown_bytes, counts.refused_bytes, counts.unanswered_bytes) == (0, 0, 0)
        assert two.pool.file_counts(file).read_bytes == 0, "it was in the memory of the other one"
        assert one.net.counts().served_reads == 0


def test_a_node_that_answers_others_meanwhile_is_not_passed_over(data: Path) -> None:
    with fake_net(2, patience_ms=20) as cluster:
        read_by(cluster, data, 0)
        two = cluster.nodes[1]
        asked = set[int]()

        def carries(node: int, message: Message) -> bool:
            if message.kind == net.ASK:
                asked.add(message.first)
            return message.kind != net.SEND or message.first >= 3

        cluster.carries = carries
        file = two.add(data)
        for number in range(3):
            assert two.pool.submit(100 + number, file, number * CHUNK, CHUNK)
        until(lambda: asked == {0, 1, 2})
        two.prefetch(file, 3 * CHUNK, CHUNK)
        done = set[int]()
        until(
            lambda: done.update(r.id for r in two.pool.reap()) or len(done & {100, 101, 102}) == 3
        )
        counts = two.net.counts()
        assert (counts.late, counts.passed_over) == (3, 0)
        assert two.net.node(0).failures == 0
