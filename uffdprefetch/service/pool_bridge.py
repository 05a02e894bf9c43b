# SPDX-License-Identifier: Apache-2.0
"""What the pool tells: its faults, which are progress of readers; and what may leave it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native import uffd
from uffdprefetch.predict.checkpoints import DISTANCE_MIN_BYTES
from uffdprefetch.readers.arbiter import Arbiter
from uffdprefetch.readers.next_shard import NextShard
from uffdprefetch.readers.reader_streams import Step
from uffdprefetch.sense.observation import Batch, Observation
from uffdprefetch.service.mappings import ManagedMappings
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.publisher import (
    POOL_BACKWARD,
    POOL_MISS,
    POOL_TOUCH,
    PUNCH,
    TOUCH,
    EventPublisher,
)
from uffdprefetch.state.reader import Reader, Region
from uffdprefetch.warm.windows import Windows

if TYPE_CHECKING:  # numpy, which a service without a pool spares
    from uffdprefetch.pool.node_pool import NodePool
    from uffdprefetch.readers.known_order import KnownOrders


class PoolBridge:
    """The pool of one service. Its thread calls everything here."""

    def __init__(
        self, pool: NodePool, mappings: ManagedMappings, arbiter: Arbiter, windows: Windows,
        ledger: Ledger, publisher: EventPublisher, next_shard: NextShard,
    ) -> None:  # fmt: skip
        self._next_shard = next_shard
        self.pool, self._mappings, self._arbiter = pool, mappings, arbiter
        self._windows, self._ledger, self._publisher = windows, ledger, publisher

    def take_events(self) -> None:
        """What has happened in the pool: faults are progress, those of a mapping together; the rest
        is for the books."""
        faults: dict[tuple[int, int], list[uffd_pool.PoolEvent]] = {}
        for event in self.pool.pool.drain():
            file = self.pool.files.by_number.get(event.file)
            if file is None:
                continue
            if event.kind == uffd_pool.FAILED:
                self._mappings.give_up(file, f"cannot be read ({os.strerror(-event.error)})")
                self.pool.processes.count_given_back()
            elif event.kind == uffd_pool.EVICTED:
                self._publisher.put(PUNCH, event.time_ns, 0, file, event.offset, event.length, 0)
            elif event.kind == uffd_pool.STUCK:
                self._give_back(event)
            else:
                faults.setdefault((event.client, event.region), []).append(event)
        for events in faults.values():
            self._take_faults(events)

    def _mapping_of(self, event: uffd_pool.PoolEvent) -> tuple[Client, Region] | None:
        client = self.pool.processes.slots.get(event.client)
        region = client.regions.get(event.region) if client else None
        if client is None or region is None or region.agent.detaching:
            return None
        return client, region

    def _give_back(self, event: uffd_pool.PoolEvent) -> None:
        """Two chunks that one instruction needs do not fit: the page cache has room."""
        mapping = self._mapping_of(event)
        if mapping is None:
            return
        client, region = mapping
        self._ledger.degrade(
            f"--budget is too small for pid {client.pid}: given back to the kernel",
            region.file.path,
        )
        self.pool.processes.count_given_back()
        self._mappings.give_back(client, region)

    def _take_faults(self, events: list[uffd_pool.PoolEvent]) -> None:
        """Of one mapping."""
        mapping = self._mapping_of(events[0])
        if mapping is None:
            return
        client, region = mapping
        file, batch = region.file, Batch(region, events[-1].time_ns)
        for event in events:
            client.watched.pool_misses += event.kind == uffd_pool.MISS
            cell = event.offset // DISTANCE_MIN_BYTES
            region.checkpoints.fired.setdefault(cell, event.time_ns)
            region.checkpoints.armed.setdefault(cell, event.offset // uffd.PAGE_BYTES)
        stretches = self._stretches(events)
        for stretch in stretches:
            first, last = stretch[0], stretch[-1]
            end = last.offset + last.length
            batch.touches.append(Observation(first.offset, end, last.time_ns, passed=first.passed))
        if file.pooled is not None:
            file.pooled.faulted_ns = batch.at_ns
        for stretch, step in zip(stretches, self._arbiter.observe(batch), strict=True):
            if step is not None:
                region.reader.pool.follow(stretch[-1].tid, step.stream)
                for event in stretch:
                    if event.refault and not step.goes_on and self.pool.chooses:
                        self.pool.victims.refaulted(file, event.offset, event.refault)
            if self._publisher.active:
                self._publish(client, file, stretch, step)

    def _stretches(self, events: list[uffd_pool.PoolEvent]) -> list[list[uffd_pool.PoolEvent]]:
        """Faults by which one thread has come over a stretch of the file, each from where the last
        one was: of a record several, which are one touch."""
        found, chunk_bytes = list[list[uffd_pool.PoolEvent]](), self.pool.chunk_bytes
        for event in events:
            last = found[-1][-1] if found else None
            if (
                last is not None
                and event.passed > 0
                and event.tid == last.tid
                and event.offset // chunk_bytes - event.passed // chunk_bytes
                == last.offset // chunk_bytes
            ):
                found[-1].append(event)
            else:
                found.append([event])
        return found

    def _publish(
        self, client: Client, file: FileState, stretch: list[uffd_pool.PoolEvent],
        step: Step | None,
    ) -> None:  # fmt: skip
        for event in stretch:
            start, end = event.offset, event.offset + event.length
            how = POOL_TOUCH | (POOL_MISS if event.kind == uffd_pool.MISS else 0)
            if step is not None:
                start = step.start if event is stretch[0] else start - event.passed
                end = step.end if event is stretch[-1] else end
                how |= POOL_BACKWARD if step.stream.direction < 0 else 0
            self._publisher.put(
                TOUCH, event.time_ns, client.pid, file, start, end - start, 0, how, event.tid
            )

    def plan_evictions(self, now: int, known_orders: KnownOrders | None) -> None:
        """Have blocks ready to leave the pool when it is full."""
        if not (self.pool.chooses or self.pool.can_choose()):
            return
        if not self.pool.victims.wants_list():
            return
        readers = self._mappings.readers()
        self.pool.victims.plan(
            (
                (reader, stream, self._windows.of(stream, pooled=True).size_bytes)
                for reader in readers
                if reader.pooled and (known_orders is None or known_orders.order_of(reader) is None)
                for stream in reader.pool.followed(reader.table.active(), now)
            ),
            [
                one
                for one in (known_orders.all if known_orders is not None else ())
                if one.live and one.file.pooled is not None
            ],
            unneeded(readers),
            self._next_shard.awaited(now),
        )  # fmt: skip


def unneeded(readers: list[Reader]) -> list[tuple[int, IntervalSet]]:
    """(number of a file in the pool, the ranges of it of which all that have it mapped have said
    that they have no use for them now)."""
    found: dict[int, IntervalSet] = {}
    for reader in readers:
        part = reader.file.pooled
        if part is None or not reader.pooled:
            continue
        # who has announced an order says by it what it will need
        ranges = IntervalSet() if reader.order.announced else reader.unneeded.ranges
        if part.number in found:
            found[part.number].keep(ranges)
        else:
            found[part.number] = ranges.copy()
    return [(number, ranges) for number, ranges in found.items() if ranges]
