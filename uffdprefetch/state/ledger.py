# SPDX-License-Identifier: Apache-2.0
"""Costs and results of a run: counters, a wait histogram, a bounded time line, degradations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from uffdprefetch.native import compare as uffd_compare
from uffdprefetch.native import uffd
from uffdprefetch.predict.gain import FileReads
from uffdprefetch.predict.randomness import Access
from uffdprefetch.predict.storage import MISS_BYTES
from uffdprefetch.predict.streams import Stream
from uffdprefetch.protocol import wire
from uffdprefetch.protocol.document import Quantiles
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState, Key
from uffdprefetch.state.processes import Watched
from uffdprefetch.state.reader import Reader, Trait
from uffdprefetch.state.unserved import Coarse, Refusal, Unserved

#: Bins of the time line, whose width doubles when the run outgrows them ([Darshan]).
TIMELINE_BINS = 512
FIRST_BIN_SECONDS = 0.1
DEGRADATIONS_MAX = 32
STREAMS_MAX = 256
FILES_MAX = 256
PROCESSES_MAX = 1024
#: Pairs of a process and a file that it was seen to read by read(2).
READ_MAX = 4096
#: How a file is served, by the names of wire.ServingMode, the best first.
_BEST = ("pool", "checkpoints", "page_tables")


class Histogram:
    """Histogram of ns with 8 bins an octave: quantiles at most 1/8 too high, in constant memory."""

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}
        self.count = 0
        self.max = 0
        self.sum = 0

    @classmethod
    def of_bins(cls, bins: list[int], total: int, most: int) -> Histogram:
        """From counts of the same bins in C (csrc/service/pool/pool.c, pool_bin)."""
        made = cls()
        made._bins = {i: n for i, n in enumerate(bins) if n}
        made.count, made.sum, made.max = sum(bins), total, most
        return made

    def add(self, ns: int) -> None:
        """Count one value >= 0."""
        octave = max(0, ns.bit_length() - 4)
        bin_ = octave * 8 + (ns >> octave)
        self._bins[bin_] = self._bins.get(bin_, 0) + 1
        self.count += 1
        self.sum += ns
        self.max = max(self.max, ns)

    def quantile(self, share: float) -> int | None:
        """The upper edge of the bin that holds the given share, ns; None when empty."""
        rest = share * self.count
        for bin_ in sorted(self._bins):
            rest -= self._bins[bin_]
            if rest <= 0:
                octave = max(0, bin_ // 8 - 1)
                return min(self.max, ((bin_ - octave * 8) + 1 << octave) - 1)
        return None

    def least(self, count: int, above_ns: int) -> list[int]:
        """The lower edges of the bins of the least values above some ns, at most so many."""
        found: list[int] = []
        for bin_ in sorted(self._bins):
            octave = max(0, bin_ // 8 - 1)
            edge = bin_ - octave * 8 << octave
            if edge >= above_ns:
                found += [edge] * min(self._bins[bin_], count - len(found))
        return found

    def quantiles(self, *, total: bool = False) -> Quantiles:
        """For a document; ``total``: with the sum."""
        most, sum_ = self.max if self.count else None, self.sum if total else None
        return Quantiles(self.count, self.quantile(0.5), self.quantile(0.99), most, sum_)


@dataclass
class JobProcess:
    """A process of the job and its counters; or ``count`` processes folded into one entry."""

    rank: int
    local_rank: int
    command: str
    watched: Watched
    count: int = 1


@dataclass
class Bin:
    """A bin of the time line: sums of bytes and events, last values of the rest."""

    prefetched_bytes: int = 0
    events: int = 0
    window_bytes: int = 0
    distance_bytes: int = 0
    under_way_bytes: int = 0
    bandwidth_bytes_per_second: float = 0.0
    reader_bytes_per_second: float = 0.0
    positions: dict[str, int] = field(default_factory=dict)  # rank -> last offset


class Timeline:
    """A fixed number of bins over the whole run."""

    def __init__(self, bins: int = TIMELINE_BINS, width_seconds: float = FIRST_BIN_SECONDS) -> None:
        self._most = bins
        self.width_seconds = width_seconds
        self.bins: list[Bin] = []

    def at(self, seconds: float) -> Bin:
        """The bin of a time since the start of the run."""
        while seconds >= self._most * self.width_seconds:
            self._double()
        index = int(seconds / self.width_seconds)
        while len(self.bins) <= index:
            self.bins.append(Bin())
        return self.bins[index]

    def _double(self) -> None:
        pairs = [self.bins[i : i + 2] for i in range(0, len(self.bins), 2)]
        self.bins = []
        for pair in pairs:
            last = next((b for b in reversed(pair) if b.window_bytes), pair[-1])
            self.bins.append(
                Bin(
                    prefetched_bytes=sum(b.prefetched_bytes for b in pair),
                    events=sum(b.events for b in pair),
                    window_bytes=last.window_bytes,
                    distance_bytes=last.distance_bytes,
                    under_way_bytes=last.under_way_bytes,
                    bandwidth_bytes_per_second=last.bandwidth_bytes_per_second,
                    reader_bytes_per_second=last.reader_bytes_per_second,
                    positions={k: v for b in pair for k, v in b.positions.items()},
                )
            )
        self.width_seconds *= 2


class FreshnessBook:
    """Results of comparing our copies with their files (service/freshness.py)."""

    def __init__(self) -> None:
        self.compared_pages = self.sampled_pages = self.rewritten_pages = 0
        self.differing_pages = self.reads = self.cpu_ns = 0
        self.old_at_most = Histogram()

    def note(self, result: uffd_compare.Result, *, pool: bool) -> None:
        """A round has ended."""
        if pool:
            self.sampled_pages += result.compared
        else:
            self.compared_pages += result.compared
        self.differing_pages += result.differing
        self.rewritten_pages += result.rewritten
        self.reads += result.reads
        self.cpu_ns += result.cpu_ns

    def describe(self) -> dict[str, Any]:
        """For the summary."""
        return {
            "compared_pages": self.compared_pages,
            "sampled_pages": self.sampled_pages,
            "differing_pages": self.differing_pages,
            "rewritten_pages": self.rewritten_pages,
            "storage_requests": self.reads,
            "cpu_seconds": round(self.cpu_ns / 1e9, 3),
            "old_at_most_ns": self.old_at_most.quantiles(),
        }


@dataclass(frozen=True)
class Note:
    """What works less well than it could. ``path``: of what file, or none; ``is_mendable``: else
    nothing better is to be had."""

    text: str
    path: str = ""
    is_mendable: bool = True

    @property
    def line(self) -> str:
        """For people."""
        return f"{self.path}: {self.text}" if self.path else self.text


class Ledger:
    """All records of a run; the service's thread writes, its summary and snapshots read."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.started_cpu_seconds = time.process_time()  # of the start itself
        self.fault_wait = Histogram()
        self.freshness = FreshnessBook()
        self.timeline = Timeline()
        self.limits: list[Note] = []
        self.left_alone: list[Note] = []
        self.unserved: dict[str, Unserved] = {}
        # by each launcher's job that has ended: by read(2), and from block devices
        self.jobs_read: list[int | None] = []
        self.jobs_storage: list[int | None] = []
        self._read: dict[tuple[int, str], int] = {}  # by read(2): (pid, path) -> position
        self.verdicts: dict[str, str] = {}
        self.laid = self.rearmed = 0
        self.bypassing = 0  # processes that change their address space past our interposers
        self.dropped_events = 0
        self.processes: list[JobProcess] = []
        self.folded: dict[int, JobProcess] = {}  # rank -> ended processes counted together
        self.streams: list[dict[str, Any]] = []
        self._jumped: set[tuple[Key, int]] = set()  # (file, rank) of rows of those that jump about
        self.closed_files: list[dict[str, Any]] = []
        self.spared: list[FileReads] = []  # of those
        self.rung: int | None = None
        self.rung_reason = "no mapping was managed"
        self.rung_lifts = True  # doctor may know how to reach the better one
        self.rung_remedy: str | None = None  # what else would
        self._is_coarse = False  # less closely than it could be
        self.coarse: dict[str, str] = {}  # why a file is followed less closely than it could be

    def seconds(self) -> float:
        """Since the service began."""
        return time.monotonic() - self.started

    def degrade(self, what: str, path: str = "", is_mendable: bool = True) -> None:
        """Note a limit that the user should know of, once; ``path``: of what file."""
        note = Note(what, path, is_mendable)
        if note not in self.limits and len(self.limits) < DEGRADATIONS_MAX:
            self.limits.append(note)

    def leave_alone(self, what: str, path: str) -> None:
        """Note, once, what needs nothing of us."""
        note = Note(what, path)
        if note not in self.left_alone and len(self.left_alone) < DEGRADATIONS_MAX:
            self.left_alone.append(note)

    @property
    def notes(self) -> list[Note]:
        """What was noted, limits first."""
        return [*self.limits, *self.left_alone][:DEGRADATIONS_MAX]

    @property
    def degradations(self) -> list[str]:
        """The same as lines."""
        return [note.line for note in self.notes]

    def refuse(self, path: str, refusal: Refusal, mapped_bytes: int = 0) -> None:
        """Note a mapping that is not served and why."""
        before = self.unserved.get(path)
        if before is not None:
            mapped_bytes = max(mapped_bytes, before.mapped_bytes)
        if before is not None or len(self.unserved) < FILES_MAX:
            self.unserved[path] = Unserved(path, mapped_bytes, refusal)

    def finished(self, read_call_bytes: int | None, storage_bytes: int | None) -> None:
        """A launcher's job has ended."""
        self.jobs_read.append(read_call_bytes)
        self.jobs_storage.append(storage_bytes)

    def read_by_calls(self, pid: int, path: str, position: int) -> None:
        """A process was seen at this offset of a file that it reads by read(2), in bytes."""
        if (pid, path) in self._read or len(self._read) < READ_MAX:
            self._read[pid, path] = max(position, self._read.get((pid, path), 0))

    def read_files(self) -> list[dict[str, Any]]:
        """For the summary: what was read by read(2) of which file, as far as it was seen."""
        files: dict[str, int] = {}
        for (_, path), position in self._read.items():
            files[path] = files.get(path, 0) + position
        most = sorted(files.items(), key=lambda one: -one[1])[:FILES_MAX]
        return [{"path": path, "bytes": position} for path, position in most]

    @property
    def refused(self) -> dict[str, str]:
        """Path -> why no mapping of it, or not all, are served."""
        return {path: one.refusal.detail for path, one in self.unserved.items()}

    def hello(self, client: Client) -> None:
        """A process of the job has connected."""
        hello = client.hello
        one = JobProcess(client.rank, hello.local_rank, hello.command, Watched(client.pid))
        client.watched = one.watched
        self.processes.append(one)
        if len(self.processes) > PROCESSES_MAX:
            self._fold()

    def _fold(self) -> None:
        """Bounds the table: the oldest ended process is folded into its rank's entry."""
        for i, one in enumerate(self.processes):
            if one.watched.ended:
                del self.processes[i]
                into = self.folded.setdefault(
                    one.rank, JobProcess(one.rank, one.local_rank, "", Watched(0, ended=True), 0)
                )
                into.watched.now = into.watched.now.plus(one.watched.now)
                into.watched.pool_misses += one.watched.pool_misses
                into.count += 1
                return

    def all_processes(self) -> list[JobProcess]:
        """Single and folded entries."""
        return [*self.processes, *self.folded.values()]

    def attached(
        self, file: FileState, verdict: wire.ServingMode, reason: str, coarse: Coarse | None = None
    ) -> None:
        """A mapping is managed; the run's sensor tier is the best of its mappings. ``reason``: why
        it is followed in this way, ``coarse``: the kind of it, where that is less closely than it
        could be.

        Until a checkpoint is laid (served()) page tables tell where they may be, too."""
        rung = 2 if verdict == wire.ServingMode.PAGE_TABLES else 1
        pooled = verdict == wire.ServingMode.POOL
        self.served(file, verdict if pooled else wire.ServingMode.PAGE_TABLES)
        if coarse is not None:
            if file.path in self.coarse or len(self.coarse) < FILES_MAX:
                self.coarse[file.path] = reason
            # there are hundreds of them
            path = "" if coarse in (Coarse.MANY, Coarse.BRIEF) else file.path
            what = f"{'' if path else 'some files: '}progress comes from page tables: {reason}"
            self.degrade(what, path, is_mendable=False)
        is_coarse = coarse is not None
        if self.rung is None or (rung, is_coarse) < (self.rung, self._is_coarse):
            self.rung, self.rung_reason, self._is_coarse = rung, reason, is_coarse
            self.rung_lifts = coarse is Coarse.NO_USERFAULTFD
            self.rung_remedy = coarse.remedy if coarse is not None else None

    def served(self, file: FileState, verdict: wire.ServingMode) -> None:
        """A mapping of the file is served so; of several the best is told."""
        before = self.verdicts.get(file.path)
        if before is None or _BEST.index(verdict.name.lower()) < _BEST.index(before):
            self.verdicts[file.path] = verdict.name.lower()

    def touch(self, rank: int, offset: int, at_ns: int) -> None:
        """Put a touch on the time line."""
        seconds = at_ns / 1e9 - self.started
        if seconds < 0:
            return
        bin_ = self.timeline.at(seconds)
        bin_.events += 1
        bin_.positions[str(rank)] = offset

    def note_streams(
        self, reader: Reader, late_extents: Callable[[Stream], int], is_served: bool = False
    ) -> None:
        """Keep a reader's streams when it ends; of one that has jumped about a single row, of where
        a process of its rank was last in the file. ``is_served``: something is read ahead of those,
        too."""
        order = reader.order
        if is_served and Trait.JUMPS in reader.traits and not order.followed:
            jumped = reader.file.key, reader.rank
            if jumped not in self._jumped and len(self.streams) < STREAMS_MAX:
                self._jumped.add(jumped)
                start, end = reader.jumps.last
                last = Stream(
                    0, reader.rank, reader.pid, start, end, reader.seen_ns, reader.seen_ns
                )
                self.streams.append({**describe_stream(reader, last, 0), "pattern": "random"})
            return
        for stream in reader.table.streams:
            if stream.active and len(self.streams) < STREAMS_MAX:
                self.streams.append(describe_stream(reader, stream, late_extents(stream)))
        had_order = order.followed or order.pending_since_ns or order.last_progress_ns
        if reader.access is Access.JUMPS and not had_order and not is_served:
            self.degrade(
                f"rank {reader.rank} jumps about (no walk found): not "
                "prefetched; a known order needs a plan",
                reader.file.path,
            )

    def close_file(self, file: FileState) -> None:
        """Keep the totals of a file whose state is dropped."""
        if len(self.closed_files) < FILES_MAX:
            self.closed_files.append(describe_file(file, self.verdicts))
        reads = reads_of(file)
        if len(self.spared) >= FILES_MAX:  # the books are of all of them
            same = [one for one in self.spared if one.request_bytes == reads.request_bytes]
            if same:
                self.spared.remove(same[0])
                reads = same[0].with_(reads)
        self.spared.append(reads)


