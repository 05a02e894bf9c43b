# SPDX-License-Identifier: Apache-2.0
"""The process that carries chunks between nodes: the only one that calls MPI.

It shares memory with its node's service (native/net.py) and owns nothing of the pool: if it or its
MPI dies, the node loses the network, and the service goes on. It also answers, as the home of its
blocks (cluster/homes.py), which nodes have them. It ignores whoever does not know the run's key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import struct
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from uffdprefetch.base.clock import CLOCK, MS, Clock
from uffdprefetch.cluster.fabric import Fabric
from uffdprefetch.cluster.homes import Answer, Home, Word, homes
from uffdprefetch.cluster.shortage import Shortage
from uffdprefetch.native import net
from uffdprefetch.native.net import Message, NetRing

#: MPI tags (an MPI has at least 32767): of messages; ANSWER + n is that of the answer to slot n.
CONTROL, ANSWER = 1, 2
#: Posted receives, for messages from any node: a poll of the network costs time for each.
RECEIVES = 64
#: Messages under way to a peer from which on it counts as lost.
UNSENT_MAX = 512
#: Kinds of messages between transports only: above the numbers of csrc/common/net.h.
BEAT, HELLO = 1001, 1002
#: Interval of heartbeats.
BEAT_NS = 500 * MS
#: Silence, three heartbeats, after which a peer that sends heartbeats to this node counts as lost.
SILENT_NS = 1500 * MS
#: Heartbeats go to the two neighbours, and to peers with requests within this time.
CONCERNED_NS = 2000 * MS
#: Sleep after a turn without work, doubled from the least to the most, while requests come ...
NAP_LEAST_NS, NAP_MOST_NS = 50_000, 200_000
#: ... and the sleep once none has come for IDLE_AFTER_NS.
IDLE_AFTER_NS, IDLE_NAP_NS = 100 * MS, 1 * MS
#: Busy wait for a demand's answer: this multiple of the last answer's time, at most SPIN_MOST_NS.
SPIN_TIMES = 2
SPIN_MOST_NS = 1 * MS


def with_room(rooms: Mapping[int, int]) -> set[int]:
    """The nodes that may be told to keep a block: those that have room for all that they have been
    told to keep, if there are any."""
    return {n for n, room in rooms.items() if room >= net.ROOM} or {
        n for n, room in rooms.items() if room >= net.ROOM_STILL
    }


def word_of(said: Answer) -> int:
    """An answer as the services' number (enum up_net_word)."""
    if said.word is Word.READ:
        return net.READ_PART if said.part else net.READ
    if said.word is Word.KEEP:
        return net.KEEP_PART if said.part else net.KEEP
    return said.node | (net.COPY if said.copy else 0) | (net.PART if said.part else 0)


@dataclass
class Peer:
    """Another node, as this one knows it."""

    rank: int
    node: int = -1  # -1: it has not shown that it knows the key
    here: bool = False
    heard_ns: int = 0
    concerned_ns: int = 0  # when one of the two last asked the other
    room: int = net.ROOM
    short: bool = False  # of processors
    unsent: int = 0


@dataclass
class Asked:
    """A request that a slot waits for."""

    peer: Peer
    message: Message
    at_ns: int


