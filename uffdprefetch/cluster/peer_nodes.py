# SPDX-License-Identifier: Apache-2.0
"""The other nodes of a generation, as a transport knows them: who they are, and whether they live.

A node counts as lost after three heartbeats without one, and as found again with any message.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

from uffdprefetch.base.clock import MS
from uffdprefetch.cluster.fabric import Fabric
from uffdprefetch.cluster.homes import Home
from uffdprefetch.cluster.service_queue import ServiceQueue
from uffdprefetch.cluster.shortage import Shortage
from uffdprefetch.native import net
from uffdprefetch.native.net import Message

#: MPI tag of messages (an MPI has at least 32767).
CONTROL = 1
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


class GenerationProof:
    """That a node knows the key of a generation, and has the same protocol version."""

    def __init__(self, key: bytes, generation: int) -> None:
        self._key, self._generation = key, generation

    def of(self, rank: int, node: int) -> tuple[int, int]:
        """A rank's that is this node."""
        said = struct.pack("<QQQQ", net.VERSION, self._generation, rank, node)
        digest = hmac.new(self._key, said, hashlib.sha256).digest()
        return struct.unpack_from("<QQ", digest)  # type: ignore[return-value]

    def is_right(self, proof: tuple[int, int], rank: int, node: int) -> bool:
        """Whether a rank has sent that."""
        return hmac.compare_digest(
            struct.pack("<QQ", *proof), struct.pack("<QQ", *self.of(rank, node))
        )


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


class PeerNodes:
    """All of them, by rank and by node. What is known of one changes here alone."""

    def __init__(self, node: int, fabric: Fabric, service: ServiceQueue, home: Home) -> None:
        """``node``: this one; ``home``: forgets what lost ones have kept."""
        self.node, self._fabric = node, fabric
        self._service, self._home = service, home
        self.by_rank = {r: Peer(r) for r in range(fabric.size) if r != fabric.rank}
        self.by_node: dict[int, Peer] = {}

    @property
    def members(self) -> list[int]:
        """The nodes that are there, this one among them."""
        return sorted([self.node, *(n for n, p in self.by_node.items() if p.here)])

    def let_in(self, peer: Peer, node: int, now: int) -> None:
        """It knows the key, and says which node it is."""
        if node not in self.by_node and node != self.node and node < net.NODES:
            peer.node = node
            self.by_node[node] = peer
            self.mark_up(peer, now)

    def send(self, peer: Peer, message: Message) -> None:
        """A message, as soon as that can be."""

        def went() -> None:
            peer.unsent -= 1

        if peer.unsent >= UNSENT_MAX:
            self.mark_down(peer)
            return
        peer.unsent += 1
        self._fabric.send(peer.rank, CONTROL, net.encode(message), went)

    def concern(self, peer: Peer, now: int) -> None:
        """One of the two has asked the other."""
        peer.concerned_ns = now

    def answered(self, peer: Peer, now: int) -> None:
        """What it was asked for has come: no message, and a sign of life all the same."""
        peer.heard_ns = now

    def note_room(self, peer: Peer, room: int) -> None:
        """How much it can keep, as it says."""
        peer.room = room

    def mark_up(self, peer: Peer, now: int) -> None:
        """A message has come from it."""
        peer.heard_ns = now
        if not peer.here:
            peer.here = True
            self._tell_of(peer)

    def mark_down(self, peer: Peer) -> None:
        """It counts as lost until it is heard again."""
        if peer.here:
            peer.here = False
            self._home.forget_node(peer.node)
            self._tell_of(peer)

    def mark_short(self, peer: Peer, short: bool) -> None:
        """Whether it is short of processors, as it says."""
        if peer.short != short:
            peer.short = short
            self._tell_of(peer)

    def _tell_of(self, peer: Peer) -> None:
        self._service.tell(
            Message(net.NODE, node=peer.node, status=int(peer.here), cpu_short=int(peer.short))
        )


class Heartbeats:
    """This node's to the others, and what their lack says."""

    def __init__(self, peers: PeerNodes, service: ServiceQueue, shortage: Shortage) -> None:
        self._peers, self._service = peers, service
        self._shortage, self._short = shortage, False
        self._last_ns = 0

    def sign_of_life(self, peer: Peer, room: int) -> Message:
        """``room``: this node's; ``status``: whether the peer is up, as far as this node knows."""
        return Message(BEAT, room=room, status=int(peer.here), cpu_short=int(self._short))

    def heard(self, peer: Peer, message: Message, room: int) -> None:
        """One of a peer."""
        self._peers.note_room(peer, message.room)
        self._peers.mark_short(peer, bool(message.cpu_short))
        if not message.status:  # we count as lost there
            self._peers.send(peer, self.sign_of_life(peer, room))

    def turn(self, now: int, room: int) -> None:
        """Once every BEAT_NS: send them, and look for who is silent."""
        if now - self._last_ns < BEAT_NS:
            return
        self._last_ns = now
        short = self._shortage.look()
        peers = self._peers
        if short != self._short:
            self._short = short
            self._service.tell(Message(net.NODE, node=peers.node, cpu_short=int(short)))
        order = peers.members
        at = order.index(peers.node)
        neighbours = {order[at - 1], order[(at + 1) % len(order)]}
        for node, peer in peers.by_node.items():
            concerned = node in neighbours or now - peer.concerned_ns < CONCERNED_NS
            if concerned or not peer.here:
                peers.send(peer, self.sign_of_life(peer, room))
            if concerned and peer.here and now - peer.heard_ns > SILENT_NS:
                peers.mark_down(peer)
