# SPDX-License-Identifier: Apache-2.0
"""Readers of bench/pool.py that begin each epoch together, and what they must have read.

pool_read.c reports in a FIFO that it is ready and that an epoch is over, and waits each time for a
byte from a FIFO of its own. This works through mpirun, wrap and cgroups, and all counters can be
read between two epochs while the ranks wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.demo.jobrun import job_environment

Line = dict[str, Any]


# ---- pure: who reads what, and the sums over it ----------------------------------------------


def units_of(pattern: str, units: int, rank: int, ranks: int) -> np.ndarray:
    """The units that a rank reads in an epoch (pool_read.c, read_part), without their order."""
    if pattern == "contiguous":
        return np.arange(units * rank // ranks, units * (rank + 1) // ranks)
    if pattern == "skipping":
        return np.arange(rank, units, ranks)
    if pattern in ("whole", "apart"):
        return np.arange(units)
    raise ValueError(pattern)


def unit_sums(path: Path, unit_bytes: int, step_bytes: int) -> np.ndarray:
    """For each unit of a file the sum over its words of word * (offset | 1), modulo 2**64."""
    words: np.ndarray = np.memmap(path, dtype="<u8", mode="r")
    every, each = step_bytes // 8, unit_bytes // 8
    sums: np.ndarray = np.zeros(-(-len(words) // each), dtype=np.uint64)
    for unit in range(len(sums)):
        part = words[unit * each : (unit + 1) * each : every]
        offsets = np.arange(len(part), dtype=np.uint64) * np.uint64(step_bytes)
        offsets += np.uint64(unit * unit_bytes)
        sums[unit] = np.sum(part * (offsets | np.uint64(1)), dtype=np.uint64)
    return sums


def check_sums(lines: Sequence[Line], sums: np.ndarray, pattern: str) -> None:
    """Raise UffdPrefetchError unless each rank's line has the expected sum."""
    for line in lines:
        units = units_of(pattern, len(sums), line["rank"], len(lines))
        expected = int(np.sum(sums[units], dtype=np.uint64))
        if line["sum"] != expected:
            raise UffdPrefetchError(
                f"WRONG BYTES: rank {line['rank']} of {len(lines)} ({pattern}, epoch "
                f"{line['epoch']}) has the sum {line['sum']:#x}, the file {expected:#x}"
            )


# ---- the gate --------------------------------------------------------------------------------


@dataclass
class Readers:
    """A finished run: for each epoch one line of each rank, in rank order."""

    epochs: list[list[Line]]
    wall_seconds: float

    def seconds(self, epoch: int) -> float:
        """From the first rank's begin to the last one's end."""
        lines = self.epochs[epoch]
        begin = min(line["begin_ns"] for line in lines)
        return float(max(line["end_ns"] for line in lines) - begin) / 1e9

    def total(self, name: str) -> int:
        """The sum of a counter over ranks and epochs."""
        return sum(int(line[name]) for lines in self.epochs for line in lines)


class Gate:
    """The bench's end of the FIFOs."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.directory = directory
        os.mkfifo(directory / "up")
        # Opened for both, an end never blocks in open(2) and never sees the other one go.
        self._up = os.open(directory / "up", os.O_RDWR | os.O_CLOEXEC)
        self._down = []
        for rank in range(ranks):
            os.mkfifo(directory / f"down.{rank}")
            self._down.append(os.open(directory / f"down.{rank}", os.O_RDWR | os.O_CLOEXEC))
        self._text = b""

    def wait(self, process: subprocess.Popen[bytes], deadline: float) -> list[Line]:
        """One line of each rank, in rank order; UffdPrefetchError if the job ends or hangs."""
        lines: list[Line] = []
        while len(lines) < len(self._down):
            while b"\n" in self._text:
                line, self._text = self._text.split(b"\n", 1)
                lines.append(json.loads(line))
            if len(lines) >= len(self._down):
                break
            ended = process.poll() is not None
            readable, _, _ = select.select([self._up], [], [], 0 if ended else 0.1)
            if readable:
                self._text += os.read(self._up, 65536)
            elif ended:
                raise UffdPrefetchError(f"the job ended early with status {process.returncode}")
            elif time.monotonic() > deadline:
                raise UffdPrefetchError("the job did not come to its next epoch in time")
        return sorted(lines, key=lambda line: int(line["rank"]))

    def go(self) -> None:
        """Release every rank."""
        for fd in self._down:
            os.write(fd, b"g")

    def close(self) -> None:
        """Close our ends."""
        for fd in (self._up, *self._down):
            os.close(fd)


@contextlib.contextmanager
def _started(
    command: Sequence[str], rundir: Path, scratch: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The job in a session of its own and the file of its stderr; killed if it is left behind."""
    stderr_path = scratch / "stderr"
    with open(stderr_path, "wb") as stderr:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env={**job_environment(), "UFFDPREFETCH_RUNDIR": str(rundir)},
            cwd=scratch,
            start_new_session=True,
        )
    try:
        yield process, stderr_path
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_line(path: Path) -> str:
    """The last line of a job's stderr, for a message."""
    text = path.read_text(errors="replace") if path.exists() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def run_readers(
    command: Callable[[Path], Sequence[str]],
    *,
    ranks: int,
    epochs: int,
    timeout_seconds: float,
    scratch: Path,
    between: Callable[[int, Path], None] | None = None,
) -> Readers:
    """Run a job of pool_read's ranks to its end.

    Args:
        command: makes the words of the job from the gate's directory.
        between: called when all ranks stand, with the number of epochs that are over and the
            runtime directory of the service: 0 when all have mapped and none has read.

    Raises:
        UffdPrefetchError: it failed, hung, or did not say what it had read.
    """
    begin = time.perf_counter()
    deadline = time.monotonic() + timeout_seconds
    finished: list[list[Line]] = []
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-gate-") as name:
        gate, rundir = Gate(Path(name), ranks), Path(name) / "run"
        rundir.mkdir(mode=0o700)
        try:
            with _started(command(Path(name)), rundir, scratch) as (process, stderr_path):
                try:
                    for epoch in range(epochs + 1):
                        lines = gate.wait(process, deadline)
                        if epoch:
                            finished.append(lines)
                        if between is not None:
                            between(epoch, rundir)
                        gate.go()
                    process.wait(max(1.0, deadline - time.monotonic()))
                except (UffdPrefetchError, subprocess.TimeoutExpired) as error:
                    raise UffdPrefetchError(f"{error}; it said: {last_line(stderr_path)}") from None
                if process.returncode:
                    raise UffdPrefetchError(
                        f"the job ended with status {process.returncode}: {last_line(stderr_path)}"
                    )
        finally:
            gate.close()
    return Readers(finished, time.perf_counter() - begin)
