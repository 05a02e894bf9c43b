# SPDX-License-Identifier: Apache-2.0
"""The process that carries chunks between nodes: the only one that calls MPI.

It shares memory with its node's service (native/net.py) and owns nothing of the pool: if it or its
MPI dies, the node loses the network, and the service goes on. It also answers, as the home of its
blocks (cluster/homes.py), which nodes have them. It ignores whoever does not know the run's key.
"""

from __future__ import annotations

import os
import select
from dataclasses import replace

from uffdprefetch.base.clock import CLOCK, MS, Clock
from uffdprefetch.cluster.fabric import Fabric
from uffdprefetch.cluster.home_side import HomeSide
from uffdprefetch.cluster.homes import Home
from uffdprefetch.cluster.peer_nodes import (
    BEAT,
    CONTROL,
    HELLO,
    GenerationProof,
    Heartbeats,
    Peer,
    PeerNodes,
)
from uffdprefetch.cluster.requests import Naps, Requests
from uffdprefetch.cluster.service_queue import ServiceQueue
from uffdprefetch.cluster.shortage import Shortage
from uffdprefetch.native import net
from uffdprefetch.native.net import Message, NetRing

#: Posted receives, for messages from any node: a poll of the network costs time for each.
RECEIVES = 64


class Transport:
    """One node's side of one generation."""

    def __init__(
        self, ring: NetRing, to_fd: int, from_fd: int, fabric: Fabric, *, node: int, key: bytes,
        generation: int, spins: bool = True, clock: Clock = CLOCK,
        shortage: Shortage | None = None,
    ) -> None:  # fmt: skip
        """``to_fd``: counts the service's messages; ``from_fd``: is to count ours; ``spins``:
        whether a core is free for that; ``shortage``: None: of the thread that calls this."""
        self._to_fd, self._fabric, self._clock = to_fd, fabric, clock
        self.proof = GenerationProof(key, generation)
        self._service = ServiceQueue(ring, from_fd)
        home = Home()
        self.peers = PeerNodes(node, fabric, self._service, home)
        self.homes = HomeSide(home, self.peers, self._service)
        self.naps = Naps(spins, clock)
        self.requests = Requests(self._service, fabric, self.peers, self.naps, clock)
        self._beats = Heartbeats(self.peers, self._service, shortage or Shortage())
        peers = self.peers.by_rank
        for _ in range(RECEIVES if peers else 0):
            self._listen(bytearray(net.MESSAGE_BYTES))
        for peer in peers.values():
            hello = Message(HELLO, node=node, file=self.proof.of(fabric.rank, node))
            self.peers.send(peer, hello)

    @property
    def members(self) -> list[int]:
        """The nodes that are there, this one among them."""
        return self.peers.members

    # -------------------------------------------------------------- of the other nodes

    def _listen(self, buffer: bytearray) -> None:
        def came(rank: int) -> None:
            data = bytes(buffer)
            self._listen(buffer)
            self.heard(self.peers.by_rank[rank], data)

        self._fabric.receive_any(CONTROL, buffer, came)

    def heard(self, peer: Peer, data: bytes) -> None:
        """Act on a message of another node's transport."""
        message, now = net.decode(data), self._clock.now_ns()
        if message.kind == HELLO:
            if self.proof.is_right(message.file, peer.rank, message.node):
                self.peers.let_in(peer, message.node, now)
            return
        if peer.node < 0:
            return
        self.peers.mark_up(peer, now)
        message = replace(message, node=peer.node)  # whatever it says
        if message.kind == BEAT:
            self._beats.heard(peer, message, self.homes.room)
        elif message.kind == net.REQUEST:
            self._concerned(peer, now)
            self._service.tell(message)
        elif message.kind in (net.WORD, net.HURRIED, net.HINTS):
            self._service.tell(message)
        elif message.kind == net.QUESTION:
            self.peers.note_room(peer, message.room)
            self._concerned(peer, now)
            self.peers.send(peer, self.homes.answer(message, peer.node, now))
        elif message.kind in (net.KEPT, net.DROPPED):
            self.homes.note(message, peer.node)

    def _concerned(self, peer: Peer, now: int) -> None:
        self.peers.concern(peer, now)
        self.naps.note_busy(now)

    # -------------------------------------------------------------- of the service

    def _hear(self, m: Message, now: int) -> None:
        """Act on a message of the service."""
        if m.kind == net.ASK:
            self.requests.ask(m, now)
        elif m.kind == net.SEND:
            self.requests.answer(m, self._service.slot(m.slot, m.length))
        elif m.kind == net.REFUSE:
            self.requests.answer(m, net.refusal(m))
        elif m.kind == net.READING and (peer := self.peers.by_node.get(m.node)):
            self.peers.send(peer, Message(net.WORD, slot=m.theirs))
        elif m.kind == net.HURRY:
            self.requests.hurry(m.slot)
        elif m.kind == net.QUESTION:
            self.homes.question(m, now)
        elif m.kind in (net.KEPT, net.DROPPED):
            self.homes.told(m)

    # -------------------------------------------------------------- the loop

    def step(self) -> bool:
        """Go on with what there is; whether there was something. Raises FabricError."""
        now, any_ = self._clock.now_ns(), False
        while (message := self._service.take()) is not None:
            self._hear(message, now)
            any_ = True
        any_ = self._fabric.poll() or any_
        self._beats.turn(now, self.homes.room)
        self._service.flush()
        return any_

    def nap_ns(self, idle_turns: int) -> int:
        """Sleep after so many successive turns without work; 0: none."""
        return self.naps.nap_ns(idle_turns, self.requests.demanded_ns())

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
