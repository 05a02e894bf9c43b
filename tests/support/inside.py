# SPDX-License-Identifier: Apache-2.0
"""What the jobs of these tests do inside: map, wait until managed, digest, talk to the test.

Imported by the programs that run under `wrap` (tests/support/harness.py puts this directory on
their path) and by nobody else. It maps through ctypes, so that the address is at hand and no
descriptor is kept.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_POPULATE = 1, 2, 0x10, 0x8000
MADV_NORMAL, MADV_RANDOM, MADV_WILLNEED, MADV_DONTNEED = 0, 1, 3, 4
PAGE = os.sysconf("SC_PAGESIZE")
CHECKPOINTS = "uffdprefetch-checkpoints"
AGENT = "uffdprefetch"
#: Shorter than the test's own (conftest.py): what was waited for is told before it gives up.
HANG_SECONDS = 140.0

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mremap.restype = ctypes.c_void_p
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def checked(ret: int | None, what: str) -> int:
    """The value of a libc call; raises OSError when it failed."""
    if ret is None or ret in (-1, ctypes.c_void_p(-1).value):
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return ret


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a state and return what ``condition`` returned; a hang ends the job, loudly."""
    end = time.monotonic() + HANG_SECONDS
    while not (value := condition()):
        if time.monotonic() > end:
            say(error=f"waited in vain for: {what}")
            os._exit(99)
        time.sleep(0.002)
    return value


class Mapping:
    """A mapping of a read-only file, made by mmap(2) as a C program would."""

    def __init__(
        self, path: str | int, length: int = 0, offset: int = 0, flags: int = MAP_SHARED,
        prot: int = PROT_READ,
    ) -> None:  # fmt: skip
        self._source = path, offset, flags, prot
        self._map(length)

    def _map(self, length: int) -> None:
        path, offset, flags, prot = self._source
        fd = os.open(path, os.O_RDONLY) if isinstance(path, str) else path
        try:
            self.length = length or os.fstat(fd).st_size - offset
            call = libc.mmap(None, self.length, prot, flags, fd, offset)
            self.address = checked(call, "mmap")
        finally:
            if isinstance(path, str):
                os.close(fd)

    @property
    def view(self) -> memoryview:
        """The bytes, without a copy."""
        return memoryview((ctypes.c_ubyte * self.length).from_address(self.address)).cast("B")

    def digest(self, step: int = 1 << 18) -> str:
        """SHA-256 over all bytes, read in order."""
        sha, view = hashlib.sha256(), self.view
        for at in range(0, self.length, step):
            sha.update(view[at : at + step])
        return sha.hexdigest()

    def parts(self) -> tuple[int, int]:
        """(pages of it under a checkpoint, mappings that the kernel has made of all of it)."""
        checkpoints = parts = 0
        with open("/proc/self/maps") as file:
            for line in file:
                start, _, end = line.split()[0].partition("-")
                if not self.address <= int(start, 16) < self.address + self.length:
                    continue
                parts += 1
                if CHECKPOINTS in line:
                    checkpoints += (int(end, 16) - int(start, 16)) // PAGE
        return checkpoints, parts

    def checkpoints(self) -> int:
        """How many pages of it have a checkpoint over them, or are the pool's."""
        return self.parts()[0]

    def pooled(self) -> bool:
        """Whether the pool serves all of it: its memory lies there, each touch is waited for."""
        pages = -(-self.length // PAGE)
        return self.parts() == (pages, 1) and {"um", "ui"} <= set(advice_flags(self.address))

    def managed(self) -> Mapping:
        """Wait until checkpoints lie over it; returns itself."""
        until(lambda: self.checkpoints() or self.again(), "a checkpoint over the mapping")
        return self

    def followed(self) -> Mapping:
        """Wait until the service has welcomed our thread, and map it anew: so it hears of it at
        once, whatever the policy; returns itself."""
        until(ring, "our thread to be welcomed")
        self.again()
        return self

    def again(self) -> bool:
        """Map it anew; false, for who looks again. Checkpoints, and the pool, come in mmap(2) or
        not at all: not where that has not waited long enough, as for a service that is slow to
        start."""
        self.unmap()
        time.sleep(0.05)
        self._map(self.length)
        return False

    def plain(self) -> Mapping:
        """Wait until none lies over it any more; returns itself."""
        until(lambda: not self.checkpoints(), "the mapping to be given back")
        return self

    def protect(self, prot: int) -> None:
        checked(libc.mprotect(self.address, self.length, prot), "mprotect")

    def present(self, start: int = 0, length: int = 0) -> int:
        """How many of its pages are in this process's page table."""
        first, pages = (self.address + start) // PAGE, -(-(length or self.length) // PAGE)
        with open("/proc/self/pagemap", "rb", buffering=0) as table:
            entries = os.pread(table.fileno(), 8 * pages, 8 * first)
        return sum(entry >> 63 for (entry,) in struct.iter_unpack("<Q", entries))

    def advise(self, advice: int, start: int = 0, length: int = 0) -> None:
        checked(libc.madvise(self.address + start, length or self.length, advice), "madvise")

    def grow(self, length: int) -> None:
        """Let it be longer, wherever there is room (MREMAP_MAYMOVE)."""
        self.address = checked(libc.mremap(self.address, self.length, length, 1), "mremap")

    def forget(self) -> None:
        """Drop its pages from the page table: the next read faults again, an event included."""
        self.advise(MADV_DONTNEED)

    def write_past_us(self, start: int, data: bytes) -> None:
        """As a debugger writes, by /proc/PID/mem: EIO while the page is not mapped."""
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            while True:
                _ = self.view[start]
                memory.seek(self.address + start)
                try:
                    memory.write(data)
                    return
                except OSError as error:
                    if error.errno != errno.EIO:
                        raise

    def unmap(self, start: int = 0, length: int = 0) -> None:
        checked(libc.munmap(self.address + start, length or self.length), "munmap")


def agents(pid: int | str = "self") -> list[int]:
    """The thread ids of the agents in a process: one, or none. The responder, which it makes, bears
    its name until it has one of its own: two are looked at again."""
    end = time.monotonic() + HANG_SECONDS
    while len(found := _called(AGENT, pid)) > 1 and time.monotonic() < end:
        time.sleep(0.002)
    return found


def _called(name: str, pid: int | str) -> list[int]:
    """The threads of a process that bear this name."""
    found = []
    for tid in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{tid}/comm") as file:
                if file.read().strip() == name:
                    found.append(int(tid))
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has just ended
    return found


def advice_flags(address: int) -> list[str]:
    """VmFlags (two letters each: rr is MADV_RANDOM) of the mapping that holds ``address``."""
    inside = False
    for line in open("/proc/self/smaps"):
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, _, end = first.partition("-")
            inside = int(start, 16) <= address < int(end, 16)
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    return []


_saying = threading.Lock()


def by_instruction(number: int, a: int = 0, b: int = 0, c: int = 0) -> int:
    """A system call past every library, the fourth argument and those after it 0; x86-64 only."""
    import mmap

    # mov rax, rdi; mov rdi, rsi; mov rsi, rdx; mov rdx, rcx; xor r10, r10; xor r8, r8; syscall; ret
    code = bytes.fromhex("4889f84889f74889d64889ca4d31d24d31c00f05c3")
    room = mmap.mmap(-1, PAGE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    room.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    return int(ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_long] * 4)(address)(number, a, b, c))