def describe_stream(reader: Reader, stream: Stream, late_extents: int) -> dict[str, Any]:
    """A stream for the summary."""
    return {
        "file": reader.file.path,
        "rank": stream.rank,
        "pid": stream.reader,
        "pattern": "random" if reader.access is Access.JUMPS else stream.pattern,
        "start_bytes": stream.start_bytes,
        "position_bytes": stream.position_bytes,
        "density_64KiB": stream.density,
        "stride_bytes": stream.stride_bytes,
        "rate_bytes_per_second": round(stream.rate_bytes_per_second),
        "late_extents": late_extents,
    }


def describe_file(file: FileState, verdicts: dict[str, str]) -> dict[str, Any]:
    """A file for the summary."""
    both, unused, other = file.blocks.counts()
    served_by = verdicts.get(file.path)
    account, pool = file.account, file.account.pool
    pooled = file.pooled is not None or pool is not None
    return {
        "path": file.path,
        "size_bytes": file.size_bytes,
        "file_system": file.call.file_system,
        "served_by": served_by,
        "warmed_by": "the pool" if served_by == "pool" else file.call.reason,
        "change_guard": file.guard.describe(pooled=pooled),
        "changed": file.guard.changed,
        "compared_pages": file.guard.compared_pages,
        "rewritten_pages": file.guard.rewritten_pages,
        "prefetched_bytes": account.prefetched_bytes,
        "already_resident_bytes": account.already_resident_bytes,
        "late_bytes": account.late_bytes,
        "prefetched_used_blocks_bytes": both,
        "prefetched_unused_blocks_bytes": unused,
        "demand_used_blocks_bytes": other,
        "checkpoint_pages": file.copies.pages,
        "pool_read_bytes": pool.read_bytes if pool else None,
        "pool_unique_bytes": pool.unique_bytes if pool else None,
        "pool_others_bytes": pool.others_bytes if pool else None,
        "pool_given_bytes": pool.given_bytes if pool else None,
        "pool_resident_bytes": pool.resident_bytes if pool else None,
    }


def reads_of(file: FileState) -> FileReads:
    """What the kernel would have asked for in the place of what was prefetched and used.

    A file that is mapped private and writable counts as one of PyTorch's, which asks for twice the
    readahead (POSIX_FADV_SEQUENTIAL) when it maps one so. Where a request costs more than its
    bytes, one brings them all.
    """
    ahead = MISS_BYTES if file.call.ahead_bytes is None else file.call.ahead_bytes
    request_bytes = max(
        uffd.PAGE_BYTES, ahead * (2 if file.mappings.copied else 1), file.call.unit_bytes
    )
    if file.mappings.says_random:
        request_bytes = max(uffd.PAGE_BYTES, file.call.unit_bytes)
    return FileReads(
        file.blocks.used,
        request_bytes,
        file.account.brought_share,
        *file.blocks.requests_used(request_bytes),
    )
