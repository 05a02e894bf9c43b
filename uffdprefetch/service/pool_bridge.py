# SPDX-License-Identifier: Apache-2.0
"""Between the engine and the pool: which mappings go there, what its faults say, what may go."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native import uffd
from uffdprefetch.pool.walkers import goes_on, note_walker, walks_of
from uffdprefetch.predict.checkpoints import DISTANCE_MIN_BYTES
from uffdprefetch.protocol import wire
from uffdprefetch.readers.predictor import Observation
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState
from uffdprefetch.state.publisher import POOL_BACKWARD, POOL_MISS, POOL_TOUCH, PUNCH, TOUCH
from uffdprefetch.state.reader import Reader

if TYPE_CHECKING:  # numpy, which a service without a pool spares
    from uffdprefetch.pool.node_pool import NodePool
    from uffdprefetch.service.coordinator import Coordinator


def accept(
    engine: Coordinator, pool: NodePool, client: Client, a: wire.Attach, file: FileState
) -> tuple[list[int], str]:
    """([what the job maps], why) when the pool can serve a mapping, else ([], why not)."""
    if client.pool_slot < 0:
        why = "the process has no userfaultfd for it"
    elif file.pooled is None and file.checkpoint_rw >= 0:
        why = "it has checkpoints"  # whose pages and the pool's are not compared at once
    else:
        try:
            return [pool.open(file).memfd], "the pool's memory is mapped in its place"
        except OSError as error:
            why = str(error)
    engine.ledger.degrade(f"a mapping is not served by the pool: {why}", file.path)
    return [], why


def take_events(engine: Coordinator, pool: NodePool) -> None:
    """What happened in the pool: faults are progress, the rest is for the books."""
    for event in pool.pool.drain():
        file = pool.files.get(event.file)
        if file is None:
            continue
        if event.kind == uffd_pool.FAILED:
            engine.give_up(file, f"cannot be read ({os.strerror(-event.error)})")
            pool.detached += 1
        elif event.kind == uffd_pool.EVICTED:
            engine.tap.put(PUNCH, event.time_ns, 0, file, event.offset, event.length, 0)
        else:
            _take_fault(engine, pool, file, event)


def _take_fault(
    engine: Coordinator, pool: NodePool, file: FileState, event: uffd_pool.PoolEvent
) -> None:
    client = pool.slots.get(event.client)
    region = client.regions.get(event.region) if client else None
    if client is None or region is None or region.detaching:
        return
    if event.kind == uffd_pool.STUCK:
        # two chunks that one instruction needs do not fit: the page cache has room
        engine.ledger.degrade(
            f"--budget is too small for pid {client.pid}: given back to the kernel", file.path
        )
        pool.detached += 1
        engine.give_back(client, region)
        return
    client.watched.pool_misses += event.kind == uffd_pool.MISS
    if file.pooled is not None:
        file.pooled.faulted_ns = event.time_ns
    start, end = event.offset, event.offset + event.length
    cell = start // DISTANCE_MIN_BYTES
    region.checkpoints.fired.setdefault(cell, event.time_ns)
    region.checkpoints.armed.setdefault(cell, start // uffd.PAGE_BYTES)
    how = POOL_TOUCH | (POOL_MISS if event.kind == uffd_pool.MISS else 0)
    seen = Observation(start, end, event.time_ns, passed=event.passed)
    step = engine.arbiter.observe(region, seen)
    if step is not None:
        start, end = step.start, step.end
        note_walker(region.reader, event.tid, step.walk)
        how |= POOL_BACKWARD if step.walk.direction < 0 else 0
        if event.refault and not goes_on(region.reader, step.walk):
            pool.refaulted(file, event.offset, event.refault)
    engine.tap.put(
        TOUCH, event.time_ns, client.pid, file, start, end - start, 0, how, event.tid
    )  # fmt: skip


def plan_evictions(engine: Coordinator, pool: NodePool) -> None:
    """Have blocks ready to leave the pool when it is full."""
    if not pool.wants_victims():
        return
    known_orders, now = engine.known_orders, engine.clock.now_ns()
    pool.plan(
        (
            (reader, walk, engine.layout.lookahead(walk, pooled=True))
            for reader in engine.readers()
            if reader.pooled and (known_orders is None or known_orders.order_of(reader) is None)
            for walk in walks_of(reader, now)
        ),
        [
            one
            for one in (known_orders.all if known_orders is not None else ())
            if one.live and one.file.pooled is not None
        ],
        unneeded(engine.readers()),
        engine.next_shard.awaited(now),
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
