# SPDX-License-Identifier: Apache-2.0
"""Probes of the machine and of the installation: kernel, memory, mappings, objects, eBPF."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from uffdprefetch.base import cgroup
from uffdprefetch.base.config import Config
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.units import format_size
from uffdprefetch.doctor import site
from uffdprefetch.doctor.check import CANNOT, LIMIT, NOTE, OK, Check, why
from uffdprefetch.native import syscalls as sc
from uffdprefetch.native.memory_limits import Limit
from uffdprefetch.trace.record import bpf_compiler

_CAPABILITIES = {19: "SYS_PTRACE", 21: "SYS_ADMIN", 28: "LEASE", 38: "PERFMON", 39: "BPF"}


def user() -> Check:
    """The user who asks: all answers below are for this user, on this machine, in this
    container."""
    effective = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
    held = [name for bit, name in _CAPABILITIES.items() if effective >> bit & 1]
    return Check(
        "user", OK,
        f"uid {os.geteuid()}, {'CAP_' + ' CAP_'.join(held) if held else 'no capability of use'};"
        f" Linux {platform.release()} {platform.machine()}",
        "the answers hold for this user: run doctor as the one who runs the job",
        values={"uid": os.geteuid(), "capabilities": held, "kernel": platform.release()},
    )  # fmt: skip


def map_count(wanted: bool = False) -> Check:
    """vm.max_map_count: two mappings per checkpoint, and at most a quarter of all is used.
    ``wanted``: checkpoints are asked for (--policy fixed)."""
    name = "vm.max_map_count"
    value = int(Path("/proc/sys/vm/max_map_count").read_text())
    checkpoints = value // 4 // 2
    values = {"max_map_count": value, "checkpoints_max": checkpoints}
    text = (
        f"with --policy fixed up to {checkpoints} checkpoints per process (a quarter, two mappings"
        " each)"
    )
    if value < 65530:
        return Check(
            name, LIMIT if wanted else NOTE, str(value), f"{text}: fewer than mappings may have",
            site.COMMAND, values,
        )  # fmt: skip
    return Check(name, OK, str(value), text, values=values)


def _mem_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("no MemAvailable in /proc/meminfo")


def _cgroup_directories() -> Iterator[tuple[Path, str]]:
    """(directory, name of the limit's file) for our memory cgroup and all above it, v2 and v1."""
    mounts: dict[str, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, mount = line.partition(" - ")
        kind, _, options = mount.split(" ", 2)
        if kind == "cgroup2":
            mounts["v2"] = place.split()[4]
        elif kind == "cgroup" and "memory" in options.split(","):
            mounts["v1"] = place.split()[4]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, inside = line.split(":", 2)
        version = "v2" if not controllers else "v1" if "memory" in controllers.split(",") else ""
        root = mounts.get(version)
        if root is None:
            continue
        limit = "memory.max" if version == "v2" else "memory.limit_in_bytes"
        directory = Path(root + inside)
        while directory.is_relative_to(root):
            yield directory, limit
            if directory == Path(root):
                break
            directory = directory.parent


def cgroup_limit_bytes() -> int | None:
    """The tightest memory limit of our cgroup and those above it, None if there is none."""
    limits = []
    for directory, limit in _cgroup_directories():
        try:
            text = (directory / limit).read_text().strip()
        except OSError:
            continue
        # v1 says "no limit" with a number near 2^63, rounded to the page.
        if text != "max" and int(text) < 1 << 60:
            limits.append(int(text))
    return min(limits) if limits else None


def memory(budget_bytes: int = Config.budget_bytes) -> Check:
    """MemAvailable and the cgroup's limit against the budget of prefetched bytes."""
    available_bytes, limit_bytes = _mem_available_bytes(), cgroup_limit_bytes()
    values = {"mem_available_bytes": available_bytes, "cgroup_limit_bytes": limit_bytes}
    found = f"{format_size(available_bytes)} available, cgroup limit " + (
        "none" if limit_bytes is None else format_size(limit_bytes)
    )
    why = cgroup.why_no_room(cgroup.SERVICE_BYTES)
    if why is not None:
        return Check(
            "memory", CANNOT, why, "wrap runs the job without prefetching",
            "ask the batch system for more memory (Slurm: --mem)", values,
        )  # fmt: skip
    usable_bytes = min(available_bytes, limit_bytes or available_bytes)
    binds = Limit.MEMORY if usable_bytes == available_bytes else Limit.CGROUP
    if usable_bytes < 2 * budget_bytes:
        return Check(
            "memory", LIMIT, found,
            f"the budget of {format_size(budget_bytes)} is cut: prefetched pages must not push"
            " out the job's own",
            f"run it {binds.raised_to(budget_bytes)}", values,
        )  # fmt: skip
    return Check("memory", OK, found, f"room for --budget {format_size(budget_bytes)}",
                 values=values)  # fmt: skip


def runtime_directory() -> Check:
    """Where the service's socket would lie."""
    from uffdprefetch.base.rundir import runtime_directory as make
    from uffdprefetch.base.rundir import why_unusable

    try:
        path = make()
    except UffdPrefetchError as error:
        return Check(
            "runtime directory", CANNOT, error.message, "no service, so no prefetching",
            "export UFFDPREFETCH_RUNDIR=$(mktemp -d)",
        )  # fmt: skip
    try:
        # as a service does (protocol/leftovers.py); what is named by mkdtemp is ours alone
        os.rmdir(tempfile.mkdtemp(prefix="doctor-", dir=path))
        with tempfile.TemporaryFile(dir=path) as file:
            os.ftruncate(file.fileno(), 1)
    except OSError as error:
        return Check(
            "runtime directory", CANNOT, why_unusable(path, error), "no service, so no prefetching",
            "export UFFDPREFETCH_RUNDIR=$(mktemp -d)",
        )  # fmt: skip
    return Check("runtime directory", OK, path, "the service's socket and log lie there")


def helper() -> Check:
    """The service's C side."""
    try:
        importlib.import_module("uffdprefetch._uffd")
    except ImportError as error:
        return Check("helper", CANNOT, f"cannot be imported: {error}", "no service", "make setup")
    return Check("helper", OK, "uffdprefetch._uffd can be imported", "the service can run")


def preload() -> Check:
    """The LD_PRELOAD object, loaded into a child that then looks at its own mappings."""
    from uffdprefetch.native.preload import PRELOAD_MODULE, preload_object

    name = "preload object"
    try:
        path = preload_object()
    except UffdPrefetchError as error:
        return Check(name, CANNOT, error.message, "no checkpoints, no advice kept", "make setup")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("UFFDPREFETCH_")}
    environment["LD_PRELOAD"] = path
    child = subprocess.run(
        ["cat", "/proc/self/maps"], env=environment, capture_output=True, text=True
    )
    if child.returncode == 0 and not child.stderr and os.path.realpath(path) in child.stdout:
        return Check(name, OK, f"{PRELOAD_MODULE} loads into a child", "jobs can be managed")
    errors = child.stderr.strip().splitlines() or [f"status {child.returncode}, not in its maps"]
    return Check(
        name, CANNOT, f"{path} does not load: {errors[0]}", "no job can be managed",
        f"LD_PRELOAD={path} ldd /bin/cat",
    )  # fmt: skip


# ---- eBPF ---------------------------------------------------------------------------------------


#: Counts what this process puts into the page cache: the smallest program that proves the chain.
_PROGRAM = """
BPF_ARRAY(fills, u64, 1);
TRACEPOINT_PROBE(filemap, mm_filemap_add_to_page_cache) {
    if (bpf_get_current_pid_tgid() >> 32 == OUR_PID)
        fills.increment(0);
    return 0;
}
"""
_LESS = "the kernel cannot be a witness; prefetching does not need it"


def bpf() -> Check:
    """Compile a small program with the distribution's bcc, load it, see our own page-cache fill."""
    name = "eBPF (bcc)"
    try:
        bpf_compiler.load("int probe(void *ctx) { return 0; }", "probe")
    except bpf_compiler.NoBpf as error:
        follows = _LESS
        if os.geteuid() != 0 and error.remedy is None:
            follows += "; root has it, or who has CAP_BPF and CAP_PERFMON"
        found = error.why if error.remedy else f"a small program does not load: {error.why}"
        return Check(name, NOTE, found, follows, error.remedy)
    return _tracepoint(name)


def _write_a_page() -> None:
    with tempfile.TemporaryFile(dir="/var/tmp") as file:
        file.write(b"x" * sc.PAGE_BYTES)
        file.flush()


def _reread(path: str) -> None:
    """Make the kernel read a page again that it has in the cache, whoever else uses the file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.pread(fd, 1, 0)
    finally:
        os.close(fd)


#: /var/tmp may lie in memory, on its own or under an overlay; what we run from rarely does.
_REREAD = (
    ("a read of this module", partial(_reread, __file__)),
    ("a read of the interpreter", partial(_reread, sys.executable)),
)


def _tracepoint(name: str) -> Check:
    """Attach to the tracepoint of page-cache fills and cause one."""
    event, place = "filemap:mm_filemap_add_to_page_cache", "/sys/kernel/tracing"
    mount = None
    try:
        if not os.path.isdir(f"{place}/events"):
            mount = f"sudo mount -t tracefs nodev {place}"
            sc.unshare_mounts()  # look without changing the machine: this is a child process
            sc.mount_tracefs(place)
        exists = os.path.isdir(f"{place}/events/{event.replace(':', '/')}")
    except OSError as error:
        return Check(name, NOTE, f"loads; tracefs cannot be read: {why(error)}", _LESS, mount)
    if not exists:
        return Check(name, NOTE, f"loads; no tracepoint {event} (about Linux 6.10)", _LESS)
    try:
        program = bpf_compiler.load(_PROGRAM.replace("OUR_PID", str(os.getpid())))
        tried = []
        for what, fill in (("a write to /var/tmp", _write_a_page), *_REREAD):
            fill()
            tried.append(what)
            seen = program["fills"][0].value
            if seen:
                break
        program.cleanup()
    except (bpf_compiler.NoBpf, OSError) as error:
        return Check(name, NOTE, f"loads; {event} cannot be attached: {error}", _LESS)
    if not seen:
        return Check(
            name, NOTE, f"attaches to {event}, which shows no fill of ours", f"tried: "
            f"{', '.join(tried)} (what lies in memory makes none); {_LESS}",
        )  # fmt: skip
    found = f"loads, and {event} shows our own page-cache fill"
    fault = "filemap:mm_filemap_fault"
    if not os.path.isdir(f"{place}/events/{fault.replace(':', '/')}"):
        return Check(
            name, NOTE, f"{found}; no tracepoint {fault} (about Linux 6.10)",
            "traces show who filled the cache; faults and stalls are not measured, what was read "
            "comes from our service", mount,
        )  # fmt: skip
    if mount:
        found = f"{found}; tracefs, not mounted here, is seen in a mount namespace of our own"
    return Check(name, OK, found, "the kernel can be a witness")
