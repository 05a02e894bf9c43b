# SPDX-License-Identifier: Apache-2.0
"""Process births on this node, as the kernel tells them (cn_proc: fork and exec events).

pyroute2 makes and reads the messages; the socket is our own, so that nothing here ever waits.
Without privilege since Linux 6.6 (before: CAP_NET_ADMIN), and only in the first network namespace.
What comes faster than it is read is lost and counted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

#: linux/netlink.h, linux/connector.h, linux/cn_proc.h
NETLINK_CONNECTOR = 11
CN_IDX_PROC = 1
FORK, EXEC = 1, 2
#: Header of netlink (16) and connector (20), then proc_event.what; an acknowledgement's error.
_WHAT = struct.Struct("=36xI")
_ERROR = struct.Struct("=52xI")
EVENTS_AT_ONCE = 64
ACK_SECONDS = 0.2


@dataclass(frozen=True)
class Birth:
    """A new process and its ``parent``; with ``parent`` 0 an old one that runs a new program."""

    pid: int
    parent: int


def parse(data: bytes, marshal: Any) -> Birth | None:
    """A datagram of cn_proc; None for what is neither fork of a process nor exec.

    ``marshal`` is pyroute2's ProcEventMarshal. Raises nothing: what cannot be read is None.
    """
    try:
        if _WHAT.unpack_from(data)[0] not in (FORK, EXEC):
            return None
        event = next(iter(marshal.parse(data)))
        if event["what"] == EXEC:
            return Birth(event["process_tgid"], 0)
        if event["child_pid"] != event["child_tgid"]:
            return None  # a thread
        return Birth(event["child_tgid"], event["parent_tgid"])
    except (struct.error, KeyError, StopIteration, TypeError):
        return None


class ProcessEvents:
    """Listens from :meth:`open` on; ``why`` says why not, when it does not."""

    def __init__(self) -> None:
        self.why: str | None = "a single look hears none"
        self.lost = 0
        self._socket: socket.socket | None = None
        self._marshal: Any = None

    def open(self) -> None:
        """Begin to listen, if that is permitted. Never raises; waits ACK_SECONDS at most."""
        try:
            from pyroute2.netlink.connector.cn_proc import ProcEventMarshal

            self._marshal = ProcEventMarshal()
            flags = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            self._socket = socket.socket(socket.AF_NETLINK, flags, NETLINK_CONNECTOR)
            self._socket.bind((0, CN_IDX_PROC))
            self._socket.send(_control(listen=True))
            self.why = self._acknowledged()
        except ImportError as error:
            self.why = f"cn_proc: {error}"
        except OSError as error:
            self.why = f"cn_proc: {_words(error.errno or 0)}"
        if self.why is not None:
            self.close()

    def _acknowledged(self) -> str | None:
        """Wait for the answer to our wish; other listeners' events may come before it."""
        deadline = time.monotonic() + ACK_SECONDS
        while time.monotonic() < deadline:
            try:
                assert self._socket is not None
                data = self._socket.recv(4096)
                if _WHAT.unpack_from(data)[0] == 0:
                    error = _ERROR.unpack_from(data)[0]
                    return f"cn_proc: {_words(error)}" if error else None
            except BlockingIOError:
                time.sleep(0.005)
            except struct.error:
                continue
        return "cn_proc: no acknowledgement (needs CAP_NET_ADMIN before Linux 6.6)"

    def fileno(self) -> int:
        """For select(); -1 when it does not listen."""
        return -1 if self._socket is None else self._socket.fileno()

    def read(self) -> list[Birth]:
        """The births since the last call, from at most EVENTS_AT_ONCE datagrams."""
        found = []
        for _ in range(EVENTS_AT_ONCE if self._socket is not None else 0):
            try:
                assert self._socket is not None
                birth = parse(self._socket.recv(4096), self._marshal)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    self.why = f"cn_proc: {_words(error.errno or 0)}"
                    self.close()
                    break
                self.lost += 1
                continue
            if birth is not None:
                found.append(birth)
        return found

    def close(self) -> None:
        """Stop listening; the kernel is told, since it counts its listeners."""
        if self._socket is not None:
            with contextlib.suppress(OSError, ImportError):
                self._socket.send(_control(listen=False))
            self._socket.close()
            self._socket = None


def _control(listen: bool) -> bytes:
    from pyroute2.netlink import NLMSG_DONE
    from pyroute2.netlink.connector.cn_proc import (
        CN_VAL_PROC,
        PROC_CN_MCAST_IGNORE,
        PROC_CN_MCAST_LISTEN,
        proc_event_control,
    )

    message = proc_event_control()
    message["idx"], message["val"], message["len"] = CN_IDX_PROC, CN_VAL_PROC, 4
    message["action"] = PROC_CN_MCAST_LISTEN if listen else PROC_CN_MCAST_IGNORE
    message["header"]["type"] = NLMSG_DONE
    message["header"]["pid"] = os.getpid()
    message.encode()
    return bytes(message.data)


def _words(code: int) -> str:
    if code == errno.ECONNREFUSED:
        return "not in this network namespace (a container's)"
    needs = " (needs CAP_NET_ADMIN before Linux 6.6)" if code == errno.EPERM else ""
    return f"{os.strerror(code)}{needs}"
