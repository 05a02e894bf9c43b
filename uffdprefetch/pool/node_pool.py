# SPDX-License-Identifier: Apache-2.0
"""`--engine pool`: the node's own page pool, as the coordinator uses it (docs/pool.md).

The C side (csrc/service/pool/pool.h) resolves faults, reads and evicts. Here: which files are in
the pool, who maps them, its size, and the list of victims.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from uffdprefetch.base.cache_call import CHUNK_MAX_BYTES
from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.base.config import Config
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.base.units import HUGE_BYTES, MIB
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native import uffd
from uffdprefetch.native.memory_limits import Limit, Limits
from uffdprefetch.pool import workingset
from uffdprefetch.pool.eviction import (
    LRU,
    SKIP,
    BlockReader,
    Cyclic,
    Policy,
    Residents,
    evictable,
    smallest,
)
from uffdprefetch.pool.other_nodes import NoOthers, OtherNodes
from uffdprefetch.pool.residents import reader, resident_blocks, to_come
from uffdprefetch.predict import window
from uffdprefetch.predict.bounds import LATELY_NS
from uffdprefetch.predict.checkpoints import DISTANCE_MIN_BYTES
from uffdprefetch.predict.order.epochs import Epochs
from uffdprefetch.predict.price import FREE_BYTES
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.predict.streams import FORGET_NS, Stream
from uffdprefetch.protocol.snapshot import PoolState
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.sense.pagetable_scan import LOOK_FIRST_NS
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Histogram, Ledger
from uffdprefetch.state.opening import Opened
from uffdprefetch.state.pool_file import PoolFile
from uffdprefetch.state.reader import Reader, Region
from uffdprefetch.warm.meter import LATENCY_LEAST, SAMPLES_LEAST

if TYPE_CHECKING:
    from uffdprefetch.native.memory import Pressure

#: Fill threads.
THREADS = 16
#: Fill threads where memory is short: two for demand alone, and two.
THREADS_LEAST = 4
#: A fill thread's buffer, whole huge pages (csrc/service/pool/pool_fill.c).
BUFFER_BYTES = 6 * MIB
#: Fraction of the pool's size for all buffers.
BUFFER_SHARE = 8
#: Blocks (units of eviction) in the pool at least, chunk size permitting: one too many is then
#: cheap.
BLOCKS_WANTED = 512
#: The same with known orders, where neighbours of a record are not used with it.
PLANNED_BLOCKS = 1 << 15
#: A unit of eviction is no larger: what one large request brings back.
BLOCK_MAX_BYTES = CHUNK_MAX_BYTES
#: Length of a list of victims: this fraction of the pool's blocks, ...
VICTIMS_SHARE = 32
#: ... and no less.
VICTIMS_LEAST = 8
#: Fill level from which a list of victims is kept ready.
NEARLY_FULL = 0.9
SHMEM_HUGE = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def huge_pages(wanted: str) -> tuple[bool, str]:
    """Whether the pool's memory comes in huge pages, and why (not): ``--huge-pages``."""
    if wanted == "off":
        return False, "--huge-pages off"
    try:
        with open(SHMEM_HUGE) as file:
            words = file.read()
    except OSError as error:
        return False, f"{SHMEM_HUGE}: {error.strerror}"
    chosen = words.partition("[")[2].partition("]")[0]
    if chosen in ("always", "within_size", "advise", "force"):
        return True, f"shmem_enabled is {chosen}"
    return False, f"shmem_enabled is {chosen}: as root, `echo advise > {SHMEM_HUGE}`"


class KnownOrder(Protocol):
    """An order that a reader of a file follows (readers/known_order.py)."""

    file: FileState
    epochs: Epochs

    @property
    def rate_bytes_per_second(self) -> float:
        """How fast it reads of this file."""


