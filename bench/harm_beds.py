# SPDX-License-Identifier: Apache-2.0
"""What the files of bench/harm.py lie on: the slow bed with a link, or ext4 on a loop device."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from uffdprefetch.base.errors import UffdPrefetchError

SECTOR_BYTES = 512  # of the block layer's statistics, whatever the device's sectors are
#: All files of one kind, most of them sparse, and what ext4 keeps for itself. The image is sparse.
IMAGE_BYTES = 32 << 30


@dataclass(frozen=True)
class Link:
    """Of the slow bed."""

    name: str
    bandwidth: int
    latency_us: int
    lookup_us: int = 0


LINKS = {
    link.name: link
    for link in (
        Link("300/1", 300_000_000, 1000),
        Link("300/5", 300_000_000, 5000),
        Link("1G/1", 1_000_000_000, 1000),
        Link("60/1", 60_000_000, 1000),
        Link("50/10", 50_000_000, 10_000),
        Link("300/1/0.5", 300_000_000, 1000, lookup_us=500),
    )
}
EXT4 = "ext4"
BEDS = (*LINKS, EXT4)


def _run(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        raise UffdPrefetchError(f"{words[0]} failed: {error.stderr.strip()[-200:]}") from error
    return done.stdout.strip()


def why_no_loop() -> str | None:
    """Why no loop device can be had here; None: it should work."""
    if os.geteuid() != 0:
        return "only root may mount a loop device"
    for program, package in (("losetup", "mount"), ("mkfs.ext4", "e2fsprogs")):
        if shutil.which(program) is None:
            return f"{program} is missing: apt-get install {package}"
    return None if os.path.exists("/dev/loop-control") else "/dev/loop-control is missing"


class LoopDisk:
    """What a SlowBed has, of a mounted loop device."""

    def __init__(self, device: str, mountpoint: Path) -> None:
        self.mountpoint = mountpoint
        self._block = Path("/sys/block") / Path(device).name
        self._before = [0, 0]

    def path(self, name: str | os.PathLike[str]) -> Path:
        """The path of `name`, which is relative to the mountpoint."""
        return self.mountpoint / name

    def set(
        self,
        *,
        bandwidth: int | None = None,
        latency_us: int | None = None,
        lookup_us: int | None = None,
    ) -> None:
        """It has no link."""

    def _statistics(self) -> list[int]:
        """Read requests and bytes since it was made (Documentation/block/stat.rst)."""
        words = (self._block / "stat").read_text().split()
        return [int(words[0]), int(words[2]) * SECTOR_BYTES]

    def reset(self) -> None:
        """Set the counters to zero."""
        self._before = self._statistics()

    def counters(self) -> dict[str, Any]:
        """Requests and bytes since the last reset."""
        requests, count = (
            now - before for now, before in zip(self._statistics(), self._before, strict=True)
        )
        return {"requests": requests, "bytes": count}

    def set_read_ahead(self, kilobytes: int) -> None:
        """The kernel's own, in order. Root."""
        (self._block / "queue/read_ahead_kb").write_text(str(kilobytes))

    def settings(self) -> dict[str, int]:
        """For a report."""
        return {"read_ahead_kb": int((self._block / "queue/read_ahead_kb").read_text())}


@contextlib.contextmanager
def loop_disk(scratch: Path) -> Iterator[LoopDisk]:
    """ext4 on a loop device that reads past the page cache of what is below it, so that a file that
    is dropped is cold; taken down again."""
    image, mountpoint = scratch / "ext4.img", scratch / "ext4"
    mountpoint.mkdir()
    with open(image, "wb") as file:
        file.truncate(IMAGE_BYTES)
    with contextlib.ExitStack() as stack:
        stack.callback(image.unlink)
        _run("mkfs.ext4", "-q", "-m0", "-E", "lazy_itable_init=1", str(image))
        device = _run("losetup", "--find", "--show", "--direct-io=on", str(image))
        stack.callback(_run, "losetup", "-d", device)
        _run("mount", "-o", "discard", device, str(mountpoint))
        stack.callback(_run, "umount", str(mountpoint))
        yield LoopDisk(device, mountpoint)


def named(words: str) -> list[str]:
    """Beds by their names, with commas; in the order of BEDS. Raises UffdPrefetchError."""
    wanted = [word.strip() for word in words.split(",")]
    unknown = [word for word in wanted if word not in BEDS]
    if unknown:
        raise UffdPrefetchError(f"no bed {unknown[0]!r}: {', '.join(BEDS)}")
    return [bed for bed in BEDS if bed in wanted]
