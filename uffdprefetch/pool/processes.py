# SPDX-License-Identifier: Apache-2.0
"""Which processes map the node's pool, and whose faults are still ours when they have gone."""

from __future__ import annotations

from uffdprefetch.base.clock import Clock
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.pool.files import PooledFiles
from uffdprefetch.pool.size import PoolSize
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.sense.pagetables import LOOK_FIRST_NS
from uffdprefetch.state.client import Client
from uffdprefetch.state.reader import Region


class PoolProcesses:
    """Those of one pool, by their slots in it."""

    def __init__(
        self, pool: uffd_pool.Pool, files: PooledFiles, size: PoolSize, clock: Clock
    ) -> None:
        self._pool, self._files, self._size, self._clock = pool, files, size, clock
        self.slots: dict[int, Client] = {}
        #: Processes without an agent, whose faults are still ours to answer: slots, since when.
        self.orphans: dict[int, int] = {}
        self.given_back = 0  # mappings, because of an error of the pool

    def join(self, client: Client, number: int) -> None:
        """Take the userfaultfd that a process sent. Raises OSError.

        Its agent is new: an orphan of the same pid has gone by exec, or keeps what it has mapped.
        """
        self.look_for_orphans()
        for slot in [slot for slot in self.orphans if self._pool.has_nothing(slot)]:
            self._release(slot)
        client.pool_slot = self._pool.join(number, client.pid, client.ring)
        self.slots[client.pool_slot] = client

    def attach(self, client: Client, region: Region) -> None:
        """A mapping becomes the pool's. Raises OSError."""
        pooled = self._files.open(region.file)
        self._size.fit()  # memory that the job has taken by now
        self._pool.map(
            client.pool_slot, region.id, pooled.number, region.address, region.length_bytes,
            region.offset_bytes,
        )  # fmt: skip

    def detach(self, client: Client, region: Region) -> None:
        """The agent has replaced the mapping by the file's."""
        if client.pool_slot >= 0:
            self._pool.unmap(client.pool_slot, region.id)

    def leave(self, client: Client) -> None:
        """A connection has ended. What the process has mapped may be there still: its agent alone
        has died, or the address space is another process's, too (CLONE_VM). Then its userfaultfd
        must stay open, or missing pages would read as zeros."""
        if client.pool_slot < 0:
            return
        slot, client.pool_slot = client.pool_slot, -1
        del self.slots[slot]
        if any(r.mode == ServingMode.POOL for r in client.regions.values()):
            self._pool.orphan(slot)
            self.orphans[slot] = self._clock.now_ns()
            self.look_for_orphans()
        else:
            self._pool.leave(slot)

    def look_for_orphans(self) -> None:
        """Release orphans whose address space is gone."""
        for slot in [slot for slot in self.orphans if self._pool.is_gone(slot)]:
            self._release(slot)

    def _release(self, slot: int) -> None:
        self._pool.leave(slot)
        del self.orphans[slot]

    def orphans_due_ns(self, now: int) -> int:
        """When to look for the end of orphans again: most are processes that are just ending."""
        ages = [now - since for since in self.orphans.values()]
        return now + min(uffd_pool.TICK_NS, max(LOOK_FIRST_NS, min(ages, default=0) // 8))

    def count_given_back(self) -> None:
        """A mapping is the kernel's again."""
        self.given_back += 1
