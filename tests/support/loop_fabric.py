# SPDX-License-Identifier: Apache-2.0
"""cluster/fabric.py without MPI: ranks of one process, whose links a test may cut, and whose
messages it may hold back, spoil or make up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from uffdprefetch.cluster.fabric import Buffer, FabricError, Then, ThenFrom

ANY = -1


@dataclass
class Loop:
    """The network that the ranks have in common. ``carries(from, to, tag, bytes)``: what arrives,
    None: nothing does, and its sender's buffer is never given back."""

    size: int
    carries: Callable[[int, int, int, bytes], bytes | None] = lambda source, to, tag, data: data
    sent: dict[tuple[int, int, int], deque[tuple[Buffer, Then | None]]] = field(
        default_factory=dict
    )
    waiting: dict[tuple[int, int, int], deque[tuple[Buffer, ThenFrom]]] = field(
        default_factory=dict
    )
    bytes_: dict[tuple[int, int], int] = field(default_factory=dict)  # by link

    def ranks(self) -> list[LoopFabric]:
        """Each rank's face of it."""
        return [LoopFabric(self, rank) for rank in range(self.size)]

    def match(self, rank: int) -> bool:
        """What a rank waits for, or has sent, goes over."""
        any_ = False
        for key in [key for key in self.sent if rank in key[:2]]:
            source, to, tag = key
            while self.sent[key] and (wanted := self._wanted(key)):
                data, went = self.sent[key].popleft()
                arrived = self.carries(source, to, tag, bytes(data))
                if arrived is None:
                    continue
                into, came = wanted.popleft()
                assert len(arrived) <= len(into), "a message that is longer than its receive"
                memoryview(into)[: len(arrived)] = arrived
                self.bytes_[source, to] = self.bytes_.get((source, to), 0) + len(arrived)
                any_ = True
                if went is not None:
                    went()
                came(source)
        return any_

    def _wanted(self, key: tuple[int, int, int]) -> deque[tuple[Buffer, ThenFrom]] | None:
        return self.waiting.get(key) or self.waiting.get((ANY, *key[1:]))


class LoopFabric:
    """One rank."""

    def __init__(self, loop: Loop, rank: int) -> None:
        self._loop, self.rank, self.size = loop, rank, loop.size
        self.failed = False

    def _check(self) -> None:
        if self.failed:
            raise FabricError("the loop has failed")

    def send(self, peer: int, tag: int, data: Buffer, then: Then | None = None) -> None:
        self._check()
        self._loop.sent.setdefault((self.rank, peer, tag), deque()).append((data, then))

    def receive(self, peer: int, tag: int, into: Buffer, then: Then) -> None:
        self._check()
        self._loop.waiting.setdefault((peer, self.rank, tag), deque()).append(
            (into, lambda _: then())
        )

    def receive_any(self, tag: int, into: Buffer, then: ThenFrom) -> None:
        self._check()
        self._loop.waiting.setdefault((ANY, self.rank, tag), deque()).append((into, then))

    def poll(self) -> bool:
        self._check()
        return self._loop.match(self.rank)
