# SPDX-License-Identifier: Apache-2.0
"""How much memory a run may use: --budget, what is available, the cgroup's limit."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

from uffdprefetch.base import cgroup
from uffdprefetch.base.units import format_size
from uffdprefetch.native import memory
from uffdprefetch.native.memory import Pressure

#: Of what is available, leave the other half to the job.
SHARE = 0.5
#: Of what a cgroup can still have: where more is ahead than a part of its inactive list, the kernel
#: takes away what nobody has read yet before what everybody has (mm/vmscan.c,
#: folio_check_references(): that has been referenced), and it is read twice. Beside two busy
#: processes, with a quarter up to 16 % of a file, with an eighth up to 3 %.
CGROUP_SHARE = 0.125


class Limit(Enum):
    """What bounds the memory that may be used; the value is for people, and for JSON."""

    BUDGET = "--budget"
    MEMORY = "MemAvailable"
    CGROUP = "cgroup memory limit"

    @property
    def words(self) -> str:
        """In a sentence."""
        if self is Limit.MEMORY:
            return "the node's free memory (MemAvailable)"
        return "the memory limit of the job's control group" if self is Limit.CGROUP else self.value

    @property
    def of_a_pool(self) -> str:
        """What bounds a pool, in a line: a part of the whole is left to a burst of the job, as
        csrc/service/memory.h has it, however much of it is free."""
        if self is Limit.BUDGET:
            return self.value
        whole = "the machine's memory" if self is Limit.MEMORY else "it"
        return f"{self.value}, and an eighth of {whole} stays free for the job"

    def raised_to(self, needed_bytes: int) -> str:
        """The change by which this much would fit, in words."""
        if self is Limit.MEMORY:
            return "on a node with more free memory"
        if self is Limit.CGROUP:
            return "with a higher memory limit of the job (Slurm: --mem)"
        return f"with --budget {format_size(needed_bytes).replace(' ', '')}"


def mem_available_bytes(meminfo: str) -> int | None:
    """MemAvailable of the text of /proc/meminfo, in bytes."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def cgroup_room_bytes(groups: str, root: Path = Path(cgroup.ROOT)) -> int | None:
    """What may still be taken in the memory groups of a text of /proc/PID/cgroup: where the least
    is left; None where there is no limit."""
    return min((left for _, left in cgroup.memory_levels(groups, str(root))), default=None)


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


def pool_bytes(
    budget_bytes: int,
    resident_bytes: int,
    reserve_bytes: int = 0,
    pressure: Pressure | None = None,
) -> tuple[int, Limit]:
    """How much the node's pool may hold now, of which ``resident_bytes`` it does hold, and which
    limit binds. It is shared memory: without swap, nobody but we ourselves can free it, and the
    kernel kills instead. So it is what is left beside the job and a burst of it
    (csrc/service/memory.h): as ``pressure`` saw it last, or, where nobody watches, now, less
    ``reserve_bytes`` for what it reads with."""
    if pressure is not None:
        room = pressure.now()
    else:
        try:
            room = memory.look(resident_bytes)
        except OSError:  # no /proc: the user's budget stands
            return budget_bytes, Limit.BUDGET
        room = room._replace(may_hold_bytes=max(0, room.may_hold_bytes - reserve_bytes))
    if room.may_hold_bytes >= budget_bytes:
        return budget_bytes, Limit.BUDGET
    return room.may_hold_bytes, Limit.CGROUP if room.is_cgroup else Limit.MEMORY


class Limits:
    """How much memory one run may use now: asked again and again, since others use it too."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        #: Who looks at memory all the time, once there is somebody.
        self.pressure: Pressure | None = None

    def ahead_bytes(self) -> tuple[int, Limit]:
        """See :func:`allowed_bytes`."""
        return allowed_bytes(self.budget_bytes)

    def at(self, budget_bytes: int, resident_bytes: int | None = None) -> Limit:
        """The limit that would bind with this --budget; ``resident_bytes``: of a pool, what it
        holds."""
        if resident_bytes is None:
            return allowed_bytes(budget_bytes)[1]
        return pool_bytes(budget_bytes, resident_bytes, pressure=self.pressure)[1]

    def pool_bytes(self, resident_bytes: int, reserve_bytes: int = 0) -> tuple[int, Limit]:
        """See :func:`pool_bytes`."""
        return pool_bytes(self.budget_bytes, resident_bytes, reserve_bytes, self.pressure)
