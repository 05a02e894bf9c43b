# SPDX-License-Identifier: Apache-2.0
"""Whoever connects, whatever they send: the service goes on serving, and holds on to nothing."""

from __future__ import annotations

import array
import contextlib
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import (
    HANG_SECONDS,
    PATIENCE_VARIABLE,
    clean_environment,
    process_gone,
    require,
    uffdprefetch,
    wait_until,
)
from harness import (
    OWN_DESCRIPTORS,
    Job,
    Records,
    Start,
    connect,
    fd_count,
    jobs,
    python,
    service_socket,
    settle,
    snapshot,
)
from nobody import as_nobody
from suite import own_name, owned_by, owner

from uffdprefetch.protocol import wire

pytest_plugins = ("harness_fixtures",)

VICTIM = """
first = Mapping(sys.argv[1]).managed()
say(ready=True)
while hear() == "read":
    again = Mapping(sys.argv[1])  # a new mapping is attached; one that a slow service has taken for
    while not again.checkpoints():  # jumping about has none until it is seen to walk
        again.digest(), again.again()
    digest = again.digest()
    again.unmap()
    first.forget()
    say(digest=first.digest(), other=digest, agents=len(agents()))
"""


class Victim:
    """An honest job, and the service that must go on serving it."""

    def __init__(self, job: Job, records: Records) -> None:
        assert job.line() == {"ready": True}
        self.job, self.records = job, records
        self.pid = job.service()
        self.read()
        self.descriptors = settle(lambda: fd_count(self.pid), "the service's descriptors")

    @property
    def env(self) -> dict[str, str]:
        return self.job.env

    def read(self) -> None:
        """A new mapping is attached and given back, and all bytes are right."""
        self.job.tell("read")
        digest = self.records.digest
        assert self.job.line() == {"digest": digest, "other": digest, "agents": 1}

    def is_served(self) -> bool:
        """By the same service as before, which keeps nothing of what happened; fails if not."""
        self.read()
        assert not process_gone(self.pid)
        wait_until(
            lambda: fd_count(self.pid) <= self.descriptors + OWN_DESCRIPTORS,
            f"{fd_count(self.pid)} descriptors to become {self.descriptors} again",
        )
        return True


@pytest.fixture(scope="module")
def victims(
    tmp_path_factory: pytest.TempPathFactory, records: Records
) -> Iterator[Callable[[], Victim]]:
    """The module's victim; a new one where a test has broken the last."""
    with contextlib.ExitStack() as stack:
        alive: list[Victim] = []
        ours = owner()

        def get() -> Victim:
            if alive and not process_gone(alive[-1].pid) and alive[-1].job.process.poll() is None:
                return alive[-1]
            cwd = tmp_path_factory.mktemp("victim")
            with owned_by(ours):
                env = {**clean_environment(), "UFFDPREFETCH_RUNDIR": str(cwd / "hub")}
                env[PATIENCE_VARIABLE] = "400"
            start = stack.enter_context(jobs(env, cwd))
            alive.append(Victim(start(python(VICTIM, records.path)), records))
            return alive[-1]

        yield get


@pytest.fixture
def victim(victims: Callable[[], Victim]) -> Victim:
    return victims()


def closed(peer: socket.socket) -> bool:
    """Whether the service has hung up (within the bound of a hang)."""
    try:
        while peer.recv(512):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def hello(role: int = wire.Role.AGENT, flags: int = wire.HELLO_UFFD, **fields: int) -> bytes:
    values = {
        "role": role, "pid": os.getpid(), "ppid": 1, "rank": -1, "local_rank": -1, "world": -1,
        "job_pid": 0, "flags": flags, "uffd_error": 0, "overlays_max": 100, "parent_pid": 0,
        "page_bytes": 4096, **fields,
    }  # fmt: skip
    return wire.pack(wire.Type.HELLO, wire.HELLO.pack(*values.values(), b"hostile"))


