# SPDX-License-Identifier: Apache-2.0
"""How much may be ahead and how fast: memory, cgroups, and a token bucket."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

#: Of what is available, leave the other half to the job.
SHARE = 0.5
#: Of what a cgroup can still have: where more is ahead than a part of its inactive list, the kernel
#: takes away what nobody has read yet before what everybody has (mm/vmscan.c,
#: folio_check_references(): that has been referenced), and it is read twice. Beside two busy
#: processes, with a quarter up to 16 % of a file, with an eighth up to 3 %.
CGROUP_SHARE = 0.125
#: Of all that the pool could have: the job needs memory of its own.
POOL_SHARE = 0.75
_UNLIMITED = 1 << 60


class Limit(Enum):
    """What bounds the memory that may be used; the value is for people, and for JSON."""

    BUDGET = "--budget"
    MEMORY = "MemAvailable"
    CGROUP = "cgroup memory limit"


def mem_available_bytes(meminfo: str) -> int | None:
    """MemAvailable of the text of /proc/meminfo, in bytes."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def cgroup_paths(cgroup: str, root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """The limit files (v2, v1) that can bind a process whose /proc/PID/cgroup is ``cgroup``,
    its own group first, then every parent: a limit anywhere above holds too. Above memory.high
    nobody is killed, but each allocation waits for reclaim."""
    files = []
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ["memory.max", "memory.high"]
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ["memory.limit_in_bytes"]
        else:
            continue
        # a container often sees its own group mounted as the root of the tree
        here = base / path.lstrip("/")
        while True:
            files += [here / name for name in names]
            if here == base or base not in here.parents:
                break
            here = here.parent
    return files


def cgroup_room_bytes(cgroup: str, root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What may still be allocated before the kernel kills or throttles somebody of the cgroup: page
    cache is given up first, all else stays. Of the tightest limit that holds; None when there is
    none."""
    rooms = []
    for path in cgroup_paths(cgroup, root):
        try:
            text = path.read_text().strip()
            if text == "max" or int(text) >= _UNLIMITED:
                continue
            one = path.name == "memory.limit_in_bytes"
            used = path.with_name("memory.usage_in_bytes" if one else "memory.current").read_text()
            rows = path.with_name("memory.stat").read_text().splitlines()
            stat = {name: int(value) for name, value in (row.split() for row in rows if row)}
        except OSError:
            continue
        names = ("active_file", "inactive_file")
        cached = sum(stat.get(f"total_{n}" if one else n, 0) for n in names)
        rooms.append(int(text) - int(used) + cached)
    return max(0, min(rooms)) if rooms else None


def allowed_bytes(budget_bytes: int) -> tuple[int, Limit]:
    """Bytes that may be warmed ahead of all readers now, and which limit binds."""
    allowed, why = budget_bytes, Limit.BUDGET
    try:
        available = mem_available_bytes(Path("/proc/meminfo").read_text())
        if available is not None and available * SHARE < allowed:
            allowed, why = int(available * SHARE), Limit.MEMORY
        room = cgroup_room_bytes(Path(f"/proc/{os.getpid()}/cgroup").read_text())
        if room is not None and room * CGROUP_SHARE < allowed:
            allowed, why = int(room * CGROUP_SHARE), Limit.CGROUP
    except (OSError, ValueError):
        pass  # no /proc: the user's budget stands
    return allowed, why


def pool_bytes(budget_bytes: int, resident_bytes: int, reserve_bytes: int = 0) -> tuple[int, Limit]:
    """How much the node's pool may hold now, of which ``resident_bytes`` it does hold, and which
    limit binds; ``reserve_bytes`` more are for what it reads with. The pool is shared memory:
    without swap, nothing but we ourselves can free it, and the kernel kills instead."""
    allowed, why = budget_bytes, Limit.BUDGET
    try:
        available = mem_available_bytes(Path("/proc/meminfo").read_text())
        if available is not None and (available + resident_bytes) * POOL_SHARE < allowed:
            allowed, why = int((available + resident_bytes) * POOL_SHARE), Limit.MEMORY
        room = cgroup_room_bytes(Path(f"/proc/{os.getpid()}/cgroup").read_text())
        if room is not None:
            room = max(0, room + resident_bytes - reserve_bytes)
            if room * POOL_SHARE < allowed:
                allowed, why = int(room * POOL_SHARE), Limit.CGROUP
    except (OSError, ValueError):
        pass  # no /proc: the user's budget stands
    return allowed, why


class Limits:
    """How much memory one run may use now: asked again and again, since others use it too."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes

    def ahead_bytes(self) -> tuple[int, Limit]:
        """See :func:`allowed_bytes`."""
        return allowed_bytes(self.budget_bytes)

    def pool_bytes(self, resident_bytes: int, reserve_bytes: int = 0) -> tuple[int, Limit]:
        """See :func:`pool_bytes`."""
        return pool_bytes(self.budget_bytes, resident_bytes, reserve_bytes)


class TokenBucket:
    """``--max-rate``: at most rate bytes/s over any time longer than a burst. None: no cap."""

    def __init__(self, rate_bytes_per_second: int | None, burst_bytes: int) -> None:
        self.rate = rate_bytes_per_second
        self.burst_bytes = burst_bytes
        self._tokens = float(burst_bytes)
        self._at_ns: int | None = None

    def wait_ns(self, now_ns: int) -> int:
        """0 when something may be sent now, else ns until it may."""
        if not self.rate:
            return 0
        if self._at_ns is not None:
            self._tokens += (now_ns - self._at_ns) * self.rate / 1e9
            self._tokens = min(self._tokens, float(self.burst_bytes))
        self._at_ns = now_ns
        return 0 if self._tokens > 0 else int((1 - self._tokens) * 1e9 / self.rate) + 1

    def take(self, length_bytes: int) -> None:
        """Account bytes sent; may go below zero by one extent, which is then waited for."""
        if self.rate:
            self._tokens -= length_bytes
