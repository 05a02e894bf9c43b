# SPDX-License-Identifier: Apache-2.0
"""Mappings and descendants of processes, from /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROCESSES_MAX = 1024
#: Name of a checkpoint's mapping in /proc/PID/maps (csrc/uffd_helper.c).
CHECKPOINT_NAME = "/memfd:uffdprefetch-checkpoints"


class Mapping(NamedTuple):
    """A mapping that may be prefetched for. Addresses and sizes in bytes."""

    start: int
    end: int
    offset: int
    inode: int
    shared: bool
    path: str
    copies: bool = False  # private and writable: a page may be a copy of the process's own


#: Rights of a reader's mapping in /proc/PID/maps: what is written to a shared one the file gets.
_READERS = ("r--p", "r--s", "rw-p")
_DELETED = " (deleted)"
#: Prefixes of names there that are no files on storage.
_NO_FILES = ("/dev/", "/memfd:", "/SYSV", "/anon_hugepage")


def file_readers(maps: str, min_bytes: int) -> list[Mapping]:
    """The file mappings of at least min_bytes in a maps text that only read the file, by address,
    except of files with an executable one (programs, libraries). One that our checkpoints split
    counts as one."""
    found: list[Mapping] = []
    programs: set[tuple[int, str]] = set()
    bridge = 0  # end of the checkpoint after the last piece
    for line in maps.split("\n"):
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[1][2] == "x":
            programs.add((int(fields[4]), fields[5]))
        if len(fields) < 6 or fields[1] not in _READERS or not fields[5].startswith("/"):
            continue
        start, end = (int(x, 16) for x in fields[0].split("-"))
        last = found[-1] if found else None
        if fields[5].startswith(CHECKPOINT_NAME):
            if last is not None and start in (last.end, bridge):
                bridge = end
            continue
        offset, inode, path = int(fields[2], 16), int(fields[4]), fields[5]
        if path.endswith(_DELETED):
            continue
        if (
            last is not None
            and start == bridge
            and (inode, path) == (last.inode, last.path)
            and (fields[1][3] == "s", fields[1][1] == "w") == (last.shared, last.copies)
            and offset - last.offset == start - last.start
        ):
            found[-1] = last._replace(end=end)
        else:
            shared, copies = fields[1][3] == "s", fields[1][1] == "w"
            found.append(Mapping(start, end, offset, inode, shared, path, copies))
        bridge = end
    return [m for m in found if m.end - m.start >= min_bytes and (m.inode, m.path) not in programs]


def is_static(maps: str) -> bool:
    """Whether a text of /proc/PID/maps is of a statically linked program: it has no loader, and so
    nothing that LD_PRELOAD names."""
    return "/ld-" not in maps and "/ld.so" not in maps and "ld-musl" not in maps


def preloaded(maps: str) -> bool:
    """Whether a text of /proc/PID/maps shows our preload object, or launch's link to it."""
    names = (line.rpartition("/")[2] for line in maps.splitlines() if "/" in line)
    return any(name.startswith(("_preload.", "preload-", "preload.")) for name in names)


def unserved_files(maps: str, min_bytes: int) -> list[tuple[str, int, bool]]:
    """The file mappings of at least min_bytes in a maps text that nobody prefetches for: (path,
    bytes, whether the file is deleted; else it is mapped shared and writable). A page of ours in
    the midst of a mapping parts it in two: all parts of a file count."""
    found: dict[tuple[str, bool], int] = {}
    for line in maps.split("\n"):
        fields = line.split(None, 5)
        if len(fields) < 6 or not fields[5].startswith("/") or fields[5].startswith(_NO_FILES):
            continue
        start, end = (int(x, 16) for x in fields[0].split("-"))
        deleted = fields[5].endswith(_DELETED)
        served = fields[1] in _READERS and not deleted
        if not served and fields[1] in (*_READERS, "rw-s"):
            key = fields[5].removesuffix(_DELETED), deleted
            found[key] = found.get(key, 0) + end - start
    return [
        (path, mapped_bytes, deleted)
        for (path, deleted), mapped_bytes in found.items()
        if mapped_bytes >= min_bytes
    ]


#: Beyond it no program reads in a run: it is a directory's position, which is a hash (ext4, FUSE),
#: and its flags need not say that it is one.
POSITION_MOST = 1 << 46


class _OpenFile(NamedTuple):
    fd: str
    path: str
    position: int
    flags: int  # of open(2)


