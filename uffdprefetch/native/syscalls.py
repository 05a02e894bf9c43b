# SPDX-License-Identifier: Apache-2.0
"""System calls of the probes, by ctypes: the doctor must work where the C build failed.

Every function raises OSError with the kernel's errno. Numbers and layouts: the uapi headers named
beside them; calls newer than 5.6 have one number on all architectures.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_libc.readahead.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_size_t]
_libc.readahead.restype = ctypes.c_ssize_t
_libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
_libc.write.restype = ctypes.c_ssize_t
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

PROT_READ, MAP_SHARED, MAP_PRIVATE = 1, 1, 2
MADV_DONTFORK, MREMAP_MAYMOVE, MREMAP_FIXED = 10, 1, 2
FALLOC_KEEP_SIZE_PUNCH_HOLE = 1 | 2

#: asm/unistd.h; the generic table (aarch64, riscv64) differs from x86_64 for the old ones only.
_X86 = platform.machine() == "x86_64"
NR_USERFAULTFD = 323 if _X86 else 282
NR_MEMBARRIER = 324 if _X86 else 283
NR_CLOSE_RANGE, NR_PIDFD_GETFD, NR_PROCESS_MADVISE, NR_CACHESTAT = 436, 438, 440, 451

MADV_COLLAPSE = 25

# linux/userfaultfd.h
UFFD_API = 0xAA
UFFD_FEATURE_MISSING_SHMEM = 1 << 5
UFFD_FEATURE_MINOR_SHMEM = 1 << 10
UFFD_USER_MODE_ONLY = 1
UFFDIO_API = 0xC018AA3F
UFFDIO_REGISTER = 0xC020AA00
UFFDIO_CONTINUE = 0xC020AA07
UFFDIO_REGISTER_MODE_MISSING = 1 << 0
UFFDIO_REGISTER_MODE_MINOR = 1 << 2
USERFAULTFD_IOC_NEW = 0xAA00
UFFD_EVENT_PAGEFAULT = 0x12
UFFD_MSG_BYTES = 32

# linux/fs.h: PAGEMAP_SCAN, struct pm_scan_arg (12 words), struct page_region (3 words)
PAGEMAP_SCAN = 0xC0606610
PAGE_IS_PRESENT = 1 << 3

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _fail(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)


def syscall(what: str, number: int, *args: int) -> int:
    """Call syscall(2) with integer arguments."""
    result: int = _libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in args))
    if result < 0:
        raise _fail(what)
    return result


def wait_for_all_cpus() -> None:
    """membarrier(2), MEMBARRIER_CMD_GLOBAL: until each CPU has left whatever of the kernel it was
    in under RCU, a BPF program too (of one CPU: nothing else is in any). EINVAL where CPUs run
    without a clock tick (nohz_full)."""
    syscall("membarrier", NR_MEMBARRIER, 1, 0, 0)


def mmap(fd: int, length: int, shared: bool, wish: int | None = None) -> int:
    """Map ``length`` bytes of ``fd`` read-only, at ``wish`` if that is free; the address."""
    address = _libc.mmap(wish, length, PROT_READ, MAP_SHARED if shared else MAP_PRIVATE, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise _fail("mmap")
    return int(address)


def munmap(address: int, length: int) -> None:
    _libc.munmap(address, length)


def keep_from_children(address: int, length: int) -> None:
    """madvise(MADV_DONTFORK)."""
    if _libc.madvise(address, length, MADV_DONTFORK) < 0:
        raise _fail("madvise")


def is_mapped(address: int, length: int) -> bool:
    """Whether anything is mapped there, by mincore(2)."""
    vector = ctypes.create_string_buffer(-(-length // PAGE_BYTES))
    return int(_libc.mincore(address, length, vector)) == 0


def duplicate(anchor: int, length: int, address: int) -> None:
    """mremap(2) of size 0: maps ``length`` bytes of the shared mapping at ``anchor`` over
    ``address``."""
    moved = _libc.mremap(anchor, 0, length, MREMAP_MAYMOVE | MREMAP_FIXED, address)
    if moved != address:
        raise _fail("mremap")


def punch(fd: int, offset: int, length: int) -> None:
    """fallocate(2), FALLOC_FL_PUNCH_HOLE."""
    if _libc.fallocate(fd, FALLOC_KEEP_SIZE_PUNCH_HOLE, offset, length) < 0:
        raise _fail("fallocate")


def peek(address: int, length: int) -> bytes:
    """The bytes at ``address``; page faults are taken under the GIL."""
    return ctypes.string_at(address, length)


def write_from(fd: int, address: int, length: int) -> int:
    """write(2) from ``address``: page faults are taken in the kernel, without the GIL."""
    written: int = _libc.write(fd, address, length)
    if written < 0:
        raise _fail("write")
    return written


def readahead(fd: int, offset: int, length: int) -> None:
    if _libc.readahead(fd, offset, length) < 0:
        raise _fail("readahead")


def cachestat_pages(fd: int, offset: int, length: int) -> int:
    """Pages of the range that are in the page cache (Linux 6.5; EPERM for others' files)."""
    # linux/mman.h: struct cachestat_range {off, len}, struct cachestat {5 counters}
    extent = ctypes.create_string_buffer(struct.pack("<QQ", offset, length), 16)
    counters = ctypes.create_string_buffer(40)
    addresses = (ctypes.addressof(extent), ctypes.addressof(counters))
    syscall("cachestat", NR_CACHESTAT, fd, *addresses, 0)
    return int(struct.unpack_from("<Q", counters)[0])


def mincore_pages(fd: int, offset: int, length: int) -> int:
    """Resident pages of the range by mincore(2); ``offset``: a multiple of the page size."""
    pages = -(-length // PAGE_BYTES)
    address = _libc.mmap(None, length, PROT_READ, MAP_SHARED, fd, offset)
    if address in (None, ctypes.c_void_p(-1).value):
        raise _fail("mmap")
    vector = ctypes.create_string_buffer(pages)
    result = _libc.mincore(address, length, vector)
    error = _fail("mincore")
    munmap(address, length)
    if result < 0:
        raise error
    return sum(byte & 1 for byte in vector.raw[:pages])


def unshare_mounts() -> None:
    """Enter a private mount namespace without propagation to the machine's."""
    new_namespace, rec_private = 0x00020000, 0x4000 | (1 << 18)  # CLONE_NEWNS; MS_REC|MS_PRIVATE
    if _libc.unshare(new_namespace) < 0:
        raise _fail("unshare")
    if _libc.mount(None, b"/", None, ctypes.c_ulong(rec_private), None) < 0:
        raise _fail("mount")


def mount_tracefs(path: str) -> None:
    if _libc.mount(b"tracefs", os.fsencode(path), b"tracefs", ctypes.c_ulong(0), None) < 0:
        raise _fail("mount tracefs")