def attach(**fields: int) -> bytes:
    values = {
        "region": 1024, "flags": 0, "address": 1 << 30, "length_bytes": 1 << 24,
        "offset_bytes": 0, "device": 1, "inode": 1, "size_bytes": 1 << 24, "mtime_ns": 0,
        "map_flags": 1, "advice": 0, "anchor": 0, **fields,
    }  # fmt: skip
    return wire.pack(wire.Type.ATTACH, wire.ATTACH.pack(*values.values()))


def offered(path: Path | str) -> dict[str, int]:
    """What an honest agent says of a file."""
    status = os.stat(path)
    return {
        "device": status.st_dev, "inode": status.st_ino, "size_bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
    }  # fmt: skip


def offer(peer: socket.socket, message: bytes, *descriptors: int) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    peer.sendmsg([message], rights if descriptors else [], socket.MSG_NOSIGNAL)


def verdict(peer: socket.socket, region: int = 1024) -> int:
    """Wait for the FILE message that answers an ATTACH; its descriptors are closed."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(peer, 512, 4)
        for fd in descriptors:
            os.close(fd)
        kind, body = wire.unpack(data)
        if kind == wire.Type.FILE:
            number, answer = wire.FILE.unpack_from(body)[:2]
            assert number == region
            return int(answer)


@contextlib.contextmanager
def agent(victim: Victim) -> Iterator[socket.socket]:
    """A connection that has said hello as an agent would, and was welcomed."""
    with connect(victim.env) as peer:
        peer.send(hello())
        data, descriptors, _, _ = socket.recv_fds(peer, 512, 4)
        for fd in descriptors:
            os.close(fd)
        assert wire.unpack(data)[0] == wire.Type.WELCOME and len(descriptors) == 2
        yield peer


# ---- what is no message -------------------------------------------------------------------------

GOOD = wire.pack(wire.Type.HELLO)
NO_MESSAGES = {
    "the version before ours": GOOD[:4] + struct.pack("<H", 0) + GOOD[6:],
    "the version after ours": GOOD[:4] + struct.pack("<H", 2) + GOOD[6:],
    "another magic": b"GET " + GOOD[4:],
    "a type that is none": wire.HEADER.pack(wire.MAGIC, wire.VERSION, 777).ljust(256, b"\0"),
    "one byte": b"x",
    "one byte too short": GOOD[:-1],
    "one byte too long": GOOD + b"\0",
    "64 KiB": bytes(65536),
    "a role that is none": hello(role=9),
    "an attach before the hello": attach(),
    "a finish before the hello": wire.pack(wire.Type.FINISH),
}


@pytest.mark.parametrize("message", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_a_peer_that_sends_no_message_of_ours_is_hung_up_on(victim: Victim, message: bytes) -> None:
    with connect(victim.env) as peer:
        peer.send(message)
        assert closed(peer)
    assert victim.is_served()


@pytest.mark.parametrize("welcomed", [False, True])
def test_random_messages_reach_nobody_else(victim: Victim, welcomed: bool) -> None:
    source = random.Random(11 + welcomed)
    kinds = [k for k in wire.Type if k not in (wire.Type.FINISH, wire.Type.SUMMARY)]
    for _ in range(150):
        with connect(victim.env) as peer, contextlib.suppress(OSError):
            if welcomed:
                peer.send(hello())
            for _ in range(source.randrange(1, 20)):
                body = source.randbytes(wire.MESSAGE_BYTES - wire.HEADER.size)
                peer.send(wire.pack(source.choice(kinds), body), socket.MSG_NOSIGNAL)
    assert victim.is_served()


def test_hello_twice_is_one_hello_too_many(victim: Victim) -> None:
    with agent(victim) as peer:
        peer.send(hello())
        assert closed(peer)
    assert victim.is_served()


def test_a_hello_of_absurd_numbers_harms_only_its_sender(victim: Victim) -> None:
    most, least = 2**31 - 1, -(2**31)
    with connect(victim.env) as peer:
        absurd = hello(
            pid=most, ppid=least, rank=most, local_rank=least, world=least, job_pid=most,
            flags=2**32 - 1, uffd_error=most, overlays_max=2**32 - 1, page_bytes=0,
        )  # fmt: skip
        peer.send(absurd)
        data, descriptors, _, _ = socket.recv_fds(peer, 512, 4)
        for fd in descriptors:
            os.close(fd)
        assert wire.unpack(data)[0] == wire.Type.WELCOME
        victim.read()
    assert victim.is_served()


# ---- attaches that cannot be --------------------------------------------------------------------

ABSURD = {
    "no length": {"length_bytes": 0},
    "the whole address space": {"address": 0, "length_bytes": 1 << 62},
    "past the end of addresses": {"address": (1 << 63) - 4096},
    "an address off the page": {"address": (1 << 30) + 1},
    "a kernel address": {"address": 0xFFFF_8000_0000_0000},
    "more than a process can map": {"address": 1 << 46, "length_bytes": 1 << 60},
    "an offset past the end": {"offset_bytes": 1 << 40},
    "an offset off the page": {"offset_bytes": 513},
    "a size of 2^64 - 1": {"size_bytes": 2**64 - 1},
    "an empty file": {"size_bytes": 0},
}


@pytest.mark.parametrize("numbers", ABSURD.values(), ids=ABSURD)
def test_an_attach_of_absurd_numbers_ends_its_sender_only(
    victim: Victim, numbers: dict[str, int], records: Records
) -> None:
    fd = os.open(records.path, os.O_RDONLY)
    try:
        with agent(victim) as peer:
            offer(peer, attach(**{**offered(records.path), **numbers}), fd)
            assert closed(peer)
    finally:
        os.close(fd)
    assert victim.is_served()


def test_the_same_region_twice_ends_its_sender_only(victim: Victim, records: Records) -> None:
    fd = os.open(records.path, os.O_RDONLY)
    try:
        with agent(victim) as peer:
            for _ in range(2):
                offer(peer, attach(**offered(records.path)), fd)
            assert closed(peer)
    finally:
        os.close(fd)
    assert victim.is_served()


def test_a_descriptor_of_something_else_is_named_as_that(
    job: Start, records: Records, tmp_path: Path
) -> None:
    """No program's mapping comes with one; its number may be another's by then."""
    written = tmp_path / "written"
    written.touch()
    os.truncate(written, 1 << 24)
    honest = job(python(VICTIM, records.path))
    victim = Victim(honest, records)
    with agent(victim) as peer:
        for region, path in ((1024, written), (1025, Path("/dev/null"))):
            fd = os.open(path, os.O_WRONLY if region == 1024 else os.O_RDONLY)
            offer(peer, attach(region=region, **offered(path) | {"size_bytes": 1 << 24}), fd)
            os.close(fd)
            assert verdict(peer, region) == wire.ServingMode.REFUSE
    honest.tell("end")
    summary = honest.finish().good().summary
    assert summary is not None
    found = {one["why"]: one for one in summary["unserved"]}
    assert set(found) == {"its descriptor is another one by now", "it is no regular file"}
    assert {(one["reason"], one["remedy"]) for one in found.values()} == {("another-file", None)}


def test_a_child_s_mapping_of_a_file_that_is_not_open_here_is_no_unserved_one(
    job: Start, records: Records, tmp_path: Path
) -> None:
    """It comes without a descriptor, perhaps before its parent's: it is found in /proc later."""
    path = tmp_path / "inherited"
    path.touch()
    os.truncate(path, 1 << 24)
    honest = job(python(VICTIM, records.path))
    victim = Victim(honest, records)
    with agent(victim) as peer:
        offer(peer, attach(flags=wire.ATTACH_INHERITED, **offered(path)))
        assert verdict(peer) == wire.ServingMode.REFUSE
        assert victim.is_served()
    honest.tell("end")
    summary = honest.finish().good().summary
    assert summary is not None and summary["unserved"] == []


