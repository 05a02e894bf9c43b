# SPDX-License-Identifier: Apache-2.0
"""What the nodes together have no room to keep: it goes from who reads it to those that come
soon."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_net import (
    BLOCK_CHUNKS,
    CHUNK,
    SIZE,
    FakeNet,
    ahead,
    drop,
    fake_net,
    make_data,
    read_by,
)

from uffdprefetch.cluster import homes
from uffdprefetch.native import net


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("net"))


@contextlib.contextmanager
def without_room(nodes: int) -> Iterator[FakeNet]:
    """None keeps anything for others."""
    with fake_net(nodes, keep_bytes=0) as cluster:
        for node in cluster.nodes:
            node.room = net.ROOM_NONE
        yield cluster


def test_what_none_has_room_to_keep_one_reads_and_those_that_come_then_get_it(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(homes, "SENT_NS", 60_000_000_000)  # however busy this machine is
    with without_room(3) as cluster:
        found = read_by(cluster, data, 0, 1, 2)
        counts = [node.pool.file_counts(file) for node, file in found]
        assert [(c.read_bytes, c.others_bytes) for c in counts] == [(SIZE, 0), (0, SIZE), (0, SIZE)]


def test_who_was_told_to_read_what_none_keeps_reads_it_for_who_comes_before_that(
    data: Path,
) -> None:
    """Windows ask ahead. It holds for a second, within which a busy machine may not come to ask."""
    block = BLOCK_CHUNKS * CHUNK
    for _ in range(10):
        with without_room(2) as cluster:
            one, two = cluster.nodes
            file, number = one.add(data), two.add(data)
            assert ahead(one, file, 0) == net.AHEAD_NOW
            two.prefetch(number, 0, block)
            read = [one.pool.file_counts(file).read_bytes, two.pool.file_counts(number).read_bytes]
            if two.pool.file_counts(number).others_bytes:
                break
    assert read == [block, 0]


def test_what_is_passing_is_read_ahead_as_what_nobody_has(data: Path) -> None:
    """Only what another node keeps is there when a reader comes."""
    with without_room(2) as cluster:
        one, two = cluster.nodes
        file, number = one.add(data), two.add(data)
        one.prefetch(file, 0, BLOCK_CHUNKS * CHUNK)
        assert ahead(two, number, 0) == net.AHEAD_NOW


def test_who_has_read_what_none_keeps_and_has_lost_it_does_not_read_it_for_others(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(homes, "SENT_NS", 60_000_000_000)  # however busy this machine is
    block = BLOCK_CHUNKS * CHUNK
    with without_room(2) as cluster:
        began = time.monotonic()
        one, two = cluster.nodes
        file, number = one.add(data), two.add(data)
        one.prefetch(file, 0, block)
        np.asarray(one.pool.books(file).touched_ms)[:BLOCK_CHUNKS] = (
            int((time.monotonic() - began) * 1000) + 1
        )  # its readers were there
        drop(one, file)
        two.prefetch(number, 0, block)
        assert one.pool.file_counts(file).read_bytes == block
        assert two.pool.file_counts(number).read_bytes == block
        assert two.net.counts().refused > 0


def test_who_wants_all_of_a_block_asks_though_it_knows_what_some_of_it_was_read_for(
    data: Path,
) -> None:
    with without_room(2) as cluster:
        one, two = cluster.nodes
        file, number = one.add(data), two.add(data)
        one.prefetch(file, 0, BLOCK_CHUNKS * CHUNK)
        words = iter([net.READ_PART])
        cluster.hints = lambda asker, word: next(words, word)
        assert ahead(two, number, 0) == net.AHEAD_NOW
        assert two.net.counts().questions == 2


def test_what_is_passing_and_read_for_another_node_is_not_kept(data: Path) -> None:
    """Though there is room where it is read."""
    with fake_net(2) as cluster:
        for node in cluster.nodes:
            node.room = net.ROOM_NONE
        one, two = cluster.nodes
        cluster.hints = lambda asker, word: net.READ if asker == 0 else net.COPY
        file, number = one.add(data), two.add(data)
        for _ in range(10):  # that one is to read it is known for a second
            drop(two, number)
            assert ahead(one, file, 0) == net.AHEAD_NOW
            two.prefetch(number, 0, BLOCK_CHUNKS * CHUNK)
            if two.pool.file_counts(number).others_bytes:
                break
        assert one.pool.file_counts(file).read_bytes >= BLOCK_CHUNKS * CHUNK
        assert one.pool.kept_bytes() == 0


def test_it_is_asked_again_after_a_second_whether_somebody_reads_what_none_keeps(
    data: Path,
) -> None:
    with without_room(2) as cluster:
        one, began = cluster.nodes[0], time.monotonic()
        file = one.add(data)
        one.prefetch(file, 0, CHUNK)
        end = time.monotonic() + 20
        while one.net.counts().questions < 2:
            assert time.monotonic() < end, "it does not ask again"
            drop(one, file)
            one.prefetch(file, 0, CHUNK)
        assert time.monotonic() - began >= 1
