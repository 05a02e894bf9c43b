# SPDX-License-Identifier: Apache-2.0
"""What a run of the suite has made: its processes, mounts and files, and how they are ended.

Every process that a run starts inherits MARK, a variable whose value no other run has, and the run
adopts what its children leave behind (PR_SET_CHILD_SUBREAPER). So everything here touches this run
alone, whatever else the machine does. Standard library only: tests/support/warden.py uses it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

#: RUN/OWNER: which run a process is of, and which test or lasting fixture of it (a number). No name
#: that conftest.clean_environment would take out.
MARK = "UPTEST_MARK"
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8  # linux/fs.h
_POLL_SECONDS = 0.01
_LIBRARIES = r"--singleton-died-pipe|multiprocessing\.(resource_tracker|forkserver)"


@dataclass(frozen=True)
class Process:
    """One look at /proc/PID/stat; ``key`` makes it unique."""

    pid: int
    start_ticks: int
    parent: int
    state: str

    @property
    def key(self) -> tuple[int, int]:
        """What no other process ever has."""
        return self.pid, self.start_ticks

    @property
    def ended(self) -> bool:
        return self.state in "ZX"

    def __str__(self) -> str:
        return f"{self.pid} ({command_line(self.pid) or 'ended'})"


# ---- processes ----------------------------------------------------------------------------------


def look(pid: int) -> Process | None:
    """The process of this number, None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Process(pid, int(fields[19]), int(fields[1]), fields[0].decode())


def everything() -> dict[int, Process]:
    """Every process that /proc shows."""
    found = (look(int(name)) for name in os.listdir("/proc") if name.isdecimal())
    return {process.pid: process for process in found if process is not None}


def descendants(table: dict[int, Process], root: int) -> list[Process]:
    """The children of ``root``, theirs, and so on; not ``root`` itself."""
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    found, left = [], [root]
    while left:
        more = children.get(left.pop(), [])
        found += more
        left += [process.pid for process in more]
    return found


def command_line(pid: int) -> str:
    """Its words, cut to a line; '' when it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = " ".join(file.read().decode(errors="replace").split("\0")).strip()
    except OSError:
        return ""
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= 160 else text[:157] + "..."


def mark_of(pid: int) -> tuple[str, int] | None:
    """(run, owner) as the process was given it, None if it has none or does not show it."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    prefix = MARK.encode() + b"="
    value = next((e[len(prefix) :] for e in entries if e.startswith(prefix)), b"")
    run, _, owner = value.decode(errors="replace").partition("/")
    return (run, int(owner)) if owner.isdecimal() else None


def marked(run: str) -> list[Process]:
    """The living processes that show a mark of this run, whoever their parent is."""
    return [
        process
        for process in everything().values()
        if not process.ended
        and (mark_of(process.pid) or ("",))[0] == run
        and not of_a_library(process)
    ]


def owners(
    root: int, run: str, noted: Mapping[tuple[int, int], int] | None = None
) -> dict[Process, int | None]:
    """The living descendants of ``root``, each with the owner that its mark names.

    One without a mark of this run (it cleared its environment, or writes over it, as browsers do)
    has the owner that ``noted`` gives its key, or its nearest ancestor's; None where no ancestor
    below ``root`` has one either. Without what is of a library.
    """
    table = everything()
    known: dict[int, int | None] = {root: None}

    def owner(pid: int) -> int | None:
        if pid not in known:
            mark = mark_of(pid)
            if mark is not None and mark[0] == run:
                known[pid] = mark[1]
            elif noted is not None and table[pid].key in noted:
                known[pid] = noted[table[pid].key]
            else:
                known[pid] = owner(table[pid].parent)
        return known[pid]

    family = [process for process in descendants(table, root) if not process.ended]
    return {process: owner(process.pid) for process in family if not of_a_library(process)}


def of_a_library(process: Process) -> bool:
    """Started by a library for as long as the process that uses it lives, pytest itself perhaps:
    Open MPI's daemon of a process without mpirun (without it MPI ends pytest), and Python's own."""
    return re.search(_LIBRARIES, command_line(process.pid)) is not None


def adopt_orphans() -> None:
    """Become the parent of whatever descendants lose theirs (services, daemons)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def has_children(except_for: int) -> bool:
    """Whether this process has children besides one, ended ones included."""
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children") as file:
                if any(int(pid) != except_for for pid in file.read().split()):
                    return True
        return False
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return True


def reap(keep: Iterable[int]) -> None:
    """Take the status of our ended children, but not of ``keep``, whose status others take."""
    kept = set(keep)
    for process in everything().values():
        if process.parent == os.getpid() and process.ended and process.pid not in kept:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def gone(process: Process) -> bool:
    """It has ended, whether or not its parent has taken the status yet."""
    now = look(process.pid)
    return now is None or now.key != process.key or now.ended


def wait_for(found: Callable[[], list[Process]], seconds: float) -> list[Process]:
    """Wait until ``found()`` finds nothing; what it still finds after ``seconds``."""
    end = time.monotonic() + seconds
    while (left := found()) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    return left


def end(found: Callable[[], list[Process]], seconds: float = 10.0) -> list[str]:
    """SIGKILL whatever ``found()`` finds until it finds nothing (they may be forking); what was
    killed, as text. One that hangs in the kernel is left after ``seconds``.

    One without memory is ending already, and shows no mark any more, so whose it is is not known
    (a lasting fixture's terminal): it counts only if it stays.
    """
    killed: dict[tuple[int, int], str] = {}

    def kill() -> list[Process]:
        for process in (left := found()):
            if not command_line(process.pid):
                continue
            killed.setdefault(process.key, str(process))
            if not gone(process):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, signal.SIGKILL)
        return left

    for process in wait_for(kill, seconds):
        killed.setdefault(process.key, str(process))
    return list(killed.values())


# ---- mounts -------------------------------------------------------------------------------------


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def mounts_below(directories: Iterable[str]) -> list[str]:
    """Where something is mounted in one of these directories, the innermost first."""
    with open("/proc/self/mountinfo") as file:
        where = [_unescaped(line.split()[4]) for line in file]
    prefixes = tuple(os.path.realpath(directory).rstrip("/") + "/" for directory in directories)
    return [path for path in reversed(where) if path.startswith(prefixes)]


def detach(path: str) -> None:
    """Unmount lazily: it vanishes with its last user. No look at ``path``, which may hang."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(path), _MNT_DETACH | _UMOUNT_NOFOLLOW) != 0:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(["fusermount3", "-u", "-z", path], capture_output=True, timeout=10)


# ---- files --------------------------------------------------------------------------------------


def files_below(directory: str, foreign: Iterable[str]) -> Iterator[str]:
    """What lies in ``directory``, but nothing whose name fits a pattern of ``foreign`` (what other
    programs leave there). Runtime directories stay for the next run, with the indices in them:
    what else is there is told."""
    patterns = [re.compile(pattern) for pattern in foreign]
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if any(pattern.fullmatch(entry.name) for pattern in patterns):
            continue
        if re.fullmatch(r"uffdprefetch(-\d+)?", entry.name) and entry.is_dir(follow_symlinks=False):
            yield from (inner.path for inner in os.scandir(entry.path) if inner.name != "index")
        else:
            yield entry.path


def remove(path: str) -> None:
    """A file or a tree, as far as we may."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)