def test_a_process_with_as_many_mappings_as_are_followed_is_named(
    victim: Victim, records: Records
) -> None:
    """The agent takes the first free number: with the last one it has all."""
    with connect(victim.env) as peer:
        offer(peer, hello())
        for region in (1022, 1023):
            fields = {**offered(records.path), "region": 5 * 1024 + region}
            offer(peer, attach(flags=wire.ATTACH_INHERITED, **fields))
            verdict(peer, 5 * 1024 + region)
            told = any("1024 mappings at a time" in x for x in snapshot(victim.env).degradations)
            assert told is (region == 1023)


def test_a_client_cannot_offer_regions_without_end(victim: Victim, records: Records) -> None:
    fields = {**offered(records.path), "flags": wire.ATTACH_INHERITED}
    victim.read()  # the file is open: else each is refused
    with agent(victim) as peer:
        peer.settimeout(0.001)
        for region in range(1, 20_000):
            try:
                peer.send(attach(region=region, **fields), socket.MSG_NOSIGNAL)
            except TimeoutError:
                continue  # the service takes its time: read nothing, go on
            except OSError:
                break
            with contextlib.suppress(OSError):
                for fd in socket.recv_fds(peer, 512, 4)[1]:
                    os.close(fd)
        else:
            pytest.fail("20 000 regions were taken from one process")
    assert victim.is_served()


