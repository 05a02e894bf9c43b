# SPDX-License-Identifier: Apache-2.0
"""What is kept of readers that have ended and of files that were closed, for the summary; and how
files and streams are described there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from uffdprefetch.base.record import dataclass, field
from uffdprefetch.native import uffd
from uffdprefetch.predict.gain import FileReads
from uffdprefetch.predict.randomness import Access
from uffdprefetch.predict.storage import MISS_BYTES
from uffdprefetch.predict.streams import Stream
from uffdprefetch.state.files import FileState, Key
from uffdprefetch.state.reader import Reader, Trait

STREAMS_MAX = 256
FILES_MAX = 256


@dataclass
class ClosedBook:
    """In bounded space. ``reads``: requests of the kernel that were avoided in closed files."""

    streams: list[dict[str, Any]] = field(default_factory=list)
    files: list[dict[str, Any]] = field(default_factory=list)
    reads: list[FileReads] = field(default_factory=list)
    _jumped: set[tuple[Key, int]] = field(default_factory=set)  # (file, rank) of rows of jumpers

    def note_reader(
        self, reader: Reader, late_extents: Callable[[Stream], int], is_served: bool = False
    ) -> None:
        """Keep a reader's streams when it ends; of one that has jumped about a single row, of where
        a process of its rank was last in the file. ``late_extents``: of a stream, came late;
        ``is_served``: something is read ahead of those that jump, too."""
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

    def note_file(self, file: FileState, modes: dict[str, str]) -> None:
        """Keep the totals of a file whose state is dropped."""
        if len(self.files) < FILES_MAX:
            self.files.append(describe_file(file, modes))
        reads = reads_of(file)
        if len(self.reads) >= FILES_MAX:  # the books are of all of them
            same = [one for one in self.reads if one.request_bytes == reads.request_bytes]
            if same:
                self.reads.remove(same[0])
                reads = same[0].with_(reads)
        self.reads.append(reads)


def describe_stream(reader: Reader, stream: Stream, late_extents: int) -> dict[str, Any]:
    """A stream for the summary."""
    return {
        "file": reader.file.path,
        "rank": stream.rank,
        "pid": stream.reader,
        "pattern": "random" if reader.access is Access.JUMPS else stream.pattern,
        "start_bytes": stream.start_bytes,
        "position_bytes": stream.position_bytes,
        "density_64KiB": stream.passed.density,
        "stride_bytes": stream.passed.stride_bytes,
        "rate_bytes_per_second": round(stream.rate_bytes_per_second),
        "late_extents": late_extents,
    }


def describe_file(file: FileState, modes: dict[str, str]) -> dict[str, Any]:
    """A file for the summary."""
    both, unused, other = file.blocks.counts()
    served_by = modes.get(file.path)
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
        "pool_disk_bytes": pool.disk_bytes if pool else None,
        "pool_disk_read_bytes": pool.disk_read_bytes if pool else None,
    }


def reads_of(file: FileState) -> FileReads:
    """Readahead requests that the kernel would have made for the prefetched blocks that were used.

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
    used, unused, _ = file.blocks.counts()
    return FileReads(
        file.blocks.used,
        request_bytes,
        file.account.brought_share(used + unused),
        *file.blocks.requests_used(request_bytes),
        file.blocks.stretches_used(),
    )
