# SPDX-License-Identifier: Apache-2.0
"""Start profiles of files that a test has made, and replays of them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from conftest import HANG_SECONDS

from uffdprefetch.base.file_systems import type_of
from uffdprefetch.launch.replay import PROGRAM, told_by
from uffdprefetch.native.profiles import EntryKind
from uffdprefetch.orders import profile_store
from uffdprefetch.orders.start_profile import StartEntry, StartProfile


def left_behind(rundir: str) -> list[str]:
    """What lies in a runtime directory, but for logs of services."""
    try:
        names = os.listdir(rundir)
    except FileNotFoundError:
        return []
    return [name for name in names if not name.endswith(".log")]


def file_entry(path: Path, blocks: tuple[tuple[int, int], ...] = ()) -> StartEntry:
    """A file as it is now; ``blocks``: of 64 KiB, (first, count); none: all of it."""
    status = path.stat()
    return StartEntry(
        EntryKind.FILE, str(path), type_of(str(path)), status.st_size, status.st_mtime_ns, blocks
    )


def directory_entry(path: Path) -> StartEntry:
    return StartEntry(EntryKind.DIRECTORY, str(path))


def name_entry(path: Path) -> StartEntry:
    return StartEntry(EntryKind.STAT, str(path))


class Replays:
    """Replays of one profile, in a directory of the test's own."""

    def __init__(self, directory: Path) -> None:
        self.profile = directory / "start.upl"
        self.result = directory / "start.told"
        self.lock = directory / "start.lock"

    def of(self, *entries: StartEntry) -> Replays:
        """From now on it has these."""
        profile_store.store(str(self.profile), StartProfile(entries, 1))
        return self

    def words(
        self, seconds: int = 30, depth: int = 0, budget_bytes: int = 1 << 30, rate: int = 0,
        parent: int | None = None, profiles: Iterable[Path] | None = None,
        program: str = "",
    ) -> list[str]:  # fmt: skip
        """The command line; of a child of this process, if no ``parent`` is given."""
        numbers = (os.getpid() if parent is None else parent, seconds, depth, budget_bytes, rate)
        paths = [self.profile] if profiles is None else profiles
        told = ("0", str(self.lock))  # its standard input: see start()
        return [PROGRAM, *map(str, numbers), *told, program, *map(str, paths)]

    def start(self, words: Sequence[str] | None = None, **how: Any) -> subprocess.Popen[bytes]:
        """One; or ``words``, which start one. It tells into a new file."""
        with open(self.result, "wb") as told:
            return subprocess.Popen(self.words(**how) if words is None else words, stdin=told)

    def run(self, **how: Any) -> dict[str, Any]:
        """One, to its end: what it tells."""
        assert self.start(**how).wait(HANG_SECONDS) == 0
        return self.told()

    def told(self) -> dict[str, Any]:
        """With nothing in ``skipped`` of which there was none."""
        told = told_by(self.result.read_text())
        return told | {"skipped": {why: n for why, n in told["skipped"].items() if n}}
