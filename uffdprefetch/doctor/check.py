# SPDX-License-Identifier: Apache-2.0
"""One finding, and how a probe is run so that nothing it does can hurt the doctor."""

from __future__ import annotations

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

#: How a finding bears on `wrap`: all well; works with less; cannot; worth knowing; not tried.
OK, LIMIT, CANNOT, NOTE, SKIPPED = "ok", "limit", "cannot", "note", "skipped"

#: Time limit of a probe: a longer one hangs, on a file server that is away or in the kernel.
PROBE_TIMEOUT_SECONDS = 30.0

#: Checks of the nodes of an allocation (doctor/cluster.py).
LAUNCHER, MEETING, MPI = "cluster: launcher", "cluster: meeting", "cluster: MPI"
MESSAGES, NETWORK = "cluster: messages", "cluster: network"
CPUS, PRIVACY = "cluster: CPUs", "cluster: privacy"
OF_NODES = frozenset((LAUNCHER, MEETING, MPI, MESSAGES, NETWORK, CPUS, PRIVACY))


@dataclass
class Check:
    """What was found, what follows from it for a run, and the one command that mends it."""

    name: str
    status: str
    found: str
    follows: str = ""
    remedy: str | None = None
    #: Figures for programs; a name ends in its unit.
    values: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, where the remedy is called ``lift``."""
        return {"lift" if k == "remedy" else k: value for k, value in asdict(self).items()}


Probe = Callable[[], Check]


def why(error: OSError) -> str:
    """'EPERM (Operation not permitted)'"""
    import errno

    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    return f"{name} ({os.strerror(error.errno or 0)})"


def run_isolated(name: str, probe: Probe, timeout_seconds: float = PROBE_TIMEOUT_SECONDS) -> Check:
    """Run ``probe`` in a forked child and return its Check.

    A probe that raises, crashes or hangs becomes a Check with status LIMIT that says so: kernels
    and sandboxes differ in ways that no list of exceptions covers.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            os.setpgid(0, 0)  # what it starts (a compiler) is killed with it
            try:
                result = probe()
            except Exception as error:
                result = _failed(name, f"the probe failed: {type(error).__name__}: {error}")
                result.values["traceback"] = traceback.format_exc(limit=4)
            data = json.dumps(asdict(result)).encode()
            while data:
                data = data[os.write(writer, data) :]
        finally:
            os._exit(0)
    os.close(writer)
    try:
        os.setpgid(pid, pid)  # whoever comes first
    except OSError:
        pass
    try:
        return _collect(name, pid, reader, timeout_seconds)
    finally:
        os.close(reader)


def _collect(name: str, pid: int, reader: int, timeout_seconds: float) -> Check:
    data = b""
    deadline = time.monotonic() + timeout_seconds
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.killpg(pid, signal.SIGKILL)
            # Not waited for without end: a task stuck in the kernel does not die of SIGKILL.
            for _ in range(100):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    break
                time.sleep(0.01)
            return _failed(name, f"the probe did not end within {timeout_seconds:.0f} s")
        piece = os.read(reader, 65536)
        if not piece:
            break
        data += piece
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status)).name
        return _failed(name, f"the probe was killed by {number}")
    try:
        return Check(**json.loads(data))
    except (ValueError, TypeError):
        return _failed(name, "the probe ended without an answer")


def _failed(name: str, found: str) -> Check:
    return Check(name, LIMIT, found, "what it was to find out is taken as not available")
