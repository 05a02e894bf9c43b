# SPDX-License-Identifier: Apache-2.0
"""A service that plans nothing and commands without end: the agent's worst day.

    python -m hammer SOCKET FILE [SEED [EVERY_US [DETACH_PERCENT]]]

It answers each ATTACH with as many checkpoints as a message holds, at random pages, and from then
on sends commands without end (checkpoints armed again, now and then a whole mapping given back;
none with DETACH_PERCENT 0), so that whatever the job does to a mapping meets checkpoints in every
state. Its checkpoint memfd holds all of the file from the start. It speaks protocol/wire.py and
follows the rule of csrc/job/checkpoint.c: a page is there, whole, before it is announced. Prints
"ready", then at the end of its input what it did, as JSON.
"""

from __future__ import annotations

import array
import json
import os
import random
import select
import socket
import struct
import sys
from dataclasses import dataclass, field

from uffdprefetch.native import uffd
from uffdprefetch.protocol import wire

PAGE = uffd.PAGE_BYTES
KINDS = (wire.Type.REARM, wire.Type.DETACH)
#: One command in so many is of the kind that has come least.
SELDOM = 40


@dataclass
class Region:
    id: int
    laid: list[int]  # page numbers of the file


@dataclass
class Peer:
    sock: socket.socket
    ring: uffd.Ring
    regions: dict[int, Region] = field(default_factory=dict)
    sequence: int = 0
    faults: int = 0


class Hammer:
    """One thread, many agents, no memory of the past but what is laid where."""

    def __init__(self, path: str, file: str, seed: int, every_us: int, detach_percent: int) -> None:
        self._weights = (100 - detach_percent, detach_percent)
        self._random = random.Random(seed)
        self._commands = 0
        self._every = every_us / 1e6
        self._file = os.open(file, os.O_RDONLY)
        size = os.fstat(self._file).st_size
        self._file_pages = size // PAGE  # whole pages only
        self._rw, self._ro = uffd.checkpoint_memfd(size)
        at = 0
        while at < size:
            at += os.pwrite(self._rw, os.pread(self._file, 1 << 20, at), at)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.path.exists(path):  # of one before
            os.unlink(path)
        self._listener.bind(path)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._peers: dict[int, Peer] = {}
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._epoll.register(0, select.EPOLLIN | select.EPOLLHUP)
        self.bypassed: list[int] = []  # how it was seen, of each process
        self.counts = dict.fromkeys(
            ("peers", "attached", "inherited", "faults", "laid", "failed", "rearm", "detach"), 0
        )

    def run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll(self._every if self._peers else 1.0):
                if fd == 0:
                    return
                if fd == self._listener.fileno():
                    self._accept()
                elif fd in self._peers:
                    self._take(fd)
            for peer in self._peers.values():
                self._command(peer)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        self._peers[sock.fileno()] = Peer(sock, uffd.Ring())
        self._epoll.register(sock, select.EPOLLIN)
        self.counts["peers"] += 1

    def _drop(self, fd: int) -> None:
        peer = self._peers.pop(fd)
        self.counts["faults"] += len(peer.ring.drain())
        self._epoll.unregister(fd)
        peer.ring.close()
        peer.sock.close()

    def _take(self, fd: int) -> None:
        peer = self._peers[fd]
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(peer.sock, 512, 4)
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            for number in descriptors:
                os.close(number)
            if not data:
                return self._drop(fd)
            kind, body = wire.unpack(data)
            if kind == wire.Type.HELLO:
                self._send(peer, wire.pack(wire.Type.WELCOME), [peer.ring.fd, self._bell])
                os.close(peer.ring.fd)
            elif kind == wire.Type.ATTACH:
                self._attach(peer, wire.attach(body))
            elif kind == wire.Type.ACK:
                self._acknowledged(peer, wire.ack(body))
            elif kind == wire.Type.BYPASS:
                self.bypassed.append(wire.BYPASS.unpack_from(body)[0])
            elif kind == wire.Type.GONE:
                peer.regions.pop(struct.unpack_from("<I", body)[0], None)
            elif kind == wire.Type.BYE:
                self._send(peer, wire.pack(wire.Type.BYE_OK), [])

    def _attach(self, peer: Peer, a: wire.Attach) -> None:
        first = a.offset_bytes // PAGE
        end = min(first + a.length_bytes // PAGE, self._file_pages)
        inherited = a.flags & wire.ATTACH_INHERITED
        fds = [self._ro, self._file] if inherited else [self._ro]
        span = range(first + 1, end - 1)  # the ends tell what lies there (csrc/common/vma.c)
        pages = [] if inherited else self._random.sample(span, min(wire.PAGES_MAX, len(span)))
        message = wire.file(a.region, wire.ServingMode.CHECKPOINTS, pages)
        self._send(peer, message, fds)
        peer.regions[a.region] = Region(a.region, pages)
        self.counts["inherited" if inherited else "attached"] += 1

    def _acknowledged(self, peer: Peer, ack: wire.Ack) -> None:
        region = peer.regions.get(ack.region)
        if region is not None and not ack.sequence:
            region.laid = region.laid[: ack.done]
            self.counts["laid"] += ack.done
            self.counts["failed"] += ack.error != 0

    def _send(self, peer: Peer, message: bytes, fds: list[int]) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            peer.sock.sendmsg([message], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def _command(self, peer: Peer) -> None:
        self.counts["faults"] += len(peer.ring.drain())
        if not peer.regions:
            return
        region = self._random.choice(list(peer.regions.values()))
        self._commands += 1
        kind = self._random.choices(KINDS, self._weights)[0]
        if (
            self._commands % SELDOM == 0 and self._weights[1]
        ):  # on a busy machine it might never come
            kind = min(KINDS, key=lambda kind: self.counts[kind.name.lower()])
        pages: list[int] = []
        if kind == wire.Type.REARM:
            most = min(len(region.laid), wire.PAGES_MAX)
            pages = self._random.sample(region.laid, self._random.randint(min(1, most), most))
            if not pages:
                return
        peer.sequence += 1
        if not self._send(peer, wire.command(kind, peer.sequence, region.id, pages), []):
            return
        self.counts[kind.name.lower()] += max(1, len(pages))
        if kind == wire.Type.DETACH:
            del peer.regions[region.id]


def main(
    path: str, file: str, seed: str = "1", every_us: str = "200", detach_percent: str = "3"
) -> None:
    hammer = Hammer(path, file, int(seed), int(every_us), int(detach_percent))
    print("ready", flush=True)
    hammer.run()
    print(json.dumps({**hammer.counts, "bypassed": hammer.bypassed}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
