# SPDX-License-Identifier: Apache-2.0
"""`--learn`: which orders of mapped files were kept of earlier runs, and what is kept of this one.

Threads of their own do both: the service's loop waits for no file of a user's home.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import Any

from uffdprefetch.base.config import LearnOptions
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.start_key import profile_directory, ranges_path
from uffdprefetch.base.units import MIB
from uffdprefetch.orders import learned_ranges
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.readers.learned_plans import LearnedPlans, PlanFate, RankRun
from uffdprefetch.state.opening import Opener

log = logging.getLogger("uffdprefetch.serve")

#: Of what a rank has touched this part was beside where it had been: it went in order, which needs
#: no plan. And what an order is to have of what its reader has touched: else the rest is added.
IN_ORDER_PART = 0.9
#: Less of a file is not kept: it is its head, and what a few misses bring.
LEAST_BYTES = 1 * MIB


class Learned(Enum):
    """What came of what a rank has done with a file."""

    WRITTEN = "written"
    ADDED = "added"  # to the order that was followed
    KEPT = "kept"  # as it was followed
    REMOVED = "removed"  # as it was wrong
    PUT_OFF = "put_off"  # as those of the runs before were wrong
    IN_ORDER = "in_order"
    LITTLE = "little"
    FAILED = "failed"


def lesson(run: RankRun) -> Learned:
    """What is to be made of it."""
    touched_bytes = run.touches.blocks * BLOCK_BYTES
    if run.fate is PlanFate.DROPPED:
        return Learned.REMOVED
    if run.fate is PlanFate.FOLLOWED:
        is_known = IN_ORDER_PART * touched_bytes <= run.known_bytes
        return Learned.KEPT if is_known else Learned.ADDED
    if touched_bytes < LEAST_BYTES:
        return Learned.LITTLE
    if run.touches.in_order_blocks >= IN_ORDER_PART * run.touches.blocks:
        return Learned.IN_ORDER
    return Learned.WRITTEN


class LearnedOrders:
    """Of one run. The service's thread calls everything here."""

    def __init__(self, options: LearnOptions, plans: LearnedPlans, opener: Opener) -> None:
        self._plans, self._name = plans, options.name or ""
        own = profile_directory(os.environ)
        #: Where orders are written; None: there is no place for them.
        self._own = ranges_path(own, self._name) if own is not None else None
        site = options.directory
        directories = [self._own] if self._own is not None else []
        directories += [ranges_path(site, self._name)] if site is not None else []
        self._writing: threading.Thread | None = None
        self._runs = 0  # of which something is to be learned
        self._came: Counter[Learned] = Counter()
        self._bytes = 0
        opener.run(lambda: kept_in(directories, self._own), self._listed)

    def _listed(self, found: dict[str, str] | OSError) -> None:
        if not isinstance(found, OSError):
            self._plans.found(found)

    def describe(self) -> dict[str, Any]:
        """For the summary (docs/summary-schema.md, ``learn.orders``)."""
        followed, dropped = self._plans.counts()
        came = {what.value: self._came[what] for what in Learned}
        return {
            "followed": followed, "dropped": dropped, **came,
            "being_written": self._runs - self._came.total(), "bytes": self._bytes,
        }  # fmt: skip

    def end(self) -> None:
        """The job is over: what is to be learned of it is written. Does not wait."""
        if self._writing is None:
            runs = self._plans.end()
            self._runs = len(runs)
            self._writing = threading.Thread(
                target=self._keep, args=(runs,), name="learn-orders", daemon=True
            )
            self._writing.start()

    def join(self, seconds: float) -> None:
        """Once it was ended, wait until all is written, no longer than this."""
        if self._writing is not None:
            self._writing.join(seconds)

    # -------------------------------------------------------------- the thread's

    def _keep(self, runs: Sequence[RankRun]) -> None:
        written = []
        for run in runs:
            what = lesson(run)
            try:
                what = self._believed(run, what)
                if what in (Learned.WRITTEN, Learned.ADDED, Learned.REMOVED):
                    what = self._change(run, what)
            except (OSError, UffdPrefetchError) as error:
                log.warning("an order is not kept: %s", error)
                what = Learned.FAILED
            self._came[what] += 1
            if what in (Learned.WRITTEN, Learned.ADDED):
                written.append(run.name)
        try:
            if written and self._own is not None:
                learned_ranges.tidy(self._own, written)
        except OSError as error:
            log.warning("older orders are not removed: %s", error)

    def _believed(self, run: RankRun, what: Learned) -> Learned:
        """What becomes of it after what became of the runs before. Raises OSError."""
        if self._own is None or what in (Learned.LITTLE, Learned.IN_ORDER):
            return what
        before = now = learned_ranges.doubt(self._own, run.name)
        if what is Learned.REMOVED:
            now = before.dropped()
        elif what is not Learned.WRITTEN:
            now = learned_ranges.OrderDrops()
        elif before.runs_left:
            what, now = Learned.PUT_OFF, before.put_off()
        if now != before:
            learned_ranges.set_doubt(self._own, run.name, now)
        return what

    def _change(self, run: RankRun, what: Learned) -> Learned:
        """Change what is kept. Raises OSError, UffdPrefetchError."""
        own, spans = self._own, run.touches.spans
        if own is None:
            raise OSError("neither XDG_CACHE_HOME nor HOME names a place for it")
        if what is Learned.REMOVED and run.plan == learned_ranges.document_path(own, run.name):
            learned_ranges.remove(own, run.name)  # the next run is learned anew
            return what
        if what is Learned.ADDED and run.plan is not None:
            from uffdprefetch.orders import learned_plan  # numpy, which the order has brought

            size = run.file.times.size_bytes
            spans = learned_plan.joined(learned_plan.load(run.plan).spans(size), spans, size)
        # where a site's was wrong, an own one takes its place
        learned_ranges.store(own, run.name, run.file.path, spans)
        self._bytes += learned_ranges.sizes(own, run.name)[0]
        return Learned.ADDED if what is Learned.ADDED else Learned.WRITTEN


def kept_in(directories: Sequence[str], doubts: str | None) -> dict[str, str]:
    """By name, the plan files that lie there, of the first directory that has one of that name.
    ``doubts``: of the directory with those; of whom nothing is to be learned, nobody's is
    followed."""
    found: dict[str, str] = {}
    for directory in directories:
        try:
            for name in learned_ranges.names(directory):
                found.setdefault(name, learned_ranges.document_path(directory, name))
        except OSError as error:
            log.warning("learned orders cannot be listed: %s", error)
    if doubts is not None:
        with contextlib.suppress(OSError):  # told above
            for name in learned_ranges.doubted(doubts):
                if learned_ranges.doubt(doubts, name).runs_left:
                    found.pop(name, None)
    return found
