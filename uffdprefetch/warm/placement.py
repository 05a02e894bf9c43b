# SPDX-License-Identifier: Apache-2.0
"""A reader's checkpoints: armed again behind it. predict/checkpoints.py says where they are."""

from __future__ import annotations

from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.native import uffd
from uffdprefetch.predict.bounds import LATELY_NS
from uffdprefetch.predict.streams import Stream
from uffdprefetch.protocol import wire
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.reader import Region
from uffdprefetch.warm.windows import Windows


class CheckpointPlacer:
    """Checkpoints of the regions of one service."""

    def __init__(self, windows: Windows, ledger: Ledger, clock: Clock = CLOCK) -> None:
        self._windows, self._ledger, self._clock = windows, ledger, clock

    def refresh(self, region: Region) -> None:
        """Arm again what its readers have left behind, after LATELY_NS: the threads of a reader,
        and its next few records, would touch it again at once."""
        if region.mode == wire.ServingMode.POOL:
            self._rearm_pool(region)
        elif region.checkpoints.fired:
            self._rearm(region)

    def _rearm(self, region: Region) -> None:
        now = self._clock.now_ns()
        old = [page for page, at in region.checkpoints.fired.items() if now - at > LATELY_NS]
        if not old:
            return
        kept, pages = [self._reach(s) for s in region.reader.table.active()], []
        for page in old:
            offset = page * uffd.PAGE_BYTES
            if not any(low <= offset <= high for low, high in kept):
                pages.append(page)
        if pages:
            region.reader.client.agent.command(wire.Type.REARM, region.id, sorted(pages))
            self._ledger.checkpoints.rearmed += len(pages)
        for page in pages:
            del region.checkpoints.fired[page]

    def _rearm_pool(self, region: Region) -> None:
        """In the pool, one page of each 4 MiB that was read leaves the page table: what stays in
        the pool over the epochs would give no sign of its reader otherwise."""
        now = self._clock.now_ns()
        if now < region.checkpoints.rearm_at_ns:
            return
        region.checkpoints.rearm_at_ns = now + LATELY_NS // 10
        kept = [self._reach(s) for s in region.reader.table.active()]
        pages = []
        for cell, at in list(region.checkpoints.fired.items()):
            page = region.checkpoints.armed[cell]
            offset = page * uffd.PAGE_BYTES
            if now - at > LATELY_NS and not any(low <= offset <= high for low, high in kept):
                pages.append(page)
                del region.checkpoints.fired[cell], region.checkpoints.armed[cell]
        if pages:
            region.reader.client.agent.command(wire.Type.REARM, region.id, sorted(pages))
            self._ledger.checkpoints.rearmed += len(pages)

    def _reach(self, stream: Stream) -> tuple[int, int]:
        """Around a reader: what it may touch again right now."""
        distance = self._windows.of(stream).step_bytes
        at = stream.position_bytes
        return at - distance, at + distance
