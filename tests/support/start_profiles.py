# SPDX-License-Identifier: Apache-2.0
"""Start profiles of files that a test has made, and replays of them."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from conftest import HANG_SECONDS

from uffdprefetch.base.file_systems import type_of
from uffdprefetch.launch.replay import PROGRAM
from uffdprefetch.native.profiles import EntryKind
from uffdprefetch.orders import profile_store
from uffdprefetch.orders.start_profile import StartEntry, StartProfile
from uffdprefetch.protocol import start_log
from uffdprefetch.protocol.replayed import told_by

#: Of what a replay tells; behind that it is told where the start log is.
RESULT_BYTES = 1024
#: In a start log.
_SLOTS_AT, _TEXT_AT = 4096, 4096 + 4 * 65536 + 4 * 131072


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


class Opens:
    """A start log (csrc/common/startlog.h) in which a job's processes have noted what they open."""

    def __init__(self) -> None:
        self.fd = start_log.make()
        self._slots = self._at = 0

    @property
    def path(self) -> str:
        """By which another process finds it."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def note(
        self, path: Path | str, *, missing: bool = False, size: int | None = None, pid: int = 1,
        directory: int = -100, is_where: bool = False,
    ) -> None:  # fmt: skip
        """One more, opened in a ``directory``, or (``is_where``) in which a process was loaded;
        ``size``: what is said of the path's."""
        name = os.fsencode(path)
        length = len(name) if size is None else size
        entry = struct.pack("<iiIHBB", pid, directory, 0, length, 2 if is_where else 1, missing)
        self.slot(self._at // 8 + 1, entry + name)

    def slot(self, word: int, text: bytes = b"") -> None:
        """One more, which says that it lies there."""
        os.pwrite(self.fd, text, _TEXT_AT + self._at)
        self._at += -(-len(text) // 8) * 8
        os.pwrite(self.fd, struct.pack("<I", word), _SLOTS_AT + 4 * self._slots)
        self._slots += 1
        os.pwrite(self.fd, struct.pack("<Q", self._slots << 32 | self._at), 0)


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
        program: str = "", follows: bool = False,
    ) -> list[str]:  # fmt: skip
        """The command line; of a child of this process, if no ``parent`` is given; ``follows``: no
        more is read than a job opens."""
        numbers = (os.getpid() if parent is None else parent, seconds, depth, budget_bytes, rate)
        paths = [self.profile] if profiles is None else profiles
        told = ("0", str(self.lock), str(int(follows)))  # its standard input: see start()
        return [PROGRAM, *map(str, numbers), *told, program, *map(str, paths)]

    def start(self, words: Sequence[str] | None = None, **how: Any) -> subprocess.Popen[bytes]:
        """One; or ``words``, which start one. It tells into a new file."""
        with open(self.result, "w+b") as told:
            return subprocess.Popen(self.words(**how) if words is None else words, stdin=told)

    def run(self, **how: Any) -> dict[str, Any]:
        """One, to its end: what it tells."""
        assert self.start(**how).wait(HANG_SECONDS) == 0
        return self.told()

    def follow(self, path: str) -> None:
        """A replay that runs is told where its job's start log lies."""
        with open(self.result, "r+b") as told:
            os.pwrite(told.fileno(), os.fsencode(path), RESULT_BYTES)

    def told(self) -> dict[str, Any]:
        """With nothing in ``skipped`` of which there was none."""
        told = told_by(self.result.read_bytes()[:RESULT_BYTES].decode())
        return told | {"skipped": {why: n for why, n in told["skipped"].items() if n}}
