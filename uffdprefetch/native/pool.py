# SPDX-License-Identifier: Apache-2.0
"""The cffi face of the node's page pool (csrc/service/pool/): memory, faults, fills, evictions.

Which chunks go when room is needed is not decided here nor in C: pool/eviction.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from uffdprefetch.native import uffd
from uffdprefetch.native.uffd import RESULTS_AT_ONCE, Ring, WarmResult

if TYPE_CHECKING:  # a service without a pool does without numpy
    import numpy as np
    import numpy.typing as npt

_ffi: Any = uffd._ffi
_lib: Any = uffd._lib
_checked = uffd._checked

EVENTS_AT_ONCE = 1024
#: How often alive() is said while nothing else happens: the agents take longer silence for death.
TICK_NS = 100_000_000
HISTOGRAM_BINS = 512

PRESENT: int = _lib.UP_PRESENT
TOUCH: int = _lib.UP_POOL_TOUCH
MISS: int = _lib.UP_POOL_MISS
EVICTED: int = _lib.UP_POOL_EVICTED
FAILED: int = _lib.UP_POOL_FAILED
STUCK: int = _lib.UP_POOL_STUCK


class PoolEvent(NamedTuple):
    """What happened in the pool (csrc/service/helper.h, struct up_pool_event); bytes and ns."""

    time_ns: int
    offset: int
    length: int
    kind: int
    file: int
    client: int
    region: int
    tid: int
    error: int


@dataclass(frozen=True)
class PoolCounts:
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
    stand_in_bytes: int
    continued_bytes: int
    collapsed_bytes: int
    direct_bytes: int
    buffered_bytes: int
    cached_bytes: int
    wait_sum_ns: int
    wait_max_ns: int
    fill_sum_ns: int
    fill_max_ns: int
    wait_bin: list[int]  # 8 bins an octave, as ledger.Histogram counts
    fill_bin: list[int]


class FileCounts(NamedTuple):
    """The same of one file."""

    resident_bytes: int
    read_bytes: int
    unique_bytes: int
    evicted_bytes: int


class Pool:
    """One node's pool. All methods are the service's main thread's; none waits for storage."""

    def __init__(
        self,
        budget_bytes: int,
        chunk_bytes: int,
        threads: int,
        event_fd: int,
        *,
        huge: bool = False,
        run_bytes: int = 0,
    ) -> None:
        """``run_bytes`` 0: fills of 64 KiB to 4 MiB, as it goes. Raises OSError."""
        options = _ffi.new("struct up_pool_options *")
        options.budget_bytes, options.chunk_bytes = budget_bytes, chunk_bytes
        options.run_bytes, options.threads = run_bytes, threads
        options.huge, options.event_fd = huge, event_fd
        pointer = _ffi.new("struct up_pool **")
        _checked(_lib.up_pool_create(pointer, options), "page pool")
        self._pointer = pointer[0]
        self._events = _ffi.new("struct up_pool_event[]", EVENTS_AT_ONCE)
        self._results = _ffi.new("struct up_warm_result[]", RESULTS_AT_ONCE)

    def alive(self) -> None:
        """The main thread's sign of life, which the agents look for."""
        _lib.up_pool_alive(self._pointer)

    def set_budget(self, budget_bytes: int) -> None:
        """From now on at most so many bytes; what is more is punched."""
        _lib.up_pool_budget(self._pointer, budget_bytes)

    # -------------------------------------------------------------- files

    def add_file(self, fd: int, size_bytes: int, unit_bytes: int = 0) -> tuple[int, int]:
        """(its number, the descriptor that the jobs map). ``fd`` stays the caller's;
        ``unit_bytes``: what one request to its storage brings (0: nothing to round to).

        Raises OSError: ENOMEM, EFBIG, EMFILE, or ENOSPC for one file too many.
        """
        memfd = _ffi.new("int *")
        number = _checked(
            _lib.up_pool_file(self._pointer, fd, size_bytes, unit_bytes, memfd), "pool memfd"
        )
        return number, int(memfd[0])

    def forget_file(self, number: int) -> bool:
        """Free its memory; False while somebody maps it or a thread reads it."""
        return int(_lib.up_pool_forget(self._pointer, number)) == 0

    def hush_file(self, number: int) -> None:
        """End what is still to be read of a file that nobody maps."""
        _lib.up_pool_hush(self._pointer, number)

    def park_file(self, number: int) -> bool:
        """Close its descriptors and keep its memory; False while somebody maps or reads it."""
        return int(_lib.up_pool_park(self._pointer, number)) == 0

    def unpark_file(self, number: int, fd: int) -> None:
        """Open it again as add_file() did. Raises OSError."""
        _checked(_lib.up_pool_unpark(self._pointer, number, fd), "pool file")

    def drop_file(self, number: int) -> None:
        """All that is there of it goes and is read again when it is touched: it has changed."""
        _lib.up_pool_drop(self._pointer, number)

    @property
    def pointer(self) -> Any:
        """The C side's, for uffd_compare."""
        return self._pointer

    def books(self, number: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """(state, time of the last touch in ms) of each chunk: the pool's own memory."""
        import numpy as np

        state, touched = _ffi.new("uint8_t **"), _ffi.new("uint32_t **")
        n = int(_lib.up_pool_books(self._pointer, number, state, touched))
        return (
            np.frombuffer(_ffi.buffer(state[0], n), np.uint8),
            np.frombuffer(_ffi.buffer(touched[0], 4 * n), np.uint32),
        )

    def file_counts(self, number: int) -> FileCounts:
        """A file's totals."""
        c = _ffi.new("struct up_pool_file_counts *")
        _lib.up_pool_file_counts(self._pointer, number, c)
        return FileCounts(*(int(getattr(c, name)) for name in FileCounts._fields))

    # -------------------------------------------------------------- processes

    def join(self, uffd_number: int, pid: int, ring: Ring) -> int:
        """A process's userfaultfd (the pool's own, unless this raises OSError): its slot."""
        slot = _lib.up_pool_join(self._pointer, uffd_number, pid, ring.pointer)
        return _checked(slot, "pool slot")

    def leave(self, slot: int) -> None:
        """The process is gone, or has nothing of the pool any more."""
        _lib.up_pool_leave(self._pointer, slot)

    def orphan(self, slot: int) -> None:
        """Its ring goes; its faults are answered as before."""
        _lib.up_pool_orphan(self._pointer, slot)

    def map(
        self, slot: int, region: int, file: int, address: int, length: int, offset: int
    ) -> None:
        """Tell which addresses of the process are which bytes of the file."""
        ret = _lib.up_pool_map(self._pointer, slot, region, file, address, length, offset)
        _checked(ret, "pool region")

    def unmap(self, slot: int, region: int) -> None:
        """Its addresses are the file's own now."""
        _lib.up_pool_unmap(self._pointer, slot, region)

    # -------------------------------------------------------------- prefetch

    def submit(self, job_id: int, file: int, offset: int, length: int) -> bool:
        """Queue one extent, bytes. False: queue full."""
        job = _ffi.new("struct up_warm_job *")
        job.id, job.fd, job.offset, job.length, job.checkpoint_fd = job_id, file, offset, length, -1
        return int(_lib.up_pool_submit(self._pointer, job)) == 0

    def reap(self) -> list[WarmResult]:
        """The extents that are done since the last call."""
        n = _lib.up_pool_reap(self._pointer, self._results, RESULTS_AT_ONCE)
        names = WarmResult.__dataclass_fields__
        return [WarmResult(*(int(getattr(self._results[i], k)) for k in names)) for i in range(n)]

    # -------------------------------------------------------------- eviction

    def set_victims(self, victims: Iterable[tuple[int, int, int]]) -> None:
        """(file, first chunk, chunks) to punch when room is needed, best first; replaces the last
        list."""
        rows = list(victims)
        array = _ffi.new("struct up_pool_victim[]", max(1, len(rows)))
        for i, (file, chunk, chunks) in enumerate(rows):
            array[i].file, array[i].chunk, array[i].chunks = file, chunk, chunks
        _lib.up_pool_victims(self._pointer, array, len(rows))

    def victims_left(self) -> int:
        """How many of the last list have not been used; -1: a reader waits for another."""
        return int(_lib.up_pool_victims_left(self._pointer))

    # -------------------------------------------------------------- books

    def used_bytes(self) -> int:
        """What of the budget is taken."""
        return int(_lib.up_pool_used(self._pointer))

    def drain(self) -> list[PoolEvent]:
        """The events since the last call, oldest first; at most 1024."""
        n = _lib.up_pool_drain(self._pointer, self._events, EVENTS_AT_ONCE)
        names = PoolEvent._fields
        return [PoolEvent(*(int(getattr(self._events[i], k)) for k in names)) for i in range(n)]

    def counts(self) -> PoolCounts:
        """The totals as they stand."""
        c = _ffi.new("struct up_pool_counts *")
        _lib.up_pool_counts(self._pointer, c)
        values: dict[str, Any] = {
            name: [int(x) for x in getattr(c, name)] if name.endswith("_bin") else
            int(getattr(c, name))
            for name in PoolCounts.__dataclass_fields__
        }  # fmt: skip
        return PoolCounts(**values)

    def cpu_seconds(self) -> float:
        """CPU time of the pool's threads, the copy of the reads included."""
        return float(_lib.up_pool_cpu_ns(self._pointer)) / 1e9

    def close(self) -> None:
        """End the threads and free everything. The jobs must not map it any more."""
        _lib.up_pool_destroy(self._pointer)
        self._pointer = _ffi.NULL
