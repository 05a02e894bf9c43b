# SPDX-License-Identifier: Apache-2.0
"""Costs and results of a run: counters, a wait histogram, a bounded time line, degradations."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from uffdprefetch.base.record import dataclass, field
from uffdprefetch.native import compare as uffd_compare
from uffdprefetch.predict.randomness import Access
from uffdprefetch.predict.streams import Stream
from uffdprefetch.protocol import wire
from uffdprefetch.protocol.document import Quantiles
from uffdprefetch.state.closed_book import ClosedBook
from uffdprefetch.state.files import FileState
from uffdprefetch.state.job_processes import JobProcesses
from uffdprefetch.state.job_reads import JobReads
from uffdprefetch.state.notes import Note, Notes
from uffdprefetch.state.reader import Reader
from uffdprefetch.state.serving_book import ServingBook
from uffdprefetch.state.unserved import Coarse, Refusal, Unserved

#: Bins of the time line, whose width doubles when the run outgrows them ([Darshan]).
TIMELINE_BINS = 512
FIRST_BIN_SECONDS = 0.1
FILES_MAX = 256


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


class CheckpointBook:
    """Checkpoints that were laid, and what touches of them have told."""

    def __init__(self) -> None:
        self.laid = self.rearmed = 0
        self.dropped_events = 0
        self.fault_wait = Histogram()


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


class Ledger:
    """All records of a run; the service's thread writes, its summary and snapshots read."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.started_cpu_seconds = time.process_time()  # of the start itself
        self.checkpoints = CheckpointBook()
        self.freshness = FreshnessBook()
        self.timeline = Timeline()
        self.noted = Notes()
        self.unserved: dict[str, Unserved] = {}
        self.serving = ServingBook()
        self.jobs = JobReads()
        self.processes = JobProcesses()
        self.closed = ClosedBook()
        self.bypassing = 0  # processes that change their address space past our interposers

    def seconds(self) -> float:
        """Since the service began."""
        return time.monotonic() - self.started

    def degrade(self, what: str, path: str = "", is_mendable: bool = True) -> None:
        """Note a limit that the user should know of, once; ``path``: of what file."""
        self.noted.limit(Note(what, path, is_mendable))

    def not_done(self, what: str) -> None:
        """Note, once, that something is not done for which the user has asked by an option."""
        self.noted.limit(Note(what, is_asked=True))

    def leave_alone(self, what: str, path: str) -> None:
        """Note, once, what needs nothing of us."""
        self.noted.leave(Note(what, path))

    @property
    def degradations(self) -> list[str]:
        """The same as lines."""
        return [note.line for note in self.noted.all]

    def refuse(self, path: str, refusal: Refusal, mapped_bytes: int = 0) -> None:
        """Note a mapping that is not served and why."""
        before = self.unserved.get(path)
        if before is not None:
            mapped_bytes = max(mapped_bytes, before.mapped_bytes)
        if before is not None or len(self.unserved) < FILES_MAX:
            self.unserved[path] = Unserved(path, mapped_bytes, refusal)

    @property
    def refused(self) -> dict[str, str]:
        """Path -> why no mapping of it, or not all, are served."""
        return {path: one.refusal.detail for path, one in self.unserved.items()}

    def attached(
        self, file: FileState, mode: wire.ServingMode, reason: str, coarse: Coarse | None = None
    ) -> None:
        """A mapping is managed; the run's sensor tier is the best of its mappings. ``reason``: why
        it is followed in this way, ``coarse``: the kind of it, where that is less closely than it
        could be.

        Until a checkpoint is laid (served()) page tables tell where they may be, too."""
        rung = 2 if mode == wire.ServingMode.PAGE_TABLES else 1
        pooled = mode == wire.ServingMode.POOL
        self.serving.served(file, mode if pooled else wire.ServingMode.PAGE_TABLES)
        if coarse is not None:
            self.serving.note_coarse(file, reason)
            # there are hundreds of them
            path = "" if coarse in (Coarse.MANY, Coarse.BRIEF) else file.path
            what = f"{'' if path else 'some files: '}followed less closely: {reason}"
            self.degrade(what, path, is_mendable=False)
        self.serving.reached(rung, reason, coarse)

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
        """A reader ends; see ClosedBook.note_reader()."""
        self.closed.note_reader(reader, late_extents, is_served)
        order = reader.order
        had_order = order.followed or order.pending_since_ns or order.last_progress_ns
        if reader.access is Access.JUMPS and not had_order and not is_served:
            self.degrade(
                f"rank {reader.rank} jumps about (no stream found): not "
                "prefetched; a known order needs a plan",
                reader.file.path,
            )

    def close_file(self, file: FileState) -> None:
        """Keep the totals of a file whose state is dropped."""
        self.closed.note_file(file, self.serving.modes)
