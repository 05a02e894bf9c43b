# SPDX-License-Identifier: Apache-2.0
"""How long a process has waited for block I/O, by the kernel's delay accounting.

Two doors to the same counter: taskstats (pyroute2; nanoseconds, all threads and those that have
ended; CAP_NET_ADMIN), and field 42 of /proc/PID/task/TID/stat (10 ms, living threads, no
privilege). Both stay at zero unless kernel.task_delayacct was 1 when the process began: then this
says why, never 0. What the kernel accounts is the wait for a page that is being read; a FUSE file
system's single synchronous reads are not in it (measured on Linux 6.18: 19 s of them, delay 0).

Used by who watches, never by the service: importing pyroute2 takes 0.12 s.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SYSCTL = Path("/proc/sys/kernel/task_delayacct")
LIFT = "set it to 1 by sysctl before the job"
TASKSTATS = "taskstats blkio_delay_total"
STAT = "/proc/PID/task/TID/stat delayacct_blkio_ticks (10 ms)"
#: include/uapi/linux/taskstats.h; pyroute2's TaskStats asks for a thread, we for a process.
_TGID = "TASKSTATS_CMD_ATTR_TGID"


@dataclass(frozen=True)
class Delay:
    """Time waited since a process began. ``count`` of waits: None where only the time is told."""

    total_ns: int
    count: int | None


def parse_stat(stat: str) -> int:
    """Field 42, delayacct_blkio_ticks, of a /proc/.../stat text, in clock ticks."""
    return int(stat.rpartition(")")[2].split()[39])


def parse_reply(message: Any) -> Delay:
    """The delay in a reply to a TGID request (pyroute2's taskstatsmsg); ValueError for another."""
    group = message.get_attr("TASKSTATS_TYPE_AGGR_TGID")
    stats: Mapping[str, Any] | None = group and group.get_attr("TASKSTATS_TYPE_STATS")
    if not stats:
        raise ValueError("a reply without TASKSTATS_TYPE_STATS")
    return Delay(int(stats["blkio_delay_total"]), int(stats["blkio_count"]))


def accounting(sysctl: Path = SYSCTL) -> str | None:
    """None when the kernel accounts delays now, else why it does not and what lifts that."""
    try:
        on = sysctl.read_text().strip()
    except FileNotFoundError:
        return "this kernel has no kernel.task_delayacct"
    except OSError as error:
        return f"{sysctl}: {error.strerror}"
    return None if on == "1" else f"kernel.task_delayacct is {on}: {LIFT}"


class BlockDelays:
    """Reads delays by the best door that is open. Never raises."""

    def __init__(self, sysctl: Path = SYSCTL) -> None:
        self._sysctl = sysctl
        self._socket: Any = None
        self._tried = False
        self._before: set[int] = set()  # processes that were there while nothing was accounted
        self.sensor = STAT
        self.why_not_taskstats: str | None = None

    def read(self, pids: list[int]) -> tuple[dict[int, Delay], str | None]:
        """The delays of the processes that are there, and why one or all are missing (or None)."""
        why = accounting(self._sysctl)
        if why is not None:
            self._before = set(pids)
            return {}, why
        if not self._tried:
            self._open()
        found = {}
        for pid in pids:
            if pid in self._before:
                why = "it began before kernel.task_delayacct was 1"
                continue
            delay = self._ask(pid) if self._socket is not None else None
            delay = delay or _by_stat(pid)
            if delay is not None:
                found[pid] = delay
        return found, None if found else why

    def _open(self) -> None:
        self._tried = True
        try:
            from pyroute2 import TaskStats

            self._socket = TaskStats()
            self._socket.bind()
            self._socket.get_pid_stat(os.getpid())
            self.sensor = TASKSTATS
        except Exception as error:  # its own classes, OSError, ImportError: the other door is open
            self.why_not_taskstats = f"taskstats: {_words(error)}"
            self.close()

    def _ask(self, pid: int) -> Delay | None:
        from pyroute2.netlink import NLM_F_REQUEST
        from pyroute2.netlink.taskstats import TASKSTATS_CMD_GET, tcmd

        message = tcmd()
        message["cmd"], message["version"] = TASKSTATS_CMD_GET, 1
        message["attrs"].append([_TGID, pid])
        try:
            reply = self._socket.nlm_request(
                message, self._socket.asyncore.prid, msg_flags=NLM_F_REQUEST
            )
            return parse_reply(next(iter(reply)))
        except Exception:  # ended, or a reply that this pyroute2 does not read
            return None

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            with contextlib.suppress(Exception):
                self._socket.close()
            self._socket = None


def _words(error: Exception) -> str:
    code = getattr(error, "code", None) or getattr(error, "errno", None)
    if isinstance(code, int):
        needs = " (needs CAP_NET_ADMIN)" if code == 1 else ""
        return f"{os.strerror(code)}{needs}"
    return f"{type(error).__name__}: {error}"


def _by_stat(pid: int) -> Delay | None:
    ticks, seen = 0, False
    try:
        for tid in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                ticks += parse_stat(Path(f"/proc/{pid}/task/{tid}/stat").read_text())
                seen = True
    except OSError:
        return None
    return Delay(ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK"), None) if seen else None
