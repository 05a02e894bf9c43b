# SPDX-License-Identifier: Apache-2.0
"""What a watcher adds to the service's snapshot, from its own looks at the kernel.

Block-I/O delay of the ranks (taskstats.py), I/O pressure of the node, and the processes of the job
that carry no preload object and so cannot be served. All of it is done by who watches: the service
spends nothing on it, and no watcher means no cost.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from uffdprefetch.base.procfs import is_static, preloaded
from uffdprefetch.protocol.snapshot import (
    IoPressure,
    NotManaged,
    Rank,
    Snapshot,
    Stall,
    UnservedProcess,
)
from uffdprefetch.view.births import ProcessEvents
from uffdprefetch.view.taskstats import BlockDelays

#: Interval over which delays are averaged.
STALL_SECONDS = 10.0
PIDS_MAX = 256
#: Interval of walks of the job's process tree; in between, cn_proc tells of births.
TREE_SECONDS = 2.0
#: Interval of looks at a new program until it has loaded its libraries, and the latest time for
#: that.
SETTLE_SECONDS, LOADED_SECONDS = 0.05, 1.0
NOT_MANAGED_MAX = 32
#: Least size of a mapping that would be served: the default of --min-size.
LARGE_BYTES = 16 << 20
PRESSURE = Path("/proc/pressure/io")


def parse_pressure(text: str) -> float | None:
    """Share of the last 10 s in which some task of the node waited for I/O (PSI, `some avg10`)."""
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "some":
            fields = dict(pair.split("=") for pair in rest.split() if "=" in pair)
            return float(fields["avg10"]) / 100 if "avg10" in fields else None
    return None


def io_pressure(path: Path = PRESSURE) -> IoPressure:
    """The node's I/O pressure, or None and why."""
    try:
        share = parse_pressure(path.read_text())
    except (OSError, ValueError) as error:
        return IoPressure(None, f"{path}: {getattr(error, 'strerror', None) or error}")
    why = None if share is not None else f"{path} has no 'some avg10'"
    return IoPressure(share, why, f"{path}, some avg10: any task of the node")


def loading(maps: str) -> bool:
    """Whether the loader is still at work: it maps what LD_PRELOAD names before the C library."""
    return bool(maps.strip()) and "/ld-" in maps and "/libc" not in maps


def why_not_preloaded(maps: str) -> str:
    """Why a process has no preload object, by its mappings."""
    if is_static(maps):
        return "statically linked"
    return "LD_PRELOAD did not reach it (cleared environment, setuid, or another libc)"


