# SPDX-License-Identifier: Apache-2.0
"""File systems of a test's own, in a file that is mounted by a loop device."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from conftest import require

#: kind -> (the least that it is made of in MiB, options that keep mkfs quiet, its package)
_KINDS = {"ext4": (64, ("-q", "-F"), "e2fsprogs"), "xfs": (300, ("-q", "-f"), "xfsprogs")}


@contextlib.contextmanager
def disk(kind: str, directory: Path, least_mib: int = 0) -> Iterator[Path]:
    """The root of an empty ext4 of 64 MiB, or XFS of 300 MiB, or of more; skipped where none can be
    had."""
    require(os.geteuid() == 0, "mounting needs root")
    size_mib, quiet, package = _KINDS[kind]
    size_mib = max(size_mib, least_mib)
    require(shutil.which(f"mkfs.{kind}"), f"no mkfs.{kind} (package {package})")
    image, root = directory / "disk.img", directory / "disk"
    root.mkdir()
    with open(image, "wb") as file:
        file.truncate(size_mib << 20)
    subprocess.run([f"mkfs.{kind}", *quiet, str(image)], check=True)
    done = subprocess.run(["mount", "-o", "loop", str(image), str(root)], capture_output=True)
    require(done.returncode == 0, f"no loop mounts here: {done.stderr.decode().strip()}")
    try:
        yield root
    finally:
        if os.path.ismount(root):
            subprocess.run(["umount", "-l", str(root)], check=True)
