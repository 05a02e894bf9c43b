# SPDX-License-Identifier: Apache-2.0
"""Small files by their names: in the order in which a directory is gone over (small_files.py), or
in one that the job has told (ordered_files.py). What reads them is made when it is needed first:
most runs need none of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uffdprefetch.base.clock import MS
from uffdprefetch.predict.file_orders import WINDOW_MOST_FILES
from uffdprefetch.sense.read_calls import ReadSeen
from uffdprefetch.service.coordinator import Coordinator
from uffdprefetch.service.ordered_files import OrderedFiles
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import Opener

if TYPE_CHECKING:
    from uffdprefetch.protocol.snapshot import SmallFilesAhead
    from uffdprefetch.service.small_files import SmallFiles
    from uffdprefetch.service.small_reads import Watching

#: How often the queue of opens is read: what a full window is ahead of who opens small files lasts
#: longer. Each turn of the service takes CPU that the job may need.
STEP_NS = 10 * MS
#: A window that is only begun lasts less: it is looked the sooner whether it is used up, but not
#: before storage can have brought something.
STEP_LEAST_NS = 2 * MS
#: Trees and orders that a watcher is told of, as many as files (live.py).
LIVE_MOST = 64


class FollowedNames:
    """Of one run. The service's thread calls everything here. ``ordered``: whom orders of files are
    told."""

    def __init__(
        self, rundir: str, small_bytes: int, core: Coordinator, opener: Opener, ledger: Ledger
    ) -> None:
        """``rundir``: where services tell each other what they watch; ``small_bytes``: a file that
        is as large is none."""
        self._rundir, self._small_bytes = rundir, small_bytes
        self._core, self._opener, self._ledger = core, opener, ledger
        self.ordered = OrderedFiles(self._made)
        self._watching: Watching | None = None
        self._small: SmallFiles | None = None
        self._step_ns = 0

    def _made(self) -> Watching | None:
        """None: it cannot be had."""
        if self._watching is not None or not self._rundir:
            return self._watching
        from uffdprefetch.native.paths import PathReader
        from uffdprefetch.sense.opens import Opens
        from uffdprefetch.service.small_files import SmallFiles
        from uffdprefetch.service.small_reads import ReadBounds, SmallReads, Watching

        rundir, self._rundir = self._rundir, ""
        try:
            opens = Opens(rundir)
        except OSError as error:
            self._ledger.degrade(f"small files are not read ahead: {error}")
            return None
        try:
            reader = PathReader()
        except OSError as error:
            opens.close()
            self._ledger.degrade(f"small files are not read ahead: {error}")
            return None
        core, ahead = self._core, self._core.ahead
        bounds = ReadBounds(core.scheduler.bucket, lambda: core.windows.allowed_bytes)
        reads = SmallReads(reader, self._small_bytes, ahead.account, ahead.measured, bounds)
        self._watching = Watching(opens, reads, self._opener, self._ledger)
        self._small = SmallFiles(self._watching, core.table.wants)
        return self._watching

    @property
    def due_ns(self) -> int | None:
        """When step() is due though nothing happens; None: nothing is watched."""
        parts = (self.ordered, self._small, self._watching)
        active = any(part is not None and part.active for part in parts)
        return self._step_ns if active else None

    def step(self, now_ns: int, waited: list[ReadSeen]) -> None:
        """Once a turn. ``waited``: small files that processes were seen to wait for."""
        if waited and self._made() is not None and self._small is not None:
            self._small.seen(waited)
        due_ns, watching, small = self.due_ns, self._watching, self._small
        if due_ns is None or now_ns < due_ns or watching is None or small is None:
            return
        events = watching.opens.read()
        small.step(now_ns, events, watching.reads.reap())
        ahead = small.fewest_ahead(now_ns - STEP_NS) or WINDOW_MOST_FILES
        wait_ns = max(STEP_LEAST_NS, STEP_NS * ahead // WINDOW_MOST_FILES)
        self._step_ns = now_ns + min(STEP_NS, wait_ns)
        self.ordered.step(watching, events)
        watching.step()

    @property
    def used_bytes(self) -> int:
        """Of small files that were read ahead, and opened."""
        return self._watching.reads.counts.used_bytes if self._watching is not None else 0

    def bytes_ahead(self) -> tuple[int, int]:
        """Of small files, what was read ahead, and what of that was opened."""
        counts = self._watching.reads.counts if self._watching is not None else None
        return (counts.read_bytes, counts.used_bytes) if counts is not None else (0, 0)

    def describe(self) -> dict[str, Any] | None:
        """For the summary (docs/summary-schema.md, ``reads``)."""
        watching = self._watching
        if watching is None:
            return None
        return {**vars(watching.reads.counts), "uncounted": watching.mounts.uncounted}

    def live(self) -> SmallFilesAhead | None:
        """For a watcher; None: no small files are looked at."""
        if self._watching is None or self._small is None:
            return None
        from uffdprefetch.protocol.snapshot import SmallFilesAhead

        counts, trees, orders = self._watching.reads.counts, self._small.live(), self.ordered.live()
        return SmallFilesAhead(
            read=counts.read,
            read_bytes=counts.read_bytes,
            used=counts.used,
            used_bytes=counts.used_bytes,
            already_resident=counts.there,
            trees=tuple(trees[:LIVE_MOST]),
            trees_not_listed=max(0, len(trees) - LIVE_MOST),
            orders=tuple(orders[:LIVE_MOST]),
            orders_not_listed=max(0, len(orders) - LIVE_MOST),
        )

    def close(self) -> None:
        """End it."""
        if self._watching is not None:
            self._watching.close()
