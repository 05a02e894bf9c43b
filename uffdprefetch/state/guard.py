# SPDX-License-Identifier: Apache-2.0
"""How a change of a file is detected: a lease, its times, and comparing our copies with it
(service/freshness.py)."""

from __future__ import annotations

import contextlib
import fcntl
import time

from uffdprefetch.base import file_systems
from uffdprefetch.base.record import dataclass, field
from uffdprefetch.native import uffd
from uffdprefetch.native.compare import Result
from uffdprefetch.state.file_times import Times
from uffdprefetch.state.file_watch import FileWatch
from uffdprefetch.state.opening import Opened


@dataclass
class Guard:
    """Of one file."""

    network: bool = True  # another machine may write it, whom no lease here binds
    takes_lease: bool = True  # copies of ours may lie over it: who begins to write it is to wait
    leased: bool = False
    no_lease: str = ""  # why no lease was taken
    writer: bool = False  # it was open for writing at our open: page tables only
    changed: str | None = None  # why it is no longer managed
    times: Times = field(default_factory=lambda: Times(0, 0, 0))  # when it was opened
    opened_ns: int = 0
    closed_ctime_ns: int = 0  # when it was closed
    watched: FileWatch | None = None
    compared_pages: int = 0
    rewritten_pages: int = 0

    @classmethod
    def of(cls, opened: Opened, takes_lease: bool = True) -> Guard:
        """Of a file that has just been opened."""
        st = opened.status
        guard = cls(
            network=not file_systems.known(opened.f_type).one_machine,
            takes_lease=takes_lease,
            times=Times(st.st_size, st.st_mtime_ns, st.st_ctime_ns),
            opened_ns=time.monotonic_ns(),
        )
        if takes_lease:
            guard._take_lease(opened.fd)
        return guard

    @property
    def unbound(self) -> bool:
        """Whether somebody may write it whom no lease of ours makes wait."""
        return self.network or not self.leased

    def park(self, fd: int) -> None:
        """It is closed, until go_on()."""
        with contextlib.suppress(OSError):
            self.closed_ctime_ns = uffd.file_status(fd).ctime_ns
        self.close(fd)

    def go_on(self, fd: int) -> bool:
        """It is open again. Returns whether it is unwritten since park(), by ctime, which a writer
        cannot set back. Raises OSError."""
        if self.takes_lease and not self.writer:
            self._take_lease(fd)
        # after the lease, which later writers wait for
        self.times, self.opened_ns = Times.of(fd), time.monotonic_ns()
        return self.times.ctime_ns == self.closed_ctime_ns

    def close(self, fd: int) -> None:
        """Give back what is held to compare it, and the lease."""
        if self.watched is not None:
            self.watched.close()
            self.watched = None
        self.release_lease(fd)

    def watch(self, now: int) -> FileWatch:
        """What is known of its copies, since it was opened."""
        if self.watched is None:
            self.watched = FileWatch(self.times, self.opened_ns, now)
        return self.watched

    def note(self, result: Result) -> None:
        """Some copies were compared."""
        self.compared_pages += result.compared
        self.rewritten_pages += result.rewritten

    def give_up(self, why: str) -> None:
        """It changes, and is no longer managed."""
        self.changed = why

    def writer_came(self) -> None:
        """Somebody has it open for writing."""
        self.writer = True

    def _take_lease(self, fd: int) -> None:
        """Take a read lease: a new local writer waits until we have detached (fcntl(2)).

        Tried once: a page copied while a writer had the file open must never be laid, even when the
        file looks unchanged later.
        """
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except BlockingIOError:
            self.writer, self.no_lease = True, "a writer has it open"
        except OSError as error:
            self.no_lease = error.strerror or str(error)
        else:
            self.leased = True

    def describe(self, *, pooled: bool) -> str:
        """For people. ``pooled``: its copies are the pool's."""
        if not self.takes_lease:
            return "size and times, each second"
        held = f"no lease: {self.no_lease}" if self.no_lease else "read lease: local writers wait"
        if pooled:
            bytes_ = "one page in 4 MiB sampled each second"
        else:
            bytes_ = "checkpoint pages compared within a second"
        if not self.network and not self.no_lease:
            return f"{held}; size and times, each second"
        return f"{held}; size and times, each second; {bytes_}"

    def lease_breaking(self, fd: int) -> bool:
        """Whether a writer waits for our lease."""
        return self.leased and fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK

    def release_lease(self, fd: int) -> None:
        """Release the lease, of which agents may have descriptors, too: the writer goes on."""
        if self.leased:
            with contextlib.suppress(OSError):  # the kernel has broken it after lease-break-time
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            self.leased = False
