# SPDX-License-Identifier: Apache-2.0
"""Progress from page tables, on the page table of the test's own process."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from components import on_memory
from conftest import require, wait_until

from uffdprefetch.base.clock import CLOCK, MS
from uffdprefetch.base.config import Config
from uffdprefetch.native import uffd
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.predict.streams import MIB
from uffdprefetch.sense import pagetables
from uffdprefetch.service.coordinator import Coordinator
from uffdprefetch.service.found import FoundMappings
from uffdprefetch.service.observe import Observer
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import Opener
from uffdprefetch.state.reader import Region
from uffdprefetch.warm.scheduler import Scheduler
from uffdprefetch.warm.token_bucket import TokenBucket

#: A skipping rank's records and the way from one to the next.
STRIDE_BYTES = 4 * BLOCK_BYTES


@dataclass
class Watched:
    """A sparse file, mapped here and watched from outside the mapping."""

    view: mmap.mmap
    coordinator: Coordinator
    client: Client
    region: Region

    def news(self) -> list[tuple[int, int]]:
        clusters, more = pagetables.new_touches(self.region, 0, self.region.span.end_bytes)
        assert more == 0
        return clusters

    def blocks(self) -> list[int]:
        """The numbers of the 64 KiB blocks that show for the first time."""
        return [start // BLOCK_BYTES for start, _ in self.news()]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    require(not on_memory(tmp_path), f"{tmp_path} is memory; set TMPDIR")
    path = tmp_path / "records"
    with open(path, "wb") as file:
        file.truncate(1 << 30)
    config = Config.of(policy="none", include=(str(path),))
    wake = os.eventfd(0)
    pool = uffd.Workers(1, wake)
    ledger = Ledger()

    def nobody(_file: FileState, _pages: list[int]) -> None:
        pass

    scheduler = Scheduler(pool, TokenBucket(0, 4 * MIB), 4 * MIB)
    opener = Opener(wake)
    coordinator = Coordinator(config, scheduler, ledger, opener=opener)
    clients = coordinator.mappings.clients
    with open(path, "rb") as file:
        view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    found = FoundMappings(
        clients,
        coordinator.mappings,
        coordinator.attachments.observed,
        coordinator.table,
        opener,
        ledger,
    )
    observer = Observer(clients, found, ledger, 512 * MIB, everybody=True)

    def mapping() -> object:
        observer.look([os.getpid()], CLOCK.now_ns())  # one process a turn
        opener.step()
        client = clients.get(-os.getpid())
        return client and client.regions

    wait_until(mapping, "the mapping")
    client = clients[-os.getpid()]
    (region,) = client.regions.values()
    yield Watched(view, coordinator, client, region)
    view.close()
    client.close()
    pool.close()
    for file_state in coordinator.table.files.values():
        file_state.close()
    os.close(wake)


def touch(view: mmap.mmap, *blocks: int) -> None:
    for block in blocks:
        assert view[block * BLOCK_BYTES] == 0


def test_a_touch_shows_once(watched: Watched) -> None:
    assert watched.blocks() == []
    touch(watched.view, 40, 800)
    assert watched.blocks() == [40, 800]
    touch(watched.view, 40, 800, 1600)
    assert watched.blocks() == [1600]


def test_threads_that_look_at_once_do_not_see_each_others_runs() -> None:
    """As the loop and the one that records a start do."""
    page, most = mmap.PAGESIZE, 512
    maps = [mmap.mmap(-1, 2 * most * page) for _ in range(2)]
    wrong, together = list[list[tuple[int, int]]](), threading.Barrier(2)

    def look(memory: mmap.mmap, step: int) -> None:
        memory[:: step * page] = bytes(len(range(0, len(memory), step * page)))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        wanted = [(address + at, page) for at in range(0, len(memory), step * page)]
        fd = os.open("/proc/self/pagemap", os.O_RDONLY)
        try:
            together.wait()
            for _ in range(2000):
                runs, _ = uffd.touched_runs(fd, address, len(memory))
                if runs != wanted[: len(runs)] or not runs:
                    wrong.append(runs[:3])
        finally:
            os.close(fd)

    for memory in maps:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    threads = [
        threading.Thread(target=look, args=(memory, step))
        for memory, step in zip(maps, (2, 3), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_the_kernel_took_away_shows_again(watched: Watched) -> None:
    touch(watched.view, 40, 800)
    assert watched.blocks() == [40, 800]
    watched.view.madvise(mmap.MADV_DONTNEED, 40 * BLOCK_BYTES, BLOCK_BYTES)
    assert watched.blocks() == []
    touch(watched.view, 40, 800)
    assert watched.blocks() == [40]


def test_a_checkpoint_that_was_touched_shows_once(watched: Watched) -> None:
    """Its event only has the mapping looked at; the page stands alone in the page table."""
    page = 40 * BLOCK_BYTES // uffd.PAGE_BYTES
    watched.view.madvise(mmap.MADV_RANDOM)  # one page is mapped, not the block
    watched.region.checkpoints.laid.add(page)
    touch(watched.view, 40)
    assert watched.blocks() == [40]
    assert watched.blocks() == []


def test_a_skipping_stream_is_followed_however_many_runs_it_leaves(watched: Watched) -> None:
    """At 300 MB/s, through more separate runs than one call tells of."""
    steps = watched.region.span.end_bytes // STRIDE_BYTES
    assert steps > 4 * uffd.RUNS_AT_ONCE
    watched.view.madvise(mmap.MADV_RANDOM)  # else large folios map what lies between
    every = int(STRIDE_BYTES / 300e6 * 1e9)
    now = CLOCK.now_ns()
    behind = 0
    for step in range(steps):
        touch(watched.view, step * 4 + 1)
        now += every
        if now < watched.region.scan.due_ns:
            continue
        watched.coordinator.look(now)
        walks = [s for s in watched.region.reader.table.active() if s.settled]
        if step * STRIDE_BYTES > 16 * MIB:
            at = max(s.position_bytes for s in walks)
            behind = max(behind, step * STRIDE_BYTES - at)
            # the time that the look took us stands for none of the reader's
            watched.region.scan.due_ns = min(watched.region.scan.due_ns, now + 100 * MS)
    assert len(watched.region.scan.mapped) > 4 * uffd.RUNS_AT_ONCE
    assert behind < 2 * STRIDE_BYTES