class Transport:
    """One node's side of one generation."""

    def __init__(
        self, ring: NetRing, to_fd: int, from_fd: int, fabric: Fabric, *, node: int, key: bytes,
        generation: int, spins: bool = True, clock: Clock = CLOCK,
        shortage: Shortage | None = None,
    ) -> None:  # fmt: skip
        """``to_fd``: counts the service's messages; ``from_fd``: is to count ours; ``spins``:
        whether a core is free for that; ``shortage``: None: of the thread that calls this."""
        self._ring, self._to_fd, self._from_fd, self._fabric = ring, to_fd, from_fd, fabric
        self._node, self._key, self._generation = node, key, generation
        self._spins, self._clock = spins, clock
        self._home = Home()
        self._shortage, self._short = shortage or Shortage(), False
        self._peers = {r: Peer(r) for r in range(fabric.size) if r != fabric.rank}
        self._by_node: dict[int, Peer] = {}
        self._asked: dict[int, Asked] = {}
        self._room = net.ROOM
        self._late: deque[Message] = deque()  # what the service's queue had no room for
        self._told = False  # it has messages that it was not woken for
        self._took_ns = 0  # the last demand's answer
        self._busy_ns = self._beat_ns = 0
        for _ in range(RECEIVES if self._peers else 0):
            self._listen(bytearray(net.MESSAGE_BYTES))
        for peer in self._peers.values():
            self._send(peer, Message(HELLO, node=node, file=self._proof(fabric.rank, node)))

    def _proof(self, rank: int, node: int) -> tuple[int, int]:
        """Proof that a node knows the key and has the same protocol version."""
        said = struct.pack("<QQQQ", net.VERSION, self._generation, rank, node)
        digest = hmac.new(self._key, said, hashlib.sha256).digest()
        return struct.unpack_from("<QQ", digest)  # type: ignore[return-value]

    @property
    def members(self) -> list[int]:
        """The nodes that are there, this one among them."""
        return sorted([self._node, *(n for n, p in self._by_node.items() if p.here)])

    # -------------------------------------------------------------- between nodes

    def _listen(self, buffer: bytearray) -> None:
        def came(rank: int) -> None:
            data = bytes(buffer)
            self._listen(buffer)
            self._heard(self._peers[rank], data)

        self._fabric.receive_any(CONTROL, buffer, came)

    def _send(self, peer: Peer, message: Message) -> None:
        def went() -> None:
            peer.unsent -= 1

        if peer.unsent >= UNSENT_MAX:
            self._mark_down(peer)
            return
        peer.unsent += 1
        self._fabric.send(peer.rank, CONTROL, net.encode(message), went)

    def _heard(self, peer: Peer, data: bytes) -> None:
        message, now = net.decode(data), self._clock.now_ns()
        if message.kind == HELLO:
            known = hmac.compare_digest(
                struct.pack("<QQ", *message.file),
                struct.pack("<QQ", *self._proof(peer.rank, message.node)),
            )
            taken = message.node in self._by_node or message.node == self._node
            if known and not taken and message.node < net.NODES:
                peer.node = message.node
                self._by_node[peer.node] = peer
                self._mark_up(peer, now)
            return
        if peer.node < 0:
            return
        self._mark_up(peer, now)
        message.node = peer.node  # whatever it says
        if message.kind == BEAT:
            peer.room = message.room
            if peer.short != bool(message.cpu_short):
                peer.short = bool(message.cpu_short)
                self._tell_of(peer)
            if not message.status:  # we count as lost there
                self._send(peer, self._sign_of_life(peer))
        elif message.kind == net.REQUEST:
            peer.concerned_ns = self._busy_ns = now
            self._tell(message)
        elif message.kind in (net.WORD, net.HURRIED):
            self._tell(message)
        elif message.kind == net.QUESTION:
            peer.room = message.room
            peer.concerned_ns = self._busy_ns = now
            self._send(peer, self._answered(message, peer.node, now))
        elif message.kind == net.HINTS:
            self._tell(message)
        elif message.kind == net.KEPT:
            self._home.told(message.file[0], message.blocks, peer.node)
        elif message.kind == net.DROPPED:
            self._home.dropped(message.file[0], message.blocks, peer.node)

    def _mark_up(self, peer: Peer, now: int) -> None:
        """A message has come from it."""
        peer.heard_ns = now
        if not peer.here:
            peer.here = True
            self._tell_of(peer)

    def _mark_down(self, peer: Peer) -> None:
        """It counts as lost until it is heard again."""
        if peer.here:
            peer.here = False
            self._home.forget_node(peer.node)
            self._tell_of(peer)

    def _tell_of(self, peer: Peer) -> None:
        self._tell(
            Message(net.NODE, node=peer.node, status=int(peer.here), cpu_short=int(peer.short))
        )

    # -------------------------------------------------------------- as a home

    def _answered(self, question: Message, asker: int, now: int) -> Message:
        """Which nodes have the blocks, answered as their home."""
        rooms = {n: peer.room for n, peer in self._by_node.items() if peer.here}
        room = with_room({**rooms, self._node: self._room, asker: question.room})
        missing = -1 if question.missing_at == net.NONE else question.missing_at
        words = {}
        for block in question.blocks:
            said = self._home.ask(
                question.file[0], block, asker, room, now, missing, bool(question.together),
                bool(question.part),
            )  # fmt: skip
            words[block - question.first] = word_of(said)
        return Message(
            net.HINTS, file=question.file, first=question.first, count=question.count,
            mask=question.mask, word=words,
        )  # fmt: skip

    def _by_home(self, message: Message) -> Iterable[tuple[int, Message]]:
        """A message about blocks, for each of their homes."""
        masks: dict[int, int] = {}
        blocks = message.blocks
        if blocks:
            for block, home in zip(
                blocks, homes(message.file[0], blocks, self.members), strict=True
            ):
                masks[home] = masks.get(home, 0) | 1 << (block - message.first)
        for home, mask in masks.items():
            yield home, Message(**{**message.__dict__, "mask": mask})

    # -------------------------------------------------------------- of the service

    def _tell(self, message: Message) -> None:
        """To the service, in the order in which it comes."""
        if self._late or not self._ring.put(message):
            self._late.append(message)
        self._told = True

    def _flush(self) -> None:
        while self._late and self._ring.put(self._late[0]):
            self._late.popleft()
        if self._told:
            self._told = False
            os.eventfd_write(self._from_fd, 1)

    def _hear(self, m: Message, now: int) -> None:
        """Act on a message of the service."""
        if m.kind == net.ASK:
            self._ask(m, now)
        elif m.kind == net.SEND:
            self._answer(m, self._ring.slot(m.slot, m.length))
        elif m.kind == net.REFUSE:
            self._answer(m, net.refusal(m))
        elif m.kind == net.READING and (peer := self._by_node.get(m.node)):
            self._send(peer, Message(net.WORD, slot=m.theirs))
        elif m.kind == net.HURRY:
            if (asked := self._asked.get(m.slot)) is not None:
                asked.message.class_ = net.DEMAND
                self._send(asked.peer, Message(net.HURRIED, theirs=m.slot))
        elif m.kind == net.QUESTION:
            self._room = m.room
            for home, part in self._by_home(m):
                if home == self._node:
                    self._tell(self._answered(part, self._node, now))
                else:
                    self._send(self._by_node[home], part)
        elif m.kind in (net.KEPT, net.DROPPED):
            for home, part in self._by_home(m):
                if home != self._node:
                    self._send(self._by_node[home], part)
                elif m.kind == net.KEPT:
                    self._home.told(part.file[0], part.blocks, home)
                else:
                    self._home.dropped(part.file[0], part.blocks, home)

    def _ask(self, m: Message, now: int) -> None:
        peer = self._by_node.get(m.node)
        slot = m.slot
        if peer is None or not peer.here or peer.unsent >= UNSENT_MAX:
            m.status = net.FAILED
            self._ring.slot(slot, 0)[:] = net.refusal(m)
            self._tell(Message(net.CAME, slot=slot))
            return

        def came() -> None:
            asked = self._asked.pop(slot)
            at = self._clock.now_ns()
            if asked.message.class_ == net.DEMAND:
                self._took_ns = at - asked.at_ns
            asked.peer.heard_ns = self._busy_ns = at
            self._tell(Message(net.CAME, slot=slot))

        peer.concerned_ns = self._busy_ns = now
        self._asked[slot] = Asked(peer, m, now)
        self._fabric.receive(peer.rank, ANSWER + slot, self._ring.slot(slot), came)
        request = Message(**{**m.__dict__, "kind": net.REQUEST, "theirs": slot})
        self._send(peer, request)

    def _answer(self, m: Message, data: bytes | memoryview) -> None:
        """Send the answer to a request; with no receiver any more its slot stays taken."""

        def went() -> None:
            if m.kind == net.SEND:
                self._tell(Message(net.SENT, slot=m.slot))

        peer = self._by_node.get(m.node)
        if peer is None or m.theirs >= net.NONE:
            went()
            return
        self._fabric.send(peer.rank, ANSWER + m.theirs, data, went)

    # -------------------------------------------------------------- the loop

    def step(self) -> bool:
        """Go on with what there is; whether there was something. Raises FabricError."""
        now, any_ = self._clock.now_ns(), False
        while (message := self._ring.take()) is not None:
            self._hear(message, now)
            any_ = True
        any_ = self._fabric.poll() or any_
        if now - self._beat_ns >= BEAT_NS:
            self._beat(now)
        self._flush()
        return any_

    def _sign_of_life(self, peer: Peer) -> Message:
        """``status``: whether the peer is up, as far as this node knows."""
        return Message(
            BEAT, room=self._room, status=int(peer.here), cpu_short=int(self._short)
        )  # fmt: skip

    def _beat(self, now: int) -> None:
        self._beat_ns = now
        short = self._shortage.look()
        if short != self._short:
            self._short = short
            self._tell(Message(net.NODE, node=self._node, cpu_short=int(short)))
        order = self.members
        at = order.index(self._node)
        neighbours = {order[at - 1], order[(at + 1) % len(order)]}
        for node, peer in self._by_node.items():
            concerned = node in neighbours or now - peer.concerned_ns < CONCERNED_NS
            if concerned or not peer.here:
                self._send(peer, self._sign_of_life(peer))
            if concerned and peer.here and now - peer.heard_ns > SILENT_NS:
                self._mark_down(peer)

    def nap_ns(self, idle_turns: int) -> int:
        """Sleep after ``idle_turns`` successive turns without work; 0: none."""
        now = self._clock.now_ns()
        waited = [a.at_ns for a in self._asked.values() if a.message.class_ == net.DEMAND]
        if self._spins and waited:
            spin = min(SPIN_MOST_NS, SPIN_TIMES * self._took_ns)
            if now - max(waited) < spin:
                return 0
        if now - self._busy_ns > IDLE_AFTER_NS:
            return IDLE_NAP_NS
        return min(NAP_MOST_NS, NAP_LEAST_NS << min(idle_turns, 8))

    def run(self, ended: select.poll) -> None:
        """Until the service has hung up, which ``ended`` tells of. Raises FabricError."""
        idle, looked_ns = 0, 0
        while True:
            idle = 0 if self.step() else idle + 1
            now = self._clock.now_ns()
            if now - looked_ns > 100 * MS:
                looked_ns = now
                if ended.poll(0):
                    return
            nap = self.nap_ns(idle) if idle else 0
            # The service's word ends it; a network has no descriptor to wait for.
            if nap and select.select([self._to_fd], [], [], nap / 1e9)[0]:
                try:
                    os.eventfd_read(self._to_fd)
                except BlockingIOError:
                    pass
