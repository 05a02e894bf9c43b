# SPDX-License-Identifier: Apache-2.0
"""Measures all curves of one machine, or of an MPI job's nodes, within a budget.

As the model's equations define them: p_0 threads of every node read the file system at
t(gamma) / gamma each ([HDMLP] equations 3.3 and 3.5), so t(gamma) is the aggregate rate of gamma
nodes with p_0 threads each, over p_0. t_demand is that of one thread on each node.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from uffdprefetch.base.errors import UffdPrefetchError, usage_error
from uffdprefetch.base.units import format_size
from uffdprefetch.sim.measure import network, scratch
from uffdprefetch.sim.measure.bounds import RUNS_MIN, Budget, repeat
from uffdprefetch.sim.measure.intervals import Median, median
from uffdprefetch.sim.measure.memory import MemoryBenchmark
from uffdprefetch.sim.measure.reads import ReadBenchmark

#: Share of the remaining time for writing a test file.
WRITING_PART = 0.25


@dataclass(frozen=True)
class Wishes:
    """The measurements that are wanted."""

    path: str  # a file on the storage in question, or a directory there
    seconds: float = 60.0
    size_bytes: int = 8 << 30  # to read in all
    file_bytes: int = 256 << 20  # of the file that is made in a directory
    threads: Sequence[int] = (1, 2, 4, 8, 16)
    requests: Sequence[int] = (4 << 10, 64 << 10, 1 << 20)
    prefetchers: int = 8  # p_0
    local: str | None = None  # a directory on the node's own disk
    direct: bool = False


@dataclass
class Measured:
    """Curves in MB/s, empty where not measured; ``notes`` say why."""

    nodes: int = 1
    #: request bytes -> threads -> MB/s of one node
    file_system: dict[int, dict[int, Median]] = field(default_factory=dict)
    #: nodes -> aggregate MB/s, with p_0 threads and with one on each
    together: dict[int, Median] = field(default_factory=dict)
    alone: dict[int, Median] = field(default_factory=dict)
    memory: dict[int, Median] = field(default_factory=dict)
    disk: dict[int, Median] = field(default_factory=dict)
    link: Median | None = None
    memory_bytes: int = 0
    disk_bytes: int = 0
    notes: list[str] = field(default_factory=list)


def calibrate(wishes: Wishes, environ: Any, say: Callable[[str], None]) -> Measured | None:
    """Measure. Collective over the ranks of an MPI job: rank 0 gets the result, the others None.

    Raises UffdPrefetchError when the storage cannot be read.
    """
    comm = network.world(environ)
    try:
        return _calibrate(wishes, comm, say)
    except UffdPrefetchError as error:
        if comm is None:
            raise
        # The other ranks wait in a collective call: end them.
        print(f"uffdprefetch: {error.message}", file=sys.stderr, flush=True)
        comm.Abort(error.exit_code)
        raise


def _calibrate(wishes: Wishes, comm: Any, say: Callable[[str], None]) -> Measured | None:
    rank = comm.Get_rank() if comm else 0
    hosts = comm.allgather(socket.gethostname()) if comm else [socket.gethostname()]
    leaders = network.leaders(hosts)
    done = Measured(nodes=len(leaders))
    budget = Budget(wishes.seconds, wishes.size_bytes)
    show = say if rank == 0 else (lambda text: None)

    def note(text: str) -> None:
        show(text)
        done.notes.append(text)

    if rank not in leaders:
        _many_nodes(wishes, None, comm, leaders, budget, done, show, note)
        return None
    # Errors of the paths are found before anything is measured.
    own = _disk(wishes, budget, done, note) if rank == 0 else nullcontext()
    with own as disk, _reader(wishes.path, wishes, rank, len(leaders), budget, note) as reader:
        if rank == 0:
            more = 2 * len(_steps(len(leaders))) + 1 if comm else 0
            _one_node(wishes, reader, disk, budget, more, done, show, note)
        if comm:
            _many_nodes(wishes, reader, comm, leaders, budget, done, show, note)
        else:
            _as_one_node(wishes, done)
    return done if rank == 0 else None


def _one_node(
    wishes: Wishes,
    reader: ReadBenchmark,
    disk: ReadBenchmark | None,
    budget: Budget,
    more: int,
    done: Measured,
    show: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """``more``: later points, which share the remaining time."""
    threads = sorted({*wishes.threads, 1, wishes.prefetchers})
    cores = sorted({n for n in threads if n <= (os.cpu_count() or 1)} | {1})
    points_left = len(wishes.requests) * len(threads) + len(cores) * (2 if disk else 1) + more

    def curve(
        what: str, counts: Sequence[int], run: Callable[[int], float | None]
    ) -> dict[int, Median]:
        nonlocal points_left
        found = {}
        for count in counts:
            show(what.format("1 thread" if count == 1 else f"{count} threads"))
            point = repeat(partial(run, count), budget, points_left)
            points_left -= 1
            if point is not None:
                found[count] = point
        lost = ", ".join(str(count) for count in sorted(counts) if count not in found)
        if lost:
            note(
                what.format(f"not with {lost} threads") + ": too little is left of --bytes, or "
                "the file is too small"
            )
        return found

    def reads(of: ReadBenchmark, request: int) -> Callable[[int], float | None]:
        def run(count: int) -> float | None:
            try:
                return of.run(count, request, budget)
            except OSError as error:  # of two readers: say which
                raise UffdPrefetchError(
                    f"calibrate: cannot read {of.path}: {error.strerror}"
                ) from None

        return run

    # First the points that the scenario needs.
    threads.sort(key=lambda count: (count != wishes.prefetchers, count))
    for request in sorted(wishes.requests, reverse=True):
        found = curve(
            f"file system: {{}}, requests of {request >> 10} KiB", threads, reads(reader, request)
        )
        if found:
            done.file_system[request] = found
    done.memory = curve("memory: {}", cores, MemoryBenchmark(max(cores)).run)
    done.memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if disk:
        done.disk = curve("local disk: {}", cores, reads(disk, max(wishes.requests)))


def _steps(nodes: int) -> list[int]:
    """1, 2, 4, ... and all."""
    return [n for n in (2**k for k in range(20)) if n < nodes] + [nodes]


def _as_one_node(wishes: Wishes, done: Measured) -> None:
    """Without other nodes, this one's threads stand in for theirs."""
    if not done.file_system:
        return
    largest = done.file_system[max(done.file_system)]
    p0 = wishes.prefetchers
    done.together = {n // p0: found for n, found in largest.items() if n % p0 == 0}
    done.alone = dict(largest)
    done.notes.append(
        "one node: its threads stand for other nodes' here; for how the file system "
        "serves several, run calibrate under mpirun, one rank a node"
    )


def _many_nodes(
    wishes: Wishes,
    reader: ReadBenchmark | None,
    comm: Any,
    leaders: list[int],
    budget: Budget,
    done: Measured,
    show: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    request = max(wishes.requests)
    counts = _steps(len(leaders))
    for threads, curve in ((wishes.prefetchers, done.together), (1, done.alone)):
        for count in counts:
            show(f"file system: {count} nodes, {threads} threads each")
            readers = leaders[:count]
            values: list[float] = []
            for _ in range(RUNS_MIN):
                if values and not comm.bcast(budget.seconds > 0, root=0):
                    break  # rank 0's clock for all
                comm.Barrier()
                mine: float | None = 0.0
                if reader is not None and comm.Get_rank() in readers:
                    mine = reader.run(threads, request, budget)
                rates = comm.allgather(mine)
                if any(rate is None for rate in rates):
                    break
                values.append(sum(rates))
            if values:
                curve[count] = median(values)
        lost = ", ".join(str(count) for count in counts if count not in curve)
        if lost:
            note(
                f"file system: not with {lost} nodes, {threads} threads each: too little is left "
                "of --bytes, or the file is too small"
            )
    if len(leaders) > 1:
        show("network between two nodes")
        source, target = leaders[0], leaders[1]
    else:
        show("network: two ranks of one node")
        source, target = 0, 1
        done.notes.append("all ranks are on one node: the network is that node's memory")
    link = network.LinkBenchmark(comm, source, target)
    values = [rate for rate in (link.run() for _ in range(RUNS_MIN))]
    if values:
        done.link = median(values)


@contextmanager
def _disk(
    wishes: Wishes, budget: Budget, done: Measured, note: Callable[[str], None]
) -> Iterator[ReadBenchmark | None]:
    """The reader of --local; None without it, and where it is no disk."""
    if wishes.local is None:
        yield None
    elif scratch.in_memory(wishes.local):
        note(
            f"local disk: left out: what is written in {wishes.local} stays in the page cache, it "
            "is memory (tmpfs)"
        )
        yield None
    else:
        done.disk_bytes = shutil.disk_usage(wishes.local).free
        with _reader(wishes.local, wishes, 0, 1, budget, note) as reader:
            yield reader


@contextmanager
def _reader(
    path: str, wishes: Wishes, seed: int, files: int, budget: Budget, note: Callable[[str], None]
) -> Iterator[ReadBenchmark]:
    """A reader of a file, or of a test file in a directory, where all nodes make ``files`` of them.

    ``seed``: differs by node, so that no node reads what another has just brought into a cache.
    """
    least = wishes.prefetchers * max(wishes.requests)
    try:
        fd = None
        if os.path.isdir(path):
            scratch.refuse_what_does_not_fit(path, files * wishes.file_bytes)
            fd = scratch.made(path, wishes.file_bytes, least, WRITING_PART * budget.seconds)
        with ReadBenchmark(path, wishes.direct, seed, fd) as reader:
            if reader.size_bytes < least:
                raise UffdPrefetchError(
                    f"calibrate: {path} has {reader.size_bytes} bytes, less than the {least} of "
                    f"{wishes.prefetchers} requests at once: give a larger file, or a directory"
                )
            if fd is not None and reader.size_bytes < wishes.file_bytes:
                note(
                    f"test file in {path}: {format_size(reader.size_bytes)} of "
                    f"{format_size(wishes.file_bytes)}, for more there was no time"
                )
            yield reader
    except OSError as error:
        raise usage_error(f"calibrate: cannot read {path}: {error.strerror}") from None