# ---- descriptors of other kinds -----------------------------------------------------------------


def _pipe() -> list[int]:
    return list(os.pipe())


def _socket() -> list[int]:
    return [s.detach() for s in socket.socketpair()]


def _fifo() -> list[int]:
    """Opening this one again for reading would block until a writer comes: never."""
    directory = tempfile.mkdtemp()
    os.mkfifo(f"{directory}/fifo")
    fd = os.open(f"{directory}/fifo", os.O_RDWR)
    opened = os.open(f"{directory}/fifo", os.O_PATH)
    os.close(fd)
    shutil.rmtree(directory)
    return [opened]


def _deleted() -> list[int]:
    file = tempfile.TemporaryFile()
    file.truncate(1 << 24)
    return [os.dup(file.fileno())]


def _epoll() -> list[int]:
    with select.epoll() as epoll:
        return [os.dup(epoll.fileno())]


OTHER_KINDS: dict[str, Callable[[], list[int]]] = {
    "a pipe": _pipe,
    "a fifo nobody writes": _fifo,
    "a socket": _socket,
    "a directory": lambda: [os.open("/tmp", os.O_RDONLY)],
    "/dev/zero": lambda: [os.open("/dev/zero", os.O_RDONLY)],
    "/dev/null": lambda: [os.open("/dev/null", os.O_RDWR)],
    "a file of /proc": lambda: [os.open("/proc/self/status", os.O_RDONLY)],
    "an epoll": _epoll,
    "an eventfd": lambda: [os.eventfd(0)],
    "another file than it says": lambda: [os.open("/etc/passwd", os.O_RDONLY)],
    "nothing": list,
}


