# SPDX-License-Identifier: Apache-2.0
"""--engine pool: whatever somebody sends as its userfaultfd, and whatever it then offers, the
others are served on, with right bytes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import clean_environment, require
from harness import Records, Start, connect, jobs, python
from inside import libc
from test_hostile_clients import VICTIM, Victim, attach, closed, hello, offer, offered

from uffdprefetch.protocol import wire

pytest_plugins = ("harness_fixtures",)

SENDS_POOL = wire.HELLO_UFFD | wire.HELLO_SENDS_POOL
SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
UFFDIO_API = 0xC018AA3F
FEATURES = 1 << 5 | 1 << 10  # MISSING_SHMEM, MINOR_SHMEM


def userfaultfd(flags: int = os.O_CLOEXEC | os.O_NONBLOCK) -> int:
    """One that nobody has initialized."""
    fd = int(libc.syscall(SYS_USERFAULTFD[os.uname().machine], flags))
    require(fd >= 0, "no userfaultfd here")
    return fd


def initialized(flags: int = os.O_CLOEXEC | os.O_NONBLOCK) -> int:
    fd = userfaultfd(flags)
    api = (ctypes.c_uint64 * 3)(0xAA, FEATURES, 0)
    fcntl.ioctl(fd, UFFDIO_API, api)
    return fd


def a_pipe() -> int:
    reader, writer = os.pipe()
    os.write(writer, bytes(64))
    os.close(writer)
    return reader


UFFDS: dict[str, Callable[[], int]] = {
    "nothing": lambda: -1,
    "a pipe": a_pipe,
    "one that nobody initialized": userfaultfd,
    "one that blocks": lambda: initialized(os.O_CLOEXEC),
    "one that does what it should": initialized,
}


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory, records: Records) -> Iterator[Victim]:
    """An honest job, which reads through a pool of a quarter of its file."""
    cwd = tmp_path_factory.mktemp("victim")
    env = {**clean_environment(), "UFFDPREFETCH_RUNDIR": str(cwd / "hub")}
    with jobs(env, cwd) as start:
        options = ("--engine", "pool", "--budget", "6MiB")
        yield Victim(start(python(VICTIM, records.path), options=options), records)


@contextlib.contextmanager
def agent(victim: Victim, uffd: int) -> Iterator[socket.socket]:
    """A connection that has said hello with a descriptor for the pool, and was welcomed."""
    with connect(victim.env) as peer:
        offer(peer, hello(flags=SENDS_POOL), *([uffd] if uffd >= 0 else []))
        data, descriptors, _, _ = socket.recv_fds(peer, 512, 4)
        for fd in descriptors:
            os.close(fd)
        assert wire.unpack(data)[0] == wire.Type.WELCOME
        yield peer


def come_again(victim: Victim) -> None:
    """We are a process that the pool serves, and our agent is dead: as long as we live, or until we
    have another agent, our faults are answered."""
    uffd = initialized()
    with agent(victim, uffd):
        os.close(uffd)
    assert victim.is_served()


def verdict(peer: socket.socket) -> int:
    """The service's answer to the ATTACH of region 1024."""
    data, descriptors, _, _ = socket.recv_fds(peer, 512, 4)
    for fd in descriptors:
        os.close(fd)
    kind, body = wire.unpack(data)
    assert kind == wire.Type.FILE
    return int(wire.FILE.unpack_from(body)[1])


@pytest.mark.parametrize("kind", UFFDS)
def test_a_descriptor_that_is_no_working_userfaultfd_harms_only_its_sender(
    victim: Victim, records: Records, kind: str
) -> None:
    uffd, fd = UFFDS[kind](), os.open(records.path, os.O_RDONLY)
    try:
        with agent(victim, uffd) as peer:
            size = records.size_bytes & ~4095
            offer(peer, attach(**offered(records.path), length_bytes=size), fd)
            good = uffd >= 0 and kind != "a pipe"
            other = wire.ServingMode.PAGE_TABLES  # of the file itself
            assert verdict(peer) == (wire.ServingMode.POOL if good else other)
            victim.read()
    finally:
        for number in (uffd, fd):
            if number >= 0:
                os.close(number)
    come_again(victim)


