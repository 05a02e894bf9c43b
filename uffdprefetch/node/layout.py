# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a region: laid ahead of the readers, armed again or taken away behind them.

plan/checkpoints.py says where they should be; this says what to tell the agent, given what is laid
and which pages of the checkpoint memfd are written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from uffdprefetch import uffd
from uffdprefetch.config import Config
from uffdprefetch.node import wire
from uffdprefetch.node.client import Client, Region
from uffdprefetch.node.ledger import Ledger
from uffdprefetch.plan import checkpoints, window
from uffdprefetch.progress.streams import REACH_BYTES, Stream
from uffdprefetch.warm.scheduler import Scheduler, now_ns

if TYPE_CHECKING:
    from uffdprefetch.node.planned import Plans
    from uffdprefetch.node.pool import NodePool

REARM_NS = 1_000_000_000
#: The set over the whole file is one small read each on cold storage: a few at a time.
COPIES_AT_ONCE = 32
#: Places where a stream has perhaps just begun: close checkpoints at the latest of them.
FRESH_MAX = 16


class Layout:
    """Keeps what is laid equal to what is wanted."""

    def __init__(self, config: Config, scheduler: Scheduler, ledger: Ledger) -> None:
        self._config = config
        self._scheduler = scheduler
        self._ledger = ledger
        self.allowed_bytes = config.budget_bytes
        self.pool: NodePool | None = None
        self.plans: Plans | None = None

    def lookahead(self, stream: Stream, region: Region | None = None) -> int:
        """Bytes ahead of a stream that its policy wants now."""
        streams = max(1, self._ledger.active_streams)
        share = self.allowed_bytes // streams
        if self.pool and region and region.verdict == wire.Verdict.POOL:
            share = self.pool.window_bytes()
        if self._config.policy == "fixed":
            return min(self._config.size_bytes, max(share, window.MIB))
        return window.lookahead_bytes(stream, self._scheduler.meter.storage, share)

    def distance(self, stream: Stream) -> int:
        """Spacing of a stream's dense checkpoints, bytes."""
        chosen = self._config.distance_bytes
        return checkpoints.distance_bytes(
            stream.rate_bytes_per_second, self.lookahead(stream), chosen
        )

    def _wanted(self, region: Region) -> set[int]:
        wanted = set(region.starts)
        if now_ns() >= region.sparse_from_ns:
            wanted |= region.sparse
        for stream in region.table.active():
            wanted |= checkpoints.dense(
                region.span,
                stream.position_bytes,
                self.lookahead(stream),
                self.distance(stream),
                stream.direction,
            )
        fresh = [s for s in region.table.streams if s.touches < 3]
        for stream in sorted(fresh, key=lambda s: -s.last_ns)[:FRESH_MAX]:
            wanted |= checkpoints.near(region.span, stream.position_bytes)
        return wanted

    def refresh(self, client: Client, region: Region) -> None:
        if region.verdict == wire.Verdict.POOL:
            self._rearm_behind(client, region)
            return
        if region.verdict != wire.Verdict.CHECKPOINTS:
            self._drop_samples(client, region)
            return
        planned = self.plans.reader(client, region) if self.plans is not None else None
        wanted = planned.milestones(region) if planned is not None else self._wanted(region)
        missing = wanted - region.laid
        unwritten = missing - region.file.written - region.file.pending_pages
        soon = unwritten - region.sparse
        later = sorted(unwritten & region.sparse)[:COPIES_AT_ONCE]
        self._scheduler.copy(region.file, sorted(soon) + later)
        ready = missing & region.file.written
        room = client.overlay_share - client.cuts()
        if len(ready - region.cut) > room and len(region.cut) > 2 * len(wanted):
            self._renew(client, region)
            ready = wanted & region.file.written
            room = client.overlay_share - client.cuts()
        # a page that was laid before is cut out already
        again, new = sorted(ready & region.cut), sorted(ready - region.cut)
        laying = sorted(again + new[: max(0, room)])
        if laying:
            region.laid.update(laying)
            region.cut.update(laying)
            client.command(wire.Type.LAY, region.id, laying)
            self._ledger.laid += len(laying)
        if planned is not None:
            planned.note_laid(region)
        self._clear_behind(client, region, wanted)

    def _renew(self, client: Client, region: Region) -> None:
        """All of it in one piece again. Where mappings have a close operation (FUSE, Lustre) what
        is taken away does not merge: a walk through a large file would cut it up without end."""
        self._ledger.taken += len(region.laid)
        region.laid.clear()
        region.fired.clear()
        region.cut.clear()
        client.command(wire.Type.RENEW, region.id, [])

    def _clear_behind(self, client: Client, region: Region, wanted: set[int]) -> None:
        """Behind the readers: what is still wanted (sparse, starts) is armed again for the next
        epoch, the rest is taken away."""
        now = now_ns()
        take, arm = [], []
        kept = [] if region.known else [self._reach(s) for s in region.table.active()]
        for page in region.laid - wanted:
            at = page * uffd.PAGE_BYTES
            if not any(low <= at <= high for low, high in kept):
                take.append(page)
        for page, at in region.fired.items():
            if page in wanted and page in region.laid and now - at > REARM_NS:
                arm.append(page)
        if take:
            region.laid.difference_update(take)
            client.command(wire.Type.TAKE, region.id, sorted(take))
            self._ledger.taken += len(take)
        if arm:
            client.command(wire.Type.REARM, region.id, sorted(arm))
            self._ledger.rearmed += len(arm)
        for page in (*take, *arm):
            region.fired.pop(page, None)

    def _rearm_behind(self, client: Client, region: Region) -> None:
        """In the pool, one page of each 4 MiB that was read leaves the page table: what stays in
        the pool over the epochs would give no sign of its reader otherwise."""
        now = now_ns()
        if now < region.rearm_at_ns:
            return
        region.rearm_at_ns = now + REARM_NS // 10
        kept = [self._reach(s) for s in region.table.active()]
        pages = []
        for cell, at in list(region.fired.items()):
            page = region.armed[cell]
            offset = page * uffd.PAGE_BYTES
            if now - at > REARM_NS and not any(low <= offset <= high for low, high in kept):
                pages.append(page)
                del region.fired[cell], region.armed[cell]
        if pages:
            client.command(wire.Type.REARM, region.id, sorted(pages))
            self._ledger.rearmed += len(pages)

    def _reach(self, stream: Stream) -> tuple[int, int]:
        """From just behind a reader to the end of its dense set: checkpoints there stay."""
        distance = self.distance(stream)
        far = max(self.lookahead(stream), distance * checkpoints.AHEAD_MAX)
        at = stream.position_bytes
        return (at - distance, at + far) if stream.direction > 0 else (at - far, at + distance)

    def _drop_samples(self, client: Client, region: Region) -> None:
        """Rung 2: a 64 KiB sample of each passed distance leaves the page table, so that the next
        epoch shows. Never of a private mapping."""
        if not region.shared or client.observed:
            return
        for stream in region.table.active():
            distance = self.distance(stream)
            done = stream.position_bytes - 2 * distance
            first = max(stream.dropped_bytes, stream.start_bytes) // distance + 1
            if stream.dropped_bytes > done + REACH_BYTES:
                first = stream.start_bytes // distance + 1  # a new epoch
            blocks = [at for at in range(first * distance, done, distance)][:64]
            if blocks:
                stream.dropped_bytes = blocks[-1]
                pages = [at // uffd.PAGE_BYTES for at in blocks if region.span.page(at)]
                client.command(wire.Type.DROP, region.id, pages)