@pytest.mark.parametrize("make", OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_a_descriptor_of_another_kind_is_refused_and_closed(
    victim: Victim, make: Callable[[], list[int]]
) -> None:
    descriptors = make()
    status = os.fstat(descriptors[0]) if descriptors else os.stat("/etc/passwd")
    said = {"device": status.st_dev, "inode": status.st_ino, "mtime_ns": status.st_mtime_ns}
    try:
        with agent(victim) as peer:
            offer(peer, attach(**said), *descriptors)
            assert verdict(peer) == wire.ServingMode.REFUSE
            most = victim.descriptors + OWN_DESCRIPTORS + 3  # this client's
            wait_until(lambda: fd_count(victim.pid) <= most, "the descriptor to be closed")
            victim.read()
    finally:
        for fd in descriptors:
            with contextlib.suppress(OSError):
                os.close(fd)
    assert victim.is_served()


@pytest.mark.parametrize(
    ("flag", "answer"),
    [(os.O_PATH, wire.ServingMode.CHECKPOINTS), (os.O_WRONLY, wire.ServingMode.REFUSE)],
    ids=["O_PATH", "O_WRONLY"],
)
def test_a_file_that_its_sender_could_not_read_is_refused(
    victim: Victim, flag: int, answer: wire.ServingMode, tmp_path: Path
) -> None:
    """By O_PATH an agent sends a file without the job's description of it, into which it has
    looked."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 24))
    status = path.stat()
    said = {"device": status.st_dev, "inode": status.st_ino, "mtime_ns": status.st_mtime_ns}
    fd = os.open(path, flag)
    try:
        with agent(victim) as peer:
            offer(peer, attach(**said), fd)
            assert verdict(peer) == answer
    finally:
        os.close(fd)
    assert victim.is_served()


def test_a_file_that_says_another_size_than_it_has_is_refused(
    victim: Victim, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 16))
    status = path.stat()
    said = {"device": status.st_dev, "inode": status.st_ino, "mtime_ns": status.st_mtime_ns}
    with open(path, "rb") as file, agent(victim) as peer:
        offer(peer, attach(**said, size_bytes=1 << 60), file.fileno())
        assert verdict(peer) == wire.ServingMode.REFUSE
    assert victim.is_served()


def test_a_file_too_large_for_our_books_is_refused(victim: Victim) -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:  # tmpfs holds 8 EiB, sparse
        file.truncate((1 << 63) - 4096)
        status = os.fstat(file.fileno())
        said = {"device": status.st_dev, "inode": status.st_ino, "mtime_ns": status.st_mtime_ns}
        with agent(victim) as peer:
            offer(peer, attach(**said, size_bytes=status.st_size), file.fileno())
            assert verdict(peer) == wire.ServingMode.REFUSE
    assert victim.is_served()


def test_descriptors_that_nobody_asked_for_are_closed(victim: Victim) -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    try:
        for count in (1, 4, 5, 100, 253):
            with agent(victim) as peer:
                offer(peer, wire.pack(wire.Type.GONE, wire.GONE.pack(5, 0)), *[null] * count)
                if count > 4:  # more than any message of ours carries
                    assert closed(peer)
                    continue
                offer(peer, attach(), *[null] * count)
                assert verdict(peer) == wire.ServingMode.REFUSE
            with connect(victim.env) as peer:
                offer(peer, b"x", *[null] * count)
                assert closed(peer)
    finally:
        os.close(null)
    assert victim.is_served()


# ---- rings, reading and floods ------------------------------------------------------------------


def test_events_that_cannot_be_are_not_believed(victim: Victim, records: Records) -> None:
    """The ring is memory that the client writes: head, tail, pages, times as it likes."""
    fields = {**offered(records.path), "flags": wire.ATTACH_INHERITED}
    source = random.Random(5)
    with connect(victim.env) as peer:
        peer.send(hello())
        _, (ring, bell), _, _ = socket.recv_fds(peer, 512, 4)
        peer.send(attach(**fields))
        try:
            for turn in range(60):
                events = b"".join(
                    struct.pack(
                        "<QQIIII",
                        source.choice([0, 1, 2**64 - 1, source.getrandbits(64)]),
                        source.choice([0, 5, 2**52 - 1, 2**64 - 1, source.getrandbits(64)]),
                        source.choice([1024, 1024, 0, 2**32 - 1]), 0, 2**32 - 1, 2**32 - 1,
                    )
                    for _ in range(2048)
                )  # fmt: skip
                size = os.fstat(ring).st_size
                os.pwrite(ring, events, size - len(events))
                head = source.choice([2048 * (turn + 1), 2**64 - 1, 0, source.getrandbits(64)])
                os.pwrite(ring, struct.pack("<Q", head), 0)
                if turn % 3 == 0:
                    os.pwrite(ring, source.randbytes(64), 64)  # the service's own side
                os.eventfd_write(bell, 1)
                if turn % 10 == 0:
                    victim.read()
        finally:
            os.close(ring)
            os.close(bell)
        victim.read()
    assert victim.is_served()


def test_the_ring_cannot_be_shrunk_under_the_service(victim: Victim) -> None:
    with connect(victim.env) as peer:
        peer.send(hello())
        _, (ring, bell), _, _ = socket.recv_fds(peer, 512, 4)
        os.close(bell)
        try:
            with pytest.raises(PermissionError):
                os.ftruncate(ring, 0)
        finally:
            os.close(ring)
    assert victim.is_served()


def test_a_client_that_never_reads_is_cut_off_and_stalls_nobody(victim: Victim) -> None:
    """It asks and asks, and takes no answer: its answers must not pile up in the service."""
    with connect(victim.env) as peer:
        peer.send(hello())
        peer.settimeout(0.2)
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 50_000:
                try:
                    peer.send(wire.pack(wire.Type.BYE), socket.MSG_NOSIGNAL)
                    sent += 1
                except TimeoutError:
                    victim.read()
        assert sent < 50_000, "the service answers without end to somebody who does not read"
    assert victim.is_served()


def test_a_client_that_says_nothing_keeps_nobody_waiting(victim: Victim) -> None:
    with connect(victim.env):
        victim.read()
    assert victim.is_served()


def test_a_flood_of_connections_passes(victim: Victim) -> None:
    for _ in range(10):
        with contextlib.ExitStack() as stack:
            for i in range(100):
                peer = stack.enter_context(connect(victim.env))
                if i % 3:
                    peer.send(hello())
            victim.read()
    assert victim.is_served()


def test_a_stranger_who_holds_a_connection_does_not_keep_the_service(
    env: dict[str, str], tmp_path: Path, records: Records
) -> None:
    """It ends with its last client; who never said hello is none."""
    with jobs(env, tmp_path) as start:
        code = "Mapping(sys.argv[1]).managed()\nsay(ready=True)\nhear()"
        work = start(python(code, records.path))
        work.line()
        pid = work.service()
        with connect(env):
            work.tell()
            assert work.finish().good().summary is not None
            wait_until(lambda: process_gone(pid), "the service to end in spite of the stranger")


# ---- other users --------------------------------------------------------------------------------


def test_another_user_does_not_reach_the_socket_and_is_not_served_if_they_do(
    env: dict[str, str], tmp_path: Path, records: Records
) -> None:
    with (
        tempfile.TemporaryDirectory(prefix=own_name(""), dir="/tmp") as directory,
        jobs(env, tmp_path) as start,
    ):
        env["UFFDPREFETCH_RUNDIR"] = directory
        victim = Victim(start(python(VICTIM, records.path)), records)
        path = service_socket(env)

        def knock() -> int:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.settimeout(HANG_SECONDS)
                try:
                    peer.connect(path)
                except PermissionError:
                    return 13
                try:
                    peer.send(hello(), socket.MSG_NOSIGNAL)
                    return 0 if peer.recv(512) == b"" else 1
                except (ConnectionResetError, BrokenPipeError):
                    return 0

        assert as_nobody(knock) == 13
        os.chmod(directory, 0o711)  # as if somebody had opened both
        os.chmod(path, 0o666)
        assert as_nobody(knock) == 0
        assert victim.is_served()
        os.chmod(directory, 0o700)


def _link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


def _open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def _of_nobody(path: Path) -> None:
    require(os.geteuid() == 0, "only root can make another user's directory")
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)


PREPARED = {"a link": _link, "open to all": _open_to_all, "another user's": _of_nobody}


@pytest.mark.parametrize("prepare", PREPARED.values(), ids=PREPARED)
def test_a_prepared_runtime_directory_is_refused_and_the_job_runs_without(
    env: dict[str, str], tmp_path: Path, records: Records, prepare: Callable[[Path], None]
) -> None:
    prepare(Path(env["UFFDPREFETCH_RUNDIR"]))
    done = subprocess.run(
        uffdprefetch("wrap", "--", "sha256sum", str(records.path)),
        env=env, cwd=tmp_path, capture_output=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.split()[0].decode() == records.digest
    assert b"refused" in done.stderr and done.stderr.count(b"\n") == 1
    assert not list(tmp_path.glob("elsewhere/*"))


# ---- and the other way round: a service that talks nonsense --------------------------------------

READER = """
m = Mapping(sys.argv[1])
say(ready=True)
digests = set()
while True:
    m.forget()
    digests.add(m.digest())
    if len(agents()) == 0:
        break
say(digests=sorted(digests))
"""


def serve_nonsense(listener: socket.socket, memfd: int, seed: int) -> int:
    """Welcome an agent properly, then send it commands of random content; returns how many."""
    source = random.Random(seed)
    peer, _ = listener.accept()
    with peer:
        peer.settimeout(HANG_SECONDS)
        assert wire.unpack(peer.recv(512))[0] == wire.Type.HELLO
        ring = os.memfd_create("ring")
        os.ftruncate(ring, 1 << 20)
        bell = os.eventfd(0)
        offer(peer, wire.pack(wire.Type.WELCOME), ring, bell)
        os.close(ring)
        os.close(bell)
        data, descriptors, _, _ = socket.recv_fds(peer, 512, 4)
        for fd in descriptors:
            os.close(fd)
        region = wire.attach(wire.unpack(data)[1]).region
        edges = [0, 1, 2, 2**52 - 1, 2**52, 2**63 // 4096, 2**64 - 1]
        if seed % 2:  # no page of the file: what it may lay would show
            nowhere = [source.choice(edges[3:]) for _ in range(28)]
            offer(peer, wire.file(region, wire.ServingMode.CHECKPOINTS, nowhere), memfd)
        sent = 0
        for _ in range(400):
            kind = source.choice([wire.Type.REARM, wire.Type.REARM, wire.Type.FILE])
            pages = [source.choice([*edges, source.randrange(6200)]) for _ in range(28)]
            if kind == wire.Type.FILE:
                pages = [p for p in pages if p > 6200]
            number = source.choice([region, region, 0, 2**32 - 1])
            try:
                peer.send(wire.command(kind, sent, number, pages), socket.MSG_NOSIGNAL)
            except OSError:
                break
            sent += 1
        with contextlib.suppress(OSError):
            peer.send(source.randbytes(256), socket.MSG_NOSIGNAL)
        assert closed(peer)
    return sent


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_an_agent_survives_a_service_that_talks_nonsense(
    env: dict[str, str], tmp_path: Path, records: Records, seed: int
) -> None:
    from uffdprefetch.native.preload import preload_object

    path = str(tmp_path / "s")
    with jobs(env, tmp_path) as start, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.settimeout(HANG_SECONDS)
        s.bind(path)
        s.listen()
        memfd = os.memfd_create("checkpoints")
        os.ftruncate(memfd, records.size_bytes)
        job = start(
            python(READER, records.path), wrap=False, LD_PRELOAD=preload_object(),
            UFFDPREFETCH_SOCKET=path, UFFDPREFETCH_MIN_SIZE="65536",
        )  # fmt: skip
        assert job.line() == {"ready": True}
        assert serve_nonsense(s, memfd, seed) == 400
        os.close(memfd)
        done = job.finish().good()
        assert done.lines == [{"digests": [records.digest]}]


def test_a_service_killed_in_the_middle_of_an_attack_is_no_ones_loss(
    env: dict[str, str], tmp_path: Path, records: Records
) -> None:
    with jobs(env, tmp_path) as start:
        victim = Victim(start(python(VICTIM, records.path)), records)
        with agent(victim) as peer:
            offer(peer, attach())
            os.kill(victim.pid, signal.SIGKILL)
            assert closed(peer)
        victim.job.tell("end")
        assert victim.job.finish().status == 0
