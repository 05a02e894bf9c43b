# SPDX-License-Identifier: Apache-2.0
"""Memory cgroups for the benches, of either version: a limit, what was used, and away again."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from uffdprefetch.base.errors import UffdPrefetchError

ROOT = Path("/sys/fs/cgroup")
_REMOVE_SECONDS = 5.0

#: sh joins the group whose cgroup.procs is $0 (a 0 there means the writer), then becomes the words.
_JOIN = 'echo 0 > "$0" && exec "$@"'
_JOIN_BY_RANK = 'echo 0 > "$0/rank$OMPI_COMM_WORLD_RANK/cgroup.procs" && exec "$@"'


def version() -> int | None:
    """1 or 2, the hierarchy that has the memory controller here; None: none is mounted."""
    with contextlib.suppress(OSError):
        if "memory" in (ROOT / "cgroup.controllers").read_text().split():
            return 2
    return 1 if (ROOT / "memory" / "memory.limit_in_bytes").exists() else None


def why_not() -> str | None:
    """Why no memory cgroup can be made here; None: one can."""
    if os.geteuid() != 0:
        return "only root may make memory cgroups"
    if version() is None:
        return "no cgroup hierarchy with a memory controller is mounted on /sys/fs/cgroup"
    return None


class MemoryGroup:
    """One memory cgroup; made and removed by memory_group()."""

    def __init__(self, path: Path, limit_bytes: int | None) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self._names = {
            1: ("memory.limit_in_bytes", "memory.max_usage_in_bytes"),
            2: ("memory.max", "memory.peak"),
        }[version() or 2]
        path.mkdir()
        if limit_bytes is not None:
            (path / self._names[0]).write_text(f"{limit_bytes}\n")

    def joined(self, command: Sequence[str]) -> list[str]:
        """The words that run `command` in this group."""
        return ["sh", "-c", _JOIN, str(self.path / "cgroup.procs"), *command]

    def take(self, pids: Iterable[int]) -> None:
        """Put processes into the group: from outside, where they do not see the hierarchy."""
        for pid in pids:
            with contextlib.suppress(OSError):
                (self.path / "cgroup.procs").write_text(str(pid))

    def peak_bytes(self) -> int | None:
        """The most that was ever charged; None where the kernel does not tell (v2 before 5.19)."""
        with contextlib.suppress(OSError):
            return int((self.path / self._names[1]).read_text())
        return None

    def kills(self) -> int:
        """How often the kernel has killed a process of it for want of memory."""
        name = {1: "memory.oom_control", 2: "memory.events"}[version() or 2]
        lines = (self.path / name).read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])

    def used(self) -> dict[str, int]:
        """Bytes charged now: file (the page cache without shmem), shmem, anonymous."""
        stat = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        shmem = int(stat.get("shmem", 0))
        if version() == 2:
            return {"file": int(stat["file"]) - shmem, "shmem": shmem, "anon": int(stat["anon"])}
        return {"file": int(stat["cache"]) - shmem, "shmem": shmem, "anon": int(stat["rss"])}

    def remove(self) -> None:
        """Put whoever is left into the parent, and remove the group."""
        give_up = time.monotonic() + _REMOVE_SECONDS
        while True:
            for pid in (self.path / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (self.path.parent / "cgroup.procs").write_text(pid)
            try:
                self.path.rmdir()
                return
            except OSError as error:
                if time.monotonic() > give_up:
                    raise UffdPrefetchError(
                        f"the cgroup {self.path} stays: {error.strerror}"
                    ) from None
                time.sleep(0.05)


def _parent() -> Path:
    return ROOT if version() == 2 else ROOT / "memory"


@contextlib.contextmanager
def memory_group(limit_bytes: int | None) -> Iterator[MemoryGroup]:
    """A new group with that limit (None: it only counts). Raises UffdPrefetchError: see why_not."""
    reason = why_not()
    if reason is not None:
        raise UffdPrefetchError(reason)
    name = f"uffdprefetch-bench-{os.getpid()}-{time.monotonic_ns()}"
    if version() == 2:
        with contextlib.suppress(OSError):
            (ROOT / "cgroup.subtree_control").write_text("+memory")
    group = MemoryGroup(_parent() / name, limit_bytes)
    try:
        yield group
    finally:
        group.remove()


@contextlib.contextmanager
def groups_of_ranks(ranks: int, limit_bytes: int) -> Iterator[tuple[Path, list[MemoryGroup]]]:
    """(their directory, one group for each rank), each with that limit."""
    with memory_group(None) as above, contextlib.ExitStack() as stack:
        if version() == 2:
            (above.path / "cgroup.subtree_control").write_text("+memory")
        groups = []
        for rank in range(ranks):
            groups.append(MemoryGroup(above.path / f"rank{rank}", limit_bytes))
            stack.callback(groups[-1].remove)
        yield above.path, groups


def joined_by_rank(directory: Path, command: Sequence[str]) -> list[str]:
    """The words for mpirun that run `command` in the group of its rank below `directory`."""
    return ["sh", "-c", _JOIN_BY_RANK, str(directory), *command]