def say(**values: Any) -> None:
    """One JSON line to the test, in one write: several processes share the pipe."""
    with _saying:
        os.write(1, (json.dumps(values) + "\n").encode())


def hear() -> str:
    """Wait for the test's word."""
    word = b""
    while not word.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("the test hung up")
        word += byte
    return word.decode().strip()


RING = "uffdprefetch-ring"
RING_FIELDS = (
    "head", "dropped", "faults", "laid", "rearmed", "failed", "overlays", "state",
)  # fmt: skip


def ring_address(pid: int | str = "self") -> int:
    """Where a process's agent has mapped its event ring; 0: it has none (yet, or any more)."""
    with open(f"/proc/{pid}/maps") as file:
        for line in file:
            if RING in line:
                return int(line.partition("-")[0], 16)
    return 0


def ring(pid: int | str = "self") -> dict[str, int]:
    """What the agent of a process counts (csrc/common/wire.h, up_ring); {} when it has no ring."""
    address = ring_address(pid)
    if not address:
        return {}
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
        data = os.pread(file.fileno(), 56, address)
    return dict(zip(RING_FIELDS, struct.unpack("<6Q2I", data), strict=True))


def faults_again(m: Mapping) -> int:
    """Read ``m`` until its agent has counted one more fault; returns how many more. Faults in the
    pool are not the agent's: there, the pages that are waited for."""
    until(m.checkpoints, "a checkpoint, or the pool")
    if m.pooled():
        m.forget()
        m.digest()
        return m.checkpoints()
    before = until(lambda: ring(), "a ring of our own")["faults"]

    def more() -> int:
        m.forget()
        m.digest()
        return ring()["faults"] - before

    return int(until(more, "an event"))


def taken_up(m: Mapping) -> int:
    """In a forked child: wait until it is served on, and read; returns > 0. Checkpoints that were
    inherited give no events, so there its page tables are followed from when it has a ring on."""
    until(m.checkpoints, "a checkpoint, or the pool")
    if m.pooled():
        return faults_again(m)
    until(ring, "a ring of our own")
    m.digest()
    return 1


def read_pooled(path: str) -> tuple[str, bool]:
    """(SHA-256 of a mapping of a file, whether the pool serves it): a worker's task."""
    m = Mapping(path)
    return m.digest(), m.pooled()
