# SPDX-License-Identifier: Apache-2.0
"""Which prefetchers read mostly for nothing, by process: windows ahead of its walks, the files that
follow its files. What is known is judged in predict/usage.py. And of which files windows are not
needed in the first place (predict/window.kernel_suffices()).

Not what a process, or its user, says that it will need (readers/stated.py), nor bulk warm: they
read a file once, and nobody can tell what of it will still be touched; the one is an order, the
other keeps pace with its reader (predict/bulk.Pace). Windows in a file that was streamed so are not
judged, since nobody knows whose its bytes are.

What was touched is told by page tables, at 64 KiB (FileState.blocks). So nothing is known of a
process whose page table cannot be read; nor in the pool, where a fault maps what lies around it;
nor of one that unmaps parts of a file, or gives them back, sooner than they are looked at.
"""

from __future__ import annotations

from enum import Enum

from uffdprefetch.base.units import format_size
from uffdprefetch.predict.usage import JUDGED_BYTES, Known, Usage
from uffdprefetch.predict.window import kernel_suffices
from uffdprefetch.state.files import BLOCK_BYTES, FileState, Key
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.warm.meter import Meter

#: Processes and prefetchers that are remembered.
USAGES_MAX = 1024


class Prefetcher(Enum):
    """Who may stop; the value is for people."""

    WINDOWS = "windows ahead of its walks"
    NEXT_SHARD = "the file that follows"


def _key(who: Prefetcher, pid: int, file: FileState) -> tuple[Prefetcher, int, Key | None]:
    return who, pid, file.key if who is Prefetcher.WINDOWS else None


class Waste:
    """Of a service, whose thread calls everything here."""

    def __init__(self, ledger: Ledger, meter: Meter) -> None:
        self._ledger, self._meter = ledger, meter
        self._usages: dict[tuple[Prefetcher, int, Key | None], Usage] = {}

    def stopped(self, who: Prefetcher, pid: int, file: FileState) -> bool:
        """Whether it is to read nothing for a process: windows in this file, NEXT_SHARD of any."""
        usage = self._usages.get(_key(who, pid, file))
        return usage is not None and usage.stopped

    def is_needless(self, file: FileState) -> bool:
        """Whether windows ahead of who reads the file in order add nothing to what the kernel reads
        ahead by itself; a finding says so."""
        ahead_bytes = file.ahead_bytes or 0
        if not kernel_suffices(ahead_bytes, self._meter.of_pages):
            return False
        size = format_size(ahead_bytes)
        why = f"left to the kernel, whose readahead of {size} suffices"
        self._ledger.leave_alone(f"{file.path}: {why}")
        return True

    def passed(self, who: Prefetcher, pid: int, file: FileState, start: int, end: int) -> bool:
        """A process has passed [start, end) bytes, or left them for good, that the prefetcher had
        read, or would have had it not been stopped; whether it is stopped by that. Ends within
        blocks belong to what is passed later."""
        key = _key(who, pid, file)
        usage = self._usages.get(key)
        if usage is None:
            usage = self._usages[key] = Usage()
            if len(self._usages) > USAGES_MAX:
                del self._usages[next(iter(self._usages))]
        first, last = start // BLOCK_BYTES, end // BLOCK_BYTES
        if last <= first:
            return usage.stopped
        both, untouched, demanded = file.block_counts(first, last)
        if usage.stopped:
            both += demanded
            untouched = (last - first) * BLOCK_BYTES - both
        known = Known(both, untouched, file.used_runs(first, last))
        if usage.note(known, self._meter.storage):
            self._ledger.degrade(
                f"{file.path}: half of {JUDGED_BYTES >> 20} MiB read ahead was not touched"
                f" (pid {pid}, {who.value}): no more is read until it touches half of what it"
                " passes"
            )
        return usage.stopped
