# SPDX-License-Identifier: Apache-2.0
"""Probes of how progress can be seen: page tables, and userfaultfd for checkpoints and the pool."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import grp
import os
import pwd
import select
import stat
import struct
import threading
from pathlib import Path

from uffdprefetch.doctor import site
from uffdprefetch.doctor.check import CANNOT, LIMIT, NOTE, OK, Check, why
from uffdprefetch.native import syscalls as sc

DEVICE = "/dev/userfaultfd"
#: The remedy in a container: an option for Docker or Podman.
IN_A_CONTAINER = f"docker run --device {DEVICE} ...  # docs/containers.md"
#: Files that Docker, and Podman, make in a container. (A machine made from an image may have kept
#: one.)
CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
SYSCTL = "/proc/sys/vm/unprivileged_userfaultfd"
#: What follows from a userfaultfd, from none, and from page tables that cannot be read.
_WITH = "--policy fixed and the pool can be used"
_WITHOUT = "--policy fixed lays no checkpoints, --engine pool runs as --engine cache"
_NO_TABLES = "readers are not followed: jobs run as without wrap"


def _seccomp_is_on() -> bool:
    return any(
        line.split() == ["Seccomp:", "2"]
        for line in Path("/proc/self/status").read_text().splitlines()
    )


def _in_a_container() -> bool:
    return _seccomp_is_on() or any(map(os.path.exists, CONTAINER_MARKS))


def cure() -> str | None:
    """What lets jobs open a userfaultfd: where the device is missing in a container, or its device
    controller refuses it (EPERM), the container's engine; where its mode refuses this user, who may
    change that: the node's administrator. None: it opens."""
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
        return None
    except OSError as error:
        if error.errno == errno.EACCES:
            return _right_to_the_device()
    return IN_A_CONTAINER if _in_a_container() else site.COMMAND


def _right_to_the_device() -> str:
    """The mode of the device's file keeps this user out."""
    status = os.stat(DEVICE)
    if status.st_mode & 0o060 == 0o060 and status.st_gid:  # a site has chosen a group already
        return f"sudo gpasswd -a {_name_of_user()} {_name_of_group(status.st_gid)}  # log in anew"
    return f"{site.COMMAND}  # on the host" if _in_a_container() else site.COMMAND


def _name_of_user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _name_of_group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def refused(error: OSError) -> str:
    """Why a userfaultfd was refused, with the mode of the device's file where it was for that."""
    if error.filename != DEVICE or error.errno != errno.EACCES:
        return why(error)
    status = os.stat(DEVICE)
    owner = f"uid {status.st_uid}, group {_name_of_group(status.st_gid)}"
    return f"{DEVICE} is {stat.S_IMODE(status.st_mode):04o} of {owner} (EACCES)"


def _through_syscall(flags: int = 0) -> int:
    return sc.syscall("userfaultfd", sc.NR_USERFAULTFD, os.O_CLOEXEC | os.O_NONBLOCK | flags)


def _through_device() -> int:
    device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        return fcntl.ioctl(device, sc.USERFAULTFD_IOC_NEW, os.O_CLOEXEC | os.O_NONBLOCK)
    finally:
        os.close(device)


def open_uffd() -> tuple[int, str]:
    """(descriptor, how) of a userfaultfd with kernel faults, as the agent in the job opens it."""
    try:
        return _through_syscall(), "userfaultfd(2)"
    except OSError:
        return _through_device(), DEVICE


def by_syscall() -> Check:
    """userfaultfd(2) with kernel faults: CAP_SYS_PTRACE or vm.unprivileged_userfaultfd=1."""
    name = "userfaultfd(2)"
    try:
        os.close(_through_syscall())
        return Check(name, OK, "opens, with kernel faults", _WITH)
    except OSError as error:
        found, number = f"{why(error)}", error.errno
    if number == errno.ENOSYS:
        return Check(name, NOTE, f"{found}: not in this kernel", _WITHOUT)
    try:
        os.close(_through_syscall(sc.UFFD_USER_MODE_ONLY))
        found += "; user-mode faults alone would be allowed"
    except OSError:
        if _seccomp_is_on():
            found += "; a seccomp filter is on (container?)"
    return Check(
        name, NOTE, found,
        "the device is the other way in; user-mode-only is not used, since a write(2) from the"
        " mapping would fail with EFAULT",
        cure(),
    )  # fmt: skip