class Sensors:
    """The looks of one watcher; used by one thread."""

    def __init__(
        self, delays: BlockDelays | None = None, births: ProcessEvents | None = None
    ) -> None:
        self._delays = delays or BlockDelays()
        self.births = births or ProcessEvents()
        self._samples: deque[tuple[float, dict[int, int]]] = deque()
        #: Whether of some rank it would know a stall, had it watched for longer.
        self.watches_too_shortly = False
        self._walked = 0.0
        self._tree: set[int] = set()
        self._agents: set[int] = set()
        self._pending: dict[int, tuple[float, float]] = {}  # pid -> look at it from, known since
        self._not_managed: dict[int, UnservedProcess] = {}
        self._born = self._unseen = 0

    def open(self) -> None:
        """Begin to listen for births; imports what that needs (0.1 s)."""
        self.births.open()

    def close(self) -> None:
        """Give back what is open."""
        self._delays.close()
        self.births.close()

    def add(self, snapshot: Snapshot) -> Snapshot:
        """The same with what the service leaves to the watcher."""
        now = time.monotonic()
        self._agents = {pid for rank in snapshot.ranks for pid in rank.pids}
        return replace(
            snapshot,
            ranks=self._with_stall(snapshot.ranks, now),
            node=replace(snapshot.node, io_pressure=io_pressure()),
            not_managed=self._look_for_not_managed(snapshot, now),
        )

    # ---- block-I/O delay ------------------------------------------------------------------------

    def _with_stall(self, ranks: tuple[Rank, ...], now: float) -> tuple[Rank, ...]:
        pids = [pid for rank in ranks for pid in rank.pids][:PIDS_MAX]
        found, why = self._delays.read(pids)
        totals = {pid: delay.total_ns for pid, delay in found.items()}
        self._samples.append((now, totals))
        while len(self._samples) > 2 and now - self._samples[1][0] >= STALL_SECONDS:
            self._samples.popleft()
        then, before = self._samples[0]
        self.watches_too_shortly = False
        return tuple(
            replace(rank, stall=self._stall(rank, totals, before, now - then, why))
            for rank in ranks
        )

    def _stall(
        self,
        rank: Rank,
        totals: dict[int, int],
        before: dict[int, int],
        seconds: float,
        why: str | None,
    ) -> Stall:
        known = [pid for pid in rank.pids if pid in totals]
        if not known:
            why = why or "none of its processes can be asked"
        elif not any(totals[pid] for pid in known) and rank.demand_misses:
            why = (
                "no wait was accounted although there were major faults: single reads of FUSE are "
                "not, nor is a process that began before kernel.task_delayacct was 1"
            )
        elif seconds < 0.5:
            self.watches_too_shortly = True
            why = "watched for less than half a second"
        else:
            waited = sum(max(0, totals[pid] - before.get(pid, 0)) for pid in known) / 1e9
            sensor = f"{self._delays.sensor}: all threads; above 1 where several wait at once"
            return Stall(waited / seconds, round(seconds, 1), sensor, None)
        return Stall(None, None, None, why)

    # ---- processes that cannot be served --------------------------------------------------------

    def _look_for_not_managed(self, snapshot: Snapshot, now: float) -> NotManaged:
        if snapshot.engine == "off":
            return NotManaged(None, "engine off: nothing is preloaded into any process")
        if now - self._walked >= TREE_SECONDS:
            self._walked = now
            self._walk(snapshot.job_pids, now)
        self.look(now)
        births_why = self.births.why
        return NotManaged(
            processes=tuple(self._not_managed.values())[:NOT_MANAGED_MAX],
            why=None,
            sensor="/proc of the job's process tree every 2 s, and births by cn_proc",
            births=None if births_why else self._born,
            births_why=births_why,
            births_lost=self.births.lost,
            ended_before_they_were_seen=self._unseen,
        )

    def _walk(self, job_pids: tuple[int, ...], now: float) -> None:
        from uffdprefetch.base.procfs import descendants

        tree = {pid for job in job_pids for pid in descendants(job)}
        for pid in tree - self._tree - self._agents:
            self._pending.setdefault(pid, (now, now))
        for pid in [p for p in self._not_managed if p not in tree or p in self._agents]:
            del self._not_managed[pid]
        for pid in self._not_managed:  # it may have become another program, or mapped a file
            self._pending.setdefault(pid, (now, now - LOADED_SECONDS))
        self._tree = tree

    def look(self, now: float) -> None:
        """Take what births there were, and look at who is new and has settled."""
        for birth in self.births.read():
            if birth.parent in self._tree:
                self._tree.add(birth.pid)
                self._born += 1
            elif birth.parent == 0 and birth.pid in self._tree:
                self._not_managed.pop(birth.pid, None)
                if len(self._pending) < PIDS_MAX:
                    self._pending[birth.pid] = (now + SETTLE_SECONDS, now)
        for pid in [p for p, (due, _) in self._pending.items() if due <= now]:
            _, since = self._pending.pop(pid)
            if pid not in self._agents and not self._look_at(pid, now - since < LOADED_SECONDS):
                self._pending[pid] = (now + SETTLE_SECONDS, since)

    def _look_at(self, pid: int, may_be_loading: bool) -> bool:
        """List the process if it has no preload object; False: it is too early to tell."""
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            command = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
            parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2]
        except OSError:  # it has ended, or is another user's by now
            self._unseen += 1
            return True
        if not maps.strip() or preloaded(maps):  # ended and not yet waited for, or all is well
            self._not_managed.pop(pid, None)
            return True
        if may_be_loading and loading(maps):
            return False
        from uffdprefetch.base.procfs import file_readers

        large = [m for m in file_readers(maps, LARGE_BYTES) if ".so" not in m.path]
        if pid in self._not_managed or len(self._not_managed) < NOT_MANAGED_MAX:
            self._not_managed[pid] = UnservedProcess(
                pid=pid,
                parent_pid=int(parent.split()[1]),
                command=command,
                why=why_not_preloaded(maps),
                maps_bytes=sum(m.end - m.start for m in large),
            )
        return True
