# SPDX-License-Identifier: Apache-2.0
"""The control group of a process, as far as memory accounting and job kills depend on it.

A service is charged to, and killed with, the group of the launcher that started it. So its socket's
name includes the group, and a launcher in another group starts its own service.
"""

from __future__ import annotations

import os
import zlib

ROOT = "/sys/fs/cgroup"
_UNLIMITED = 1 << 60
#: Least memory for a service: its own before it reads (heap, page tables, kernel stacks), and what
#: it must leave to the job (csrc/service/pressure.c); with less it would end at once. A pool takes
#: as much more (docs/limits.md), some MiB of it for its own structures.
SERVICE_BYTES = (48 + 8) << 20
POOL_BYTES = SERVICE_BYTES + (16 << 20)
#: Hierarchies (version 1) that charge memory or by which a job's processes are found and killed;
#: the empty name is version 2. A rank may well have a cpuset or a net_cls of its own.
_MATTER = frozenset({"", "memory", "freezer", "pids", "name=systemd"})


def _of_step(path: str) -> str:
    """A group's path, of a task of a Slurm step the step's.

    Slurm gives each task a group below the step's: .../job_7/step_0/task_3 (version 1),
    .../job_7/step_0/user/task_3 (version 2). Limits and kills are the step's.
    """
    names = path.split("/")
    if names[-1].startswith("task_"):
        names.pop()
    if names[-1] == "user":
        names.pop()
    if len(names) < 3:
        return path
    job, step = names[-2:]
    of_a_step = job.startswith("job_") and job[4:].isdigit() and step.startswith("step_")
    return "/".join(names) if of_a_step else path


def _directories(text: str, root: str) -> list[tuple[str, bool]]:
    """(directory, whether it is of version 1) of the memory groups in a text of /proc/PID/cgroup,
    the own ones first, then every parent: a limit anywhere above holds too."""
    found = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        is_v1 = "memory" in controllers.split(",")
        if controllers and not is_v1:
            continue
        base = f"{root}/memory" if is_v1 else root
        # a container often sees its own group mounted as the root of the tree; one outside of ours
        # is told with dots
        names = [] if "/.." in path else [name for name in path.split("/") if name]
        while True:
            found.append(("/".join([base, *names]), is_v1))
            if not names:
                break
            names.pop()
    return found


def _number(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):  # ValueError: max
        return None


def memory_levels(text: str, root: str = ROOT) -> list[tuple[int, int]]:
    """(limit, what of it may still be taken) in bytes, of each memory group that has a limit.

    Page cache is given up before the kernel kills somebody, all else stays. Above memory.high
    nobody is killed, but each allocation waits for reclaim.
    """
    levels = []
    for directory, is_v1 in _directories(text, root):
        names = ["memory.limit_in_bytes"] if is_v1 else ["memory.max", "memory.high"]
        numbers = [n for n in (_number(f"{directory}/{name}") for name in names) if n is not None]
        limit = min(numbers, default=_UNLIMITED)
        name = "memory.usage_in_bytes" if is_v1 else "memory.current"
        used = _number(f"{directory}/{name}")
        if limit >= _UNLIMITED or used is None:
            continue
        cached = 0
        of_files = [f"{'total_' if is_v1 else ''}{name}_file" for name in ("active", "inactive")]
        try:
            with open(f"{directory}/memory.stat") as file:
                for row in file:
                    name, _, value = row.partition(" ")
                    cached += int(value) if name in of_files else 0
        except OSError:
            continue
        levels.append((limit, max(0, limit - used + cached)))
    return levels


def own_memory_levels() -> list[tuple[int, int]]:
    """The same of this process; none without /proc."""
    try:
        with open("/proc/self/cgroup", errors="surrogateescape") as file:
            return memory_levels(file.read())
    except (OSError, ValueError):
        return []


def left_bytes() -> int | None:
    """What this process's memory groups leave, beside page cache; None: none has a limit."""
    return min((left for _, left in own_memory_levels()), default=None)


def why_no_room(needed_bytes: int) -> str | None:
    """Why a process that needs this much memory is not started; None: there is room."""
    left = left_bytes()
    if left is None or left >= needed_bytes:
        return None
    return f"{left >> 20} MiB are left in the memory cgroup, it needs {needed_bytes >> 20} MiB"


def groups(text: str) -> list[str]:
    """The relevant groups in a text of /proc/PID/cgroup, sorted:
    "memory:/slurm/uid_0/job_7/step_0".

    Equal for the tasks of one Slurm step on a node, different for different steps.
    """
    found = []
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        matter = sorted(_MATTER.intersection(names.split(",")))
        if matter:
            found.append(",".join(matter) + ":" + _of_step(path))
    return sorted(found)


def mark(text: str, namespace: str) -> str:
    """A hash of the groups, 8 digits; ``namespace``: the cgroup namespace of their paths.

    It tells groups of one user apart, and nobody else's: a checksum does, and takes no OpenSSL.
    """
    whole = "\n".join([namespace, *groups(text)])
    return f"{zlib.crc32(whole.encode('utf-8', 'surrogateescape')):08x}"


def own_mark() -> str:
    """The mark of this process; that of no groups without /proc."""
    try:
        with open("/proc/self/cgroup", errors="surrogateescape") as file:
            text = file.read()
        namespace = os.readlink("/proc/self/ns/cgroup")
    except (OSError, ValueError):
        return mark("", "")
    return mark(text, namespace)
