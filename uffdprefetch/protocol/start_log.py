# SPDX-License-Identifier: Apache-2.0
"""The memory in which processes of a job note what they open while it starts
(csrc/common/startlog.h): made by the launcher that starts the service, before the job, kept by the
service, and found by its name beside the service's socket."""

from __future__ import annotations

import fcntl
import os

#: Tells the preload object where it is, %h standing for the node's name.
VARIABLE = "UFFDPREFETCH_START_LOG"
#: Of its name.
SUFFIX = ".starts"
#: UP_START_LOG_BYTES; here, too, because a launcher loads no C.
LOG_BYTES = 4 << 20
#: Nobody can make it shorter: who writes it never gets SIGBUS.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make() -> int:
    """A new one: its descriptor. All of it is there, so that no process of the job is charged for
    it, or waits for memory. Raises OSError."""
    fd = os.memfd_create("uffdprefetch-starts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, LOG_BYTES)
        os.posix_fallocate(fd, 0, LOG_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def publish(socket: str, pid: int, fd: int) -> None:
    """Have it found by its name beside ``socket`` as long as the process ``pid`` has it open as
    ``fd``. Raises OSError."""
    link = socket + SUFFIX
    try:
        os.unlink(link)
    except FileNotFoundError:
        pass
    os.symlink(f"/proc/{pid}/fd/{fd}", link)
