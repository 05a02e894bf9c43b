# SPDX-License-Identifier: Apache-2.0
"""Memory and pids cgroups of either version, for tests as root."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from conftest import require, wait_until

_V1 = Path("/sys/fs/cgroup/memory")


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A group with that limit, which must be left at the end; skipped where none can be made."""
    root = _V1 if _V1.exists() else Path("/sys/fs/cgroup")
    group = root / f"uffdprefetch-test-{os.getpid()}"
    limit = group / ("memory.limit_in_bytes" if _V1.exists() else "memory.max")
    try:
        group.mkdir()
        limit.write_text(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        require(False, f"no memory cgroup can be made here: {error}")
    procs = group / "cgroup.procs"
    try:
        yield group
    except BaseException:  # the next one has to find none
        for pid in map(int, procs.read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise
    finally:
        wait_until(lambda: not procs.read_text(), "the service to end")
        group.rmdir()


@contextlib.contextmanager
def pids_group(most: str) -> Iterator[Path]:
    """A group below one with that limit, skipped where none can be made. It is left at the end."""
    root = Path("/sys/fs/cgroup")
    above = (root / "pids" if (root / "pids").exists() else root) / f"uffdprefetch-{os.getpid()}"
    group = above / "below"
    try:
        try:
            above.mkdir()
            group.mkdir()
            (above / "pids.max").write_text(most)
        except OSError as error:
            require(False, f"no pids cgroup can be made here: {error}")
        yield group
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "all to end")
    finally:
        for made in (group, above):
            with contextlib.suppress(OSError):
                made.rmdir()


def entering(group: Path) -> tuple[str, ...]:
    """The words before a command that is to run in a group."""
    return ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")


def kills(group: Path) -> int:
    """How often the kernel killed somebody in it for want of memory."""
    for name in ("memory.oom_control", "memory.events"):
        with contextlib.suppress(OSError):
            for line in (group / name).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0
