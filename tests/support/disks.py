# SPDX-License-Identifier: Apache-2.0
"""File systems of a test's own, in a file that is mounted by a loop device; and disks that do not
answer."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from conftest import HANG_SECONDS, require
from harness import programs

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


def run_with_such_a_disk(script: str, tmp_path: Path, **environment: str) -> str:
    """What a program says whose disk is as tests/programs/stopped_disk.c makes it."""
    environment = {
        **os.environ, "LD_PRELOAD": programs(tmp_path, "stopped_disk", "-shared", "-fPIC"),
        "PYTHONPATH": os.pathsep.join(sys.path), **environment,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=environment, capture_output=True,
        text=True, timeout=2 * HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
