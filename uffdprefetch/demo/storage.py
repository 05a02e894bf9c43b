# SPDX-License-Identifier: Apache-2.0
"""Where the demonstration's data set lies: behind a slow link, or on the local disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.units import format_rate, format_size
from uffdprefetch.demo.bed import (
    DEFAULT_BANDWIDTH,
    DEFAULT_LATENCY_US,
    BedError,
    SlowBed,
    drop_cache,
    warm_fully,
    why_no_bed,
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """Requested storage: bytes, bytes/s, microseconds; ``work``: directory that keeps the data
    set."""

    size_bytes: int = 1 << 30
    bandwidth: int = DEFAULT_BANDWIDTH
    latency_us: int = DEFAULT_LATENCY_US
    local: bool = False
    work: Path | None = None


@dataclass(frozen=True)
class DemoStorage:
    """The job's LMDB and its storage.

    bed is None on a local disk; bandwidth is then a measured one.
    """

    database: Path
    bed: SlowBed | None
    bandwidth: int
    description: str

    @property
    def data(self) -> Path:
        """The file that is mapped."""
        return self.database / "data.mdb"

    @contextlib.contextmanager
    def fast(self) -> Iterator[None]:
        """The bed without its link, to fill the cache quickly."""
        if self.bed is None:
            yield
            return
        before = self.bed.counters()
        self.bed.set(bandwidth=0, latency_us=0)
        try:
            yield
        finally:
            self.bed.set(
                bandwidth=before["bandwidth_bytes_per_second"], latency_us=before["latency_us"]
            )

    def make_cold(self) -> None:
        """Drop all of the file from the page cache, verified."""
        drop_cache(self.data)

    def make_warm(self) -> None:
        """Bring all of the file into the page cache, verified."""
        with self.fast():
            warm_fully(self.data)


@contextlib.contextmanager
def directory_in(parent: Path) -> Iterator[Path]:
    """A new directory in `parent`, removed afterwards."""
    try:
        path = Path(tempfile.mkdtemp(prefix="uffdprefetch-demo-", dir=parent))
    except OSError as error:
        raise UffdPrefetchError(
            f"cannot make a directory in {parent}: {error.strerror}; give another with --work"
        ) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def memory_available_bytes() -> int:
    """MemAvailable of /proc/meminfo; 0 where unknown."""
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


def fits_in_tmpfs(size_bytes: int, shm: Path = Path("/dev/shm")) -> bool:
    """Whether /dev/shm can hold the data set, and memory the data set and its page cache."""
    if not os.access(shm, os.W_OK):
        return False
    needed_bytes = size_bytes + size_bytes // 50 + (64 << 20)
    free_bytes = shutil.disk_usage(shm).free
    return needed_bytes <= free_bytes and 2 * needed_bytes <= memory_available_bytes()


def measure_bandwidth(path: Path) -> int:
    """Bytes per second of a cold read of `path` with 8 readers, as warm_fully() reads."""
    drop_cache(path)
    begin = time.perf_counter()
    warm_fully(path)
    return round(path.stat().st_size / (time.perf_counter() - begin))


def _make_records(wanted: Wanted, on_bed: bool, stack: contextlib.ExitStack, say: Say) -> Path:
    """Make the data set, for the lifetime of `stack`; returns its directory."""
    from uffdprefetch.demo import dataset  # after the check that numpy and lmdb are there

    if wanted.work is not None:
        source = wanted.work
    else:
        # A bed's source is in memory, without a real disk's noise.
        in_memory = on_bed and fits_in_tmpfs(wanted.size_bytes)
        parent = Path("/dev/shm") if in_memory else Path("/var/tmp")
        source = stack.enter_context(directory_in(parent))
    say(f"making {format_size(wanted.size_bytes)} of records")
    dataset.make_dataset(source, wanted.size_bytes)
    return source


@contextlib.contextmanager
def _slow_storage(wanted: Wanted, say: Say) -> Iterator[DemoStorage]:
    """The data set behind a slow link; raises BedError."""
    reason = why_no_bed()
    if reason is not None:
        raise BedError(reason)
    with contextlib.ExitStack() as stack:
        source = _make_records(wanted, True, stack, say)
        bed = stack.enter_context(
            SlowBed(source, bandwidth=wanted.bandwidth, latency_us=wanted.latency_us)
        )
        description = (
            f"{format_rate(wanted.bandwidth)}, {wanted.latency_us / 1000:g} ms latency, "
            f"readahead {bed.read_ahead_kb} KiB (FUSE bed)"
        )
        yield DemoStorage(bed.path(_database_name()), bed, wanted.bandwidth, description)


@contextlib.contextmanager
def _local_storage(wanted: Wanted, say: Say) -> Iterator[DemoStorage]:
    """The data set on the local disk."""
    with contextlib.ExitStack() as stack:
        source = _make_records(wanted, False, stack, say)
        database = source / _database_name()
        bandwidth = measure_bandwidth(database / "data.mdb")
        yield DemoStorage(
            database, None, bandwidth, f"local disk, {format_rate(bandwidth)} measured"
        )


def _database_name() -> str:
    from uffdprefetch.demo.dataset import DATABASE_NAME

    return DATABASE_NAME


@contextlib.contextmanager
def open_storage(wanted: Wanted, say: Say) -> Iterator[DemoStorage]:
    """The data set on slow storage, or on the local disk if requested or there is no bed."""
    with contextlib.ExitStack() as stack:
        storage: DemoStorage | None = None
        if not wanted.local:
            try:
                storage = stack.enter_context(_slow_storage(wanted, say))
            except BedError as error:
                say(f"no slow storage: the local disk is used, cache dropped ({error.message})")
        if storage is None:
            storage = stack.enter_context(_local_storage(wanted, say))
        say(f"storage: {storage.description}")
        yield storage
