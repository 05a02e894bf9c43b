# SPDX-License-Identifier: Apache-2.0
"""Probes of a path: its file system, its readahead, who may watch it, and what fills its cache."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from typing import Any

from uffdprefetch.base import file_systems
from uffdprefetch.base.cache_call import CALLS, choose
from uffdprefetch.base.file_systems import FILE_SYSTEMS, PREAD, PROBE
from uffdprefetch.base.mounts import read_ahead_bytes
from uffdprefetch.base.units import format_duration, format_size
from uffdprefetch.doctor.check import CANNOT, LIMIT, NOTE, OK, SKIPPED, Check, why
from uffdprefetch.native import syscalls as sc
from uffdprefetch.native.residency import Residency

WARM_BYTES = 4 << 20
#: Most 4 MiB extents examined to find a cold one.
_EXTENTS_TRIED = 2048
#: Time after which a readahead(2) that has brought nothing counts as "does nothing": it only
#: submits.
_SETTLE_SECONDS = 2.0


def record_file(path: str) -> str:
    """The file to look at: ``path``, or for an LMDB directory its data.mdb, or its largest file."""
    if not os.path.isdir(path):
        return path
    data = os.path.join(path, "data.mdb")
    if os.path.isfile(data):
        return data
    sizes = []
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                if entry.is_file(follow_symlinks=False):
                    sizes.append((entry.stat().st_size, entry.path))
            except OSError:
                continue
    return max(sizes)[1] if sizes else path


def readable(path: str) -> Check:
    """Can it be read at all, and is it a file that would be managed?"""
    name = "path"
    try:
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return Check(name, CANNOT, f"{path}: {why(error)}", "nothing can be said about it")
    if not stat.S_ISREG(status.st_mode):
        return Check(name, NOTE, f"{path} is no regular file", "only its file system is looked at")
    values = {"path": path, "size_bytes": status.st_size}
    return Check(name, OK, f"{path}, {format_size(status.st_size)}", "readable", values=values)


def file_system(path: str) -> Check:
    """Which file system, from statfs(2)."""
    magic = file_systems.type_of(path)
    known = file_systems.known(magic)
    name = known.name if magic in FILE_SYSTEMS else None
    values = {"magic": magic, "name": name}
    if known.in_memory:
        return Check("file system", NOTE, f"{known.name}: it is memory itself",
                     "nothing to prefetch", values=values)  # fmt: skip
    if known.call == PREAD:
        size = format_size(known.unit_bytes)
        follows = f"{size} preads that are not speculative fill its cache"
    elif known.call == PROBE:
        follows = "which call fills its cache is tried: below, and on each file of a run"
    else:
        follows = f"{CALLS[known.call]} fills its cache; each run checks that it does"
    return Check("file system", OK, known.name, follows, values=values)


def lease(path: str, wanted: bool = False) -> Check:
    """A read lease: the kernel would hold a local writer until we have let go. ``wanted``: by a run
    that lays something over mappings (--policy fixed, --engine pool)."""
    name = "read lease"
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    poll = "a change of the file is noticed by polling, within a second"
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return Check(
                name, LIMIT if wanted else NOTE, "refused: somebody has the file open for writing",
                "neither checkpoints nor the pool's pages are laid over a file that may change",
                f"fuser -v {path}",
            )  # fmt: skip
        reason = "not the owner" if error.errno == errno.EACCES else "not on this file system"
        return Check(name, NOTE, f"{why(error)}: {reason}", poll)
    return Check(
        name, OK, "can be had",
        "--policy fixed and the pool: a local writer waits until nothing lies over mappings",
    )  # fmt: skip


def residency(path: str) -> Check:
    """cachestat(2) on the file, or why it must be mincore."""
    name = "cachestat"
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    eye = Residency(fd)
    if eye.refusal is None:
        return Check(name, OK, "works", "what is cached already is seen and skipped")
    refusal = why(eye.refusal)
    if eye.trusted:
        return Check(name, NOTE, f"{refusal} (Linux 6.5)", "mincore is used, it is slower")
    return Check(
        name, LIMIT, f"{refusal}, and mincore tells the owner only",
        "what is cached already cannot be seen: it is read again, and no probe can check a warm."
        " A data set that others share stays theirs: nothing is to be done about it",
    )  # fmt: skip


def _cold_extent(eye: Residency, size_bytes: int) -> tuple[int, int] | None:
    """(offset, length) of a 4 MiB extent of which no page is cached, or None."""
    extents = max(1, size_bytes // WARM_BYTES)
    step = max(1, extents // _EXTENTS_TRIED)
    for index in range(0, extents, step):
        offset = index * WARM_BYTES
        length = min(WARM_BYTES, size_bytes - offset)
        if eye.pages(offset, length) == 0:
            return offset, length
    return None


def warm(path: str) -> Check:
    """Fill 4 MiB of the page cache as a warmer would, and look whether they are there."""
    name = "warm 4 MiB"
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    size_bytes = os.fstat(fd).st_size
    if size_bytes == 0:
        return Check(name, SKIPPED, "the file is empty", "not tried")
    if file_systems.at(path).in_memory:
        return Check(name, SKIPPED, "the file lies in memory", "not tried")
    eye = Residency(fd)
    if not eye.is_told:
        return Check(name, SKIPPED, "residency is not told to this user", "not tried")
    extent = _cold_extent(eye, size_bytes)
    if extent is None:
        return Check(
            name, SKIPPED, "every extent looked at is cached already", "nothing to try it on",
            f"dd if={path} iflag=nocache count=0",
        )  # fmt: skip
    return _warm_extent(name, path, eye, *extent)


def _settled(eye: Residency, offset: int, length: int) -> int:
    """Cached pages of the range once their number has stopped growing."""
    wanted = -(-length // sc.PAGE_BYTES)
    deadline = time.monotonic() + _SETTLE_SECONDS
    while (pages := eye.pages(offset, length)) < wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return pages


def _warm_extent(name: str, path: str, eye: Residency, offset: int, length: int) -> Check:
    wanted = -(-length // sc.PAGE_BYTES)
    where = f"{format_size(length)} at offset {offset}"
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    values: dict[str, Any] = {"offset_bytes": offset, "length_bytes": length}
    values["wanted_pages"] = wanted
    ahead_bytes = read_ahead_bytes(os.fstat(fd).st_dev)
    choice = choose(file_systems.type_of(fd), ahead_bytes, True)
    values["chosen"] = choice.reason
    share = "as is known of this file system"
    by_readahead = 0
    if choice.call != PREAD:
        sc.readahead(fd, offset, length)
        by_readahead = _settled(eye, offset, length)
        values["readahead_pages"] = by_readahead
        share = f"readahead(2) filled {by_readahead} of {wanted} pages"
    if by_readahead >= wanted:
        return Check(name, OK, f"readahead(2) filled {where}", "readahead(2) is used here",
                     values=values)  # fmt: skip
    # As the warmers do on Lustre: no speculation of the kernel's, whole requests of our own.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    start = time.monotonic()
    read_bytes = len(os.pread(fd, length, offset))
    seconds = time.monotonic() - start
    by_pread = eye.pages(offset, length)
    values["pread_pages"], values["pread_seconds"] = by_pread, seconds
    if read_bytes == length and by_pread >= wanted and choice.call == PREAD:
        return Check(
            name, OK, f"pread, FADV_RANDOM filled {where} in {format_duration(seconds)}",
            f"pread is used here, {share}", values=values,
        )  # fmt: skip
    if read_bytes == length and by_pread >= wanted:
        how = "in several calls" if by_readahead else "never: pread is used"
        return Check(
            name, OK, f"{share}, pread the rest of {where} in {format_duration(seconds)}",
            f"readahead(2) {how}", values=values,
        )  # fmt: skip
    return Check(
        name, LIMIT, f"{share}, pread {by_pread}: they do not stay in the cache",
        "this file system does not keep what is read (O_DIRECT mount option?):"
        " prefetching cannot help", values=values,
    )  # fmt: skip
