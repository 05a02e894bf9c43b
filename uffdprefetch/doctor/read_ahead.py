# SPDX-License-Identifier: Apache-2.0
"""Probe of the kernel's own readahead of a path: its size, the file that sets it, and what more of
it would gain, measured.

The kernel brings as much for a reader in order as read_ahead_kb says, and no more before the reader
is on its way in that (mm/readahead.c). So such a reader has at most that many bytes in the time of
one request. Here one request of that size is timed, and one of LARGE_BYTES, each of what was cold.
Nothing is set: writing the file is for root, holds for all users of the file system, and on a
Lustre client panics the node.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from uffdprefetch.base import file_systems, mounts
from uffdprefetch.base.file_systems import READAHEAD
from uffdprefetch.base.units import format_rate, format_size
from uffdprefetch.doctor.check import NOTE, Check
from uffdprefetch.doctor.storage import Residency
from uffdprefetch.native import syscalls as sc

NAME = "read_ahead_kb"
#: Readahead size that the current one is compared with: beyond it requests grow no larger, and a
#: page that nobody wanted costs more.
LARGE_BYTES = 4 << 20
#: Timed requests of each size, of which the median counts.
TRIES = 3
#: Most extents examined to find cold ones.
_LOOKS = 64
#: Least ratio of the rates that is reported: a smaller one is within the variation of requests.
WORTH_SAYING = 1.25


def read_ahead(path: str) -> Check:
    """The kernel's readahead, with which `wrap` competes, and which root may enlarge instead."""
    status = os.stat(path)
    kind = file_systems.at(path)
    size_bytes = mounts.read_ahead_bytes(status.st_dev)
    mountinfo = Path("/proc/self/mountinfo").read_text()
    places = mounts.read_ahead_files(status.st_dev, mountinfo)
    if size_bytes is None:
        return Check(
            NAME, NOTE, f"no {places[0]}",
            "what the kernel reads ahead here is not told; a run finds out what one call brings",
        )  # fmt: skip
    place = next((one for one in places if one.exists()), places[0])
    values: dict[str, Any] = {"read_ahead_bytes": size_bytes}
    found = f"{size_bytes >> 10} ({place} sets it)"
    why_not = _why_not_measured(path, kind, size_bytes)
    rates = _measured(path, size_bytes) if why_not is None else None
    if rates is None:
        never = f"; NEVER write {place}: on {kind.name} the next read panics the node"
        why_not = why_not or "too little of the file was cold, or nobody has to wait for it"
        return Check(
            NAME, NOTE, found,
            f"{found}: what more of it would gain was not measured: {why_not}"
            + (never if kind.settings else ""),
            values=values,
        )  # fmt: skip
    now, large = rates
    more = LARGE_BYTES >> 10
    values["bytes_per_second"], values["large_bytes_per_second"] = round(now), round(large)
    values["large_bytes"] = LARGE_BYTES
    measured = (
        f"{found}: a reader in order gets {format_rate(now)} at most, with {more} "
        f"{format_rate(large)} (measured)"
    )
    if large < WORTH_SAYING * now:
        return Check(NAME, NOTE, found, f"{measured}: more is not needed here", values=values)
    return Check(
        NAME, NOTE, found,
        f"{measured}. Only root sets it, for all who use this file system; `wrap` needs no root,"
        " and serves who does not read in order, too",
        f"echo {more} | sudo tee {place}", values,
    )  # fmt: skip


def _why_not_measured(path: str, kind: file_systems.FileSystem, size_bytes: int) -> str | None:
    if not os.path.isfile(path):
        return "name a file"
    if kind.in_memory:
        return f"{kind.name} is memory itself"
    if kind.settings:
        return f"its client reads ahead by settings of its own ({kind.settings})"
    if kind.call != READAHEAD:
        return f"{kind.name} may read ahead by settings of its own"
    if not size_bytes:
        return "it is off, and each page a request"
    if size_bytes >= LARGE_BYTES:
        return f"it is {format_size(size_bytes)} already"
    return None


def _measured(path: str, size_bytes: int) -> tuple[float, float] | None:
    """(bytes a second by requests of ``size_bytes``, by those of LARGE_BYTES); None: too little of
    the file was cold."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # No speculation: a pread brings what it reads, in one request.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        small: list[float] = []
        large: list[float] = []
        for offset in _maybe_cold(fd):
            # in turns, so that who else reads there meanwhile slows both
            times, length = (
                (small, size_bytes) if len(small) <= len(large) else (large, LARGE_BYTES)
            )
            seconds = _seconds(fd, offset, length, size_bytes)
            if seconds is not None:
                times.append(length / seconds)
            if len(large) == TRIES:
                return statistics.median(small), statistics.median(large)
    finally:
        os.close(fd)
    return None


def _maybe_cold(fd: int) -> Iterator[int]:
    """Offsets of extents of LARGE_BYTES, from the file's end; none of which a page is cached, where
    that is told to this user."""
    eye = Residency(fd)
    told = eye.sensor == "cachestat" or eye.trusted
    extents = os.fstat(fd).st_size // LARGE_BYTES
    step = max(1, extents // _LOOKS)
    for index in range(extents - 1, -1, -step):
        offset = index * LARGE_BYTES
        if not told or eye.pages(offset, LARGE_BYTES) == 0:
            yield offset


def _seconds(fd: int, offset: int, length: int, ahead_bytes: int) -> float | None:
    """Time until all of a range, requested at once, is resident; None where this thread did not
    wait (ru_nvcsw), as the range was cached."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    began = time.perf_counter()
    if length > ahead_bytes:  # one call brings no more than that
        for at in range(offset, offset + length, ahead_bytes):
            sc.readahead(fd, at, min(ahead_bytes, offset + length - at))
    read_bytes = len(os.pread(fd, length, offset))
    seconds = time.perf_counter() - began
    waited = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw > before
    return seconds if waited and read_bytes == length else None
