# SPDX-License-Identifier: Apache-2.0
"""The kernel as a witness: the programs of bpf/, loaded, fed with decisions, and drained.

Nothing here asks our own service: what is seen is what the kernel did for any process. Needs root,
or CAP_BPF and CAP_PERFMON, a compiler (bcc) and tracepoints; what is not there is said.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from uffdprefetch.native import syscalls, uffd
from uffdprefetch.trace.file.events import (
    EVENT,
    EVENT_BYTES,
    HUGE_BYTES,
    Kind,
    empty,
)
from uffdprefetch.trace.file.sensors import Sensor, entry
from uffdprefetch.trace.record import bpf_compiler
from uffdprefetch.trace.record.bpf_compiler import NoBpf

PROGRAMS = Path(__file__).parent / "programs"
SOURCES = ("event.h", "faults.c", "cache.c", "calls.c")
TRACEFS = "/sys/kernel/tracing"
#: Pages of the events' ring: 16 MiB hold 300 000 events, two seconds of a warm scan as fast as
#: memory.
RING_PAGES = 4096
#: Pages of the opens' ring: 4 MiB hold 15 000 paths, as a large Python program opens at its start.
OPENS_PAGES = 1024
#: Initial PID namespace (include/linux/proc_ns.h, PROC_PID_INIT_INO): elsewhere the numbers that
#: BPF sees are not those of /proc.
INIT_PID_NAMESPACE = 0xEFFFFFFC
RECORDED, CHILDREN_ONLY = 1, 2
_UNWANTED = 0xFFFF
_COSTS_ONLY = 0x10000
_NEW_FILE, SILENT = 100, 101
_OPENED = struct.Struct("<QQIIiI232s")

#: HAVE_x -> (tracepoints, the sensor that they are, since when they exist)
FEATURES: dict[str, tuple[tuple[str, ...], Sensor, str]] = {
    "FAULT": (("filemap/mm_filemap_fault",), Sensor.FAULTS, "about Linux 6.10"),
    "MAP_PAGES": (
        ("filemap/mm_filemap_map_pages",),
        Sensor.AROUND,
        "about Linux 6.10",
    ),
    "EXCEPTIONS": (
        ("exceptions/page_fault_user", "exceptions/page_fault_kernel"),
        Sensor.ADDRESSES,
        "x86 only",
    ),
    "SWITCH": (("sched/sched_switch",), Sensor.SLEEPS, "CONFIG_SCHED"),
    "FILL": (("filemap/mm_filemap_add_to_page_cache",), Sensor.FILLS, "Linux 3.10"),
    "EVICT": (("filemap/mm_filemap_delete_from_page_cache",), Sensor.EVICTIONS, "Linux 3.10"),
    "GET_PAGES": (("filemap/mm_filemap_get_pages",), Sensor.READS, "about Linux 6.10"),
    "RA_ORDER": (("readahead/page_cache_ra_order",), Sensor.READAHEAD_SIZES, "about Linux 6.17"),
    "RA_UNBOUNDED": (
        ("readahead/page_cache_ra_unbounded",),
        Sensor.READAHEAD_SIZES,
        "about Linux 6.17",
    ),
    "RA_SYNC": (("readahead/page_cache_sync_ra",), Sensor.READAHEAD_DECISIONS, "about Linux 6.17"),
    "RA_ASYNC": (
        ("readahead/page_cache_async_ra",),
        Sensor.READAHEAD_DECISIONS,
        "about Linux 6.17",
    ),
    "CALLS": (
        (
            "syscalls/sys_enter_munmap",
            *(
                f"syscalls/sys_{side}_{name}"
                for side in ("enter", "exit")
                for name in ("openat", "mmap", "read", "pread64", "write")
            ),
        ),
        Sensor.CALLS,
        "CONFIG_FTRACE_SYSCALLS",
    ),
    "PROCESSES": (
        ("sched/sched_process_fork", "sched/sched_process_exec", "sched/sched_process_exit"),
        Sensor.BIRTHS,
        "any",
    ),
    "BLOCK": (("block/block_rq_issue", "block/block_rq_complete"), Sensor.BLOCK, "CONFIG_BLOCK"),
}
#: Without these there is no trace of mapped reading; progress must come from the service.
ESSENTIAL = "FAULT"


@dataclass(frozen=True)
class NewFile:
    """A file that a process of the job touched for the first time; ``device`` as the kernel has it
    (major << 20 | minor)."""

    number: int
    inode: int
    device: int
    pid: int


@dataclass(frozen=True)
class OpenedFile:
    """An openat(2) that succeeded, with the path as it was given; fd -1: a program was executed."""

    time_ns: int
    took_ns: int
    pid: int
    tid: int
    fd: int
    flags: int
    path: str


def _fault_around_pages() -> int:
    try:
        value = int(Path("/sys/kernel/debug/fault_around_bytes").read_text())
    except (OSError, ValueError):
        value = 65536  # mm/memory.c
    return max(1, value // uffd.PAGE_BYTES)


def _possible_cpus() -> int:
    try:
        text = Path("/sys/devices/system/cpu/possible").read_text()
        return int(text.strip().replace(",", "-").rpartition("-")[2]) + 1
    except (OSError, ValueError):
        return os.cpu_count() or 1


def available() -> tuple[set[str], list[dict[str, Any]]]:
    """(names of FEATURES that this kernel has, what is missing and why)."""
    present: set[str] = set()
    missing: dict[Sensor, dict[str, Any]] = {}
    for name, (points, sensor, since) in FEATURES.items():
        absent = [p for p in points if not os.path.exists(f"{TRACEFS}/events/{p}/format")]
        if absent:
            why = f"no tracepoint {absent[0].replace('/', ':')} ({since})"
            missing.setdefault(sensor, entry([sensor], why))
        else:
            present.add(name)
    return present, list(missing.values())


def _check_rights() -> None:
    """Say who lacks what before the compiler is started for nothing."""
    effective = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
    sys_admin, perfmon, bpf = (bool(effective >> bit & 1) for bit in (21, 38, 39))
    if not sys_admin and not (perfmon and bpf):
        raise NoBpf(
            f"uid {os.geteuid()} has neither CAP_SYS_ADMIN nor CAP_BPF and CAP_PERFMON",
            "run it as root, or ask for those two capabilities",
        )


def _mount_tracefs() -> None:
    """See tracefs without changing the machine: in a mount namespace of this process's own."""
    if os.path.isdir(f"{TRACEFS}/events"):
        return
    try:
        syscalls.unshare_mounts()
        syscalls.mount_tracefs(TRACEFS)
    except OSError as error:
        raise NoBpf(
            f"tracefs cannot be read: {error.strerror}", f"sudo mount -t tracefs nodev {TRACEFS}"
        ) from None


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Not preempted while a map is written: meanwhile no BPF program runs on this
    CPU (kernel/bpf/syscall.c, bpf_disable_instrumentation), and what it would have told is lost
    without being counted."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def program_text(features: set[str], cpus: int, around_pages: int) -> str:
    """The C text for bcc, all of bpf/ with what the kernel has. Raises OSError."""
    defines = {
        "RING_PAGES": RING_PAGES,
        "OPENS_PAGES": OPENS_PAGES,
        "AROUND_PAGES": around_pages,
        "CPUS": cpus,
        **{f"HAVE_{name}": 1 for name in sorted(features)},
    }
    lines = [f"#define {name} {value}\n" for name, value in defines.items()]
    return "".join(lines) + "".join((PROGRAMS / name).read_text() for name in SOURCES)


