# SPDX-License-Identifier: Apache-2.0
"""Announcements from the job: files in a directory beside the service's socket.

An announcement is ``PID-N.json`` and the arrays that it names, ``PID-N.NAME``; the JSON is renamed
into place last, and a short connection notifies the service. Progress is a counter in a file. No
call blocks on the service beyond _PATIENCE, keeps a descriptor open (the job may close or reuse any
number) or touches a mapped record file; on any error nothing is announced.

``uffdprefetch/orders/announcement.py`` parses it and describes the format.
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

from . import messages

SCHEMA = "uffdprefetch.announce/1"
SUFFIX = messages.PLAN_SUFFIX
SOCKET_VARIABLE = "UFFDPREFETCH_SOCKET"
#: Progress counters in one process's file, 8 bytes each; slot 0 is unused.
SLOTS = 512
#: Flag in a counter: the order has ended.
ENDED = 1 << 63

_PATIENCE = struct.pack("ll", 0, 200_000)  # SO_SNDTIMEO, a struct timeval: 0.2 s

_counter = struct.Struct("<Q")
_lock = threading.Lock()


def _in_the_child() -> None:
    """Another thread of the parent may hold the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_in_the_child)


class _ProcessFiles:
    """A process's files in the directory. A forked child gets its own."""

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


_process: _ProcessFiles | None = None


def socket_path(environ: Mapping[str, str] = os.environ) -> str | None:
    """Where this node's service listens; None: there is none. %h stands for the node's name, as in
    csrc/job/preload.c."""
    path = environ.get(SOCKET_VARIABLE)
    return path.replace("%h", os.uname().nodename) if path else None


def _here(environ: Mapping[str, str]) -> _ProcessFiles:
    """This process's files. Raises OSError when there is no directory of ours."""
    global _process
    path = socket_path(environ)
    if path is None:
        raise OSError("not under uffdprefetch")
    directory = path + SUFFIX
    if _process is None or _process.pid != os.getpid() or _process.directory != directory:
        status = os.lstat(directory)
        if status.st_uid != os.geteuid() or status.st_mode & 0o777 != 0o700:
            raise OSError(f"{directory} is not ours")
        _process = _ProcessFiles(directory)
    return _process


def available(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a service accepts announcements."""
    path = socket_path(environ)
    return path is not None and os.path.isdir(path + SUFFIX)


def expect(environ: Mapping[str, str] = os.environ) -> None:
    """Have the service start its indexer: announcements will follow. Raises OSError."""
    path = socket_path(environ)
    if path is None:
        raise OSError("not under uffdprefetch")
    _notify_service(path, os.getpid(), 0)


class ProgressSlot:
    """How far the job has read an announced order: its counter in the process's progress file."""

    def __init__(self, process: _ProcessFiles, slot: int, items: int) -> None:
        self._process, self._slot, self.items = process, slot, items
        self._done_items = 0

    def said(self, items: int) -> None:
        """The first ``items`` of the order have been read."""
        self._done_items = max(self._done_items, min(items, self.items))
        self._store(self._done_items)

    def end(self) -> None:
        """End the order, however far it has been read."""
        self._store(self._done_items | ENDED)

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
) -> ProgressSlot:
    """Announce what will be read next. ``reader``: a short name; a new order replaces the same
    reader's last one. ``items``: the order's length. ``parts``: the JSON's entry for each file
    (orders/announcement.py); ``arrays``: name -> bytes, named by the parts.

    Progress is reported by ProgressSlot.said(). Raises OSError without a service, or
    without room for the files or the counter.
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
        _notify_service(process.directory[: -len(SUFFIX)], process.pid, number)
    except BaseException:
        for path in made:
            try:
                os.unlink(path)
            except OSError:
                pass
        raise
    return ProgressSlot(process, slot, items)


def _write(path: str, data: Any) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(data).cast("B")
        while len(rest):
            rest = rest[os.write(fd, rest) :]
    finally:
        os.close(fd)


def _notify_service(path: str, pid: int, number: int) -> None:
    """One connection, two messages: HELLO and PLAN. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        # bounded: many ranks begin an epoch at once, and the service may be stopped
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _PATIENCE)
        connection.connect(path)
        hello = messages.HELLO_BODY.pack(messages.PLANNER, pid, os.getppid(), 0, 0, 0, 0)
        for kind, body in (
            (messages.HELLO, hello),
            (messages.PLAN, messages.PLAN_BODY.pack(0, pid, number)),
        ):
            connection.send(messages.pack(kind, body), socket.MSG_NOSIGNAL)


def packed(strings: Iterable[bytes]) -> bytes:
    """Keys as one array of an announcement: their count (int64), the end of each (int64), and all
    their bytes."""
    strings = list(strings)
    ends, at = [], 0
    for string in strings:
        at += len(string)
        ends.append(at)
    return struct.pack(f"<{len(ends) + 1}q", len(ends), *ends) + b"".join(strings)
