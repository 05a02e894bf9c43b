# SPDX-License-Identifier: Apache-2.0
"""Recording under test: programs whose faults are known, and the trace that was made of them."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from conftest import HANG_SECONDS, uffdprefetch
from paths import JOBS

from uffdprefetch.demo.bed import drop_cache
from uffdprefetch.trace.file import trace_file
from uffdprefetch.trace.file.events import FAULT_AFTER_AROUND, Kind

READER = JOBS / "pattern_reader.py"


@functools.cache
def why_no_witness() -> str | None:
    """Why the kernel's events cannot be had here; None when they can."""
    check = (
        "from uffdprefetch.trace.record.kernel_tracer import KernelTracer\n"
        "witness = KernelTracer()\n"
        "assert witness.sees_faults, witness.missing\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    if done.returncode == 0:
        return None
    return done.stderr.strip().splitlines()[-1]


@dataclass(frozen=True)
class Recorded:
    """A recorded run: what the job printed (a JSON line per process) and its trace."""

    said: list[dict[str, Any]]
    trace: trace_file.Trace
    stderr: str

    def file(self, path: Path) -> trace_file.TracedFile:
        """The trace's entry of a file."""
        found = [f for f in self.trace.files.values() if f.path == str(path.resolve())]
        assert found, f"{path} is not in the trace: {list(self.trace.files.values())}"
        return found[0]

    def events(self, path: Path, pid: int | None = None) -> np.ndarray[Any, Any]:
        """The events of a file, of one process or of all."""
        events = self.trace.events
        events = events[events["file"] == self.file(path).id]
        return events if pid is None else events[events["pid"] == pid]


def faults(events: np.ndarray[Any, Any]) -> int:
    """How many faults they are (trace/file/events.py)."""
    kinds = events["kind"]
    again = (kinds == Kind.FAULT) & (events["aux"] & FAULT_AFTER_AROUND != 0)
    return int(((kinds == Kind.AROUND) | (kinds == Kind.FAULT)).sum() - again.sum())


def count(events: np.ndarray[Any, Any], kind: Kind) -> int:
    """How many of a kind."""
    return int((events["kind"] == kind).sum())


def length(events: np.ndarray[Any, Any], kind: Kind) -> int:
    """Sum of their lengths, bytes."""
    return int(events["length"][events["kind"] == kind].sum())


def reader(path: Path, pattern: str, record_bytes: int = 1 << 18, *more: str) -> list[str]:
    """The command line of tests/jobs/pattern_reader.py."""
    return [sys.executable, str(READER), str(path), pattern, str(record_bytes), *more]


def ranks_of(n: int, command: Sequence[str]) -> list[str]:
    """``command`` as n ranks, one process each, that end together."""
    code = (
        "import os, subprocess, sys\n"
        "n = int(sys.argv[1])\n"
        "ps = [subprocess.Popen(sys.argv[2:], env={**os.environ, 'RANK': str(r),"
        " 'LOCAL_RANK': str(r), 'WORLD_SIZE': str(n)}) for r in range(n)]\n"
        "sys.exit(max(p.wait() for p in ps))\n"
    )
    return [sys.executable, "-c", code, str(n), *command]


def record(
    env: dict[str, str],
    cwd: Path,
    command: Sequence[str],
    *options: str,
    cold: Path | None = None,
    wrap: Sequence[str] | None = None,
) -> Recorded:
    """Run ``command`` under ``trace`` (or ``wrap --trace`` with these options) and read it all."""
    if cold is not None:
        drop_cache(cold)
    path = cwd / "run.uptrace"
    if wrap is None:
        ours = uffdprefetch("trace", "-f", "-o", str(path), *options, "--")
    else:
        summary = str(cwd / "run")
        ours = uffdprefetch("wrap", "-f", "-o", summary, "--trace", str(path), *wrap, "--")
    done = subprocess.run(
        [*ours, *command], env={**env, "UPTEST_TRACE": str(path)}, cwd=cwd, capture_output=True,
        text=True, timeout=2 * HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return Recorded(said, trace_file.read(str(path)), done.stderr)
