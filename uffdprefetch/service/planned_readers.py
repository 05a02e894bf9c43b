# SPDX-License-Identifier: Apache-2.0
"""Which processes of the job follow a plan's orders of files: for each rank one.

A rank's processes (shells, the program, its workers) have the same rank in their environment. The
first of them stands for all: it lives longest, and whose open a file's is nobody needs to know.
"""

from __future__ import annotations

from collections.abc import Mapping

from uffdprefetch.base.identity import identify
from uffdprefetch.base.procfs import environment, parent
from uffdprefetch.base.record import dataclass
from uffdprefetch.predict.bounds import LATELY_NS
from uffdprefetch.readers.planned_files import PlannedFiles


@dataclass
class RankedProcess:
    """``rank``, ``parent``: as they were when it was looked at last; rank None: it has none."""

    rank: int | None
    parent: int
    came_ns: int
    looked_ns: int

    @property
    def is_settled(self) -> bool:
        """Whether its rank stays: between fork(2) and execve(2) it has its launcher's."""
        return self.looked_ns - self.came_ns >= LATELY_NS


class PlannedReaders:
    """Of one run. The service's thread calls everything here. ``files``: their orders."""

    def __init__(self, planned: PlannedFiles) -> None:
        self.files = planned
        self._processes: dict[int, RankedProcess] = {}
        self._readers: dict[int, int] = {}  # by pid, whose rank
        self._seen: frozenset[int] = frozenset()

    def step(self, pids: frozenset[int], now_ns: int) -> None:
        """Once a turn. ``pids``: the job's processes on this node, another object where it was
        looked for them again."""
        if pids is not self._seen:
            self._seen = pids
            self._look(pids, now_ns)
        self.files.step()

    def _look(self, pids: frozenset[int], now_ns: int) -> None:
        for pid in self._processes.keys() - pids:
            del self._processes[pid]
        for pid in sorted(pids):  # a parent before its children, as a rule
            known = self._processes.get(pid)
            if known is None or not known.is_settled:
                came_ns = now_ns if known is None else known.came_ns
                rank = identify(environment(pid)).rank
                self._processes[pid] = RankedProcess(rank, parent(pid), came_ns, now_ns)
        readers = readers_of(self._processes)
        for pid, rank in list(self._readers.items()):
            if readers.get(pid) != rank:
                self.files.end(pid)
                del self._readers[pid]
        for pid, rank in readers.items():
            if pid not in self._readers:
                self.files.begin(pid, rank)
        self._readers = readers


def readers_of(processes: Mapping[int, RankedProcess]) -> dict[int, int]:
    """By pid, the rank of each process that stands for one: the first that has it and has started
    none with another (a launcher). Where no process has any, the first stands for rank 0, as
    wherever no launcher has said one."""
    launchers = set[int]()
    for process in processes.values():
        above, seen = process.parent, set[int]()
        while process.rank is not None and above in processes and above not in seen:
            seen.add(above)
            if processes[above].rank != process.rank:
                launchers.add(above)
            above = processes[above].parent
    firsts: dict[int, int] = {}
    for pid, process in processes.items():
        if process.rank is not None and pid not in launchers:
            firsts.setdefault(process.rank, pid)
    if not firsts and processes:
        return {next(iter(processes)): 0}
    return {pid: rank for rank, pid in firsts.items()}
