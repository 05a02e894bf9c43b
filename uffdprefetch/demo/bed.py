# SPDX-License-Identifier: Apache-2.0
"""Controls the slow-storage bed (bench/slowfs.c), and checks for cold and warm page caches.

A bed shows a directory as if behind a link of B bytes/s and L microseconds, with the kernel's page
cache in front. Cold and warm are verified with cachestat(2) (Linux 6.5+), or mincore(2) where that
is missing.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.native import residency

DEFAULT_BANDWIDTH = 300_000_000
"""Bytes per second of the bed's default link."""

DEFAULT_LATENCY_US = 1000
"""Microseconds from a reply's last byte on the link to its arrival."""

CONTROL_NAME = ".slowfs"


class BedError(UffdPrefetchError):
    """A failure of the bed: what failed, what was found, what to do."""


# ---- residency ------------------------------------------------------------------------------


def resident_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes of `path` in the page cache: whole pages, so up to the file's size rounded up.

    Raises:
        BedError: the kernel does not tell who neither owns nor may write the file.
    """
    found = residency.resident_bytes(path)
    if found is None:
        raise BedError(f"what is cached of {path} is not told to you: run as its owner, or as root")
    return found


def drop_cache(path: str | os.PathLike[str], *, patience_seconds: float = 5.0) -> None:
    """Drop `path` from the page cache and check that nothing of it remains.

    Readahead still in flight when a reader ends adds pages after the drop, so it is repeated until
    none remain or `patience_seconds` are over.

    Raises:
        BedError: pages remain (tmpfs, a live mapping, a file system without a cache of its own).
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        give_up = time.monotonic() + patience_seconds
        with contextlib.suppress(OSError):
            os.fdatasync(fd)  # dirty pages are not dropped; read-only beds have none
        while True:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            left_bytes = resident_bytes(path)
            if left_bytes == 0:
                return
            if time.monotonic() > give_up:
                raise BedError(
                    f"{path} does not become cold: {left_bytes} bytes stay in the page cache after "
                    "posix_fadvise(DONTNEED); end the programs that map it, and do not use tmpfs"
                )
            time.sleep(0.02)
    finally:
        os.close(fd)


def warm_fully(path: str | os.PathLike[str], *, threads: int = 8, passes: int = 5) -> None:
    """Read all of `path` through the page cache and check that all of it is resident.

    Repeated up to `passes` times where pages are missing afterwards: with proactive reclaim
    (DAMON's pageout, see proactive_reclaim()) the kernel may drop single pages at any moment.

    Raises:
        BedError: pages are missing in the end (too little memory, a memory cgroup's limit).
    """
    chunk_bytes = 1 << 20
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size_bytes = os.fstat(fd).st_size

        def read_chunk(offset_bytes: int) -> None:
            os.pread(fd, chunk_bytes, offset_bytes)

        for _ in range(passes):
            with ThreadPoolExecutor(threads) as pool:
                for _chunk in pool.map(read_chunk, range(0, size_bytes, chunk_bytes)):
                    pass
            missing_bytes = size_bytes - resident_bytes(path)
            if missing_bytes <= 0:
                return
    finally:
        os.close(fd)
    raise BedError(
        f"{path} does not become warm: {missing_bytes} of {size_bytes} bytes are not in the "
        f"page cache after {passes} full reads; use a smaller --size or a host with more free "
        "memory"
    )


def proactive_reclaim(admin: Path = Path("/sys/kernel/mm/damon/admin/kdamonds")) -> str | None:
    """What reclaims cached pages here though memory is free, in a line; None if nothing does.

    Some virtual machines run DAMON with a pageout scheme (Documentation/admin-guide/mm/damon),
    which drops pages in idle regions. None also where sysfs is not readable.
    """
    with contextlib.suppress(OSError):
        for state in admin.glob("*/state"):
            for action in state.parent.glob("contexts/*/schemes/*/action"):
                if state.read_text().strip() == "on" and action.read_text().strip() == "pageout":
                    return "DAMON pageout is on: cached pages that rest are taken away"
    return None


# ---- the bed --------------------------------------------------------------------------------


def find_slowfs() -> Path:
    """The slowfs program: $UFFDPREFETCH_SLOWFS, or build/slowfs beside the package's source tree.

    Raises:
        BedError: there is none.
    """
    named = os.environ.get("UFFDPREFETCH_SLOWFS")
    path = Path(named) if named else Path(__file__).resolve().parents[2] / "build" / "slowfs"
    if os.access(path, os.X_OK) and path.is_file():
        return path
    where = "$UFFDPREFETCH_SLOWFS names" if named else "looked for"
    raise BedError(
        f"the slow bed's program is missing: {where} {path}; "
        "run `make build/slowfs` in the source tree, or set UFFDPREFETCH_SLOWFS to the program"
    )


