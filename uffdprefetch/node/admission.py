# SPDX-License-Identifier: Apache-2.0
"""Which files are served: the table of open ones, and why a mapping is not wanted."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from typing import TYPE_CHECKING

from uffdprefetch.config import Config
from uffdprefetch.node import wire
from uffdprefetch.node.files import MEMORY_FILE_SYSTEMS, FileState, Key
from uffdprefetch.node.ledger import Ledger
from uffdprefetch.warm.scheduler import Scheduler

if TYPE_CHECKING:
    from uffdprefetch.node.pool import NodePool

#: Files without a region that are kept ready for the next epoch's workers.
IDLE_FILES_MAX = 64


class FileTable:
    """The files under management, by (device, inode, size, mtime)."""

    def __init__(self, config: Config, scheduler: Scheduler, ledger: Ledger) -> None:
        self._config = config
        self._scheduler = scheduler
        self._ledger = ledger
        self.files: dict[Key, FileState] = {}
        self.pool: NodePool | None = None

    def find(self, a: wire.Attach, fd: int | None) -> tuple[FileState | None, str, str]:
        """(file, path, '') of a mapping, opened at its first one; (None, path, why) when it is
        not wanted."""
        key = (a.device, a.inode, a.size_bytes, a.mtime_ns)
        file = self.files.get(key)
        if file is not None:
            if fd is not None:
                os.close(fd)
            return file, file.path, ""
        if fd is None:
            return None, f"inode {a.inode}", "unknown file of a forked process"
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            path = os.readlink(f"/proc/self/fd/{fd}")
            why = self._unfit(key, fd, path)
            if why:
                return None, path, why
            file = FileState.open(fd, path)
            undo.pop_all()
        if file.file_system in MEMORY_FILE_SYSTEMS:
            file.close()
            return None, path, f"{file.file_system} is memory already"
        self._forget_idle_files()
        self.files[key] = file
        return file, path, ""

    def _unfit(self, key: Key, fd: int, path: str) -> str:
        """Why a descriptor that was sent is not the file to warm; '' when it is."""
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode):
            return "no regular file"
        if (st.st_dev, st.st_ino) != key[:2]:
            return "the descriptor is of another file"
        if (st.st_size, st.st_mtime_ns) != key[2:]:
            return "it has changed since it was mapped"
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if flags & os.O_PATH or flags & os.O_ACCMODE == os.O_WRONLY:
            return "the descriptor cannot be read"
        if not self._config.wants(path):
            return "--include/--exclude"
        if os.path.basename(path) == "lock.mdb" or ".so" in os.path.basename(path):
            return "a lock file or a library"
        return ""

    def _forget_idle_files(self) -> None:
        idle = [(key, f) for key, f in self.files.items() if not f.attached and f.fd >= 0]
        for _, file in idle[: max(0, len(idle) - IDLE_FILES_MAX)]:
            if not self._scheduler.busy_with(file) and (not self.pool or self.pool.forget(file)):
                self._scheduler.forget_file(file)
                self._ledger.close_file(file)
                del self.files[file.key]
                file.close()
