# SPDX-License-Identifier: Apache-2.0
"""What the programs of bench/apps.py share: how they tell what they have read and how long it took.

They are independent of uffdprefetch: each is what a user of its library writes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

#: Of computing: time.sleep() takes some 0.1 ms more than it is told.
SHORTEST_SLEEP_SECONDS = 0.001


def major_faults() -> int:
    """Of this process and of its children that have ended (getrusage(2))."""
    return sum(
        resource.getrusage(who).ru_majflt
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def cpu_seconds() -> float:
    """Likewise."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Reading:
    """The part of a program that is measured; a context manager that prints one JSON line.

    ``begin_ns`` and ``end_ns`` are of the clock that all processes share. The digest is the CRC-32
    of what was added, in order: a quarter of a second for a GB. What is added after end() costs
    nothing. ``compute_seconds_per_byte``: what is added is computed with, which is a sleep.
    """

    def __init__(self, compute_seconds_per_byte: float = 0.0) -> None:
        self.crc = self.bytes = self.end_ns = 0
        self.compute_seconds_per_byte, self.owed_seconds = compute_seconds_per_byte, 0.0

    def begin(self) -> None:
        """Start the clock."""
        self.faults_before, self.cpu_before = major_faults(), cpu_seconds()
        self.begin_ns = time.monotonic_ns()

    def end(self) -> None:
        """Stop the clock, unless it was."""
        if self.end_ns:
            return
        self.end_ns = time.monotonic_ns()
        self.faults = major_faults() - self.faults_before
        self.cpu_seconds = cpu_seconds() - self.cpu_before

    def __enter__(self) -> Reading:
        self.begin()
        return self

    def add(self, data: Any) -> None:
        """Take in what exports a buffer in C order."""
        begin = time.perf_counter()
        view = memoryview(data).cast("B")
        self.crc = zlib.crc32(view, self.crc)
        self.bytes += len(view)
        if self.compute_seconds_per_byte and not self.end_ns:
            self.compute(len(view) * self.compute_seconds_per_byte, begin)

    def compute(self, seconds: float, begin: float) -> None:
        """Until so long after ``begin``; together with what comes next, where that is short."""
        due = begin + seconds + self.owed_seconds
        if due - time.perf_counter() > SHORTEST_SLEEP_SECONDS:
            time.sleep(due - time.perf_counter())
        self.owed_seconds = due - time.perf_counter()

    def add_tensor(self, tensor: Any) -> None:
        """Take in a torch tensor."""
        import torch

        self.add(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())

    def line(self) -> dict[str, Any]:
        """What is told of it, once it is over."""
        return {
            "seconds": (self.end_ns - self.begin_ns) / 1e9,
            "begin_ns": self.begin_ns,
            "end_ns": self.end_ns,
            "digest": f"{self.crc:08x}",
            "bytes": self.bytes,
            "major_faults": self.faults,
            "cpu_seconds": self.cpu_seconds,
        }

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        if error is None:
            # in one write: torchrun starts ranks with -u, and they share a pipe
            sys.stdout.write(json.dumps(self.line()) + "\n")
            sys.stdout.flush()


def together(readers: list[Callable[[], int]], reading: Reading) -> None:
    """Each in a process of its own, at the same time; what they return is taken in."""
    context = multiprocessing.get_context("fork")
    pipes = []
    for reader in readers:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=lambda send=theirs, run=reader: send.send(run()))
        process.start()
        theirs.close()
        pipes.append((process, mine))
    for process, pipe in pipes:
        reading.add(pipe.recv().to_bytes(8, "little"))
        process.join()


def read_as_told(readers: Mapping[str, tuple[str, Callable[[Path, int, Reading], None]]]) -> None:
    """`DIR --reader NAME [--reads N] [--compute-seconds-per-byte S]`: one of these, which are named
    with the library that each needs. Its import is not measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--reader", choices=tuple(readers), required=True)
    parser.add_argument("--reads", type=int, default=0)
    parser.add_argument("--compute-seconds-per-byte", type=float, default=0.0)
    args = parser.parse_args()
    library, read = readers[args.reader]
    __import__(library)
    with Reading(args.compute_seconds_per_byte) as reading:
        read(args.directory, args.reads, reading)
