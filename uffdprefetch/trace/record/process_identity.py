# SPDX-License-Identifier: Apache-2.0
"""Who is who in a trace: files by device and inode, processes with their ranks.

Everything is read from /proc while the process is there; what ended too soon keeps a number
instead of a name, and a process its parent's rank.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from uffdprefetch.base.config import SERVED_VARIABLE, Config
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.identity import identify
from uffdprefetch.base.mounts import mount_of, read_ahead_bytes
from uffdprefetch.base.procfs import maps_text
from uffdprefetch.trace.file.trace_file import TracedFile, TracedProcess

#: Paths of no record files: programs, libraries, what an interpreter reads to start.
_SYSTEM = re.compile(r"^/(usr|lib|lib64|bin|sbin|proc|sys|dev|etc|run/systemd)/")
_CODE = re.compile(r"(\.so(\.[0-9.]+)?|\.pyc?|\.pyd|\.h|\.mo|locale-archive|/ld\.so\.cache)$")
#: An LMDB lock file counts whatever its size: who shares it is a finding.
LOCK = re.compile(r"(^|/)lock\.mdb$|-lock$")
PATHS_MAX = 65536
#: Paths of installed packages, of the interpreter's own library, of other programs.
_PACKAGE = re.compile(r"/(?:site|dist)-packages/(?:__pycache__/)?([^/]+)")
_STANDARD = re.compile(r"/lib(?:64|exec)?/(python[0-9.]*|perl[0-9.]*|R|julia|node_modules)/")
_INTERPRETERS = ("/usr/bin/env", "/bin/sh", "/bin/bash", sys.executable)


def kernel_device(st_dev: int) -> int:
    """st_dev as the kernel's s_dev (include/linux/kdev_t.h)."""
    return os.major(st_dev) << 20 | os.minor(st_dev)


def _maps_lines(pid: int) -> list[str]:
    return (maps_text(pid) or "").split("\n")


def mappings(pid: int, device: int, inode: int) -> list[tuple[int, int, int, str, str]]:
    """(address, length, file offset, permissions, path) of a process's mappings of a file."""
    found: dict[int, tuple[int, int, int, str, str]] = {}
    for line in _maps_lines(pid):
        fields = line.split(None, 5)
        if len(fields) < 6 or int(fields[4]) != inode:
            continue
        major, minor = (int(x, 16) for x in fields[3].split(":"))
        if major << 20 | minor != device:
            continue
        start, end = (int(x, 16) for x in fields[0].split("-"))
        # under checkpoints a mapping is cut in pieces: those of one base are one
        offset = int(fields[2], 16)
        old = found.get(start - offset)
        if old is not None:
            start, offset = min(start, old[0]), min(offset, old[2])
            end = max(end, old[0] + old[1])
        found[start - offset] = (start, end - start, offset, fields[1], fields[5])
    return list(found.values())


def mapped_paths(pid: int) -> set[str]:
    """The paths of all files that a process has mapped."""
    fields = (line.split(None, 5) for line in _maps_lines(pid))
    return {words[5] for words in fields if len(words) == 6 and words[5].startswith("/")}


@dataclass(frozen=True)
class TraceLimits:
    """What of a job is kept: files with these names only, where there are any, else those of a size
    from ``min_size_bytes`` on; so many events as they are."""

    include: list[str]
    min_size_bytes: int
    max_events: int


