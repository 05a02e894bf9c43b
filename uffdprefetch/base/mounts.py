# SPDX-License-Identifier: Apache-2.0
"""What is mounted where, and how much the kernel reads ahead there."""

from __future__ import annotations

import os
import re
from pathlib import Path


def mount_of(device: int, mountinfo: str) -> tuple[str, str]:
    """(file system type, mount point) of a device number in the text of /proc/self/mountinfo."""
    return _mount(device, mountinfo)[:2]


def type_at(path: str, mountinfo: str) -> str:
    """The type of the file system that a path lies in, by the path's words: nothing is asked of the
    file system, which may not answer any more."""
    longest, found = -1, "unknown"
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, after = left.split(), right.split()
        if len(fields) < 5 or not after:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4]).rstrip("/")
        if len(point) >= longest and (path == point or path.startswith(f"{point}/")):
            longest, found = len(point), after[0]
    return found


def _mount(device: int, mountinfo: str) -> tuple[str, str, str]:
    """The same, and the mount source. A device with several mounts has one type: the last is
    taken."""
    want = f"{os.major(device)}:{os.minor(device)}"
    found = ("unknown", "", "")
    for line in mountinfo.splitlines():
        if f" {want} " not in line:
            continue
        left, _, right = line.partition(" - ")
        fields, after = left.split(), right.split()
        if len(fields) > 4 and fields[2] == want:
            found = (after[0], fields[4], after[1] if len(after) > 1 else "")
    return found


def read_ahead_files(device: int, mountinfo: str, sys: Path = Path("/sys")) -> list[Path]:
    """The read_ahead_kb files that may be a device's.

    Most are named by its number, of a partition by its disk's; Lustre's by the file system and a
    client's address, which only root can match to a mount: all of the file system's.
    """
    bdi = sys / "class" / "bdi"
    number = f"{os.major(device)}:{os.minor(device)}"
    own = bdi / number / "read_ahead_kb"
    kind, _, source = _mount(device, mountinfo)
    if kind != "lustre":
        disk = sys / "dev" / "block" / number
        if not own.exists() and (disk / "partition").exists():
            own = bdi / (disk.resolve().parent / "dev").read_text().strip() / "read_ahead_kb"
        return [own]
    names = {source.rpartition(":/")[2].partition("/")[0] or "lustre", "lustre"}
    found = [p / "read_ahead_kb" for name in sorted(names) for p in sorted(bdi.glob(f"{name}-*"))]
    return found or [own]


def read_ahead_bytes(device: int, mountinfo: str | None = None) -> int | None:
    """The device's read_ahead_kb in bytes, None where there is none. Never written: that panics a
    node with a Lustre client. ``mountinfo``: the text of /proc/self/mountinfo, by who has just read
    it."""
    try:
        if mountinfo is None:
            mountinfo = Path("/proc/self/mountinfo").read_text()
        files = read_ahead_files(device, mountinfo)
        return max(int(file.read_bytes()) * 1024 for file in files)
    except (OSError, ValueError):
        return None
