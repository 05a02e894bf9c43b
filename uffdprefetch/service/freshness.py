# SPDX-License-Identifier: Apache-2.0
"""No copy of ours is older than what a plain mapping shows by more than a second, nor for good.

Copies are the pages of a checkpoint memfd and the pool's memory. Who writes the file shows
- in a read lease, where no other machine can write it and the kernel gives us one: a writer waits;
- in its size and times, which some writers put back, and stores through a mapping move late;
- in the bytes. Every PERIOD_NS each page of the memfd is compared with what a plain mapping of our
  own shows (csrc/service/compare.c) and rewritten where it differs, so that every mapping of it has
  the file's bytes again, that of a child which nobody saw fork, too. The pool is sampled.

Where a lease holds, pages are compared only after the times have moved.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from uffdprefetch.native import compare as uffd_compare
from uffdprefetch.native import uffd
from uffdprefetch.state.file_times import Times
from uffdprefetch.state.file_watch import FileWatch
from uffdprefetch.state.guard import Guard

if TYPE_CHECKING:
    from uffdprefetch.pool.node_pool import NodePool
    from uffdprefetch.state.client import Client
    from uffdprefetch.state.files import FileState, Key
    from uffdprefetch.state.ledger import Ledger

MS = 1_000_000
#: From one round to the next: a second, less what the round itself and the turn around it take.
PERIOD_NS = 600 * MS
#: A round that takes more than a tenth of a core is followed by a longer rest. (8192 pages take 7
#: to 14 ms, 1 to 2 % of a core: it is under emulation, or with many large files, that this binds.)
REST = 10
THREADS = 8
#: Of files that other machines may write, on one device: its server may not answer.
PER_DEVICE = 3
#: Pages that are read again from storage in one round: this part of the bandwidth, and no fewer;
#: by all nodes that share what they read together, each of which looks at what it has.
BANDWIDTH_SHARE = 0.01
READS_LEAST = 128
READ_NS = 400 * MS
SAMPLE_NS = 80 * MS
#: Delay from a file's opening to the pool's first samples, if another machine may write it: what
#: was read just now is not old, and each sample is a request.
SAMPLE_AFTER_NS = 5000 * MS
#: Pages of a file that are compared in every round. Of what is more, those that lie over no mapping
#: that we know are copied anew before they do, and compared in turn until then.
PAGES_MAX = 8192
LOOSE_AT_ONCE = 1024


def what_moved(before: Times, now: Times) -> str | None:
    """What a user is told of a change that ends the service of a file; '' where only ctime moved
    (chmod, link, rename and archives do that), so that the bytes must tell; None: nothing."""
    if now.size_bytes != before.size_bytes:
        return f"size {before.size_bytes} -> {now.size_bytes}"
    if now.mtime_ns != before.mtime_ns:
        return "modified"
    return "" if now.ctime_ns != before.ctime_ns else None


def must_compare(guard: Guard, *, compared: bool) -> bool:
    """Whether anybody can have written since the pages were compared last."""
    return guard.unbound or not compared


def reads_allowed(bandwidth_bytes_per_second: float, nodes: int = 1) -> int:
    """Pages that a round may ask storage for, of ``nodes`` that share what they read."""
    share = bandwidth_bytes_per_second * BANDWIDTH_SHARE * PERIOD_NS / 1e9
    return max(1, max(READS_LEAST, int(share / uffd.PAGE_BYTES)) // nodes)


def some_of(pages: list[int], start: int, most: int) -> list[int]:
    """``most`` of the pages, from number ``start`` on and from the beginning again; ascending."""
    if len(pages) <= most:
        return pages
    start %= len(pages)
    return sorted((pages[start:] + pages[:start])[:most])


class Freshness:
    """Looks at every file, in rounds. The service's thread calls everything; nothing waits."""

    def __init__(
        self, files: dict[Key, FileState], clients: dict[int, Client], ledger: Ledger,
        give_up: Callable[[FileState, str], None], reads: Callable[[], int],
        event_fd: int, pool: NodePool | None = None,
    ) -> None:  # fmt: skip
        """``give_up``: a file, and why; ``reads``: how many pages a round may ask storage for.
        Raises OSError when there can be no threads."""
        self._files, self._clients, self._ledger = files, clients, ledger
        self._give_up, self._reads, self._pool = give_up, reads, pool
        self._checker = uffd_compare.Checker(THREADS, event_fd)
        self._under_way: dict[int, tuple[FileState, FileWatch]] = {}
        self._waiting: list[FileState] = []
        self._next_id = 1
        self._cpu_ns = 0  # of this round
        self.due_ns = 0

    def step(self, now: int) -> None:
        """Take what has been found, and begin what is due."""
        found = self._checker.reap()
        for result in found:
            self._take(result)
        if now >= self.due_ns:
            self.due_ns = now + max(PERIOD_NS, REST * self._cpu_ns)
            self._cpu_ns = 0
            self._waiting = list(self._files.values())
        elif not found:  # those that are under way still are: there is no room for more
            return
        waiting, self._waiting, full = self._waiting, [], set[int]()
        for file in waiting:
            device = file.key[0]
            if device in full or not self._begin(file, now):
                full.add(device)
                self._waiting.append(file)

    # -------------------------------------------------------------- one round of one file

    def _begin(self, file: FileState, now: int) -> bool:
        """False: not now, others of its kind are under way."""
        if file.opened.fd < 0:
            return True
        state = file.guard.watch(now)
        if state.under_way or state.over:
            return True
        if not file.mappings.attached and file.pooled is None and not file.in_use():
            state.over = file.guard.changed is not None
            if state.over or file.guard.unbound:
                self._let_go(file, state)
        if file.mappings.take_opened() and file.guard.unbound:
            state.compared, state.began_ns = False, 0  # network file systems ask what is new then
        if file.guard.changed and file.pooled is not None and file.mappings.attached and self._pool:
            self._pool.files.drop(file)  # for those who cannot give it back
        pages = self._pages(file, state, now)
        if not pages and not file.guard.network:
            with contextlib.suppress(OSError):
                self._look(file, state, Times.of(file.opened.fd))
            return True
        if file.guard.network and self._busy(file.key[0]) >= PER_DEVICE:
            return False
        return self._submit(file, state, pages)

    @staticmethod
    def _let_go(file: FileState, state: FileWatch) -> None:
        """Nobody has a page of the memfd: nothing is compared, and what is laid in another epoch is
        copied anew before."""
        file.copies.keep(set())
        state.loose.clear()
        state.close()

    def _busy(self, device: int) -> int:
        under_way = self._under_way.values()
        return sum(file.key[0] == device and file.guard.network for file, _ in under_way)

    def _pages(self, file: FileState, state: FileWatch, now: int) -> list[int]:
        """What to compare in this round."""
        if not must_compare(file.guard, compared=state.compared):
            return []
        if file.pooled is not None:
            early = file.guard.network and state.compared and now - state.began_ns < SAMPLE_AFTER_NS
            if not file.mappings.attached or early or self._pool is None:
                return []
            return self._pool.sample(file, self._reads())
        if len(file.copies.written) > PAGES_MAX:
            self._loosen(file, state)
        state.loose -= file.copies.written
        if len(state.pages) != len(file.copies.written):
            state.pages = sorted(file.copies.written)
        if not state.loose:
            return state.pages
        some = some_of(sorted(state.loose), state.loose_at, LOOSE_AT_ONCE)
        state.loose_at += LOOSE_AT_ONCE
        return sorted({*state.pages, *some})

    def _loosen(self, file: FileState, state: FileWatch) -> None:
        laid: set[int] = set()
        for client in self._clients.values():
            for region in client.regions.values():
                if region.file is file:
                    laid |= region.checkpoints.laid
        state.loose |= file.copies.written - laid
        file.copies.keep(laid)

    def _submit(self, file: FileState, state: FileWatch, pages: list[int]) -> bool:
        pooled, how = file.pooled, uffd_compare.MAPPED if file.guard.network else uffd_compare.READ
        try:
            watch = state.watch
            if not pages or pooled:  # its times, or what the pool reads: no copies
                watch = uffd_compare.Watch(file.opened.page_fd, -1, file.size_bytes)
            elif watch is None:
                watch = uffd_compare.Watch(file.opened.page_fd, file.copies.rw, file.size_bytes)
                state.watch = watch
        except OSError as error:
            self._ledger.degrade(f"its copies are not compared: {error}", file.path)
            return True
        sent = self._checker.submit(
            self._next_id, watch, uffd_compare.POOL if pooled else how, pages,
            start=state.start if state.start < len(pages) else 0,
            reads_max=self._reads(),
            limit_ns=SAMPLE_NS if pooled else READ_NS,
            pool=pooled.pool if pooled else None,
            pool_file=pooled.number if pooled else -1,
        )  # fmt: skip
        if watch is not state.watch:
            watch.close()
        if sent:
            self._under_way[self._next_id] = file, state
            self._next_id += 1
            state.under_way, state.pooled = True, pooled
        return sent

    # -------------------------------------------------------------- what was found

    def _take(self, result: uffd_compare.Result) -> None:
        file, state = self._under_way.pop(result.id)
        state.under_way = False
        self._cpu_ns += result.cpu_ns
        self._ledger.freshness.note(result, pool=state.pooled is not None)
        file.guard.note(result)
        if file.guard.watched is not state:
            return  # closed meanwhile: whether it has changed is looked at when it is opened again
        moved = False
        if result.error:
            self._changed(file, f"fstat: {os.strerror(result.error)}")
        else:
            found = Times(result.size_bytes, result.mtime_ns, result.ctime_ns)
            moved = self._look(file, state, found)
        if result.differing and file.pooled is state.pooled:  # else the pool is another by now
            self._ledger.freshness.old_at_most.add(result.done_ns - state.since_ns)
            self._changed(file, "its bytes have changed")
        state.start = result.stopped_at
        if not result.unread and (result.compared or not file.copies.written):
            state.since_ns = result.start_ns
            state.compared = not moved
        if not must_compare(file.guard, compared=state.compared):
            state.close()

    def _look(self, file: FileState, state: FileWatch, now: Times) -> bool:
        """Whether the file's times or its size have moved."""
        moved = what_moved(state.times, now)
        if moved is None:
            return False
        state.times, state.compared = now, False
        if moved:
            self._changed(file, moved)
        elif self._pool and must_compare(file.guard, compared=True):
            # Somebody may have written, and put size and mtime back: who maps it from now on, here
            # or on another node, would see that.
            self._pool.files.drop(file, "its ctime has moved")
        return True

    def _changed(self, file: FileState, why: str) -> None:
        if file.guard.changed is None:
            self._give_up(file, why)
        if file.pooled is not None and self._pool:
            self._pool.files.drop(file)

    def let_in(self, file: FileState) -> None:
        """Somebody begins to write now: what the pool has is read anew by who could not be told."""
        if file.pooled is not None and self._pool:
            self._pool.files.drop(file)

    # -------------------------------------------------------------- the end

    def may_end(self) -> bool:
        """Whether nobody has a copy of ours any more that only this service keeps right."""
        pool = self._pool
        return not (pool and pool.processes.orphans) and not in_use(self._files.values())

    def close(self) -> bool:
        """End the threads. False: they go with the process, and the pool, too."""
        return self._checker.close()


def in_use(files: Iterable[FileState]) -> bool:
    """Whether somebody has the checkpoints of one of the files open or mapped."""
    return any(file.in_use() for file in files)