def why_no_bed() -> str | None:
    """Why no bed can be mounted here, found without mounting; None: it should work."""
    try:
        find_slowfs()
    except BedError as error:
        return str(error)
    if not os.path.exists("/dev/fuse"):
        return "/dev/fuse is missing; load the fuse module (modprobe fuse) or give the container it"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse may not be opened; run as root, or `chmod 666 /dev/fuse` as root"
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        return "fusermount3 is missing; install the package fuse3 or run as root"
    return None


class SlowBed:
    """A directory, mounted read-only behind a slow link; a context manager.

    Args:
        source: the directory to show. It must not change while the bed is mounted, except with
            `writers_behind`.
        mountpoint: an existing empty directory; None makes one and removes it afterwards.
        bandwidth: bytes per second of the link that all reads share; 0 is no limit.
        latency_us: microseconds added to each reply after its transfer.
        read_ahead_kb: the mount's readahead window in KiB (root only); None leaves the
            kernel's default, 128.
        writers_behind: attributes are not cached, and the source may be written by "another
            client": see write_behind() and freeze_times().
        told_of_closes: close(2) of a file waits for the bed's answer, as with most file systems in
            user space.
        lookup_us: microseconds of each lookup, getattr, open, opendir and readdir; they overlap.
        entry_seconds: time for which names and attributes are cached; None: while it is mounted.
        missing_seconds: time for which the absence of a name is cached.
        keep_cache: False: each open takes the file's pages away, as with many file systems in user
            space.
        direct_io: no page is kept in the page cache.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        mountpoint: str | os.PathLike[str] | None = None,
        *,
        bandwidth: int = DEFAULT_BANDWIDTH,
        latency_us: int = DEFAULT_LATENCY_US,
        read_ahead_kb: int | None = None,
        writers_behind: bool = False,
        told_of_closes: bool = False,
        lookup_us: int = 0,
        entry_seconds: float | None = None,
        missing_seconds: float = 0.0,
        keep_cache: bool = True,
        direct_io: bool = False,
    ) -> None:
        self.source = Path(source)
        self._own_mountpoint = mountpoint is None
        self._wanted_mountpoint = None if mountpoint is None else Path(mountpoint)
        self._mountpoint: Path | None = None
        self._first_read_ahead_kb = read_ahead_kb
        self._options = [
            f"--bandwidth={bandwidth}",
            f"--latency-us={latency_us}",
            f"--lookup-us={lookup_us}",
            *([] if entry_seconds is None else [f"--entry-seconds={entry_seconds}"]),
            f"--missing-seconds={missing_seconds}",
            *([] if keep_cache else ["--no-keep-cache"]),
            *(["--direct-io"] if direct_io else []),
            *(["--writers-behind"] if writers_behind else []),
            *(["--told-of-closes"] if told_of_closes else []),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SlowBed:
        self.mount()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.unmount()

    @property
    def mountpoint(self) -> Path:
        """Where the bed is mounted; raises BedError when it is not."""
        if self._mountpoint is None:
            raise BedError("the slow bed is not mounted")
        return self._mountpoint

    @property
    def pid(self) -> int:
        """Process id of the bed's program, whose CPU time is not the job's."""
        if self._process is None:
            raise BedError("the slow bed is not mounted")
        return self._process.pid

    def path(self, name: str | os.PathLike[str]) -> Path:
        """The path on the bed of `name`, which is relative to the source."""
        return self.mountpoint / name

    def mount(self) -> None:
        """Mount, and wait until the bed answers. Raises BedError with the reason."""
        if self._process is not None:
            raise BedError(f"the slow bed is already mounted at {self._mountpoint}")
        reason = why_no_bed()
        if reason is not None:
            raise BedError(f"cannot mount the slow bed: {reason}")
        where = self._wanted_mountpoint or Path(tempfile.mkdtemp(prefix="uffdprefetch-bed-"))
        self._mountpoint = where
        # Its own session: on Ctrl-C the bench unmounts it in order. Its stdin is a pipe from us: on
        # its hang-up, should we be killed, it unmounts itself.
        process = subprocess.Popen(
            [
                str(find_slowfs()),
                "--exit-with-stdin",
                *self._options,
                str(self.source),
                str(where),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._process = process
        assert process.stdout is not None and process.stderr is not None
        if not process.stdout.readline().startswith(b"slowfs: ready"):
            stderr = process.stderr.read().decode(errors="replace").strip() or "nothing said"
            self.unmount()
            raise BedError(
                f"cannot mount the slow bed on {where}: {stderr}; "
                "FUSE needs /dev/fuse, and root or a set-uid fusermount3"
            )
        atexit.register(self.unmount)
        try:
            self.counters()
            if self._first_read_ahead_kb is not None:
                self.read_ahead_kb = self._first_read_ahead_kb
        except BaseException:
            self.unmount()
            raise

    def unmount(self) -> None:
        """Unmount and end the program; does nothing when not mounted, never raises for a busy one.

        A mount that is still in use is detached lazily: it vanishes with its last user.
        """
        process, where = self._process, self._mountpoint
        if process is None or where is None:
            return
        self._process = self._mountpoint = None
        atexit.unregister(self.unmount)
        commands = [["fusermount3", "-u", str(where)], ["fusermount3", "-u", "-z", str(where)]]
        if os.geteuid() == 0:
            commands = [["umount", str(where)], *commands, ["umount", "-l", str(where)]]
        for command in commands:
            if not os.path.ismount(where):
                break
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, capture_output=True, timeout=10, check=False)
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()  # its death aborts the connection: readers get ENOTCONN, not a hang
            process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        if self._own_mountpoint:
            with contextlib.suppress(OSError):
                where.rmdir()

    def _command(self, *lines: str) -> None:
        fd = os.open(self.path(CONTROL_NAME), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, "".join(line + "\n" for line in lines).encode())
        except OSError as error:
            raise BedError(f"the slow bed refused {lines}: {error.strerror}") from error
        finally:
            os.close(fd)

    def set(
        self,
        *,
        bandwidth: int | None = None,
        latency_us: int | None = None,
        lookup_us: int | None = None,
    ) -> None:
        """Change the link while it runs: bytes/s (0: no limit) and microseconds."""
        new = {"bandwidth": bandwidth, "latency_us": latency_us, "lookup_us": lookup_us}
        lines = [f"{name}={int(value)}" for name, value in new.items() if value is not None]
        if lines:
            self._command(*lines)

    def reset(self) -> None:
        """Set the counters to zero."""
        self._command("reset")

    def write_behind(
        self,
        name: str | os.PathLike[str],
        offset_bytes: int,
        data: bytes,
        *,
        pages_go: bool = True,
        keep_mtime: bool = False,
    ) -> None:
        """Write the source's file as another client of the same storage would.

        Args:
            name: relative to the source. It must have been looked up through the mount.
            pages_go: the mount's cached pages of the written range are invalidated on return, as
                under a distributed lock (Lustre, GPFS); False: not, as on NFS.
            keep_mtime: the file's mtime is restored (its ctime changes; see freeze_times()).
        """
        fd = os.open(self.source / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            before = os.fstat(fd)
            os.pwrite(fd, data, offset_bytes)
            if keep_mtime:
                os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
        finally:
            os.close(fd)
        if pages_go:
            self._command(f"invalidate={offset_bytes} {len(data)} {os.fspath(name)}")

    def freeze_times(self, frozen: bool) -> None:
        """Show every file's times as at its first look-up (with `writers_behind` only)."""
        self._command("times=frozen" if frozen else "times=live")

    def counters(self) -> dict[str, Any]:
        """Counters since the mount or the last reset, and the settings.

        Keys: requests, bytes, largest_request_bytes, most_in_flight, in_flight, errors, of read
        requests; lookups, getattrs, opens, opendirs, readdirs; bandwidth_bytes_per_second,
        latency_us, lookup_us, max_background.
        """
        text = self.path(CONTROL_NAME).read_text()
        return dict(json.loads(text))

    @property
    def _read_ahead_file(self) -> Path:
        device = os.stat(self.mountpoint).st_dev
        return Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")

    @property
    def read_ahead_kb(self) -> int:
        """The kernel's readahead window of this mount, in KiB."""
        return int(self._read_ahead_file.read_text())

    @read_ahead_kb.setter
    def read_ahead_kb(self, value: int) -> None:
        try:
            self._read_ahead_file.write_text(f"{int(value)}\n")
        except OSError as error:
            raise BedError(
                f"cannot set read_ahead_kb={value} for the slow bed: {error.strerror}; "
                "only root can"
            ) from error

    def settings(self) -> dict[str, int]:
        """The bed's settings for a report: link, readahead window, requests in flight allowed."""
        now = self.counters()
        return {
            "bandwidth_bytes_per_second": int(now["bandwidth_bytes_per_second"]),
            "latency_us": int(now["latency_us"]),
            "max_background": int(now["max_background"]),
            "read_ahead_kb": self.read_ahead_kb,
        }