def by_device() -> Check:
    """/dev/userfaultfd (Linux 6.1): access is a matter of the node's permissions."""
    name = DEVICE
    try:
        os.close(_through_device())
        return Check(name, OK, "opens, with kernel faults", _WITH)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return Check(
                name, NOTE, "not there (Linux < 6.1, or a container that hides it)",
                "userfaultfd(2) is the other way in", cure(),
            )  # fmt: skip
        return Check(name, NOTE, refused(error), "userfaultfd(2) is the other way in", cure())


def unprivileged_sysctl() -> Check:
    """vm.unprivileged_userfaultfd, the setting behind by_syscall()."""
    name = "vm.unprivileged_userfaultfd"
    value = Path(SYSCTL).read_text().strip()
    if value == "1":
        return Check(name, OK, "1", "userfaultfd(2) works for every user")
    return Check(
        name, NOTE, value, "userfaultfd(2) wants CAP_SYS_PTRACE; the device does not",
        cure(),
    )  # fmt: skip


def _armed_page(uffd: int) -> tuple[int, bytes]:
    """A checkpoint page as the agent lays it: (address, what it holds), registered MINOR."""
    api = bytearray(struct.pack("<QQQ", sc.UFFD_API, 0, 0))
    fcntl.ioctl(uffd, sc.UFFDIO_API, api)
    features = struct.unpack_from("<Q", api, 8)[0]
    if not features & sc.UFFD_FEATURE_MINOR_SHMEM:
        raise OSError(errno.EOPNOTSUPP, "MINOR faults on shared memory need Linux 5.14")
    content = os.urandom(16) * (sc.PAGE_BYTES // 16)
    memfd = os.memfd_create("doctor", os.MFD_CLOEXEC)
    os.pwrite(memfd, content, 0)
    # As in a job: reopened read-only and mapped private, so that no job can write it.
    read_only = os.open(f"/proc/self/fd/{memfd}", os.O_RDONLY | os.O_CLOEXEC)
    address = sc.mmap(read_only, sc.PAGE_BYTES, shared=False)
    extent = struct.pack("<QQ", address, sc.PAGE_BYTES)
    request = bytearray(extent + struct.pack("<QQ", sc.UFFDIO_REGISTER_MODE_MINOR, 0))
    fcntl.ioctl(uffd, sc.UFFDIO_REGISTER, request)
    return address, content


def register_minor(wanted: bool = False) -> Check:
    """Register a page of a memfd for MINOR faults: a checkpoint is laid. ``wanted``: a userfaultfd
    is asked for (--policy fixed, --engine pool)."""
    name, status = "lay a checkpoint", LIMIT if wanted else NOTE
    try:
        uffd, how = open_uffd()
    except OSError as error:
        return Check(
            name, status, f"no userfaultfd: {refused(error)}",
            _WITHOUT, cure(),
        )  # fmt: skip
    try:
        _armed_page(uffd)
    except OSError as error:
        return Check(name, status, f"registering a memfd page failed: {why(error)}", _WITHOUT)
    return Check(name, OK, f"MINOR mode on a memfd page, through {how}", _WITH)


def kernel_fault(wanted: bool = False) -> Check:
    """write(2) from an armed page: the kernel itself takes the fault, a thread answers it."""
    name, status = "kernel-mode fault", LIMIT if wanted else NOTE
    try:
        uffd, _ = open_uffd()
        address, content = _armed_page(uffd)
    except OSError as error:
        return Check(name, status, f"not tried: {refused(error)}", _WITHOUT, cure())
    events: list[int] = []

    def answer() -> None:
        select.select([uffd], [], [])
        message = os.read(uffd, sc.UFFD_MSG_BYTES)
        events.append(message[0])
        extent = struct.pack("<QQ", address, sc.PAGE_BYTES)
        fcntl.ioctl(uffd, sc.UFFDIO_CONTINUE, bytearray(extent + struct.pack("<Qq", 0, 0)))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    reader, writer = os.pipe()
    try:
        sc.write_from(writer, address, sc.PAGE_BYTES)
    except OSError as error:
        return Check(
            name, status, f"write(2) from a checkpoint gave {why(error)}",
            f"a job that writes or sends from its mapping would fail: {_WITHOUT}", cure(),
        )  # fmt: skip
    thread.join()
    if os.read(reader, sc.PAGE_BYTES) != content or events != [sc.UFFD_EVENT_PAGEFAULT]:
        return Check(name, CANNOT, "wrong bytes came through", "do not use this kernel")
    return Check(
        name, OK, "write(2) from a checkpoint was answered, right bytes",
        "jobs may write and send from their mappings",
    )  # fmt: skip


_NO_AGENT = "the agent cannot start: jobs run unmanaged (--engine off follows their page tables)"


def pidfd_getfd() -> Check:
    """The agent has a descriptor table of its own and takes the job's descriptors this way."""
    name = "pidfd_getfd"
    memfd = os.memfd_create("doctor", os.MFD_CLOEXEC)
    try:
        copy = sc.syscall("pidfd_getfd", sc.NR_PIDFD_GETFD, os.pidfd_open(os.getpid()), memfd, 0)
    except OSError as error:
        found = why(error) + ("; a seccomp filter is on (container?)" if _seccomp_is_on() else "")
        return Check(name, LIMIT, found, _NO_AGENT)
    same = os.fstat(copy).st_ino == os.fstat(memfd).st_ino
    return Check(name, OK if same else LIMIT, "of our own process: works", "the agent can start")


def close_range() -> Check:
    """The agent leaves the job's descriptor table with close_range(CLOSE_RANGE_UNSHARE)."""
    name = "close_range"
    low = os.open("/dev/null", os.O_RDONLY)
    unshare = 1 << 1
    try:
        sc.syscall("close_range", sc.NR_CLOSE_RANGE, low, low, unshare)
    except OSError as error:
        return Check(name, LIMIT, f"{why(error)}: Linux < 5.9?", _NO_AGENT)
    try:
        os.fstat(low)
    except OSError:
        return Check(name, OK, "works, with CLOSE_RANGE_UNSHARE", "the agent can start")
    return Check(name, LIMIT, "it closed nothing", _NO_AGENT)


def page_tables() -> Check:
    """See a touched page of our own in the page table: PAGEMAP_SCAN (6.7), else pagemap."""
    name = "page tables"
    memfd = os.memfd_create("doctor", os.MFD_CLOEXEC)
    os.pwrite(memfd, b"x" * (2 * sc.PAGE_BYTES), 0)
    address = sc.mmap(memfd, 2 * sc.PAGE_BYTES, shared=True)
    end = address + 2 * sc.PAGE_BYTES
    sc.peek(address, 1)
    try:
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return Check(name, LIMIT, f"/proc/self/pagemap: {why(error)}", _NO_TABLES)
    vector = bytearray(24 * 4)
    where = ctypes.addressof((ctypes.c_char * len(vector)).from_buffer(vector))
    words = (96, 0, address, end, 0, where, 4, 0, 0, sc.PAGE_IS_PRESENT, 0, sc.PAGE_IS_PRESENT)
    try:
        runs = fcntl.ioctl(pagemap, sc.PAGEMAP_SCAN, bytearray(struct.pack("<12Q", *words)))
        first = struct.unpack_from("<Q", vector)[0]
        if runs >= 1 and first == address:
            return Check(
                name, OK, "PAGEMAP_SCAN sees a touched page", "readers are followed, cheaply",
                values={"pagemap_scan": True},
            )  # fmt: skip
    except OSError:
        pass
    entry = struct.unpack("<Q", os.pread(pagemap, 8, address // sc.PAGE_BYTES * 8))[0]
    if entry >> 63:
        return Check(
            name, OK, "pagemap shows a touched page; no PAGEMAP_SCAN (Linux 6.7)",
            "readers are followed, by 8 bytes a page", values={"pagemap_scan": False},
        )  # fmt: skip
    return Check(name, LIMIT, "a touched page does not show in pagemap", _NO_TABLES)


def ptrace_scope() -> Check:
    """Yama: who may attach to whom. It does not limit who reads page tables, as the service does;
    what it does to the system calls of a job says reads.py."""
    name = "kernel.yama.ptrace_scope"
    try:
        value = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except FileNotFoundError:
        return Check(name, OK, "no Yama in this kernel", "nothing is restricted by it")
    if value in ("0", "1", "2"):
        return Check(name, OK, value, "the service reads the ranks' page tables all the same")
    return Check(name, NOTE, value, "no process may look into another: expect less")
