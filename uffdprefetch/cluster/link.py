# SPDX-License-Identifier: Apache-2.0
"""A service's side of its transports: one at a time, each of a generation of its own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uffdprefetch.cluster.homes import BLOCK_BYTES, keep_bytes
from uffdprefetch.native.net import (
    AHEAD_NOW,
    FileId,
    Layout,
    Net,
    NetRing,
    NodeCounts,
    Stamp,
    TransportCounts,
)
from uffdprefetch.native.pool import Pool
from uffdprefetch.protocol import wire

#: Slots for requests to other nodes, and for answers to theirs. Their memory is taken on first use.
#: A request is at most 1 MiB: at 20 MB/s a demand waits 50 ms for one that has begun.
LAYOUT = Layout(slot_bytes=1 << 20, ask_slots=32, serve_slots=32)
_TOTALS = ("from_bytes", "to_bytes", "late", "corrupt")
#: Time without a network after which the pool keeps nothing for other nodes: a network returns
#: earlier, but for the convener's last pauses (PAUSE_SECONDS, TRIES of lead.py).
GONE_SECONDS = 60.0
#: Threads that answer other nodes, of which two read (csrc/service/net/serve.c).
SERVE_THREADS = 4


@dataclass(frozen=True)
class Joined:
    """A transport that has been let in: whom it belongs to, and what it counts. ``ours``: what is
    closed when it has gone."""

    sock: socket.socket
    pid: int
    generation: int
    net: Net
    ours: contextlib.ExitStack

    def close(self) -> None:
        """It has gone: nobody waits for it any more."""
        self.ours.close()
        self.sock.close()

    def cpu_seconds(self) -> float | None:
        """CPU time that it has used; None: not known, it may have gone."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{self.pid}/stat").read_text()
            fields = text.rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return None


