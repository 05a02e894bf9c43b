# SPDX-License-Identifier: Apache-2.0
"""The kernel's counters of a process of the job: major faults, bytes read.

Unprivileged, of the same user. Read once a second and once more before the process ends (UP_BYE);
the last second of a killed process is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from uffdprefetch.base.record import dataclass

#: Generations of ancestors that are followed.
ANCESTORS_MAX = 32


@dataclass
class Counters:
    """Totals of one process since its hello."""

    major_faults: int = 0
    read_call_bytes: int | None = 0  # /proc/PID/io rchar: all read(2) and the like
    storage_bytes: int | None = 0  # /proc/PID/io read_bytes

    def plus(self, other: Counters) -> Counters:
        """The sum; unknown where either is."""
        return Counters(
            self.major_faults + other.major_faults,
            _sum(self.read_call_bytes, other.read_call_bytes),
            _sum(self.storage_bytes, other.storage_bytes),
        )


def parse_major_faults(stat: str) -> int:
    """Field 12 of /proc/PID/stat (the command in brackets may contain anything)."""
    return int(stat.rpartition(")")[2].split()[9])


def parse_io(io: str) -> tuple[int, int]:
    """(rchar, read_bytes) of /proc/PID/io."""
    fields = dict(line.split(": ") for line in io.splitlines() if ": " in line)
    return int(fields["rchar"]), int(fields["read_bytes"])


def major_faults(pid: int | str) -> int | None:
    """Of all of a process's threads; None when it has ended."""
    try:
        return parse_major_faults((Path("/proc") / str(pid) / "stat").read_text())
    except (OSError, ValueError, IndexError):
        return None


def run_delay_ns(pid: int) -> int:
    """How long its main thread has been ready to run, and waited for a core (/proc/PID/schedstat);
    0 where nobody tells."""
    try:
        return int((Path("/proc") / str(pid) / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def read(pid: int | str) -> Counters | None:
    """The present counters, or None when the process has ended."""
    base = Path("/proc") / str(pid)
    faults = major_faults(pid)
    if faults is None:
        return None
    try:
        rchar, storage = parse_io((base / "io").read_text())
    except (OSError, ValueError, KeyError):
        if not base.exists():  # it has ended between the two reads: keep its last counters
            return None
        return Counters(faults, None, None)
    return Counters(faults, rchar, storage)


class Rights(NamedTuple):
    """Privileges of a process's main thread, as shown by /proc."""

    ids: tuple[str, ...]  # of users, then of groups: real, effective, saved, file system
    capabilities: int  # effective
    no_new_privs: int
    seccomp: int  # 0: no filter

    def lost(self, now: Rights) -> bool:
        """Whether ``now`` has fewer privileges than this, or other ids."""
        return (
            now.ids != self.ids
            or bool(self.capabilities & ~now.capabilities)
            or now.no_new_privs > self.no_new_privs
            or now.seccomp > self.seccomp
        )


def parse_rights(status: str) -> Rights:
    """The fields of a text of /proc/PID/status; raises KeyError or ValueError."""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return Rights(
        (*fields["Uid"].split(), *fields["Gid"].split()),
        int(fields["CapEff"], 16),
        int(fields["NoNewPrivs"]),
        int(fields.get("Seccomp", "0")),  # absent without CONFIG_SECCOMP
    )


def rights(pid: int) -> Rights | None:
    """Present rights of a process, or None when it has ended or cannot be read."""
    try:
        return parse_rights((Path("/proc") / str(pid) / "status").read_text())
    except (OSError, ValueError, KeyError):
        return None


def ancestors(pid: int) -> list[int]:
    """The process's present ancestors, the parent first."""
    found: list[int] = []
    while pid > 1 and len(found) < ANCESTORS_MAX:
        try:
            stat = (Path("/proc") / str(pid) / "stat").read_text()
            pid = int(stat.rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
        found.append(pid)
    return found


class Watched:
    """One process: the difference between now and its hello."""

    def __init__(self, pid: int, ended: bool = False) -> None:
        self.pid = pid
        self.ended = ended  # its pid may have been reused
        self._first = (None if ended else read(pid)) or Counters()
        self.now = Counters()
        self.pool_misses = 0  # demand misses of the pool, which are no major faults

    @property
    def misses(self) -> int:
        """Touches that had to wait for storage."""
        return self.now.major_faults + self.pool_misses

    def sample(self) -> None:
        """Read again; an ended process keeps its last values."""
        latest = None if self.ended else read(self.pid)
        if latest is None:
            return
        first = self._first
        self.now = Counters(
            latest.major_faults - first.major_faults,
            _minus(latest.read_call_bytes, first.read_call_bytes),
            _minus(latest.storage_bytes, first.storage_bytes),
        )


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _minus(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a - b
