# SPDX-License-Identifier: Apache-2.0
"""Nodes of a cluster in one process: a pool each, and between them, in the place of MPI, a thread
that carries messages, and loses, delays or spoils them where a test says so."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loop_fabric import Loop

from uffdprefetch.cluster.fabric import FabricError
from uffdprefetch.cluster.home_side import with_room, word_of
from uffdprefetch.cluster.homes import Home, homes
from uffdprefetch.cluster.shortage import Shortage
from uffdprefetch.cluster.transport import Transport
from uffdprefetch.native import net
from uffdprefetch.native.net import Layout, Message, Net, NetRing
from uffdprefetch.native.pool import Pool
from uffdprefetch.state.file_times import Times

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 64 * KIB
SLOT_BYTES = 256 * KIB
#: In the place of 4 MiB, so that small files have many.
BLOCK_CHUNKS = 8
#: Longer than a busy machine lets a thread wait: what is not meant to be lost is not late.
PATIENCE_MS = 5000
FILE_ID = (0x0123456789ABCDEF, 0xFEDCBA9876543210)

#: Of each disk tier.
DISK_BYTES = 16 * MIB
#: Of the file that most tests read: whole blocks and a part of one.
SIZE = 6 * MIB + 12345

#: What becomes of a message: it is carried (True), or not.
Filter = Callable[[int, Message], bool]


@dataclass
class Node:
    """One node: its pool, its side of the transport, and what it was asked."""

    number: int
    pool: Pool
    ring: NetRing  # the transport's
    net: Net
    to_fd: int
    from_fd: int
    spill_fd: int = -1  # of its disk tier
    home: Home = field(default_factory=Home)
    memfds: dict[int, int] = field(default_factory=dict)  # by file
    seen: list[Message] = field(default_factory=list)  # what the service has said
    out: dict[int, Message] = field(default_factory=dict)  # what was asked, by slot
    jobs: int = 0
    room: int = net.ROOM
    telling: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, message: Message) -> None:
        with self.telling:  # the carrier and a test
            assert self.ring.put(message)
        os.eventfd_write(self.from_fd, 1)

    def add(self, path: Path, identity: tuple[int, int] | None = FILE_ID) -> int:
        """A file joins the pool, and is shared."""
        fd = os.open(path, os.O_RDONLY)
        try:
            number, memfd = self.pool.add_file(fd, path.stat().st_size)
            self.memfds[number] = memfd
            if identity is not None:
                self.net.share(number, identity, Times.of(fd))
        finally:
            os.close(fd)
        return number

    def prefetch(self, file: int, start: int, length: int, patience: float = 20.0) -> None:
        """Have it in the pool, as far as there is room."""
        self.jobs += 1
        assert self.pool.submit(self.jobs, file, start, length)
        end = time.monotonic() + patience
        while not any(result.id == self.jobs for result in self.pool.reap()):
            assert time.monotonic() < end, "a prefetch that never ends"
            time.sleep(0.001)

    def bytes(self, file: int, start: int, length: int) -> bytes:
        """What lies in its memory."""
        return os.pread(self.memfds[file], length, start)


class FakeNet:
    """The nodes, and who carries. ``carries`` may be set to what drops messages; ``spoils`` to what
    changes the bytes of an answer."""

    def __init__(
        self, count: int, budget_bytes: int = 64 * MIB, keep_bytes: int = 32 * MIB,
        patience_ms: int = PATIENCE_MS, slots: int = 16, disk: Path | None = None, **more: float,
    ) -> None:  # fmt: skip
        """``disk``: where each one's disk tier lies; ``more``: of native.net.Net."""
        self.carries: Filter = lambda node, message: True
        self.spoils: Callable[[bytearray], None] | None = None
        self.hints: Callable[[int, int], int] = lambda asker, word: word
        self.delay_seconds = 0.0
        self.nodes = [
            self._node(i, budget_bytes, keep_bytes, patience_ms, slots, disk, **more)
            for i in range(count)
        ]
        self._late: list[tuple[float, int, Message]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._meet()
        self._thread.start()

    def _meet(self) -> None:
        for one in self.nodes:
            for other in self.nodes:
                if one is not other:
                    one.tell(Message(net.NODE, node=other.number, status=1))

    @staticmethod
    def _node(
        number: int, budget_bytes: int, keep_bytes: int, patience_ms: int, slots: int,
        disk: Path | None, **more: Any,
    ) -> Node:  # fmt: skip
        pool = Pool(budget_bytes, CHUNK, 8, os.eventfd(0, os.EFD_NONBLOCK))
        spill_fd = -1
        if disk is not None:
            fd = os.open(disk, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
            spill_fd = os.dup(fd)
            pool.spill(fd, DISK_BYTES)
        pool.set_budget(budget_bytes, keep_bytes)
        service = NetRing.create(Layout(SLOT_BYTES, slots, slots))
        ring = NetRing.open(service.fd)
        os.close(service.fd)
        to_fd, from_fd = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
        side = Net(
            pool, service, number, to_fd, from_fd, chunks_per_block=BLOCK_CHUNKS,
            patience_ms=patience_ms, **more,
        )  # fmt: skip
        return Node(number, pool, ring, side, to_fd, from_fd, spill_fd)

    def _run(self) -> None:
        while not self._stop.is_set():
            if not any([self._step(node) for node in self.nodes]):
                time.sleep(0.0002)

    def _step(self, node: Node) -> bool:
        now, carried = time.monotonic(), False
        while (message := node.ring.take()) is not None:
            carried = True
            node.seen.append(message)
            self._late.append((now + self.delay_seconds, node.number, message))
        due = [late for late in self._late if late[0] <= now]
        self._late = [late for late in self._late if late[0] > now]
        for _, number, message in due:
            if self.carries(number, message):
                self._carry(self.nodes[number], message)
        return carried or bool(due)

    def _carry(self, node: Node, m: Message) -> None:
        if m.kind == net.ASK:
            node.out[m.slot] = m
            self.nodes[m.node].tell(
                Message(
                    net.REQUEST, node=node.number, theirs=m.slot, file=m.file, first=m.first,
                    count=m.count, class_=m.class_, useful_ms=m.useful_ms, serial=m.serial,
                    copy=m.copy,
                )
            )  # fmt: skip
        elif m.kind == net.SEND:
            data = bytearray(node.ring.slot(m.slot, m.length))
            if self.spoils is not None:
                self.spoils(data)
            self._answer(m, data)
            node.tell(Message(net.SENT, slot=m.slot))
        elif m.kind == net.REFUSE:
            self.refuse(m, m.status)
        elif m.kind == net.READING:
            self.nodes[m.node].tell(Message(net.WORD, slot=m.theirs))
        elif m.kind == net.HURRY:
            self.nodes[m.node].tell(Message(net.HURRIED, node=node.number, theirs=m.slot))
        elif m.kind in (net.QUESTION, net.KEPT, net.DROPPED):
            self._home(node, m)

    def refuse(self, m: Message, status: int) -> None:
        """In the place of what was asked for."""
        self._answer(m, bytearray(net.refusal(replace(m, status=status))))

    def _answer(self, m: Message, data: bytearray) -> None:
        asker = self.nodes[m.node]
        asker.ring.slot(m.theirs, len(data) - net.HEADER_BYTES)[:] = data
        asker.out.pop(m.theirs, None)
        asker.tell(Message(net.CAME, slot=m.theirs))

    def _home(self, node: Node, m: Message) -> None:
        alive = [one.number for one in self.nodes]
        file = m.file[0]
        node.room = m.room if m.kind == net.QUESTION else node.room
        room = with_room({one.number: one.room for one in self.nodes})
        words = {}
        for block, number in zip(m.blocks, homes(file, m.blocks, alive), strict=True):
            home = self.nodes[number].home
            if m.kind == net.KEPT:
                home.told(file, [block], node.number)
            elif m.kind == net.DROPPED:
                home.dropped(file, [block], node.number)
            else:
                missing = -1 if m.missing_at == net.NONE else m.missing_at
                said = home.ask(
                    file, block, node.number, room, time.monotonic_ns(), missing,
                    bool(m.together), bool(m.part),
                )  # fmt: skip
                word = word_of(said)
                words[block - m.first] = self.hints(node.number, word)
        if m.kind == net.QUESTION:
            node.tell(Message(net.HINTS, file=m.file, first=m.first, mask=m.mask, word=words))

    def hold_answers(self) -> list[tuple[int, Message]]:
        """Those that come from now on stay on the way: what let_go() is given."""
        held = list[tuple[int, Message]]()

        def hold(node: int, message: Message) -> bool:
            if message.kind == net.SEND:
                held.append((node, message))
            return message.kind != net.SEND

        self.carries = hold
        return held

    def let_go(self, held: list[tuple[int, Message]]) -> None:
        """They arrive, and so does whatever comes after them."""
        self.carries = lambda node, message: True
        for number, message in held:
            self._carry(self.nodes[number], message)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for node in self.nodes:
            node.net.close()
            node.pool.close()
            node.ring.close()
            for fd in (node.to_fd, node.from_fd, node.spill_fd, *node.memfds.values()):
                if fd >= 0:
                    os.close(fd)


class LoopNet(FakeNet):
    """The same with real transports in the place of who carries, and between them a loop."""

    key, generation = b"k" * 32, 1

    def _meet(self) -> None:
        self.loop = Loop(len(self.nodes))
        self.fabrics = self.loop.ranks()
        self.transports = [
            Transport(
                node.ring, node.to_fd, node.from_fd, fabric, node=node.number, key=self.key_of(i),
                generation=self.generation, shortage=self.shortage_of(i),
            )
            for i, (node, fabric) in enumerate(zip(self.nodes, self.fabrics, strict=True))
        ]  # fmt: skip
        self.frozen = set[int]()
        self.failed: dict[int, FabricError] = {}
        for _ in range(10):
            for node in self.nodes:
                self._step(node)

    def key_of(self, number: int) -> bytes:
        """The run's key, as a node has it."""
        return self.key

    def shortage_of(self, number: int) -> Shortage:
        """Whether it is short of processors: never, whatever this machine has."""
        return Shortage("")

    def _step(self, node: Node) -> bool:
        if node.number in self.frozen or node.number in self.failed:
            return False
        try:
            return self.transports[node.number].step()
        except FabricError as error:
            self.failed[node.number] = error
            return False


@contextmanager
def fake_net(count: int, kind: type[FakeNet] = FakeNet, **more: Any) -> Iterator[Any]:
    """Nodes that end with the test."""
    one = kind(count, **more)
    try:
        yield one
    finally:
        one.close()


def is_right(node: Node, file: int, data: Path) -> bool:
    return node.bytes(file, 0, data.stat().st_size) == data.read_bytes()


def make_data(directory: Path) -> Path:
    """A file of SIZE bytes, of which no two chunks are alike."""
    path = directory / "data.bin"
    path.write_bytes(random.Random(5).randbytes(SIZE))
    return path


def drop(node: Node, file: int) -> None:
    """Nothing of it is there any more."""
    node.pool.drop_file(file)
    end = time.monotonic() + 20
    while node.pool.file_counts(file).resident_bytes:
        assert time.monotonic() < end, "what is never dropped"
        time.sleep(0.001)


def read_by(cluster: FakeNet, data: Path, *numbers: int) -> list[tuple[Node, int]]:
    """Each of these has the whole file, one after the other."""
    found = []
    for number in numbers:
        node = cluster.nodes[number]
        file = node.add(data)
        node.prefetch(file, 0, data.stat().st_size)
        assert is_right(node, file, data)
        found.append((node, file))
    return found


def ahead(node: Node, file: int, block: int, patience: float = 20.0) -> int:
    """What becomes of a block in a window, once it is known who has it."""
    end = time.monotonic() + patience
    while (
        found := node.net.ahead(
            file, block * BLOCK_CHUNKS, BLOCK_CHUNKS, (block + 1) * BLOCK_CHUNKS
        )
    ) == net.AHEAD_SOON:
        assert time.monotonic() < end, "a question that is never answered"
        time.sleep(0.001)
    return found