class Paths:
    """Paths of files by (kernel device, inode), from opens that were seen and from /proc."""

    def __init__(self, limits: TraceLimits) -> None:
        self._include = tuple(limits.include)
        self._min_size_bytes = limits.min_size_bytes
        self._known: dict[tuple[int, int], str] = {}
        # what the kernel itself opens when a program or a script is executed
        self._code: set[tuple[int, int]] = set()
        for path in (*glob.glob("/lib*/ld-*"), *_INTERPRETERS):
            self.opened(0, path, executed=True)

    def opened(self, pid: int, path: str, executed: bool = False) -> tuple[int, int] | None:
        """Note a path that a process opened or executed; of a regular file its (device, inode)."""
        if not path or len(self._known) >= PATHS_MAX or path.startswith(("/proc/", "/sys/")):
            return None
        if not path.startswith("/"):
            try:
                path = os.path.join(os.readlink(f"/proc/{pid}/cwd"), path)
            except OSError:
                return None
        try:
            st = os.stat(path)
        except (OSError, ValueError):
            return None
        if not stat.S_ISREG(st.st_mode):
            return None
        key = (kernel_device(st.st_dev), st.st_ino)
        self._known.setdefault(key, os.path.realpath(path))
        if executed:
            self._code.add(key)
        return key

    def is_code(self, key: tuple[int, int]) -> bool:
        """Whether a file was executed."""
        return key in self._code

    def path_of(self, key: tuple[int, int]) -> str:
        """The path of a file whose open was seen, or ''."""
        return self._known.get(key, "")

    def find(self, pid: int, device: int, inode: int) -> tuple[str, bool]:
        """(path or '', whether it is mapped as code) of a file that ``pid`` has just touched."""
        code = (device, inode) in self._code
        path = self._known.get((device, inode), "")
        for _, _, _, permissions, name in mappings(pid, device, inode):
            code = code or "x" in permissions
            path = path or name
        return path or self._by_descriptor(pid, device, inode), code

    def _by_descriptor(self, pid: int, device: int, inode: int) -> str:
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            return ""
        for name in names:
            try:
                st = os.stat(f"/proc/{pid}/fd/{name}")
                if st.st_ino == inode and kernel_device(st.st_dev) == device:
                    return os.readlink(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue
        return ""

    def wanted(self, path: str, code: bool, size_bytes: int) -> bool:
        """Whether a file belongs into the trace: --include decides, else its size and place."""
        if self._include:
            name = os.path.basename(path)
            return any(fnmatch.fnmatchcase(path if "/" in g else name, g) for g in self._include)
        if LOCK.search(path):
            return True
        if code or _CODE.search(path) or _SYSTEM.match(path):
            return False
        return size_bytes >= self._min_size_bytes or not path


def group_of(path: str) -> str:
    """The group of a program or a small file: its Python package, its interpreter's library,
    or else its directory."""
    package = _PACKAGE.search(path)
    if package:  # of torch/, torch-2.4.dist-info and torch.libs the package is torch
        return re.split(r"[.-]", package[1])[0] or package[1]
    standard = _STANDARD.search(path)
    return standard[1] if standard else os.path.dirname(path) or "/"


def size_of(path: str) -> int:
    """Size of a file in bytes, 0 of one that is gone."""
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return 0


def describe_file(number: int, path: str, device: int, inode: int) -> TracedFile:
    """A file for the trace's table; what cannot be found out stays empty."""
    where = f"inode {inode} on {device >> 20}:{device & 0xFFFFF}"
    file = TracedFile(number, path or where, 0, device, inode)
    try:
        st = os.stat(path)
    except (OSError, ValueError):
        return file
    file.size_bytes = st.st_size
    try:
        file.file_system, _ = mount_of(st.st_dev, Path("/proc/self/mountinfo").read_text())
    except OSError:
        pass
    file.read_ahead_bytes = read_ahead_bytes(st.st_dev)
    if file.file_system == "lustre":
        file.stripe_bytes, file.stripe_count = lustre_stripe(path)
    return file


def lustre_stripe(path: str) -> tuple[int | None, int | None]:
    """(stripe size in bytes, stripe count) by `lfs getstripe`; None where it does not say."""
    import subprocess

    try:
        command = subprocess.run(
            ["lfs", "getstripe", "-S", "-c", path], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None, None
    return parse_getstripe(command.stdout)


def parse_getstripe(text: str) -> tuple[int | None, int | None]:
    """The two numbers of `lfs getstripe -S -c`; of a composite layout the last component's."""
    size = re.findall(r"stripe_size:\s*(\d+)", text)
    count = re.findall(r"stripe_count:\s*(-?\d+)", text)
    return (int(size[-1]) if size else None), (int(count[-1]) if count else None)


class Processes:
    """Processes by pid, with rank and command. ``wrapped``: whether among them is a service of ours
    that reads ahead, which the recorded command has started."""

    def __init__(self) -> None:
        self.known: dict[int, TracedProcess] = {}
        self.wrapped = False
        self._changed: set[int] = set()

    def identify(self, pid: int, parent: int = 0) -> TracedProcess | None:
        """Read (again) who a process is; None for the number of a thread."""
        base = Path(f"/proc/{pid}")
        known = self.known.get(pid)
        try:
            status = dict(
                line.split(":\t", 1) for line in (base / "status").read_text().splitlines()
                if ":\t" in line
            )  # fmt: skip
            if int(status["Tgid"]) != pid:
                return None
            parent = parent or int(status["PPid"])
            command = status["Name"]
            environ = (base / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError, KeyError):
            if known is not None:
                return known
            command, environ = "", []
        pairs = (entry.decode(errors="replace").partition("=") for entry in environ)
        variables = {name: value for name, _, value in pairs}
        who = identify(variables)
        above = self.known.get(parent)
        rank, local_rank = who.rank, who.local_rank
        if rank is None and above is not None:
            rank, local_rank = above.rank, above.local_rank
        now = TracedProcess(
            pid, parent, rank or 0, -1 if local_rank is None else local_rank,
            command or (above.command if above else ""), self._role(variables, above),
        )  # fmt: skip
        return self.put(now)

    def _role(self, environ: Mapping[str, str], above: TracedProcess | None) -> str:
        """By the environment of a process, which is empty where it has ended."""
        options = environ.get(SERVED_VARIABLE)
        if options is None:
            return above.role if above is not None and not environ else "job"
        with contextlib.suppress(UffdPrefetchError):  # another version's
            self.wrapped |= Config.from_json(options).policy != "none"
        return "service"

    def put(self, process: TracedProcess) -> TracedProcess:
        """Note a process as somebody else described it."""
        if self.known.get(process.pid) != process:
            self.known[process.pid] = process
            self._changed.add(process.pid)
        return self.known[process.pid]

    def changed(self) -> list[dict[str, Any]]:
        """Those that are new or different since the last call, for the file."""
        out = [asdict(self.known[pid]) for pid in sorted(self._changed)]
        self._changed.clear()
        return out