class NetworkTotals:
    """What all transports of a run have counted, one after the other."""

    def __init__(self, node: int) -> None:
        """``node``: this one's number."""
        self._node = node
        self.generations = 0
        self._before: list[TransportCounts] = []  # of transports that have gone
        self._links_before: dict[int, NodeCounts] = {}  # and what went to and from each node
        self._cpu_before = self._cpu_seconds = 0.0

    def begin(self) -> None:
        """One has come."""
        self.generations += 1

    def end(self, joined: Joined, present: Iterable[int]) -> None:
        """It has gone, or is to go. ``present``: the run's nodes."""
        self._before.append(joined.net.counts())
        self._links_before = self.links(joined, present)
        self._cpu_before += self._cpu_seconds
        self._cpu_seconds = 0.0

    def counts(self, joined: Joined | None) -> dict[str, int]:
        """Totals of all generations; of what is at a time, the present one's."""
        now = [joined.net.counts()] if joined is not None else []
        totals: dict[str, Any] = {}
        for one in [*self._before, *now]:
            for name, value in vars(one).items():
                totals[name] = totals.get(name, 0) + value
        for name in ("lost_slots", "failed"):
            totals[name] = getattr(now[0], name) if now else 0
        return totals

    def links(self, joined: Joined | None, present: Iterable[int]) -> dict[int, NodeCounts]:
        """Traffic with each node that is known: totals of all generations, and present values."""
        found = dict(self._links_before)
        if joined is None:
            return found
        for number in present:
            now = joined.net.node(number)
            before = found.get(number)
            if before is not None:
                totals = {name: getattr(before, name) + getattr(now, name) for name in _TOTALS}
                now = now._replace(**totals)
            if number != self._node:
                found[number] = now
        return found

    def sample_cpu(self, joined: Joined) -> None:
        """Note what the present transport has used: nobody tells when it has gone."""
        used = joined.cpu_seconds()
        if used is not None:
            self._cpu_seconds = used

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all transports, as last seen."""
        return self._cpu_before + self._cpu_seconds


class PoolNetwork:
    """A pool's side of the network. The service's thread calls all of it."""

    def __init__(
        self, pool: Pool, node: int, key: bytes, *, chunk_bytes: int,
        block_bytes: int = BLOCK_BYTES, layout: Layout = LAYOUT, serve_cpu: float = 0,
    ) -> None:  # fmt: skip
        """``node``: this one's number; ``key``: of the next
        transport's generation; ``serve_cpu``: see native.net.Net."""
        self._pool, self._node, self.key = pool, node, key
        self.chunk_bytes, self._serve_cpu = chunk_bytes, serve_cpu
        #: A slot holds a chunk at the least: with huge pages one of 2 MiB.
        self.layout = layout._replace(slot_bytes=max(layout.slot_bytes, chunk_bytes))
        self._chunks = max(1, block_bytes // chunk_bytes)
        self._shared: dict[int, tuple[FileId, Stamp]] = {}
        self.joined: Joined | None = None
        self._left: float | None = None  # when the last one went
        self.totals = NetworkTotals(node)
        self.present: list[int] = []  # the run's nodes

    def join(self, sock: socket.socket, pid: int, generation: int) -> None:
        """A transport has come: it gets what it needs, and takes the last one's place. Raises
        OSError."""
        self.leave()
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as handed_on:
            fds = tuple(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2))
            for fd in fds:
                undo.callback(os.close, fd)
            ring = NetRing.create(self.layout)
            handed_on.callback(os.close, ring.fd)
            with contextlib.ExitStack() as without_net:
                without_net.callback(ring.close)
                net = Net(
                    self._pool, ring, self._node, *fds, chunks_per_block=self._chunks,
                    serve_threads=SERVE_THREADS, serve_cpu=self._serve_cpu,
                )  # fmt: skip
                without_net.pop_all()  # the ring is the net's
            undo.callback(net.close)
            for file, (identity, stamp) in self._shared.items():
                net.share(file, identity, stamp)
            info = os.memfd_create("uffdprefetch-transport", os.MFD_CLOEXEC)
            handed_on.callback(os.close, info)
            said = {"node": self._node, "key": self.key.hex(), "spins": _has_a_core_free()}
            os.write(info, json.dumps(said).encode())
            message = wire.pack(wire.Type.WELCOME, wire.WELCOME.pack(0))
            socket.send_fds(sock, [message], [ring.fd, *fds, info])
            self.joined = Joined(sock, pid, generation, net, undo.pop_all())
        self.totals.begin()

    def leave(self) -> None:
        """The transport has gone, or is to go: nobody waits for it any more."""
        if self.joined is None:
            return
        self.totals.end(self.joined, self.present)
        self.joined.close()
        self.joined, self._left = None, time.monotonic()

    def share(self, file: int, identity: FileId, stamp: Stamp) -> None:
        """See native.net.Net.share(). Raises OSError."""
        self._shared[file] = identity, stamp
        if self.joined is not None:
            self.joined.net.share(file, identity, stamp)

    def pending(self, file: int, patience_ms: int) -> None:
        """See native.net.Net.pending()."""
        if self.joined is not None:
            self.joined.net.pending(file, patience_ms)

    def ahead(self, file: int, first: int, count: int, expected: int) -> int:
        """See native.net.Net.ahead()."""
        if self.joined is None:
            return AHEAD_NOW
        return self.joined.net.ahead(file, first, count, expected)

    def reads_alike(self, file: int) -> bool:
        """See native.net.Net.reads_alike()."""
        return self.joined is not None and self.joined.net.reads_alike(file)

    def unshare(self, file: int) -> None:
        """Stop sharing a file that has changed, or that nobody has open."""
        if self._shared.pop(file, None) is not None and self.joined is not None:
            self.joined.net.unshare(file)

    @property
    def is_failed(self) -> bool:
        """Whether another transport is needed."""
        return self.joined is not None and bool(self.joined.net.counts().failed)

    def keep_bytes(self, budget_bytes: int) -> int:
        """Most bytes that a pool of this size keeps for other nodes: none when there has been no
        transport for GONE_SECONDS."""
        if self.joined is None and self._left and time.monotonic() - self._left > GONE_SECONDS:
            return 0
        return keep_bytes(budget_bytes)

    def counts(self) -> dict[str, int]:
        """See NetworkTotals."""
        return self.totals.counts(self.joined)

    def links(self) -> dict[int, NodeCounts]:
        """See NetworkTotals."""
        return self.totals.links(self.joined, self.present)

    def rates(self) -> tuple[int | None, int | None]:
        """See native.net.Net.rates()."""
        return self.joined.net.rates() if self.joined is not None else (None, None)

    def keepers(self, file: int, cells: int) -> list[int | None]:
        """See native.net.Net.map()."""
        return self.joined.net.map(file, cells) if self.joined is not None else [None] * cells

    def sample_cpu(self) -> None:
        """See NetworkTotals."""
        if self.joined is not None:
            self.totals.sample_cpu(self.joined)


def _has_a_core_free() -> bool:
    """Whether a transport may spin: where there are more CPUs than two, one for a rank and one for
    the service."""
    return len(os.sched_getaffinity(0)) > 2
