# SPDX-License-Identifier: Apache-2.0
"""Probes of how what is read by calls is seen (docs/reads.md): system calls of another process, and
names of files that are opened."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from uffdprefetch.doctor.check import NOTE, OK, Check, why
from uffdprefetch.native import opens

CALLS, NAMES = "calls that read", "names of opened files"


def calls() -> Check:
    """Look at the system call of a process that is no child of ours, as a service's job is not."""
    try:
        Path(f"/proc/{os.getppid()}/syscall").read_text()
    except OSError as error:
        return Check(
            CALLS, NOTE, f"/proc/PID/syscall: {why(error)}",
            "read(2) is followed by positions; pread(2), and how far one large call has come, are"
            " not seen",
        )  # fmt: skip
    return Check(CALLS, OK, "a thread's system call shows", "read(2) and pread(2) are followed")


def names() -> Check:
    """Watch a directory, and open a file in it."""
    follows, why_not = "small files that are opened in order are read ahead", ""
    with tempfile.TemporaryDirectory() as directory:
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        for kind in (opens.Fanotify, opens.Inotify):
            try:
                group = kind()
                group.mark(fd)
                Path(directory, "probe").touch()
                if any(event.name == "probe" for event in group.read()):
                    return Check(NAMES, OK, f"{kind.__name__.lower()} tells them{why_not}", follows)
                error = OSError(0, "it tells nothing")
            except OSError as refused:
                error = refused
            why_not += f" ({kind.__name__.lower()}: {error.strerror})"
    return Check(NAMES, NOTE, f"nothing tells them{why_not}", "small files are not read ahead")
