# SPDX-License-Identifier: Apache-2.0
"""Touches of armed checkpoints, as the job's responders tell of them (csrc/job/respond.c)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from uffdprefetch.base.clock import Clock
from uffdprefetch.native import uffd
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.sense.observation import Batch, Observation
from uffdprefetch.state.client import Client
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.publisher import TOUCH, EventPublisher


class CheckpointEvents:
    """Those of one service."""

    def __init__(
        self,
        ledger: Ledger,
        publisher: EventPublisher,
        observe: Callable[[Batch], object],
        clock: Clock,
    ) -> None:
        """``observe`` hears of touches that no look at a page table will tell."""
        self._ledger, self._publisher, self._observe, self._clock = (
            ledger,
            publisher,
            observe,
            clock,
        )

    def take(self, client: Client, events: Iterable[uffd.Event]) -> None:
        """A process has touched them: its page tables, which are looked at in this turn, tell where
        its readers have begun. Where they cannot be read the touch itself tells."""
        now, told = self._clock.now_ns(), dict[int, Batch]()
        for event in events:
            region = client.regions.get(event.region)
            self._ledger.checkpoints.fault_wait.add(event.handle_ns)
            start = event.page * uffd.PAGE_BYTES
            # the ring is the client's memory: believe what can be
            if region is None or not region.span.start_bytes <= start < region.span.end_bytes:
                continue
            at_ns = min(event.time_ns, now)
            if event.page in region.checkpoints.laid:
                region.checkpoints.fired[event.page] = at_ns
            region.scan.due_ns = min(region.scan.due_ns, now)
            region.scan.news_ns = now
            if self._publisher.active:
                self._publisher.put(
                    TOUCH, at_ns, client.pid, region.file, start, uffd.PAGE_BYTES, event.handle_ns,
                    tid=event.tid,
                )  # fmt: skip
            if not client.page_table.is_readable:
                end = start + uffd.PAGE_BYTES
                around = start - BLOCK_BYTES, end + BLOCK_BYTES
                new = region.scan.mapped.missing(*around) == [around]
                seen = Observation(start, end, at_ns, new)
                told.setdefault(region.id, Batch(region, now)).touches.append(seen)
        for batch in told.values():
            self._observe(batch)
