# SPDX-License-Identifier: Apache-2.0
"""Probes of how what is read by calls is seen (docs/reads.md): system calls of another process, and
names of files that are opened."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from uffdprefetch.doctor.check import NOTE, OK, Check, why
from uffdprefetch.native import opens

CALLS, NAMES = "calls that read", "names of opened files"

#: A process that is no descendant of who starts it, and names it as one who may look, as programs
#: of a job name their service (csrc/job/ptracer.c: PR_SET_PTRACER). It ends with its input.
_STRANGER = """
import ctypes, os, sys
if os.fork():
    os._exit(0)
ctypes.CDLL(None).prctl(0x59616d61, int(sys.argv[1]), 0, 0, 0)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def calls() -> Check:
    """Look at the system call of a process that is no child of ours, as a service's job is not."""
    words = [sys.executable, "-Ic", _STRANGER, str(os.getpid())]
    try:
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            pid = int(process.stdout.readline() or b"0")
            Path(f"/proc/{pid}/syscall").read_text()
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
