# SPDX-License-Identifier: Apache-2.0
"""Probes of `--engine pool`: memory of the service's in the place of a mapping, filled on demand.

`wrap` asks mechanism() before it starts a service with that engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import select
import signal
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from uffdprefetch.base import cgroup, spill_place
from uffdprefetch.base.config import POOL_LEAST_BYTES, Config
from uffdprefetch.base.units import format_size
from uffdprefetch.doctor import faults, site
from uffdprefetch.doctor.check import LIMIT, NOTE, OK, Check, why
from uffdprefetch.native import memory_limits
from uffdprefetch.native import syscalls as sc

NAME = "pool"
SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
NOEXEC = Path("/proc/sys/vm/memfd_noexec")
#: Time limit for a waiting thread to be woken.
ANSWER_SECONDS = 5.0
_FEATURES = sc.UFFD_FEATURE_MISSING_SHMEM | sc.UFFD_FEATURE_MINOR_SHMEM
_MODES = sc.UFFDIO_REGISTER_MODE_MISSING | sc.UFFDIO_REGISTER_MODE_MINOR


class _Refused(Exception):
    """(what was found, the command that mends it or None)"""

    def __init__(self, found: str, remedy: str | None = None) -> None:
        super().__init__(found)
        self.found, self.remedy = found, remedy


def mechanism(wanted: bool = False) -> Check:
    """Do with two pages what the pool does with a file; ``wanted``: --engine pool is asked for."""
    cannot = "--engine pool runs as --engine cache here"
    status = LIMIT if wanted else NOTE
    try:
        how = _open()
        _fill_punch_and_give_back(how[0])
    except _Refused as refused:
        return Check(NAME, status, refused.found, cannot, refused.remedy)
    except OSError as error:
        return Check(NAME, status, f"{error.filename or 'ioctl'}: {why(error)}", cannot)
    return Check(
        NAME, OK,
        f"through {how[1]}: a hole of a memfd was filled for who touched it, punched, filled again",
        "--engine pool can be used",
    )  # fmt: skip


def _open() -> tuple[int, str]:
    try:
        uffd, how = faults.open_uffd()
    except OSError as error:
        found = f"no userfaultfd with kernel faults: {faults.refused(error)}"
        raise _Refused(found, faults.cure()) from None
    api = bytearray(struct.pack("<QQQ", sc.UFFD_API, 0, 0))
    fcntl.ioctl(uffd, sc.UFFDIO_API, api)
    if struct.unpack_from("<Q", api, 8)[0] & _FEATURES != _FEATURES:
        raise _Refused("MISSING and MINOR faults on shared memory need Linux 5.14")
    return uffd, how


def _memory(length: int) -> tuple[int, int]:
    """(a memfd of a fixed size, the same opened for reading only, as the jobs get it)."""
    try:
        memfd = os.memfd_create("doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        remedy = None
        with contextlib.suppress(OSError):
            if NOEXEC.read_text().strip() == "2":
                remedy = "sudo sysctl -w vm.memfd_noexec=1"
        raise _Refused(f"memfd_create: {why(error)}", remedy) from None
    os.ftruncate(memfd, length)
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    try:
        return memfd, os.open(f"/proc/self/fd/{memfd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _Refused(f"a memfd cannot be opened again through /proc: {why(error)}") from None


def _fill_punch_and_give_back(uffd: int) -> None:
    length = 2 * sc.PAGE_BYTES
    memfd, read_only = _memory(length)
    address = sc.mmap(read_only, length, shared=False)
    sc.keep_from_children(address, length)
    extent = struct.pack("<QQ", address, length)
    try:
        fcntl.ioctl(uffd, sc.UFFDIO_REGISTER, bytearray(extent + struct.pack("<QQ", _MODES, 0)))
    except OSError as error:
        raise _Refused(f"registering a memfd for MISSING faults failed: {why(error)}") from None
    if _in_a_child(lambda: sc.is_mapped(address, length)):
        raise _Refused("MADV_DONTFORK does not keep a mapping from a child")
    for _ in range(2):  # the second time after it was punched
        content = os.urandom(16) * (sc.PAGE_BYTES // 16)
        _touch_a_hole(uffd, memfd, address, content)
        sc.punch(memfd, 0, sc.PAGE_BYTES)
    # What a forked child does before its code runs: the file in the place of the hole.
    whole = os.memfd_create("doctor", os.MFD_CLOEXEC)
    os.pwrite(whole, b"a" * sc.PAGE_BYTES + b"b" * sc.PAGE_BYTES, 0)
    sc.duplicate(sc.mmap(whole, sc.PAGE_BYTES, shared=True), length, address)
    if sc.peek(address + sc.PAGE_BYTES, 1) != b"b":
        raise _Refused("mremap of a page makes no mapping of the file around it")


def _touch_a_hole(uffd: int, memfd: int, address: int, content: bytes) -> None:
    """A thread writes from the hole to a pipe; we fill the page and let it go on."""
    reader, writer = os.pipe()
    result: list[OSError] = []

    def touch() -> None:
        try:
            sc.write_from(writer, address, sc.PAGE_BYTES)
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=touch, daemon=True)
    thread.start()
    if not select.select([uffd], [], [], ANSWER_SECONDS)[0]:
        raise _Refused("a touch of a hole told nobody")
    if os.read(uffd, sc.UFFD_MSG_BYTES)[0] != sc.UFFD_EVENT_PAGEFAULT:
        raise _Refused("a touch of a hole was told as something else")
    os.pwrite(memfd, content, 0)
    extent = struct.pack("<QQ", address, sc.PAGE_BYTES)
    fcntl.ioctl(uffd, sc.UFFDIO_CONTINUE, bytearray(extent + struct.pack("<Qq", 0, 0)))
    thread.join(ANSWER_SECONDS)
    if thread.is_alive():
        raise _Refused("a thread that touched a hole was not woken")
    if result:
        raise _Refused(f"write(2) from a hole gave {why(result[0])}")
    if os.read(reader, sc.PAGE_BYTES) != content:
        raise _Refused("wrong bytes came through")
    os.close(reader)
    os.close(writer)


def _in_a_child(question: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(int(question()))
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


# ---- memory -------------------------------------------------------------------------------------


def memory(config: Config, size_bytes: int | None = None) -> Check:
    """What the pool may hold: shared memory, which nobody but the service can free."""
    name, budget = "pool memory", config.budget_bytes
    status = LIMIT if config.engine == "pool" else NOTE
    if budget < POOL_LEAST_BYTES:
        return Check(
            name, status, f"--budget {format_size(budget)}",
            f"too little for a pool ({format_size(POOL_LEAST_BYTES)} at least): cache is used",
            f"leave --budget out ({format_size(Config.budget_bytes)}); uffdprefetch doctor"
            " --show-config says where it is from",
        )  # fmt: skip
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft != resource.RLIM_INFINITY and soft < (size_bytes or budget):
        what = "the file" if size_bytes else "--budget"
        return Check(
            name, status, f"RLIMIT_FSIZE is {format_size(soft)}, less than {what}: it holds for a"
            " memfd too",
            "a file that is larger is served by cache, not by the pool",
            "ulimit -f unlimited" if hard == resource.RLIM_INFINITY else None,
            {"file_size_limit_bytes": soft},
        )  # fmt: skip
    why_not = cgroup.why_no_room(cgroup.POOL_BYTES)
    if why_not is not None:
        return Check(
            name, status, why_not, "cache is used",
            "ask the batch system for more memory (Slurm: --mem)",
        )  # fmt: skip
    allowed, binds = memory_limits.pool_bytes(budget, 0)
    values = {"budget_bytes": budget, "allowed_bytes": allowed, "allowed_by": binds.value}
    if allowed < budget:
        return Check(
            name, status,
            f"{format_size(allowed)} of --budget {format_size(budget)} ({binds.of_a_pool})",
            "the pool is no larger than that: what does not fit is read again each epoch",
            f"run it {binds.raised_to(budget)}", values,
        )  # fmt: skip
    return Check(
        name, OK, f"room for --budget {format_size(budget)}",
        "taken as it fills, given back when the job ends", values=values,
    )  # fmt: skip


#: Where batch systems say that a node's own disk is.
DISKS = ("TMPDIR", "SLURM_TMPDIR", "PBS_JOBFS")


def disk(directory: str | None = None) -> Check:
    """Whether `--spill` may be in a directory, or in those that a batch system names; tried with a
    file."""
    name, follows = "pool disk", "what leaves the pool's memory is read again"
    named = [os.environ[one] for one in DISKS if os.environ.get(one)]
    refused = []
    for one in [directory] if directory else named or ["/tmp"]:
        found = spill_place.why_not(one)
        if found is None:
            try:
                fd = spill_place.open_file(one)
            except OSError as error:
                found = why(error)
            else:
                free, total, used = spill_place.room_of(fd)
                os.close(fd)
                size = format_size(
                    spill_place.default_bytes(free, spill_place.allowed_bytes(free, total, used))
                )
                return Check(
                    name, OK, f"{one} is a disk of this node with {format_size(free)} free",
                    f"--spill {one} would take {size}",
                )  # fmt: skip
        refused.append(f"{one}: {found}")
    return Check(name, NOTE, "; ".join(refused), follows, "--spill DIR, on a disk of this node")


def huge_pages() -> Check:
    """shmem_enabled: whether a memfd comes in huge pages; tried with one."""
    name, remedy = "pool huge pages", site.COMMAND
    follows = "the pool uses pages of 4 KiB: more faults and more CPU, nothing else"
    try:
        chosen = SHMEM_HUGE.read_text().partition("[")[2].partition("]")[0]
    except OSError as error:
        return Check(name, NOTE, f"{SHMEM_HUGE}: {why(error)}", follows)
    if chosen not in ("always", "within_size", "advise", "force"):
        return Check(name, NOTE, f"shmem_enabled is {chosen}", follows, remedy)
    length = 2 << 20
    memfd = os.memfd_create("doctor", os.MFD_CLOEXEC)
    os.ftruncate(memfd, 2 * length)
    with mmap.mmap(memfd, 2 * length) as mapping:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, 2 * length, length):
            mapping[offset] = 1
        huge_bytes = os.fstat(memfd).st_blocks * 512
    refused = _map_in_a_child(memfd, length)
    if huge_bytes < length:
        return Check(
            name, NOTE, f"shmem_enabled is {chosen}, but a memfd got pages of 4 KiB",
            follows, "echo 1 | sudo tee /proc/sys/vm/compact_memory",
        )  # fmt: skip
    if refused is not None:
        return Check(
            name, NOTE, f"shmem_enabled is {chosen}, a memfd got one; another process's page table "
            f"did not: process_madvise: {why(refused)}",
            "the pool's memory is huge pages, mapped as 512 small ones: more CPU, nothing else",
            "sudo setcap cap_sys_nice+ep $(readlink -f $(command -v python3))"
            if refused.errno == errno.EPERM else None,
        )  # fmt: skip
    return Check(
        name, OK, f"shmem_enabled is {chosen}; a memfd got one, and a page table",
        "fewer faults to answer",
    )  # fmt: skip


def _map_in_a_child(memfd: int, length: int) -> OSError | None:
    """Put a huge page of the memfd into another process's page table, as the pool does
    (csrc/service/pool/pool_map.c): why that does not work, or None."""
    anywhere = sc.mmap(memfd, 2 * length, shared=True)
    sc.munmap(anywhere, 2 * length)
    address = sc.mmap(memfd, length, shared=True, wish=-(-anywhere // length) * length)
    pid = os.fork()
    if pid == 0:
        try:
            signal.pause()
        finally:
            os._exit(0)
    pidfd = os.pidfd_open(pid)
    try:
        vector = ctypes.create_string_buffer(struct.pack("<QQ", address, length))
        sc.syscall(
            "process_madvise", sc.NR_PROCESS_MADVISE, pidfd, ctypes.addressof(vector), 1,
            sc.MADV_COLLAPSE, 0,
        )  # fmt: skip
    except OSError as error:
        return error
    finally:
        os.close(pidfd)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        sc.munmap(address, length)
    return None


def direct(path: str) -> Check:
    """O_DIRECT on PATH: whether the pool's reads leave nothing in the page cache."""
    name = "O_DIRECT"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        buffer = mmap.mmap(-1, sc.PAGE_BYTES)  # on a page, as the kernel wants it
        os.preadv(fd, [buffer], 0)
    except OSError as error:
        found = "not on this file system" if error.errno == errno.EINVAL else "it cannot"
        return Check(
            name, NOTE, f"{why(error)}: {found}",
            "the pool reads through the page cache, and has it forget what it read",
        )  # fmt: skip
    return Check(name, OK, "a page was read", "what the pool holds is not in the page cache too")
