# SPDX-License-Identifier: Apache-2.0
"""The control group that a process is in, as far as it matters who is charged and who is killed.

A service is charged, and killed, with the group of the launcher that started it. So its socket's
name tells the group, and a launcher in another group starts a service of its own.
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
    """What matters of the text of /proc/PID/cgroup, sorted: "memory:/slurm/uid_0/job_7/step_0".

    The tasks of one Slurm step on a node come out equal, those of different steps do not.
    """
    found = []
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        matter = sorted(_MATTER.intersection(names.split(",")))
        if matter:
            found.append(",".join(matter) + ":" + _SLURM_TASK.sub(r"\1", path))
    return sorted(found)


def mark(text: str, namespace: str) -> str:
    """A short name for the groups; ``namespace``: of what the paths are relative to."""
    whole = "\n".join([namespace, *groups(text)])
    return hashlib.sha256(whole.encode("utf-8", "surrogateescape")).hexdigest()[:_MARK_CHARS]


def own_mark() -> str:
    """The mark of this process; of no groups where /proc does not tell."""
    try:
        text = Path("/proc/self/cgroup").read_text(errors="surrogateescape")
        namespace = os.readlink("/proc/self/ns/cgroup")
    except (OSError, ValueError):
        return mark("", "")
    return mark(text, namespace)
