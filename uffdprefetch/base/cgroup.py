# SPDX-License-Identifier: Apache-2.0
"""The control group of a process, as far as memory accounting and job kills depend on it.

A service is charged to, and killed with, the group of the launcher that started it. So its socket's
name includes the group, and a launcher in another group starts its own service.
"""

from __future__ import annotations

import os
import zlib

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