def _open_files(pid: int) -> Iterator[_OpenFile]:
    """Of a process."""
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for fd in descriptors:
        try:
            path = os.readlink(f"/proc/{pid}/fd/{fd}")
            if not path.startswith("/") or path.startswith(_NO_FILES):
                continue
            fields = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().split(None, 4)
            position, flags = int(fields[1]), int(fields[3], 8)
        except (OSError, ValueError, IndexError):
            continue
        if not flags & os.O_DIRECTORY:  # a directory's position is a hash on ext4
            yield _OpenFile(fd, path, position, flags)


def read_files(pid: int, min_bytes: int) -> list[tuple[str, int]]:
    """Files that a process has open to read, and has read at least min_bytes of by read(2)
    and its kind: (path, position). pread(2) leaves no trace."""
    return [
        (one.path, one.position)
        for one in _open_files(pid)
        if one.flags & os.O_ACCMODE == os.O_RDONLY
        and min_bytes <= one.position < POSITION_MOST
        and not _is_directory(pid, one.fd)
    ]


def _is_directory(pid: int, fd: str) -> bool:
    """Whether a descriptor is a directory's, which may be opened without O_DIRECTORY (tar). Storage
    is not asked."""
    try:
        os.close(os.open(f"/proc/{pid}/fd/{fd}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def files_in_use(pid: int) -> set[str]:
    """Files that a process has open to read, or mapped, but those that it has mapped to execute:
    programs, libraries."""
    found = {one.path for one in _open_files(pid) if one.flags & os.O_ACCMODE != os.O_WRONLY}
    maps = maps_text(pid) or ""
    found.update(mapping.path for mapping in file_readers(maps, 0))
    found.update(path for path, _, _ in unserved_files(maps, 0))
    return {path for path in found if not path.endswith(_DELETED)}


def may_write(pid: int, path: str) -> bool:
    """Whether a process has a file open for writing, by a path as /proc shows it."""
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for fd in descriptors:
        with contextlib.suppress(OSError, ValueError, IndexError):
            if os.readlink(f"/proc/{pid}/fd/{fd}") != path:
                continue
            fields = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().split(None, 4)
            if int(fields[3], 8) & os.O_ACCMODE != os.O_RDONLY:
                return True
    return False


def maps_text(pid: int) -> str | None:
    """/proc/PID/maps of a process; None: it cannot be read. Its lines end with "\\n" alone: what
    splitlines() takes for an end, too, may be in a file's name."""
    try:
        with open(f"/proc/{pid}/maps", errors="surrogateescape", newline="\n") as file:
            return file.read()
    except OSError:
        return None


def from_here(pid: int, path: str) -> str:
    """A path as a process has it, as this one can open it: by /proc/PID/root where the process sees
    other mounts, or has another root, and as long as it lives. Raises OSError: it has ended."""
    base = f"/proc/{pid}"
    same = os.readlink(f"{base}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    return path if same and os.readlink(f"{base}/root") == "/" else f"{base}/root{path}"


def children(pid: int) -> list[int]:
    """A process's, by /proc/PID/task/TID/children, with those that have ended and are not waited
    for; none where the kernel does not list them (CONFIG_PROC_CHILDREN)."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def parent(pid: int) -> int:
    """A process's; 0: it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])  # the command's name may have blanks in it


def environment(pid: int) -> dict[str, str]:
    """As a process was given it by execve(2); none where it has ended, or is another user's."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in entries)
    return {name: value for name, _, value in pairs}


def descendants(pid: int) -> list[int]:
    """``pid`` and all its descendants."""
    found: list[int] = []
    queue = [pid]
    while queue and len(found) < PROCESSES_MAX:
        one = queue.pop()
        found.append(one)
        queue += children(one)
    return found


def newest_pid() -> int | None:
    """The process or thread that was made last, of those that we can see (proc(5), /proc/loadavg);
    None: nobody says."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[4])
    except (OSError, ValueError, IndexError):
        return None


def command_line(pid: int) -> list[str]:
    """Its words; none where it has ended, or is another user's."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in data.split(b"\0")[:-1]]


def machine_cpu_seconds() -> tuple[float, float]:
    """(busy, stolen) seconds of all CPUs since boot, from /proc/stat (proc(5))."""
    with open("/proc/stat", encoding="ascii") as stat:
        ticks = [int(word) for word in stat.readline().split()[1:]]
    hertz = os.sysconf("SC_CLK_TCK")
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks[:8]
    return (user + nice + system + irq + softirq) / hertz, steal / hertz
