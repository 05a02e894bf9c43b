# SPDX-License-Identifier: Apache-2.0
"""How code in the job says what it will read: files in a directory beside the service's socket.

An announcement is ``PID-N.json`` and the arrays that it names, ``PID-N.NAME``; the JSON comes last,
as a whole, and a short connection tells the service to look. Progress is a number in a file.
Nothing here waits long for the service, keeps a descriptor open (the job may close or reuse any
number) or touches a mapped record file; whatever goes wrong, nothing is announced.

``uffdprefetch/orders/announcement.py`` reads it and describes the format.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import struct
import threading
from collections.abc import Iterable, Mapping
from typing import Any

SCHEMA = "uffdprefetch.announce/1"
SUFFIX = ".plan"
SOCKET_VARIABLE = "UFFDPREFETCH_SOCKET"
#: Progress counters of one process, 8 bytes each; slot 0 is not used.
SLOTS = 512
#: In a counter: the order has ended, nothing of it is read any more.
ENDED = 1 << 63

# csrc/common/wire.h
_HEADER = struct.Struct("<IHH")
_MAGIC, _VERSION, _MESSAGE_BYTES = 0x50444655, 4, 256
_HELLO, _PLAN, _PLANNER = 1, 20, 5
_HELLO_BODY = struct.Struct("<Iii")
_PLAN_BODY = struct.Struct("<IiI")
_PATIENCE = struct.pack("ll", 0, 200_000)  # a struct timeval: 0.2 s

_counter = struct.Struct("<Q")
_lock = threading.Lock()


def _in_the_child() -> None:
    """Another thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_in_the_child)


class _Process:
    """What this process has in the directory. A forked child gets one of its own."""

    def __init__(self, directory: str) -> None:
        self.pid = os.getpid()
        self.directory = directory
        self.numbers = itertools.count(1)
        self.slots: dict[str, int] = {}  # by reader
        self.progress = os.path.join(directory, f"{self.pid}.progress")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(self.progress, flags, 0o600))

    def store(self, slot: int, value: int) -> None:
        """Write a counter. Raises OSError."""
        fd = os.open(self.progress, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.pwrite(fd, _counter.pack(value), 8 * slot)
        finally:
            os.close(fd)

    def slot(self, reader: str) -> int:
        if reader not in self.slots:
            if len(self.slots) + 1 >= SLOTS:
                raise OSError("too many readers in one process")
            self.slots[reader] = len(self.slots) + 1
        return self.slots[reader]


_process: _Process | None = None


def _here(environ: Mapping[str, str]) -> _Process:
    """This process's place in the directory. Raises OSError when there is none."""
    global _process
    path = environ.get(SOCKET_VARIABLE)
    if not path:
        raise OSError("not under uffdprefetch")
    directory = path + SUFFIX
    if _process is None or _process.pid != os.getpid() or _process.directory != directory:
        status = os.lstat(directory)
        if status.st_uid != os.geteuid() or status.st_mode & 0o777 != 0o700:
            raise OSError(f"{directory} is not ours")
        _process = _Process(directory)
    return _process


def available(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a service listens to announcements."""
    path = environ.get(SOCKET_VARIABLE)
    return path is not None and os.path.isdir(path + SUFFIX)


def expect(environ: Mapping[str, str] = os.environ) -> None:
    """Say that there will be announcements, so that the service makes ready. Raises OSError."""
    _tell(environ[SOCKET_VARIABLE], os.getpid(), 0)


class Announcement:
    """An order that has been announced."""

    def __init__(self, process: _Process, slot: int, items: int) -> None:
        self._process, self._slot, self.items = process, slot, items
        self._said = 0

    def said(self, items: int) -> None:
        """So many items of the order have been read."""
        self._said = max(self._said, min(items, self.items))
        self._store(self._said)

    def end(self) -> None:
        """Nothing of it is read any more, however far it has come."""
        self._store(self._said | ENDED)

    def _store(self, value: int) -> None:
        if self._process.pid != os.getpid():
            return  # a forked child's copy
        try:
            self._process.store(self._slot, value)
        except OSError:
            pass  # the service has gone


def announce(
    reader: str,
    items: int,
    parts: list[dict[str, Any]],
    arrays: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
) -> Announcement:
    """Say what will be read next. ``reader``: a short name; a new order of the same one takes the
    place of the last. ``items``: how many there are. ``parts``: what the JSON says of each file
    (orders/announcement.py); ``arrays``: name -> bytes, that parts name.

    Returns an Announcement, whose said() tells progress. Raises OSError when there is no service,
    or no room.
    """
    with _lock:
        process = _here(environ)
        number = next(process.numbers)
        slot = process.slot(reader)
    stem = os.path.join(process.directory, f"{process.pid}-{number}")
    body = {
        "schema": SCHEMA,
        "pid": process.pid,
        "number": number,
        "reader": reader,
        "slot": slot,
        "items": items,
        "parts": parts,
    }
    made = []
    try:
        for name, data in arrays.items():
            made.append(f"{stem}.{name}")
            _write(made[-1], data)
        process.store(slot, 0)
        made.append(stem + ".tmp")
        _write(made[-1], json.dumps(body).encode())
        os.rename(stem + ".tmp", stem + ".json")
        made.append(stem + ".json")
        _tell(environ[SOCKET_VARIABLE], process.pid, number)
    except BaseException:
        for path in made:
            try:
                os.unlink(path)
            except OSError:
                pass
        raise
    return Announcement(process, slot, items)


def _write(path: str, data: Any) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        left = memoryview(data).cast("B")
        while len(left):
            left = left[os.write(fd, left) :]
    finally:
        os.close(fd)


def _tell(path: str, pid: int, number: int) -> None:
    """One connection, two messages: who we are, what is there. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        # many ranks begin an epoch at once; but who does not listen is not waited for
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _PATIENCE)
        connection.connect(path)
        for kind, payload in (
            (_HELLO, _HELLO_BODY.pack(_PLANNER, pid, os.getppid())),
            (_PLAN, _PLAN_BODY.pack(0, pid, number)),
        ):
            message = _HEADER.pack(_MAGIC, _VERSION, kind) + payload
            connection.send(message.ljust(_MESSAGE_BYTES, b"\0"), socket.MSG_NOSIGNAL)


def packed(strings: Iterable[bytes]) -> bytes:
    """Keys (bytes) as one array of an announcement: how many (int64), where each ends (int64), and
    all their bytes."""
    strings = list(strings)
    ends, at = [], 0
    for string in strings:
        at += len(string)
        ends.append(at)
    return struct.pack(f"<{len(ends) + 1}q", len(ends), *ends) + b"".join(strings)
