# SPDX-License-Identifier: Apache-2.0
"""What came of each extent that was read: the books, the meter, and whether the call that fills the
page cache does what it was chosen for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from uffdprefetch.base.cache_call import corrected, probed
from uffdprefetch.native import uffd
from uffdprefetch.state.files import FileState
from uffdprefetch.warm.consumer import Consumer
from uffdprefetch.warm.meter import TELLING_BYTES, Meter
from uffdprefetch.warm.token_bucket import TokenBucket

if TYPE_CHECKING:
    from uffdprefetch.state.pool_file import PoolFile


class Fetched(Protocol):
    """What was asked for (scheduler.py, Extent)."""

    file: FileState
    start: int
    end: int
    consumer: Consumer | None
    pooled: PoolFile | None
    pages: list[int]
    alone: bool

    @property
    def at(self) -> int:
        """Where its consumer needs it, in the consumer's own coordinate."""

    @property
    def window_bytes(self) -> int:
        """How much of it was under way at one time; 0: all."""


class Results:
    """Of one service."""

    def __init__(
        self, meter: Meter, bucket: TokenBucket, on_finding: Callable[[str], None]
    ) -> None:
        """``on_finding``: told what a user should know of, once."""
        self._meter, self._bucket, self._on_finding = meter, bucket, on_finding
        self._told: set[str] = set()  # files whose pages do not stay
        self.prefetched_bytes = 0
        self.failed_extents = 0
        self.last_error = ""

    def none(self, read: Fetched, result: uffd.WarmResult) -> None:
        """Of no extent: checkpoint pages were copied, or it failed."""
        if result.error:
            self.failed_extents += 1
            self.last_error = f"{read.file.path} at {read.start}: errno {-result.error}"
        else:
            self._meter.note_pages(result, len(read.pages))

    def note(
        self, read: Fetched, result: uffd.WarmResult, was_idle: bool, beside_bytes: int
    ) -> float | None:
        """An extent was read. ``was_idle``: nothing was under way before it; ``beside_bytes``: what
        is under way beside it, if that tells the bandwidth as it does. None: it does not tell that;
        bytes/s of a stretch that has ended with it, else 0."""
        file = read.file
        self._check_call(read, result)
        if read.pooled is None:
            file.cache.recent.add(read.start, read.end)
        brought = self._brought(read, result)
        if not brought:
            return None
        self._meter.note_any(result, read.alone)
        self._meter.quickest.note(result, brought)
        if read.alone:
            self._meter.note_alone(result)
        sample = None
        if max(result.bytes, beside_bytes) >= TELLING_BYTES and not read.window_bytes:
            sample = self._meter.note(result, was_idle, read.alone) or 0.0
        self._note_late(read, brought)
        return sample

    def _brought(self, read: Fetched, result: uffd.WarmResult) -> int:
        """To the books; how much of it was not there before, bytes."""
        file, there, brought = read.file, result.resident_bytes, result.bytes
        if result.sensor < 0:  # nobody says what was there: by what our own reads had to fetch
            counted = file.call.counts_reads and result.storage_bytes >= 0
            fetched = result.storage_bytes if counted else result.waited_bytes
            brought = min(result.bytes, fetched)
            there = result.bytes - brought
        file.account.came(brought, there)
        self._bucket.take(-there)
        if read.consumer is not None:
            length = read.end - read.start
            read.consumer.feedback.came(length, brought, result.took_ns / 1e9)
        if brought:
            self.prefetched_bytes += brought
            file.blocks.mark_prefetched(read.start, read.end)
        return brought

    @staticmethod
    def _note_late(read: Fetched, brought: int) -> None:
        """Whether its consumer had passed it by then."""
        consumer = read.consumer
        if consumer is None:
            return
        late = (consumer.position_bytes - read.at) * consumer.direction > 0
        if consumer.direction < 0:
            late = consumer.position_bytes < read.end
        if late:
            read.file.account.late(brought)
        consumer.feedback.note(late)

    def _check_call(self, read: Fetched, result: uffd.WarmResult) -> None:
        """What a probe has found; or whether the call still does what it was chosen for."""
        file = read.file
        if file.call.method == uffd.WARM_PROBE and read.pooled is None:
            if result.method != uffd.WARM_PROBE:
                chunk_bytes, ahead_bytes = result.chunk_bytes, file.call.ahead_bytes
                file.call.use(probed(result.method, chunk_bytes, ahead_bytes), file.opened.fd)
            return
        if result.method != file.call.method or read.window_bytes:  # sent before that was chosen
            return
        found = file.call.doubt.note(result.asked_bytes, result.came_bytes)
        if found is None:
            return
        choice = corrected(file.call.method, *found)
        if choice is not None:
            file.call.use(choice, file.opened.fd)
            self._on_finding(f"{file.path}: {choice.reason}")
        elif file.path not in self._told:
            self._told.add(file.path)
            self._on_finding(
                f"{file.path}: of {found[0] >> 20} MiB read ahead {found[1] >> 20} MiB stayed in "
                "the page cache: its file system, or memory that is short, does not keep them"
            )
