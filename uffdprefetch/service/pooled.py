# SPDX-License-Identifier: Apache-2.0
"""Which mappings the pool serves, and what it is told of those that do."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.reader import Region

if TYPE_CHECKING:  # numpy, which a service without a pool spares
    from uffdprefetch.pool.node_pool import NodePool


class PooledMappings:
    """Of one service with a pool."""

    def __init__(self, pool: NodePool, ledger: Ledger, is_shared: bool) -> None:
        """``is_shared``: other nodes may have what is in it."""
        self._pool, self._ledger, self._is_shared = pool, ledger, is_shared

    def may_have(self, file: FileState) -> bool:
        """Whether somebody could have it from the pool."""
        return file.pooled is not None or self._is_shared

    def has_no_use_for(self, file: FileState) -> bool:
        """Whether it would only copy what a disk of this node delivers as quickly."""
        if self.may_have(file) or not file.opened.on_quick_disk:
            return False
        self._ledger.leave_alone(
            "its disk answers as quickly as the pool: served by the page cache", file.path
        )
        return True

    def accept(self, client: Client, file: FileState) -> tuple[list[int], str]:
        """([what the job maps], why) when the pool can serve a mapping, else ([], why not)."""
        if client.pool_slot < 0:
            why = "the process has no userfaultfd for it"
        elif file.pooled is None and file.copies.rw >= 0:
            why = "it has checkpoints"  # whose pages and the pool's are not compared at once
        else:
            try:
                memfd = self._pool.files.open(file).memfd
                return [memfd], "the pool's memory is mapped in its place"
            except OSError as error:
                too_many = error.errno == errno.ENFILE
                why = "it has as many files as it can at one time" if too_many else str(error)
        self._ledger.degrade(f"a mapping is not served by the pool: {why}", file.path)
        return [], why

    def attached(self, client: Client, region: Region) -> None:
        """One is managed from now on."""
        if region.mode == ServingMode.POOL:
            self._pool.processes.attach(client, region)

    def refused(self, client: Client, region: Region) -> None:
        """Its agent has not mapped the pool's memory."""
        self._pool.processes.detach(client, region)

    def detached(self, client: Client, region: Region) -> None:
        """One has gone."""
        if region.mode == ServingMode.POOL:
            self._pool.processes.detach(client, region)
