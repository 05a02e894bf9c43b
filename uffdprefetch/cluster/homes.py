# SPDX-License-Identifier: Apache-2.0
"""Who keeps a block of a file, in a cluster of nodes. Pure: no messages, no clock of its own.

The *home* of a block is a node that rendezvous hashing names (Thaler and Ravishankar 1998): every
node finds the same one from the file's identity, the block's number and the members, and when a
member leaves, only its blocks have another. A home keeps no bytes and has no open file, only a
hint of who has the block or is about to read it. Who asks first is told to read and keep it; where
readers of several nodes come to the same blocks of a file, these nodes are named in turn. That
several ask for a block says little: what lies in a window is asked for, too. What nobody has room
to keep is *passing*: who asks for it within SENT_NS after another one is sent to that one. A hint
may be wrong: then it is a miss, and whoever met it asks again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from uffdprefetch.base.arrays import UInt64Array

#: Size of a block: the unit that has one home and one keeper.
BLOCK_BYTES = 4 << 20
#: Part of a node's budget that keeps nothing for others, and its limit: it holds windows, mapped
#: chunks, and passing blocks.
RESERVE_SHARE, RESERVE_MOST_BYTES = 0.25, 256 << 20
#: Latest questions that tell whether nodes read the same parts of a file: they do where at least
#: half came from nodes whose readers come to blocks that others keep.
RECENT_QUESTIONS = 16
#: Fan-out of the tree in which a block is passed on while it is still coming: nodes that ask within
#: SENT_NS of each other are sent to one that asked before, which serves at most this many.
CHILDREN = 2
#: Time for which an unkept copy is sure to be there (csrc/service/net/net.h, NET_PASSING_MS).
SENT_NS = 1_000_000_000
#: Keeper of a block that is passing, and the answer that the storage is to be read.
NOBODY = -1
#: Blocks, and files, that a home remembers. 10^6 hints cover 4 TiB and take some 300 MB of memory.
#: A file's entry is its latest questions, which new ones soon replace.
HINTS_MAX, FILES_MAX = 1_000_000, 10_000

_ODD = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def keep_bytes(budget_bytes: int) -> int:
    """Most bytes that a node with this budget keeps for others."""
    return budget_bytes - min(RESERVE_MOST_BYTES, int(RESERVE_SHARE * budget_bytes))


def _mixed(values: UInt64Array) -> UInt64Array:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014), a bijection of 64 bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_ODD[1])
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_ODD[2])
    return values ^ (values >> np.uint64(31))


def weights(file: int, blocks: Sequence[int] | UInt64Array, nodes: Sequence[int]) -> UInt64Array:
    """How much each node wants each block, (blocks, nodes). ``file``: 64 bits of its identity."""
    members = np.asarray(nodes, np.uint64) * np.uint64(_ODD[0]) + np.uint64(_ODD[1])
    places = _mixed(np.asarray(blocks, np.uint64) + np.uint64(file & (1 << 64) - 1))
    return _mixed(places[:, None] ^ _mixed(members)[None, :])


def homes(file: int, blocks: Sequence[int] | UInt64Array, nodes: Sequence[int]) -> list[int]:
    """The home of each block. ``nodes``: the members, at least one, in any order."""
    order = sorted(nodes)
    found = weights(file, blocks, order).argmax(axis=1)
    return [order[i] for i in found.tolist()]


class Word(IntEnum):
    """What a home says of a block."""

    KEEP = 1  # read it, and keep it
    READ = 2  # read it; nobody has room to keep it
    ASK = 3  # another node has it, or is to read it


class Answer(NamedTuple):
    """``node``: whom to ask; ``copy``: it does not keep the block, but has asked for it before;
    ``part``: home knows of some bytes of it, or of nothing: who wants all of it is to ask."""

    word: Word
    node: int = -1
    copy: bool = False
    part: bool = False


@dataclass
class _Hint:
    """``keeper``: NOBODY, where it is passing; ``part``: its keeper wanted some bytes of it;
    ``asked``: who was sent for a copy, or to read what is passing, within SENT_NS, and when, in
    this order; ``line``: those of them that others may be sent to."""

    keeper: int
    part: bool = False
    asked: dict[int, int] = field(default_factory=dict)
    line: list[int] = field(default_factory=list)

    def drop(self, node: int) -> None:
        """Nobody is sent to it any more."""
        if node in self.line:
            self.line.remove(node)

    def nearest(self, asker: int, now_ns: int) -> int:
        """The node to ask, by the tree of those that asked before; or NOBODY."""
        self._forget_late(now_ns)
        tree = [node for node in (self.keeper, *self.line) if node not in (asker, NOBODY)]
        return tree[(len(tree) - 1) // CHILDREN] if tree else NOBODY

    def _forget_late(self, now_ns: int) -> None:
        while self.asked and now_ns - next(iter(self.asked.values())) > SENT_NS:
            late = next(iter(self.asked))
            del self.asked[late]
            self.drop(late)

    def answer(self, asker: int, now_ns: int, again: bool) -> Answer:
        """See send()."""
        node = self.send(asker, now_ns, again)
        if node == NOBODY:
            return Answer(Word.READ)
        return Answer(Word.ASK, node, node != self.keeper, self.part)

    def send(self, asker: int, now_ns: int, again: bool) -> int:
        """The node to ask, or NOBODY: storage is to be read. Whoever asks ``again`` is sent to the
        keeper or to storage, lest two nodes wait for each other."""
        self._forget_late(now_ns)
        again = again or asker in self.asked
        node = self.keeper if again else self.nearest(asker, now_ns)
        self.drop(asker)
        self.asked.pop(asker, None)
        self.asked[asker] = now_ns
        self.line.append(asker)
        return node


@dataclass
class _FileQuestions:
    """``recent``: of each of the last questions about a file, the nodes that read the same, as far
    as it shows any; ``turn``: of those that are told to read in turn."""

    recent: deque[set[int]] = field(default_factory=lambda: deque(maxlen=RECENT_QUESTIONS))
    turn: int = -1


class Home:
    """What a node knows of the blocks whose home it is."""

    def __init__(self, most: int = HINTS_MAX) -> None:
        self._most = most
        self._hints: OrderedDict[tuple[int, int], _Hint] = OrderedDict()
        #: The last FILES_MAX asked about.
        self._files: OrderedDict[int, _FileQuestions] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hints)

    def ask(
        self, file: int, block: int, asker: int, with_room: Collection[int], now_ns: int,
        missing_at: int = -1, together: bool = False, part: bool = False,
    ) -> Answer:  # fmt: skip
        """Where ``asker`` finds a block. ``with_room``: members that have room to keep one;
        ``missing_at``: who was asked, and does not have it (-1: nobody was); ``together``: readers
        at the asker come to what others keep; ``part``: it wants some bytes of the block, and
        leaves it to who wants all of it."""
        key = (file, block)
        hint = self._hints.get(key)
        if hint is not None and missing_at >= 0:
            hint.drop(missing_at)
            if hint.keeper == missing_at:
                del self._hints[key]
                hint = None
        recent = self._file(file).recent
        keeper = NOBODY if hint is None else hint.keeper
        recent.append({asker, keeper} - {NOBODY} if together else set())
        if hint is not None and keeper not in (asker, NOBODY):
            if part or not hint.part:
                return hint.answer(asker, now_ns, missing_at >= 0)
            keeper = NOBODY
        if keeper == NOBODY:
            keeper = self._reader(file, asker, with_room, missing_at)
        if keeper == NOBODY:
            if part:
                node = NOBODY if hint is None or missing_at >= 0 else hint.nearest(asker, now_ns)
                if node == NOBODY:
                    return Answer(Word.READ, part=True)
                return Answer(Word.ASK, node, copy=True, part=True)
            if hint is None or hint.keeper != NOBODY:
                hint = self._note(key, NOBODY)
            return hint.answer(asker, now_ns, missing_at >= 0)
        hint = self._note(key, keeper, part)
        if keeper == asker:
            return Answer(Word.KEEP, part=part)
        return hint.answer(asker, now_ns, missing_at >= 0)

    def _reader(self, file: int, asker: int, with_room: Collection[int], missing_at: int) -> int:
        """The node that is to read and keep a block that no node has; NOBODY: none has room."""
        room = set(with_room) - {missing_at}
        recent = self._file(file).recent
        readers = sorted(room.intersection(set[int]().union(*recent)))
        if len(readers) > 1 and 2 * sum(map(bool, recent)) >= len(recent):
            return self._next(file, readers)
        if asker in with_room:
            return asker
        return self._next(file, sorted(room)) if room else NOBODY

    def _next(self, file: int, nodes: list[int]) -> int:
        """The nodes in turn."""
        one = self._file(file)
        one.turn += 1
        return nodes[one.turn % len(nodes)]

    def _file(self, file: int) -> _FileQuestions:
        one = self._files.setdefault(file, _FileQuestions())
        self._files.move_to_end(file)
        if len(self._files) > FILES_MAX:
            self._files.popitem(last=False)
        return one

    def _note(self, key: tuple[int, int], keeper: int, part: bool = False) -> _Hint:
        hint = self._hints[key] = _Hint(keeper, part)
        self._hints.move_to_end(key)
        if len(self._hints) > self._most:
            self._hints.popitem(last=False)
        return hint

    def told(self, file: int, blocks: Sequence[int], keeper: int) -> list[int]:
        """A node says that it keeps these blocks. Those that another one is known to keep already:
        it need not."""
        taken = []
        for block in blocks:
            hint = self._hints.get((file, block))
            if hint is None or hint.keeper == NOBODY:
                self._note((file, block), keeper)
            elif hint.keeper != keeper:
                taken.append(block)
        return taken

    def dropped(self, file: int, blocks: Sequence[int], keeper: int) -> None:
        """A node says that it has these no longer."""
        for block in blocks:
            hint = self._hints.get((file, block))
            if hint is not None and hint.keeper == keeper:
                del self._hints[(file, block)]

    def forget_node(self, node: int) -> None:
        """A node has left, and what it kept is gone."""
        for key in [key for key, hint in self._hints.items() if hint.keeper == node]:
            del self._hints[key]
        for hint in self._hints.values():
            hint.drop(node)
        for one in self._files.values():
            for nodes in one.recent:
                nodes.discard(node)
