# SPDX-License-Identifier: Apache-2.0
"""Publishes the service's events to recorders: touches, page-table scans, warmed extents, windows.

A recorder (trace/record/recorder.py) connects like any peer and receives batches, without blocking:
one that is slow or stopped loses events, which are counted. Without a recorder nothing is gathered.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

from uffdprefetch.protocol import wire
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState
from uffdprefetch.state.processes import Watched
from uffdprefetch.state.reader import Region

#: trace/file/events.py, EVENT; the numbers of its kinds that are ours.
_EVENT = struct.Struct("<QQQQIIHHI")
TOUCH, SEEN, WARM, WINDOW, MAJORS, PUNCH, NODES, DISK = 20, 21, 22, 23, 24, 25, 26, 27
#: Flags in `aux` of a TOUCH that the pool answered.
POOL_TOUCH, POOL_MISS, POOL_BACKWARD = 1, 2, 4
#: The same of a DISK.
DISK_FULL, DISK_OFF = 1, 2
#: Small enough that several batches fit into a socket's default send buffer.
BATCH_BYTES = 1024 * _EVENT.size
RECORDERS_MAX = 4
TABLE_ENTRIES = 128


class EventPublisher:
    """Gathers events while a recorder is connected, and sends them once a turn of the loop."""

    def __init__(self) -> None:
        self._recorders: dict[int, socket.socket] = {}
        #: Whether one is connected: else nobody need tell us anything.
        self.active = False
        self._batch = bytearray()
        self._files: dict[int, dict[str, Any]] = {}
        self._numbers: dict[tuple[int, ...], int] = {}
        self._processes: dict[int, dict[str, Any]] = {}
        self._launchers: list[int] = []
        self._tables_changed = False
        self.lost = 0

    # -------------------------------------------------------------- recorders

    def join(self, sock: socket.socket) -> bool:
        """Add a recorder; False when there are too many."""
        if len(self._recorders) >= RECORDERS_MAX:
            return False
        self._recorders[sock.fileno()] = sock
        self.active = True
        self._tables_changed = True
        return True

    def leave(self, fd: int) -> socket.socket | None:
        """Remove a recorder and return its socket, to be closed."""
        gone = self._recorders.pop(fd, None)
        self.active = bool(self._recorders)
        return gone

    def socket_of(self, fd: int) -> socket.socket | None:
        """The recorder with this descriptor."""
        return self._recorders.get(fd)

    # -------------------------------------------------------------- who and what

    def process(self, client: Client) -> None:
        """A process of the job; later recorders get it too."""
        self._processes[client.pid] = {
            "pid": client.pid,
            "parent": client.hello.ppid,
            "rank": client.rank,
            "local_rank": client.hello.local_rank,
            "command": client.hello.command,
        }
        while len(self._processes) > 4096:
            del self._processes[next(iter(self._processes))]
        self._tables_changed = True

    def launcher(self, pid: int) -> None:
        """A launcher has connected: its children belong to the job."""
        self._launchers = [*self._launchers[-255:], pid]
        self._tables_changed = True

    def _file(self, file: FileState) -> int:
        number = self._numbers.get(file.key)
        if number is None:
            if len(self._numbers) >= 4096:
                return 0
            number = self._numbers[file.key] = len(self._numbers) + 1
            self._files[number] = {
                "id": number,
                "path": file.path,
                "size_bytes": file.size_bytes,
                "st_dev": file.key[0],
                "inode": file.key[1],
            }
            self._tables_changed = True
        return number

    def region(self, client: Client, region: Region) -> None:
        """A mapping is served: names its file, for the recorder's kernel tracer."""
        self._file(region.file)
        self.process(client)

    # -------------------------------------------------------------- events

    def put(self, kind: int, time_ns: int, pid: int, file: FileState | None, offset: int,
            length: int, value: int, aux: int = 0, tid: int = 0) -> None:  # fmt: skip
        """Publish one event, if a recorder is connected."""
        if not self._recorders:
            return
        number = self._file(file) if file is not None else 0
        if len(self._batch) >= BATCH_BYTES:
            self._send_batch()
        self._batch += _EVENT.pack(
            time_ns, offset, length, value, pid, tid, kind, number, min(aux, 0xFFFFFFFF)
        )

    def sample(self, watched: Watched, now: int) -> None:
        """Read the counters of a process; recorders hear of its major faults."""
        before = watched.now.major_faults
        watched.sample()
        more = watched.now.major_faults - before
        if more > 0:
            self.put(MAJORS, now, watched.pid, None, 0, 0, more)

    # -------------------------------------------------------------- sending

    def flush(self) -> None:
        """Send the events gathered since the last turn."""
        if not self._recorders:
            return
        if self._tables_changed:
            self._tables_changed = not self._send_tables()
        if self._batch:
            self._send_batch()

    def finished(self) -> None:
        """The job has ended: recorders finish their files."""
        self.flush()
        self._broadcast(wire.Type.FINISH, {"lost": self.lost})

    def _send_tables(self) -> bool:
        whole = self._broadcast(
            wire.Type.TABLES, {"launchers": self._launchers, "service": os.getpid()}
        )
        for name, table in (("files", self._files), ("processes", self._processes)):
            entries = list(table.values())
            for i in range(0, len(entries), TABLE_ENTRIES):
                whole &= self._broadcast(wire.Type.TABLES, {name: entries[i : i + TABLE_ENTRIES]})
        return whole

    def _broadcast(self, kind: wire.Type, body: dict[str, Any]) -> bool:
        return self._send(wire.stream(kind, json.dumps(body).encode()))

    def _send_batch(self) -> None:
        if not self._send(wire.stream(wire.Type.EVENTS, bytes(self._batch))):
            self.lost += len(self._batch) // _EVENT.size
        self._batch.clear()

    def _send(self, message: bytes) -> bool:
        sent = True
        for sock in self._recorders.values():
            try:
                sock.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:  # slow, or disconnected: see epoll
                sent = False
        return sent
