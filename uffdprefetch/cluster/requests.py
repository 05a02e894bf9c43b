# SPDX-License-Identifier: Apache-2.0
"""Requests for chunks: this node's to others, and the answers to theirs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from uffdprefetch.base.clock import MS, Clock
from uffdprefetch.cluster.fabric import Fabric
from uffdprefetch.cluster.peer_nodes import UNSENT_MAX, Peer, PeerNodes
from uffdprefetch.cluster.service_queue import ServiceQueue
from uffdprefetch.native import net
from uffdprefetch.native.net import Message

#: MPI tag of the answer to slot 0; that of slot n is n more (an MPI has at least 32767).
ANSWER = 2
#: Sleep after a turn without work, doubled from the least to the most, while requests come ...
NAP_LEAST_NS, NAP_MOST_NS = 50_000, 200_000
#: ... and the sleep once none has come for IDLE_AFTER_NS.
IDLE_AFTER_NS, IDLE_NAP_NS = 100 * MS, 1 * MS
#: Busy wait for a demand's answer: this multiple of the last answer's time, at most SPIN_MOST_NS.
SPIN_TIMES = 2
SPIN_MOST_NS = 1 * MS


class Naps:
    """How long the transport may sleep: the network has no descriptor to wait for."""

    def __init__(self, spins: bool, clock: Clock) -> None:
        """``spins``: whether a core is free for that."""
        self.spins, self._clock = spins, clock
        self.took_ns = 0  # the last demand's answer
        self.busy_ns = 0  # when something was last asked or answered

    def note_busy(self, now: int) -> None:
        """Something is asked, or answered."""
        self.busy_ns = now

    def note_answer(self, took_ns: int) -> None:
        """To a demand."""
        self.took_ns = took_ns

    def nap_ns(self, idle_turns: int, demanded_ns: list[int]) -> int:
        """Sleep after ``idle_turns`` successive turns without work, with demands since these times
        that no answer has come to; 0: none."""
        now = self._clock.now_ns()
        if self.spins and demanded_ns:
            spin = min(SPIN_MOST_NS, SPIN_TIMES * self.took_ns)
            if now - max(demanded_ns) < spin:
                return 0
        if now - self.busy_ns > IDLE_AFTER_NS:
            return IDLE_NAP_NS
        return min(NAP_MOST_NS, NAP_LEAST_NS << min(idle_turns, 8))


@dataclass
class Asked:
    """A request that a slot waits for."""

    peer: Peer
    at_ns: int
    demanded: bool  # a thread waits for it


class Requests:
    """One node's, by the slots that the answers are to come to."""

    def __init__(
        self, service: ServiceQueue, fabric: Fabric, peers: PeerNodes, naps: Naps, clock: Clock
    ) -> None:
        self._service, self._fabric, self._peers = service, fabric, peers
        self._naps, self._clock = naps, clock
        self._asked: dict[int, Asked] = {}

    def demanded_ns(self) -> list[int]:
        """When each demand was sent that no answer has come to."""
        return [one.at_ns for one in self._asked.values() if one.demanded]

    def ask(self, m: Message, now: int) -> None:
        """Of a node, for what the service needs."""
        peer = self._peers.by_node.get(m.node)
        slot = m.slot
        if peer is None or not peer.here or peer.unsent >= UNSENT_MAX:
            self._service.slot(slot, 0)[:] = net.refusal(replace(m, status=net.FAILED))
            self._service.tell(Message(net.CAME, slot=slot))
            return

        def came() -> None:
            asked = self._asked.pop(slot)
            at = self._clock.now_ns()
            if asked.demanded:
                self._naps.note_answer(at - asked.at_ns)
            self._peers.answered(asked.peer, at)
            self._naps.note_busy(at)
            self._service.tell(Message(net.CAME, slot=slot))

        self._peers.concern(peer, now)
        self._naps.note_busy(now)
        self._asked[slot] = Asked(peer, now, m.class_ == net.DEMAND)
        self._fabric.receive(peer.rank, ANSWER + slot, self._service.slot(slot), came)
        self._peers.send(peer, replace(m, kind=net.REQUEST, theirs=slot))

    def hurry(self, slot: int) -> None:
        """A thread waits for it by now."""
        asked = self._asked.get(slot)
        if asked is not None:
            asked.demanded = True
            self._peers.send(asked.peer, Message(net.HURRIED, theirs=slot))

    def answer(self, m: Message, data: bytes | memoryview) -> None:
        """Send the answer to a request; with no receiver any more its slot stays taken."""

        def went() -> None:
            if m.kind == net.SEND:
                self._service.tell(Message(net.SENT, slot=m.slot))

        peer = self._peers.by_node.get(m.node)
        if peer is None or m.theirs >= net.NONE:
            went()
            return
        self._fabric.send(peer.rank, ANSWER + m.theirs, data, went)