@dataclass
class NodePool:
    """The pool of one service."""

    config: Config
    event_fd: int
    ledger: Ledger
    clock: Clock = CLOCK
    limits: Limits | None = None
    make: Callable[..., uffd_pool.Pool] = uffd_pool.Pool
    files: dict[int, FileState] = field(default_factory=dict)  # by their numbers in the pool
    slots: dict[int, Client] = field(default_factory=dict)
    #: Processes without an agent, whose faults are still ours to answer: their slots, since when.
    orphans: dict[int, int] = field(default_factory=dict)
    detached: int = 0  # regions given back because of an error of the pool
    limited_by: Limit | None = None
    places: int = 1  # distinct positions at which files are read
    others: OtherNodes = field(default_factory=NoOthers)
    _reported: set[Limit] = field(default_factory=set)
    _fit_at_ns: int = 0
    _random: np.random.Generator = field(default_factory=np.random.default_rng)

    def __post_init__(self) -> None:
        self._limits = self.limits or Limits(self.config.budget_bytes)
        allowed, limit = self._limits.pool_bytes(0)
        self.huge, self.huge_reason = huge_pages(self.config.pool.huge_pages)
        if self.huge and self.config.budget_bytes < 8 * HUGE_BYTES:
            self.huge, self.huge_reason = False, "--budget is below eight of them"
        self.chunk_bytes = HUGE_BYTES if self.huge else BLOCK_BYTES
        self.block_bytes = self._block_bytes(BLOCKS_WANTED)
        self.planned = False  # whether known orders choose the victims
        threads = THREADS
        if limit is not Limit.BUDGET:
            most = allowed // BUFFER_SHARE // BUFFER_BYTES
            threads = min(THREADS, max(THREADS_LEAST, most))
        self._buffer_bytes = threads * BUFFER_BYTES
        self.pool = self.make(
            self.config.budget_bytes, self.chunk_bytes, threads, self.event_fd,
            huge=self.huge, guardian=True, free_bytes=FREE_BYTES,
        )  # fmt: skip
        self.policy: Policy = LRU() if self.config.pool.evict == "lru" else Cyclic()
        self.budget_bytes, self.keep_bytes = self.config.budget_bytes, 0
        self._planned_ns = 0

    # -------------------------------------------------------------- files and processes

    def open(self, file: FileState) -> PoolFile:
        """The file's part of the pool, made at its first mapping. Raises OSError."""
        if file.pooled is None:
            number, memfd = self.pool.add_file(
                file.opened.fd, file.size_bytes, file.call.unit_bytes, file.opened.was
            )
            file.pooled = PoolFile(
                self.pool, number, memfd, self.chunk_bytes, *self.pool.books(number)
            )
            self.files[number] = file
            self.others.opened(file, number)
        return file.pooled

    def forget(self, file: FileState) -> bool:
        """Free a file's memory; False while it is in use."""
        pooled = file.pooled
        if pooled is None:
            return True
        self._note_counts(file)
        if not self.pool.forget_file(pooled.number):
            return False
        self.others.closed(pooled.number)
        os.close(pooled.memfd)
        del self.files[pooled.number]
        file.pooled = None
        return True

    def park(self, file: FileState) -> bool:
        """Close the file and keep its pages; False while it is mapped or read."""
        return file.pooled is None or self.pool.park_file(file.pooled.number)

    def unpark(self, file: FileState, opened: Opened) -> None:
        """It is mapped again. Raises OSError."""
        assert file.pooled is not None
        self.pool.unpark_file(file.pooled.number, opened.fd, opened.was)

    def drop(self, file: FileState, why: str | None = None) -> None:
        """The file has changed: drop its pages, which other nodes may not have either; mappings
        that cannot be notified read them again. ``why``, for people: it may have, and is served
        on."""
        if file.pooled is not None:
            self.others.closed(file.pooled.number, why)
            self.pool.drop_file(file.pooled.number)

    def sample(self, file: FileState, most: int) -> list[int]:
        """Pages to compare with the file: one of each resident 4 MiB, ``most`` at most,
        ascending."""
        if file.pooled is None:
            return []
        return sampled_pages(file.pooled, file.size_bytes, most, self._random)

    def join(self, client: Client, number: int) -> None:
        """Take the userfaultfd that a process sent. Raises OSError.

        Its agent is new: an orphan of the same pid has gone by exec, or keeps what it has mapped.
        """
        self.look_for_orphans()
        for slot in [slot for slot in self.orphans if self.pool.has_nothing(slot)]:
            self._release(slot)
        client.pool_slot = self.pool.join(number, client.pid, client.ring)
        self.slots[client.pool_slot] = client

    def attach(self, client: Client, region: Region) -> None:
        """A mapping becomes the pool's. Raises OSError."""
        pooled = self.open(region.file)
        self.fit()  # memory that the job has taken by now
        self.pool.map(
            client.pool_slot, region.id, pooled.number, region.address, region.length_bytes,
            region.offset_bytes,
        )  # fmt: skip

    def detach(self, client: Client, region: Region) -> None:
        """The agent has replaced the mapping by the file's."""
        if client.pool_slot >= 0:
            self.pool.unmap(client.pool_slot, region.id)

    def leave(self, client: Client) -> None:
        """A connection has ended. What the process has mapped may be there still: its agent alone
        has died, or the address space is another process's, too (CLONE_VM). Then its userfaultfd
        must stay open, or missing pages would read as zeros."""
        if client.pool_slot < 0:
            return
        slot, client.pool_slot = client.pool_slot, -1
        del self.slots[slot]
        if any(r.verdict == ServingMode.POOL for r in client.regions.values()):
            self.pool.orphan(slot)
            self.orphans[slot] = self.clock.now_ns()
            self.look_for_orphans()
        else:
            self.pool.leave(slot)

    def look_for_orphans(self) -> None:
        """Release orphans whose address space is gone."""
        for slot in [slot for slot in self.orphans if self.pool.is_gone(slot)]:
            self._release(slot)

    def _release(self, slot: int) -> None:
        self.pool.leave(slot)
        del self.orphans[slot]

    def orphans_due_ns(self, now: int) -> int:
        """When to look for the end of orphans again: most are processes that are just ending."""
        ages = [now - since for since in self.orphans.values()]
        return now + min(uffd_pool.TICK_NS, max(LOOK_FIRST_NS, min(ages, default=0) // 8))

    @staticmethod
    def come_over(
        part: PoolFile | None, stream: Stream, start: int, end: int, forward: int
    ) -> tuple[int, int]:
        """For a touch of [start, end) of which the fault does not tell that its reader has come
        over more: the bytes that it has read since the last one, ``forward`` at the most. Where
        pages of an earlier epoch are still mapped, one page of each cell faults, wherever in it
        that lies (warm/placement.py, _rearm_pool)."""
        low, high = (end - forward, start) if stream.direction > 0 else (end, start + forward)
        near = 0 < forward <= 2 * DISTANCE_MIN_BYTES + end - start
        if part is None or not near or not part.is_mapped(low, high):
            return start, end
        return min(low, start), max(high, end)

    # -------------------------------------------------------------- size

    def watched_by(self, pressure: Pressure) -> None:
        """From now on the size is what the C side finds, which asks many times a second."""
        self._limits.pressure = pressure

    def window_bytes(self, walk: bool = False) -> int:
        """The most that a stream may have prefetched ahead of it: a part of what is not kept for
        other nodes. ``walk``: for one, and not for an order that is known: where several nodes walk
        through the same file, half of what is never kept, of which nothing stays for an epoch."""
        files_bytes = sum(file.size_bytes for file in self.files.values())
        kept_bytes = self.pool.kept_bytes() if self.keep_bytes else 0
        room_bytes = max(0, self.budget_bytes - kept_bytes)
        reserve_bytes = 0  # it holds what this node alone will read again
        if walk and any(map(self.others.reads_alike, self.files)):
            reserve_bytes = self.budget_bytes - self.keep_bytes
        return window.pool_bytes(
            room_bytes,
            max(0, files_bytes - kept_bytes),
            self.places,
            min(reserve_bytes, room_bytes),
        )

    def note_places(self, streams: Iterable[tuple[FileState, Stream]]) -> None:
        """Count the distinct positions at which files are read."""
        self.places = window.places((id(file), stream.position_bytes) for file, stream in streams)

    def housekeep(self) -> None:
        """Once a second: free changed files, fit the size to memory, release orphans."""
        for file in [f for f in self.files.values() if f.guard.changed and not f.mappings.attached]:
            self.forget(file)
        self.fit()
        self.look_for_orphans()

    def share_with(self, others: OtherNodes) -> None:
        """From now on other nodes may have what is in it."""
        self.others = others
        self.fit()

    def fit(self) -> None:
        """Its size, and what of it is kept for other nodes, are what they may be now."""
        self._fit_at_ns = self.clock.now_ns() + uffd_pool.TICK_NS
        resident = self.pool.used_bytes()
        allowed, limit = self._limits.pool_bytes(resident, self._buffer_bytes)
        allowed = max(allowed, 2 * self.chunk_bytes, MIB)  # csrc/service/pool/pool_yield.c
        self.budget_bytes = min(allowed, self.config.budget_bytes)
        self.limited_by = None if self.budget_bytes == self.config.budget_bytes else limit
        full = resident >= NEARLY_FULL * self.budget_bytes  # else it makes no difference
        if self.limited_by and full and limit not in self._reported:
            self._reported.add(limit)  # reported once: the size changes all the time
            self.ledger.degrade(
                f"the pool holds {self.budget_bytes >> 20} MiB, not --budget: {limit.value}"
            )
        self.keep_bytes = self.others.keeps(self.budget_bytes)
        self.pool.set_budget(self.budget_bytes, self.keep_bytes)

    # -------------------------------------------------------------- eviction

    def wants_victims(self) -> bool:
        """Whether to make a new list of victims: half of it is used and the pool is nearly full, or
        it is older than LATELY_NS."""
        remaining = self.pool.victims_left()
        if remaining < 0 or self.clock.now_ns() - self._planned_ns > LATELY_NS:
            return True
        full = self.pool.used_bytes() >= NEARLY_FULL * self.budget_bytes
        return full and remaining <= self._victims() // 2

    def plan(
        self,
        streams: Iterable[tuple[Reader, Stream, int]],
        planned: Sequence[KnownOrder] = (),
        unneeded: Iterable[tuple[int, IntervalSet]] = (),
        awaited: Iterable[tuple[FileState, int]] = (),
    ) -> None:
        """Make the list of victims. ``streams``: (reader, walk, its window in bytes) of readers
        whose order is not known, ``planned``: the others; ``unneeded``: (number of a file, ranges
        of it that go first); ``awaited``: (file, bytes of it) to which a walk in another file will
        come."""
        if self.limited_by and self.clock.now_ns() >= self._fit_at_ns:
            self.fit()  # others may have taken memory
        self._planned_ns = self.clock.now_ns()
        self.block_bytes = self._block_bytes(PLANNED_BLOCKS if planned else BLOCKS_WANTED)
        per = self.block_bytes // self.chunk_bytes
        readers = [reader(*one, self.block_bytes) for one in streams]
        readers += [to_come(*one, self.block_bytes) for one in awaited]
        unneeded = list(unneeded)
        ordered = {one.file.pooled.number for one in planned if one.file.pooled is not None}
        active = self._active_chunks(ordered, unneeded)
        residents = resident_blocks(self.files, per, active)
        self.planned = bool(planned)
        first = unneeded_blocks(residents, unneeded, self.block_bytes)
        rows = np.empty(0, np.intp)
        if first.any():
            residents.pinned[:] = ~first
            rows = self._best(residents, readers, planned)
            residents.pinned[:] = first
        if not planned:
            rows = np.concatenate((rows, self._passed(residents, readers)))
        rows = np.concatenate((rows, self._best(residents, readers, planned)))[: self._victims()]
        self.pool.set_victims(
            (number, start, end - start)
            for number, block in zip(
                residents.file[rows].tolist(), residents.block[rows].tolist(), strict=True
            )
            for start, end in without(active.get(number), block * per, per)
        )

    def refaulted(self, file: FileState, offset: int, distance: int) -> None:
        """A reader that does not walk has missed what was evicted ``distance`` chunks ago."""
        part = file.pooled
        if part is None or self.policy.name != Cyclic.name:
            return
        chunk = offset // self.chunk_bytes
        times = workingset.refaulted(int(part.refaults[chunk]), distance, self._own_chunks())
        part.refaults[chunk] = times
        part.has_active |= times >= uffd_pool.ACTIVE

    def _own_chunks(self) -> int:
        """Chunks of the pool that are not kept for other nodes."""
        return max(0, self.budget_bytes - self.keep_bytes) // self.chunk_bytes

    def _active_chunks(
        self, ordered: Collection[int], unneeded: Iterable[tuple[int, IntervalSet]]
    ) -> dict[int, npt.NDArray[np.bool_]]:
        """Of the files, by number, that are read just now: which chunks are no victims, since they
        are used again and again. ``ordered``: those with a known order, which says more."""
        now = self.clock.now_ns()
        found: dict[int, workingset.Ghosts] = {}
        for number, file in self.files.items():
            part = file.pooled
            if part is None or not part.has_active or number in ordered:
                continue
            if now - part.faulted_ns <= FORGET_NS:
                present = part.state == uffd_pool.PRESENT
                found[number] = workingset.Ghosts(part.refaults, part.left, present)
        if not found:
            return {}
        for number, ranges in unneeded:
            for start, end in ranges if number in found else ():
                chunks = slice(-(-start // self.chunk_bytes), end // self.chunk_bytes)
                found[number].refaults[chunks] = 0
        workingset.retire(list(found.values()), self.pool.evictions(), self._own_chunks())
        return {number: file.refaults >= uffd_pool.ACTIVE for number, file in found.items()}

    def _passed(self, residents: Residents, readers: list[BlockReader]) -> npt.NDArray[np.intp]:
        """Of files that several nodes walk through, what lies outside of windows, the oldest first:
        what stays there is kept, and what has just been read is what others come to next. It is
        pinned then."""
        walked = [n for n in {one.file for one in readers} if self.others.reads_alike(n)]
        among = np.isin(residents.file, walked) & evictable(residents, readers)
        rows = smallest(residents, np.where(among, residents.touched, SKIP), self._victims())
        residents.pinned |= among
        return rows

    def _best(
        self, residents: Residents, readers: list[BlockReader], planned: Sequence[KnownOrder]
    ) -> npt.NDArray[np.intp]:
        if planned:
            return self._planned_victims(residents, readers, planned)
        return self.policy.victims(residents, readers, self._victims())

    def _planned_victims(
        self, residents: Residents, readers: list[BlockReader], planned: Sequence[KnownOrder]
    ) -> npt.NDArray[np.int_]:
        """Rows to evict where orders are known: pool/order_eviction.py."""
        from uffdprefetch.pool import order_eviction

        next_use = np.full(len(residents.file), np.inf)
        is_known: npt.NDArray[np.bool_] = np.zeros(len(next_use), bool)
        for one in planned:
            if one.file.pooled is None:
                continue
            its = np.flatnonzero(residents.file == one.file.pooled.number)
            blocks = residents.block[its]
            next_use[its] = np.minimum(next_use[its], one.epochs.future(blocks, self.block_bytes))
            is_known[its] |= one.epochs.knows(blocks, self.block_bytes)
        rate = sum(one.rate_bytes_per_second for one in planned)
        now_ms = int(residents.touched.max(initial=0))
        found: npt.NDArray[np.int_] = order_eviction.victims(
            residents, readers, self._victims(), next_use, is_known, self.block_bytes, now_ms, rate
        )
        return found

    def _block_bytes(self, wanted: int) -> int:
        """The unit of eviction with at least ``wanted`` blocks in the pool."""
        size = self.chunk_bytes
        while size < BLOCK_MAX_BYTES and self.config.budget_bytes // (2 * size) >= wanted:
            size *= 2
        return size

    def _victims(self) -> int:
        """Length of the list of victims: short, since by the time that it is used up its end may be
        what is read next."""
        return max(VICTIMS_LEAST, self.budget_bytes // self.block_bytes // VICTIMS_SHARE)

    # -------------------------------------------------------------- books

    def _note_counts(self, file: FileState) -> None:
        if file.pooled is not None:
            file.account.note_pool(self.pool.file_counts(file.pooled.number))

    def summary(self) -> dict[str, Any]:
        """The ``pool`` object of docs/summary-schema.md; the files' counts are taken as well."""
        for file in self.files.values():
            self._note_counts(file)
        c = self.pool.counts()
        ways = {"O_DIRECT": c.direct_bytes, "buffered, FADV_DONTNEED": c.buffered_bytes}
        return {
            **vars(self.state(c)),
            "block_bytes": self.block_bytes,
            "huge_pages_reason": self.huge_reason,
            "resident_peak_bytes": c.peak_bytes,
            "demand_read_bytes": c.demand_read_bytes,
            "prefetch_read_bytes": c.read_bytes - c.demand_read_bytes,
            "unique_bytes": c.unique_bytes,
            "mapped_bytes": c.continued_bytes + c.collapsed_bytes,
            "mapped_huge_bytes": c.collapsed_bytes,
            "from_page_cache_bytes": c.cached_bytes,
            "stand_in_bytes": c.stand_in_bytes,
            "mapped_for_writers": c.rescues,
            "oom_canaries": self._limits.pressure.now().canaries if self._limits.pressure else 0,
            "present_faults": c.present_faults,
            "source": max(ways, key=lambda way: ways[way]) if any(ways.values()) else None,
            "lost_events": c.lost_events,
            "mappings_given_back": self.detached,
        }

    def quickest_fills(self) -> list[tuple[int, float]]:
        """(bytes, seconds) of as many as tell of the reads that took the least time of all that
        took longer than memory does: what a thread waits for is read by single chunks at first,
        alone."""
        c = self.pool.counts()
        fills = Histogram.of_bins(c.fill_bin, c.fill_sum_ns, c.fill_max_ns)
        quickest = fills.least(SAMPLES_LEAST, int(LATENCY_LEAST * 1e9))
        return [(self.chunk_bytes, ns / 1e9) for ns in quickest]

    def state(self, c: uffd_pool.PoolCounts) -> PoolState:
        """What both documents of a run tell, of these counts."""
        waits = Histogram.of_bins(c.wait_bin, c.wait_sum_ns, c.wait_max_ns)
        fills = Histogram.of_bins(c.fill_bin, c.fill_sum_ns, c.fill_max_ns)
        return PoolState(
            budget_bytes=c.budget_bytes,
            limited_by=self.limited_by.value if self.limited_by else None,
            chunk_bytes=self.chunk_bytes,
            huge_pages=self.huge,
            evict="planned" if self.planned else self.policy.name,
            resident_bytes=c.resident_bytes,
            pinned_bytes=c.pinned_bytes,
            read_bytes=c.read_bytes,
            reread_bytes=c.read_bytes + c.others_bytes - c.unique_bytes,
            others_bytes=c.others_bytes,
            evicted_bytes=c.evicted_bytes,
            waiters=c.waiters,
            waiters_peak=c.waiters_peak,
            faults=c.faults,
            missing_faults=c.missing_faults,
            demand_wait_ns=waits.quantiles(total=True),
            fill_ns=fills.quantiles(total=True),
        )

    def close(self) -> None:
        """End the threads."""
        self.pool.close()
        for file in self.files.values():
            if file.pooled is not None:
                os.close(file.pooled.memfd)
                file.pooled = None


def sampled_pages(
    pooled: PoolFile, size_bytes: int, most: int, random: np.random.Generator
) -> list[int]:
    """A random page of each BLOCK_MAX_BYTES with resident chunks (service/freshness.py)."""
    page_bytes = uffd.PAGE_BYTES
    chunks = random.permutation(np.flatnonzero(pooled.state == uffd_pool.PRESENT))
    cells = chunks * pooled.chunk_bytes // BLOCK_MAX_BYTES
    _, first = np.unique(cells, return_index=True)
    chosen = chunks[random.permutation(first)[:most]]
    per = pooled.chunk_bytes // page_bytes
    pages = chosen * per + random.integers(0, per, len(chosen))
    return sorted(int(page) for page in pages if (page + 1) * page_bytes <= size_bytes)


def unneeded_blocks(
    residents: Residents, unneeded: Iterable[tuple[int, IntervalSet]], block_bytes: int
) -> npt.NDArray[np.bool_]:
    """Of which rows all of the block lies in one of these ranges of (number of a file, ranges)."""
    found: npt.NDArray[np.bool_] = np.zeros(len(residents.file), bool)
    for number, ranges in unneeded:
        of_file = residents.file == number
        for start, end in ranges:
            first, last = -(-start // block_bytes), end // block_bytes
            found |= of_file & (residents.block >= first) & (residents.block < last)
    return found


def without(
    spared: npt.NDArray[np.bool_] | None, first: int, count: int
) -> Iterator[tuple[int, int]]:
    """The runs [start, end) of [first, first + count) that a mask does not have."""
    if spared is None or not spared[first : first + count].any():
        yield first, first + count
        return
    edges = np.flatnonzero(np.diff(~spared[first : first + count], prepend=False, append=False))
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield first + start, first + end
