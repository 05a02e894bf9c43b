# SPDX-License-Identifier: Apache-2.0
"""Questions about blocks: this node's to their homes, and others' to this one as a home."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from uffdprefetch.cluster.homes import Answer, Home, Word, homes
from uffdprefetch.cluster.peer_nodes import PeerNodes
from uffdprefetch.cluster.service_queue import ServiceQueue
from uffdprefetch.native import net
from uffdprefetch.native.net import Message


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


class HomeSide:
    """One node's."""

    def __init__(self, home: Home, peers: PeerNodes, service: ServiceQueue) -> None:
        self.home, self._peers, self._service = home, peers, service
        self.room = net.ROOM  # this node's, as its service last said

    def question(self, message: Message, now: int) -> None:
        """The service asks which nodes have blocks."""
        self.room = message.room
        for home, part in self._by_home(message):
            if home == self._peers.node:
                self._service.tell(self.answer(part, home, now))
            else:
                self._peers.send(self._peers.by_node[home], part)

    def told(self, message: Message) -> None:
        """The service has blocks, or has them no longer."""
        for home, part in self._by_home(message):
            if home == self._peers.node:
                self.note(part, home)
            else:
                self._peers.send(self._peers.by_node[home], part)

    def note(self, message: Message, node: int) -> None:
        """A node has blocks whose home is here, or has them no longer."""
        if message.kind == net.KEPT:
            self.home.told(message.file[0], message.blocks, node)
        else:
            self.home.dropped(message.file[0], message.blocks, node)

    def answer(self, question: Message, asker: int, now: int) -> Message:
        """Which nodes have the blocks, answered as their home."""
        rooms = {n: peer.room for n, peer in self._peers.by_node.items() if peer.here}
        room = with_room({**rooms, self._peers.node: self.room, asker: question.room})
        missing = -1 if question.missing_at == net.NONE else question.missing_at
        words = {}
        for block in question.blocks:
            said = self.home.ask(
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
                blocks, homes(message.file[0], blocks, self._peers.members), strict=True
            ):
                masks[home] = masks.get(home, 0) | 1 << (block - message.first)
        for home, mask in masks.items():
            yield home, replace(message, mask=mask)
