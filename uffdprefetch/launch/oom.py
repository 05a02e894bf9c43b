# SPDX-License-Identifier: Apache-2.0
"""Whether the kernel killed the job, or its service, for want of memory.

The kernel counts for each control group of memory how many of its processes it has killed so
(`oom_kill`, mm/oom_kill.c: whichever limit it was for, the node's memory too). The launcher, its
job and the service that it has started are in one group, so what the count has grown by during
the run, and how each of them ended, tell who it was.
"""

from __future__ import annotations

import os
import signal

from uffdprefetch.base.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: File with the counts: of cgroup version 2 (its own and of all below it), of version 1.
_EVENTS, _CONTROL = "memory.events", "memory.oom_control"


def directory_of(cgroup: str, mountinfo: str) -> tuple[str, str]:
    """Where the memory group of a process lies, and its file's name; texts of /proc/PID/cgroup and
    /proc/PID/mountinfo. Raises LookupError, which says why there is none."""
    paths = {}
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    kind = "cgroup" if "cgroup" in paths else "cgroup2"  # a controller is in one hierarchy only
    if kind not in paths:
        raise LookupError("this system has no control groups of memory")
    for line in mountinfo.splitlines():
        place, _, mount = line.partition(" - ")
        mounted, _, options = mount.split(" ", 2)
        if mounted == kind and (kind == "cgroup2" or "memory" in options.split(",")):
            root, point = place.split()[3:5]
            inside = os.path.relpath(paths[kind], root)
            if not inside.startswith(".."):
                return os.path.normpath(f"{point}/{inside}"), (
                    _EVENTS if kind == "cgroup2" else _CONTROL
                )
    raise LookupError(f"no mounted {kind} shows the control group {paths[kind]}")


@record(frozen=True)
class Counts:
    """``kills``: processes killed; ``group_kills``: times that a whole group was
    (memory.oom.group), None where the kernel does not count it; ``sensor``: the file."""

    kills: int
    group_kills: int | None
    sensor: str

    @classmethod
    def now(cls) -> Counts | str:
        """The counts of this process's group; or why there are none."""
        try:
            with open("/proc/self/cgroup", errors="surrogateescape") as file:
                cgroup = file.read()
            with open("/proc/self/mountinfo", errors="surrogateescape") as file:
                directory, name = directory_of(cgroup, file.read())
            return cls.read(directory, name)
        except (OSError, ValueError, LookupError) as error:
            return str(error)

    @classmethod
    def read(cls, directory: str, name: str) -> Counts:
        """The counts in the group's file or, where its controller is off, in that of the nearest
        group above, to which its memory is charged. Raises OSError, LookupError, ValueError."""
        at = directory
        while not os.path.exists(f"{at}/{name}"):
            if not os.path.exists(f"{at}/cgroup.procs"):  # above all groups; the root has no counts
                raise LookupError(f"{directory} and those above it have no {name}")
            at = os.path.dirname(at)
        with open(f"{at}/{name}") as file:
            counts = dict(line.split() for line in file)
        if "oom_kill" not in counts:
            raise LookupError(f"{at}/{name} does not count kills (Linux 4.13 and later do)")
        groups = counts.get("oom_group_kill")
        group_kills = int(groups) if groups is not None else None
        return cls(int(counts["oom_kill"]), group_kills, f"{at}/{name}")


def verdict(
    before: Counts | str, after: Counts | str, job_status: int, service_killed: bool | None
) -> dict[str, Any]:
    """The object ``oom`` of docs/summary-schema.md. ``job_status``: as waitpid(2) has it;
    ``service_killed``: whether it ended by SIGKILL; None: it ended, nobody knows how."""
    job_killed = os.WIFSIGNALED(job_status) and os.WTERMSIG(job_status) == signal.SIGKILL
    found: dict[str, Any] = {
        "kills": None, "group_kills": None, "job": None if job_killed else False,
        "service": False if service_killed is False else None, "sensor": None, "why_not": None,
    }  # fmt: skip
    if isinstance(before, str) or isinstance(after, str):
        found["why_not"] = before if isinstance(before, str) else after
        return found
    if before.sensor != after.sensor:
        found["why_not"] = f"the launcher has come to another control group ({after.sensor})"
        return found
    kills = after.kills - before.kills
    found.update(kills=kills, sensor=after.sensor)
    if before.group_kills is not None and after.group_kills is not None:
        found["group_kills"] = after.group_kills - before.group_kills
    killed = [who for who, dead in (("job", job_killed), ("service", service_killed)) if dead]
    for who in ("job", "service"):
        if kills == 0:
            found[who] = False
        elif who in killed and kills >= len(killed):
            found[who] = True  # where it is less, one of them was killed by somebody else
    return found
