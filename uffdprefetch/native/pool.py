# SPDX-License-Identifier: Apache-2.0
"""cffi binding of the node's page pool (csrc/service/pool/pool.h): memory, faults, fills,
evictions.

Victims are chosen by pool/eviction.py.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from uffdprefetch.native import uffd
from uffdprefetch.native.layout import layout
from uffdprefetch.native.uffd import RESULTS_AT_ONCE, FileStatus, Ring, WarmResult, warm_results

if TYPE_CHECKING:  # a service without a pool does without numpy
    import numpy as np
    import numpy.typing as npt

_ffi: Any = uffd._ffi
_lib: Any = uffd._lib
_checked = uffd._checked

EVENTS_AT_ONCE = 1024
#: Interval of alive(): after a longer silence the agents count the service as dead.
TICK_NS = 100_000_000

PRESENT: int = _lib.UP_PRESENT
#: Of Books.kept: other nodes ask for it here, and it lies in memory alone.
HELD: int = _lib.UP_KEPT_HELD
#: Refaults from which a chunk is active: the clock hand spares it.
ACTIVE: int = _lib.UP_ACTIVE
TOUCH: int = _lib.UP_POOL_TOUCH
MISS: int = _lib.UP_POOL_MISS
EVICTED: int = _lib.UP_POOL_EVICTED
FAILED: int = _lib.UP_POOL_FAILED
STUCK: int = _lib.UP_POOL_STUCK
#: Errors of a disk within a minute after which it is not used any more.
SPILL_ERRORS_MOST = 3


def _status(was: FileStatus | None) -> Any:
    return _ffi.NULL if was is None else _ffi.new("struct up_file_status *", was)


class PoolEvent(NamedTuple):
    """An event of the pool (csrc/service/helper.h, struct up_pool_event); bytes and ns."""

    time_ns: int
    offset: int
    length: int
    kind: int
    file: int
    client: int
    region: int
    tid: int
    error: int
    #: Of a miss: chunks evicted since this one was, itself included; 0: it never was.
    refault: int = 0
    #: Of a fault: bytes that its reader has come over since the last one; below 0: backward.
    passed: int = 0


_EVENT = layout("up_pool_event")
_EVENT_FIELDS = operator.itemgetter(
    *map([name for name, _ in _ffi.typeof("struct up_pool_event").fields].index, PoolEvent._fields)
)


class DiskCopies(NamedTuple):
    """Of which chunks of a file the disk tier has copies: a view of its books."""

    words: memoryview  # uint16, a bit a chunk
    per_word: int
    chunks: int

    def mask(self) -> npt.NDArray[np.bool_]:
        """As they are now, one entry a chunk."""
        import numpy as np

        words = np.asarray(self.words, np.uint16)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little").reshape(-1, 16)
        return bits[:, : self.per_word].reshape(-1)[: self.chunks].astype(bool)

    def places(self) -> npt.NDArray[np.bool_]:
        """Of which there is one, or a place for one beside those of its neighbours."""
        import numpy as np

        words = np.asarray(self.words, np.uint16)
        return np.repeat(words != 0, self.per_word)[: self.chunks]


class Books(NamedTuple):
    """A file's accounts by chunk (csrc/service/helper.h, struct up_pool_books): views of the pool's
    memory, for numpy or without it."""

    state: memoryview  # uint8
    touched_ms: memoryview  # uint32
    kept: memoryview  # uint8, for other nodes: what is HELD is no choice of a policy's
    refaults: memoryview  # uint8, the working set's: pool/workingset.py
    left: memoryview  # uint32
    spilled: DiskCopies | None = None  # None: there is no disk tier, or nothing of it goes there


class PoolCounts(NamedTuple):
    """Totals since the pool began (csrc/service/helper.h, struct up_pool_counts)."""

    resident_bytes: int
    peak_bytes: int
    pinned_bytes: int
    budget_bytes: int
    read_bytes: int
    demand_read_bytes: int
    unique_bytes: int
    evicted_bytes: int
    faults: int
    present_faults: int
    missing_faults: int
    lost_events: int
    waiters: int
    waiters_peak: int
    fills: int
    failed_fills: int
    rescues: int
    stand_in_bytes: int
    continued_bytes: int
    collapsed_bytes: int
    direct_bytes: int
    buffered_bytes: int
    cached_bytes: int
    others_bytes: int
    wait_sum_ns: int
    wait_max_ns: int
    fill_sum_ns: int
    fill_max_ns: int
    wait_bin: list[int]  # 8 bins an octave, as ledger.Histogram counts
    fill_bin: list[int]


class FileCounts(NamedTuple):
    """Totals of one file."""

    resident_bytes: int
    read_bytes: int
    unique_bytes: int
    evicted_bytes: int
    others_bytes: int  # of unique_bytes, what came from other nodes
    given_bytes: int  # to other nodes
    disk_bytes: int = 0  # copies of it in the disk tier
    disk_read_bytes: int = 0  # came from there
    disk_written_bytes: int = 0  # went there
    disk_dropped_bytes: int = 0  # left memory before they could


class SpillCounts(NamedTuple):
    """Totals of the disk tier (csrc/service/helper.h, struct up_spill_counts)."""

    size_bytes: int
    used_bytes: int
    written_bytes: int
    read_bytes: int
    dropped_bytes: int
    refused_bytes: int
    write_busy_ns: int
    read_busy_ns: int
    late_reads: int
    disk_rate: int
    storage_rate: int
    full: int
    ended: int
    errors: list[int]
    error: list[int]


class Pool:
    """One node's pool. For the service's main thread; no method blocks on storage."""

    def __init__(
        self,
        budget_bytes: int,
        chunk_bytes: int,
        threads: int,
        event_fd: int,
        *,
        huge: bool = False,
        guardian: bool = False,
        free_bytes: int = 0,
    ) -> None:
        """``guardian``: a process that outlives this one holds the userfaultfds, too
        (csrc/service/pool/guardian.c). ``free_bytes``: so much may be read beyond what readers were
        given, where a request costs the same whatever it brings.

        Raises OSError.
        """
        options = _ffi.new("struct up_pool_options *")
        options.budget_bytes, options.chunk_bytes = budget_bytes, chunk_bytes
        options.threads, options.free_bytes = threads, free_bytes
        options.huge, options.event_fd, options.guardian = huge, event_fd, guardian
        pointer = _ffi.new("struct up_pool **")
        _checked(_lib.up_pool_create(pointer, options), "page pool")
        self._pointer = pointer[0]
        self._events = _ffi.new("struct up_pool_event[]", EVENTS_AT_ONCE)
        self._results = _ffi.new("struct up_warm_result[]", RESULTS_AT_ONCE)

    def alive(self) -> None:
        """The main thread's heartbeat, checked by the agents."""
        _lib.up_pool_alive(self._pointer)

    def set_budget(self, budget_bytes: int, keep_bytes: int = 0) -> None:
        """Set the size limit; the excess is evicted. ``keep_bytes``: of it, at the most, for what
        other nodes may ask for; the disk tier has as much of that as it has room for."""
        _lib.up_pool_budget(self._pointer, budget_bytes, keep_bytes)

    def kept_bytes(self) -> int:
        """Bytes kept for other nodes in memory alone."""
        return int(_lib.up_pool_kept(self._pointer))

    # -------------------------------------------------------------- files

    def add_file(
        self, fd: int, size_bytes: int, unit_bytes: int = 0, was: FileStatus | None = None
    ) -> tuple[int, int]:
        """(its number, the descriptor for jobs to map). ``fd`` stays the caller's; ``unit_bytes``:
        its storage's request size (0: no rounding); ``was``: what the file must still be when it is
        opened for reading, None where its pages go by inode.

        Raises OSError: ENOMEM, EFBIG, EMFILE, or ENFILE for one file too many.
        """
        memfd = _ffi.new("int *")
        number = _checked(
            _lib.up_pool_file(self._pointer, fd, size_bytes, unit_bytes, _status(was), memfd),
            "pool memfd",
        )
        return number, int(memfd[0])

    def forget_file(self, number: int) -> bool:
        """Free its memory; False while it is mapped or read."""
        return int(_lib.up_pool_forget(self._pointer, number)) == 0

    def hush_file(self, number: int) -> None:
        """Cancel queued reads of an unmapped file."""
        _lib.up_pool_hush(self._pointer, number)

    def park_file(self, number: int) -> bool:
        """Close its descriptors and keep its memory; False while it is mapped or read."""
        return int(_lib.up_pool_park(self._pointer, number)) == 0

    def unpark_file(self, number: int, fd: int, was: FileStatus | None = None) -> None:
        """Reopen it as add_file() did. Raises OSError."""
        _checked(_lib.up_pool_unpark(self._pointer, number, fd, _status(was)), "pool file")

    def drop_file(self, number: int) -> None:
        """The file has changed: drop its pages, which are read again on touch."""
        _lib.up_pool_drop(self._pointer, number)

    @property
    def pointer(self) -> Any:
        """The C pointer, for native/compare.py."""
        return self._pointer

    def books(self, number: int) -> Books:
        """A file's accounts: views of the pool's memory, valid until forget_file()."""
        b = _ffi.new("struct up_pool_books *")
        n = int(_lib.up_pool_books(self._pointer, number, b))
        state, kept, refaults = (
            memoryview(_ffi.buffer(at, n)).cast("B") for at in (b.state, b.kept, b.refaults)
        )
        touched_ms, left = (
            memoryview(_ffi.buffer(at, 4 * n)).cast("B").cast("I") for at in (b.touched_ms, b.left)
        )
        spilled = None
        if b.spilled != _ffi.NULL:
            words = _ffi.buffer(b.spilled, 2 * -(-n // b.spilled_chunks))
            view = memoryview(words).cast("B").cast("H")
            spilled = DiskCopies(view, int(b.spilled_chunks), n)
        return Books(state, touched_ms, kept, refaults, left, spilled)

    def evictions(self) -> int:
        """Chunks that have been evicted: the clock of Books.left, modulo 2**32."""
        return int(_lib.up_pool_evictions(self._pointer))

    def file_counts(self, number: int) -> FileCounts:
        """A file's totals."""
        c = _ffi.new("struct up_pool_file_counts *")
        _lib.up_pool_file_counts(self._pointer, number, c)
        return FileCounts(*(int(getattr(c, name)) for name in FileCounts._fields))

    # -------------------------------------------------------------- processes

    def join(self, uffd_number: int, pid: int, ring: Ring) -> int:
        """Add a process; returns its slot. Takes over its userfaultfd, unless it raises OSError."""
        slot = _lib.up_pool_join(self._pointer, uffd_number, pid, ring.pointer)
        return _checked(slot, "pool slot")

    def leave(self, slot: int) -> None:
        """Remove a process that has ended, or has no mapping of the pool."""
        _lib.up_pool_leave(self._pointer, slot)

    def orphan(self, slot: int) -> None:
        """Close its ring; its faults are still resolved."""
        _lib.up_pool_orphan(self._pointer, slot)

    def is_gone(self, slot: int) -> bool:
        """Whether nobody has the address space of a process any more."""
        return bool(_lib.up_pool_is_gone(self._pointer, slot))

    def has_nothing(self, slot: int) -> bool:
        """Whether a process has none of the pool's memory mapped."""
        return bool(_lib.up_pool_has_nothing(self._pointer, slot))

    def map(
        self, slot: int, region: int, file: int, address: int, length: int, offset: int
    ) -> None:
        """Register a mapping: addresses of the process, and bytes of the file."""
        ret = _lib.up_pool_map(self._pointer, slot, region, file, address, length, offset)
        _checked(ret, "pool region")

    def unmap(self, slot: int, region: int) -> None:
        """Unregister a mapping."""
        _lib.up_pool_unmap(self._pointer, slot, region)

    def say_random(self, file: int, so: bool) -> None:
        """Whether a job has said that it reads a file here and there."""
        _lib.up_pool_random(self._pointer, file, so)

    # -------------------------------------------------------------- prefetch

    def submit(
        self, job_id: int, file: int, offset: int, length: int, due_ns: int = 0,
        record: bool = False,
    ) -> bool:  # fmt: skip
        """Queue one extent (bytes), to which its reader comes after ``due_ns`` (0: not known), and
        of which it takes all (``record``). False: queue full."""
        job = _ffi.new("struct up_warm_job *")
        job.id, job.fd, job.offset, job.length, job.checkpoint_fd = job_id, file, offset, length, -1
        job.due_ns, job.record = due_ns, record
        return int(_lib.up_pool_submit(self._pointer, job)) == 0

    def reap(self) -> list[WarmResult]:
        """Extents finished since the last call."""
        n = _lib.up_pool_reap(self._pointer, self._results, RESULTS_AT_ONCE)
        return warm_results(self._results, n)

    # -------------------------------------------------------------- eviction

    def set_victims(self, victims: Iterable[tuple[int, int, int]]) -> None:
        """Set the list of victims, (file, first chunk, chunks), best first."""
        rows = list(victims)
        array = _ffi.new("struct up_pool_victim[]", max(1, len(rows)))
        for i, (file, chunk, chunks) in enumerate(rows):
            array[i].file, array[i].chunk, array[i].chunks = file, chunk, chunks
        _lib.up_pool_victims(self._pointer, array, len(rows))

    def victims_left(self) -> int:
        """Unused victims of the list; -1: a reader waits for a new one."""
        return int(_lib.up_pool_victims_left(self._pointer))

    # -------------------------------------------------------------- books

    def used_bytes(self) -> int:
        """Bytes of the budget in use."""
        return int(_lib.up_pool_used(self._pointer))

    def drain(self) -> list[PoolEvent]:
        """Events since the last call, oldest first; at most 1024."""
        n = _lib.up_pool_drain(self._pointer, self._events, EVENTS_AT_ONCE)
        rows = _EVENT.iter_unpack(_ffi.buffer(self._events, n * _EVENT.size))
        return [PoolEvent._make(_EVENT_FIELDS(row)) for row in rows]

    def counts(self) -> PoolCounts:
        """The present totals."""
        c = _ffi.new("struct up_pool_counts *")
        _lib.up_pool_counts(self._pointer, c)
        values: dict[str, Any] = {
            name: [int(x) for x in getattr(c, name)] if name.endswith("_bin") else
            int(getattr(c, name))
            for name in PoolCounts._fields
        }  # fmt: skip
        return PoolCounts(**values)

    # -------------------------------------------------------------- the disk tier

    def spill(
        self, fd: int, size_bytes: int, errors_most: int = SPILL_ERRORS_MOST, try_bytes: int = 0
    ) -> None:
        """What leaves memory goes into this file, which has no name and is open past the page
        cache; the pool's own from now on. Before the first file. ``errors_most``: of the disk
        within a minute; then it ends. ``try_bytes``: with so many it is tried once whether it is
        quicker than what the files are read from; 0: never. Raises OSError."""
        options = _ffi.new("struct up_spill_options *")
        options.fd, options.size_bytes, options.errors_most = fd, size_bytes, errors_most
        options.try_bytes = try_bytes
        _checked(_lib.up_pool_spill(self._pointer, options), "disk tier")

    def fit_spill(self, size_bytes: int) -> None:
        """The file may be so large from now on; what lies beyond goes."""
        _lib.up_pool_spill_fit(self._pointer, size_bytes)

    def keep_from_disk(self, file: int) -> None:
        """Nothing of a file goes to the disk tier."""
        _lib.up_pool_spill_not(self._pointer, file)

    def free_spilled(self, file: int, size_bytes: int) -> int:
        """The disk tier's copies of so much of a file, of what is not kept for other nodes, go, the
        last first: bytes that are free."""
        return int(_lib.up_pool_spill_free(self._pointer, file, size_bytes))

    def spill_counts(self) -> SpillCounts:
        """The tier's present totals."""
        c = _ffi.new("struct up_spill_counts *")
        _lib.up_pool_spill_counts(self._pointer, c)
        values: dict[str, Any] = {
            name: list(getattr(c, name)) if name.startswith("error") else int(getattr(c, name))
            for name in SpillCounts._fields
        }
        return SpillCounts(**values)

    def cpu_seconds(self) -> float:
        """CPU time of the pool's threads, including the reads' copies."""
        return float(_lib.up_pool_cpu_ns(self._pointer)) / 1e9

    def close(self) -> None:
        """End the threads and free everything. No job may map it."""
        _lib.up_pool_destroy(self._pointer)
        self._pointer = _ffi.NULL