@pytest.mark.parametrize("sequence", [0, 7], ids=["of the mapping", "of a command"])
def test_only_a_refusal_of_the_mapping_takes_it_out_of_the_pool(
    job: Start, env: dict[str, str], records: Records, sequence: int
) -> None:
    """An agent says also which page it could not arm again (a kernel may refuse that): a mapping
    that is taken for refused then is woken for ever, because the pool's memory lies there."""
    work = job(python(VICTIM, records.path), ("--engine", "pool", "--budget", "6MiB"))
    victim = Victim(work, records)
    uffd, fd = initialized(), os.open(records.path, os.O_RDONLY)
    with agent(victim, uffd) as peer:
        offer(peer, attach(**offered(records.path), length_bytes=records.size_bytes & ~4095), fd)
        assert verdict(peer) == wire.ServingMode.POOL
        body = wire.ACK.pack(sequence, 1024, 0, errno.EAGAIN, 0)
        peer.send(wire.pack(wire.Type.ACK, body))
        victim.read()
    os.close(fd)
    os.close(uffd)
    summary = work.finish().summary
    assert summary is not None
    said = [d for d in summary["degradations"] if "a mapping is not served by the pool" in d]
    assert len(said) == (sequence == 0), said


def test_an_attach_before_the_hello_ends_its_sender_only(victim: Victim, records: Records) -> None:
    with connect(victim.env) as peer, open(records.path, "rb") as file:
        offer(peer, attach(**offered(records.path)), file.fileno())
        assert closed(peer)
    assert victim.is_served()


def test_regions_over_each_other_and_faults_of_none_are_the_senders_affair(
    victim: Victim, records: Records
) -> None:
    """It says that its memory is the file's, again and again at one address, and maps nothing."""
    uffd, fd = initialized(), os.open(records.path, os.O_RDONLY)
    page = os.sysconf("SC_PAGESIZE")
    try:
        with agent(victim, uffd) as peer:
            for n in range(200):
                fields = {**offered(records.path), "address": (1 << 30) + n % 7 * page}
                offer(peer, attach(region=1024 * (n + 1), length_bytes=1 << 20, **fields), fd)
                socket_answer(peer)
            victim.read()
            os.close(uffd)
            uffd = -1
            victim.read()
    finally:
        for number in (uffd, fd):
            if number >= 0:
                os.close(number)
    come_again(victim)


def socket_answer(peer: socket.socket) -> None:
    for fd in socket.recv_fds(peer, 512, 4)[1]:
        os.close(fd)


def test_the_memory_that_a_job_is_given_cannot_be_written_by_it(
    victim: Victim, records: Records
) -> None:
    uffd, fd = initialized(), os.open(records.path, os.O_RDONLY)
    try:
        with agent(victim, uffd) as peer:
            size = records.size_bytes & ~4095
            offer(peer, attach(**offered(records.path), length_bytes=size), fd)
            _, descriptors, _, _ = socket.recv_fds(peer, 512, 4)
            memfd = descriptors[0]
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(memfd, b"x", 0)
            with pytest.raises(OSError, match="Invalid argument"):
                os.ftruncate(memfd, 0)
            descriptors.append(os.open(f"/proc/self/fd/{memfd}", os.O_RDWR))
            with pytest.raises(OSError, match="not permitted"):
                os.ftruncate(descriptors[-1], 0)
            for number in descriptors:
                os.close(number)
    finally:
        os.close(uffd)
        os.close(fd)
    come_again(victim)


def test_a_pool_has_a_place_for_each_process_and_gives_it_back(
    victim: Victim, tmp_path: Path
) -> None:
    for _ in range(3):
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                uffd = initialized()
                stack.callback(os.close, uffd)
                stack.enter_context(agent(victim, uffd))
            victim.read()
        assert victim.is_served()
