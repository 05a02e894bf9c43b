# SPDX-License-Identifier: Apache-2.0
"""The control group of a process, as far as memory accounting and job kills depend on it.

A service is charged to, and killed with, the group of the launcher that started it. So its socket's
name includes the group, and a launcher in another group starts its own service.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

#: Hierarchies (version 1) that charge memory or by which a job's processes are found and killed;
#: the empty name is version 2. A rank may well have a cpuset or a net_cls of its own.
_MATTER = frozenset({"", "memory", "freezer", "pids", "name=systemd"})
#: Slurm gives each task of a step a group below the step's: .../job_7/step_0/task_3 (version 1),
#: .../job_7/step_0/user/task_3 (version 2). Limits and kills are the step's.
_SLURM_TASK = re.compile(r"(/job_\d+/step_[^/]+)(?:/user)?(?:/task_[^/]+)?$")
_MARK_CHARS = 8


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
            found.append(",".join(matter) + ":" + _SLURM_TASK.sub(r"\1", path))
    return sorted(found)


def mark(text: str, namespace: str) -> str:
    """A short hash of the groups; ``namespace``: the cgroup namespace of their paths."""
    whole = "\n".join([namespace, *groups(text)])
    return hashlib.sha256(whole.encode("utf-8", "surrogateescape")).hexdigest()[:_MARK_CHARS]


def own_mark() -> str:
    """The mark of this process; that of no groups without /proc."""
    try:
        text = Path("/proc/self/cgroup").read_text(errors="surrogateescape")
        namespace = os.readlink("/proc/self/ns/cgroup")
    except (OSError, ValueError):
        return mark("", "")
    return mark(text, namespace)
