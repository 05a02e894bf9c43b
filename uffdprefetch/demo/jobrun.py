# SPDX-License-Identifier: Apache-2.0
"""Measured runs of the demonstration's job: command, environment, result."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.procfs import machine_cpu_seconds

JOB = Path(__file__).with_name("job.py")
_PACKAGE_PARENT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class JobRun:
    """One run of job.py: its JSON, and the machine's CPU use meanwhile (seconds).

    steal_seconds: stolen by the hypervisor from all CPUs; machine_busy_seconds: their busy time;
    children_cpu_seconds: the part of the job and its wrapper.
    """

    command: list[str]
    job: dict[str, Any]
    stderr: str
    wall_seconds: float
    steal_seconds: float
    machine_busy_seconds: float
    children_cpu_seconds: float


def _children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def job_environment() -> dict[str, str]:
    """Our environment without the user's options, which would alter the configurations."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("UFFDPREFETCH_") or name == "UFFDPREFETCH_RUNDIR"
    }
    paths = [str(_PACKAGE_PARENT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def wrap_command(*options: str, quiet: bool = True) -> list[str]:
    """The command prefix of `uffdprefetch wrap` with this interpreter."""
    words = [sys.executable, "-m", "uffdprefetch", "wrap", *options, "--"]
    return [*words[:4], "-q", *words[4:]] if quiet else words


def job_command(database: str | os.PathLike[str], *options: str) -> list[str]:
    """The command of job.py on a database with this interpreter."""
    return [sys.executable, str(JOB), "--db", str(database), *options]


def run_job(command: Sequence[str], *, timeout_seconds: float, cwd: Path | None = None) -> JobRun:
    """Run a command that ends in job_command(); returns when it has ended.

    Raises:
        UffdPrefetchError: it failed, hung for `timeout_seconds`, or printed no JSON.
    """
    busy_before, steal_before = machine_cpu_seconds()
    children_before = _children_cpu_seconds()
    begin = time.perf_counter()
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=job_environment(),
        cwd=cwd,
        start_new_session=True,  # so that a hung job can be killed with its children
        text=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise UffdPrefetchError(
            f"the job did not end within {timeout_seconds:.0f} s and was killed"
        ) from None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    wall_seconds = time.perf_counter() - begin
    busy_after, steal_after = machine_cpu_seconds()
    if process.returncode != 0:
        lines = [line for line in err.splitlines() if line.strip()]
        last = lines[-1] if lines else "it said nothing"
        raise UffdPrefetchError(f"the job ended with status {process.returncode}: {last}")
    try:
        job = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        raise UffdPrefetchError(f"the job printed no JSON: {out[-200:]!r}") from None
    return JobRun(
        command=list(command),
        job=job,
        stderr=err,
        wall_seconds=wall_seconds,
        steal_seconds=steal_after - steal_before,
        machine_busy_seconds=busy_after - busy_before,
        children_cpu_seconds=_children_cpu_seconds() - children_before,
    )


def read_tool_summary(output: Path) -> dict[str, Any] | None:
    """The summary of `wrap -o OUTPUT`, None if there is none (as without wrap)."""
    try:
        summary = json.loads(Path(f"{output}.summary.json").read_text())
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None
