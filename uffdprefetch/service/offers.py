# SPDX-License-Identifier: Apache-2.0
"""Checkpoints for a mapping whose job waits in mmap(2) until their pages have been read."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from uffdprefetch.base.clock import MS, Clock
from uffdprefetch.native import uffd
from uffdprefetch.predict import checkpoints
from uffdprefetch.predict.randomness import Access
from uffdprefetch.protocol import wire
from uffdprefetch.state.client import Client
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.reader import Reader, Region
from uffdprefetch.state.unserved import Coarse
from uffdprefetch.warm.scheduler import Scheduler

#: A job waits in mmap(2) for its checkpoints: what has not been read by then is not laid. The rest
#: of the 50 ms that mmap(2) may take longer than without us is for the way there and back.
CHECKPOINTS_NS = 20 * MS
#: Tests: how many steps the job waits, and what of each is for reading the pages.
_PATIENCE, _PATIENCE_NS = "UFFDPREFETCH_TEST_PATIENCE", 2 * MS


class _Offer(NamedTuple):
    """A job that waits in mmap(2), until its checkpoints have been read or ``until_ns``."""

    client: Client
    region: Region
    pages: list[int]
    memfd: int
    until_ns: int


class Offers:
    """The mappings whose jobs wait."""

    def __init__(self, scheduler: Scheduler, ledger: Ledger, clock: Clock) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._clock = clock
        self.waiting: list[_Offer] = []
        patience = os.environ.get(_PATIENCE, "")
        self._wait_ns = int(patience) * _PATIENCE_NS if patience.isdigit() else CHECKPOINTS_NS

    @property
    def due_ns(self) -> int | None:
        """When the first job has waited long enough; None: nobody waits."""
        return min((offer.until_ns for offer in self.waiting), default=None)

    def wanted(
        self, a: wire.Attach, reader: Reader, spacing_bytes: int
    ) -> tuple[list[int], list[int], bool]:
        """(the pages of a reader's new mapping that are to be checkpoints, [memfd for the agent],
        whether one like it would have some if its job waited). There are none where nothing would
        be done at once about a touch: the file is streamed, or its reader jumps about."""
        file = reader.file
        end = min(a.offset_bytes + a.length_bytes, file.size_bytes)
        span = checkpoints.Span(a.offset_bytes, end, uffd.PAGE_BYTES)
        listens = not (file.account.streamed or reader.access is Access.JUMPS)
        pages = checkpoints.fixed_set(span, spacing_bytes) if listens else []
        if not pages or a.flags & (wire.ATTACH_INHERITED | wire.ATTACH_KNOWN):
            return [], [], bool(pages)
        try:
            return pages, [file.copies.fds()[1]], True
        except OSError as error:
            self._ledger.degrade(f"no checkpoints: {error}", file.path)
            return [], [], False

    def make(self, client: Client, region: Region, pages: list[int], memfd: int) -> None:
        """The job waits from now on for these pages of a mapping."""
        until_ns = self._clock.now_ns() + self._wait_ns
        self.waiting.append(_Offer(client, region, pages, memfd, until_ns))
        self.hand_out()

    def hand_out(self) -> None:
        """Tell the agents whose pages have been read, or whose time is over, what to lay."""
        now, waiting = self._clock.now_ns(), []
        for offer in self.waiting:
            region, file = offer.region, offer.region.file
            missing = [p for p in offer.pages if p not in file.copies.written]
            if missing and now < offer.until_ns and not file.guard.changed:
                self._scheduler.copy(file, missing)
                waiting.append(offer)
                continue
            if offer.client.regions.get(region.id) is not region:
                continue  # gone meanwhile
            region.checkpoints.offered = (
                [] if file.guard.changed else [p for p in offer.pages if p in file.copies.written]
            )
            offer.client.agent.tell(
                region.id, wire.ServingMode.CHECKPOINTS, [offer.memfd],
                pages=region.checkpoints.offered, lease_fd=region.lease_fd,
            )  # fmt: skip
        self.waiting = waiting

    def laid(self, client: Client, region: Region, done: int, error: int) -> None:
        """The agent has laid the first ``done`` of those it was told of; ``error``: why no more."""
        if not region.checkpoints.offered:
            return
        region.checkpoints.laid = set(region.checkpoints.offered[:done])
        region.checkpoints.offered = []
        if region.checkpoints.laid:
            self._ledger.checkpoints.laid += len(region.checkpoints.laid)
            self._ledger.serving.served(region.file, region.mode)
        if error == errno.ETIMEDOUT:
            words = Coarse.GONE_ON.words
            self._ledger.attached(
                region.file, wire.ServingMode.PAGE_TABLES, words, Coarse.GONE_ON
            )  # fmt: skip
        elif error:
            self._ledger.degrade(
                f"pid {client.pid}: a checkpoint could not be laid ({os.strerror(error)}): "
                "followed by page tables"
            )