class _FileKey(ctypes.Structure):
    _fields_ = [("inode", ctypes.c_uint64), ("device", ctypes.c_uint64)]


class KernelTracer:
    """The loaded programs. Use from one process that does not fork afterwards."""

    def __init__(self) -> None:
        """Load and attach; raises NoBpf. Afterwards ``missing`` says what this kernel lacks."""
        _check_rights()
        if os.stat("/proc/self/ns/pid").st_ino != INIT_PID_NAMESPACE:
            raise NoBpf("in a PID namespace (a container) BPF sees other process numbers than we")
        _mount_tracefs()
        self.features, self.missing = available()
        if not self.features:
            raise NoBpf(f"none of the tracepoints is there (uid {os.geteuid()})")
        try:
            text = program_text(self.features, _possible_cpus(), _fault_around_pages())
        except OSError as error:
            raise NoBpf(f"the BPF programs are not installed: {error}") from None
        self._bpf = bpf_compiler.load(text)
        page = uffd.PAGE_BYTES
        self._ring = uffd.BpfRing(
            self._bpf["events"].map_fd, RING_PAGES * page, EVENT_BYTES, most=1 << 17
        )
        self._opens = uffd.BpfRing(
            self._bpf["opens"].map_fd, OPENS_PAGES * page, _OPENED.size, most=4096
        )

    @property
    def sees_faults(self) -> bool:
        """Whether demand faults are told; else only a service of ours sees progress."""
        return ESSENTIAL in self.features

    def follow(self, pid: int, how: int = RECORDED) -> None:
        """Record a process (RECORDED), or only what it starts (CHILDREN_ONLY)."""
        with _undisturbed():
            self._bpf["tracked"][ctypes.c_uint32(pid)] = ctypes.c_uint32(how)

    def mapped(self, pid: int, address: int, length: int) -> None:
        """A recorded process has this mapping of a file from before."""
        if length < HUGE_BYTES:
            return
        table = self._bpf["mapped"]
        key = ctypes.c_uint32(pid)
        with _undisturbed():
            ranges = table[key] if key in table else table.Leaf()
            at = ranges.n % len(ranges.start)
            ranges.start[at], ranges.end[at] = address, address + length
            ranges.n += 1
            table[key] = ranges

    def forget(self, pid: int) -> None:
        """Record a process no longer."""
        with _undisturbed(), contextlib.suppress(KeyError):
            del self._bpf["tracked"][ctypes.c_uint32(pid)]

    def include(self, inode: int, device: int, number: int) -> None:
        """Record a file from now on, whoever touches it, under a number of the caller's. Where the
        kernel's table is full its events are lost, and counted."""
        self._give_number(inode, device, number)

    def costs_only(self, inode: int, device: int, number: int) -> None:
        """Tell of this file no more than what it costs the job."""
        self._give_number(inode, device, number | _COSTS_ONLY)

    def ignore(self, inode: int, device: int) -> None:
        """Never again an event of this file."""
        self._give_number(inode, device, _UNWANTED)

    def _give_number(self, inode: int, device: int, number: int) -> None:
        try:
            with _undisturbed():
                self._bpf["files"][_FileKey(inode, device)] = ctypes.c_uint32(number)
        except Exception:  # bcc raises no other (bcc/table.py, __setitem__)
            if ctypes.get_errno() != errno.E2BIG:
                raise

    def drain(self) -> tuple[np.ndarray[Any, Any], list[NewFile]]:
        """Events since the last call, in the order of their recording, and new files."""
        events = np.frombuffer(self._ring.drain(), EVENT)
        fresh = events["kind"] == _NEW_FILE
        if not fresh.any():
            return events, []
        new = [
            NewFile(int(e["file"]), int(e["offset"]), int(e["value"]), int(e["pid"]))
            for e in events[fresh]
        ]
        return events[~fresh], new

    def opened(self) -> list[OpenedFile]:
        """Paths that were opened or executed since the last call."""
        found = []
        for at, took, pid, tid, fd, flags, name in _OPENED.iter_unpack(self._opens.drain()):
            path = name.split(b"\0")[0].decode(errors="surrogateescape")
            found.append(OpenedFile(at, took, pid, tid, fd, flags, path))
        return found

    def lost(self) -> int:
        """Events and names that found a ring or the table of files full since the start."""
        return int(self._bpf["lost"][0].value)

    def stop(self) -> np.ndarray[Any, Any]:
        """Stop recording, and take what was still being gathered in the kernel: runs of
        pages, majors."""
        self._bpf["over"][ctypes.c_int(0)] = ctypes.c_uint32(1)
        try:
            syscalls.wait_for_all_cpus()  # for a program that had begun
        except OSError:
            for name in list(self._bpf.tracepoint_fds):
                self._bpf.detach_tracepoint(name)
        last = []
        if self.features & {"FILL", "EVICT"}:
            for key, run in self._bpf["runs"].items():
                took = run.last_ns - run.first_ns
                last.append(
                    (run.first_ns, run.start, run.end - run.start, took,
                     run.pid, key.tid, run.kind, run.file, run.folios)
                )  # fmt: skip
        if "EXCEPTIONS" in self.features:
            for key, fault in self._bpf["exceptions"].items():
                if fault.silent:
                    last.append(
                        (fault.time_ns, 0, uffd.PAGE_BYTES, fault.address, fault.pid, key.value,
                         SILENT, 0, fault.kernel)
                    )  # fmt: skip
        if "FAULT" in self.features:
            for key, fault in self._bpf["in_faults"].items():
                if fault.open and fault.missed_ns and not fault.major:
                    took = fault.missed_ns - fault.time_ns
                    last.append(
                        (fault.missed_ns, fault.offset, uffd.PAGE_BYTES, took,
                         fault.pid, key.value, Kind.MAJOR, fault.file, 0)
                    )  # fmt: skip
        return np.array(last, EVENT) if last else empty()

    def close(self) -> None:
        """Give everything back; the programs are unloaded with the last descriptor."""
        self._ring.close()
        self._opens.close()
        self._bpf.cleanup()
