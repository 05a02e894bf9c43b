# SPDX-License-Identifier: Apache-2.0
"""cluster/link.py: what a service gives its transports, one after the other."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from uffdprefetch.cluster.homes import RESERVE_MOST_BYTES
from uffdprefetch.cluster.link import GONE_SECONDS, PoolNetwork
from uffdprefetch.native import net
from uffdprefetch.native.net import Layout, NetRing
from uffdprefetch.native.pool import Pool
from uffdprefetch.protocol import wire

MIB = 1 << 20
KEY = bytes(range(32))


@pytest.fixture
def pool() -> Iterator[Pool]:
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    one = Pool(64 * MIB, 64 << 10, 2, wake)
    yield one
    one.close()
    os.close(wake)


class Guest:
    """What a transport has been sent."""

    def __init__(self) -> None:
        self.theirs, self.sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def hear(self) -> None:
        data, fds, _, _ = socket.recv_fds(self.sock, wire.MESSAGE_BYTES, 8)
        assert wire.unpack(data)[0] == wire.Type.WELCOME
        ring_fd, self.to_fd, self.from_fd, info = fds
        self.told = json.loads(os.pread(info, 4096, 0))
        self.ring = NetRing.open(ring_fd)
        for fd in (ring_fd, info):
            os.close(fd)

    def close(self) -> None:
        self.ring.close()
        for fd in (self.to_fd, self.from_fd):
            os.close(fd)
        self.sock.close()


def link(pool: Pool, **more: object) -> PoolNetwork:
    values = {"chunk_bytes": 64 << 10, **more}
    return PoolNetwork(pool, 3, KEY, **values)  # type: ignore[arg-type]


def test_a_transport_gets_the_ring_and_what_it_must_know(pool: Pool) -> None:
    one, guest = link(pool), Guest()
    assert one.counts() == {"lost_slots": 0, "failed": 0}
    one.join(guest.theirs, 77, 4)
    guest.hear()
    assert (guest.told["node"], bytes.fromhex(guest.told["key"])) == (3, KEY)
    assert guest.ring.layout == one.layout
    assert one.joined is not None and (one.joined.pid, one.joined.generation) == (77, 4)
    one.present = [1, 3, 4]
    assert one.counts()["asks"] == 0 and sorted(one.links()) == [1, 4]
    assert one.rates() == (None, None) and one.keepers(0, 3) == [None] * 3
    one.leave()
    one.leave()
    assert one.joined is None and not one.is_failed
    assert sorted(one.links()) == [1, 4], "what went before is not forgotten"
    assert guest.sock.recv(1) == b"", "its connection has ended"
    guest.close()


def test_the_next_one_takes_the_last_ones_place_and_is_told_what_is_shared(
    pool: Pool, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    with path.open("rb") as file:
        number, memfd = pool.add_file(file.fileno(), MIB)
    one, first, second = link(pool), Guest(), Guest()
    one.share(number, (1, 2), (MIB, 0, 0))
    one.unshare(99)
    for generation, guest in enumerate((first, second)):
        one.join(guest.theirs, 77, generation)
        guest.hear()
    assert first.sock.recv(1) == b"" and one.totals.generations == 2
    second.ring.put(net.Message(net.NODE, node=1, status=1))
    os.eventfd_write(second.from_fd, 1)
    assert pool.submit(1, number, 0, 64 << 10)
    while not pool.reap():
        pass
    asked = [m for m in iter(second.ring.take, None) if m.kind == net.QUESTION]
    assert [m.file for m in asked] == [(1, 2)]
    one.leave()
    for guest in (first, second):
        guest.close()
    os.close(memfd)


def test_a_slot_holds_a_chunk_and_a_part_of_the_budget_is_never_kept(pool: Pool) -> None:
    assert link(pool, chunk_bytes=2 * MIB).layout.slot_bytes == 2 * MIB
    assert link(pool, layout=Layout(4 * MIB, 2, 2)).layout.slot_bytes == 4 * MIB
    assert link(pool).keep_bytes(64 * MIB) == 48 * MIB
    assert link(pool).keep_bytes(1 << 40) == (1 << 40) - RESERVE_MOST_BYTES


def test_nothing_is_kept_for_a_network_that_does_not_come_back(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, guest, again = link(pool), Guest(), Guest()
    one.join(guest.theirs, 77, 0)
    one.leave()
    assert one.keep_bytes(64 * MIB) == 48 * MIB
    later = time.monotonic() + GONE_SECONDS + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert one.keep_bytes(64 * MIB) == 0
    one.join(again.theirs, 78, 1)
    assert one.keep_bytes(64 * MIB) == 48 * MIB
    one.leave()
    for each in (guest, again):
        each.hear()
        each.close()


def test_a_transport_that_has_gone_again_is_an_error_and_no_more(pool: Pool) -> None:
    one, guest = link(pool), Guest()
    guest.sock.close()
    with pytest.raises(OSError):
        one.join(guest.theirs, 77, 1)
    assert one.joined is None
