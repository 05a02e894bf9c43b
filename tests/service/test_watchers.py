# SPDX-License-Identifier: Apache-2.0
"""Whoever watches, and whatever they send: the job, the summary and the service do not feel it."""

from __future__ import annotations

import array
import contextlib
import json
import os
import random
import select
import socket
import types
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_SECONDS, process_gone, wait_until
from harness import OWN_DESCRIPTORS, Records, connect, fd_count, settle
from watched import Watched, watched

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.protocol import wire
from uffdprefetch.service.agents import Agents
from uffdprefetch.service.peers import Peers
from uffdprefetch.service.watchers import ASKS_MAX, WATCHERS_MAX, Watchers
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.publisher import EventPublisher
from uffdprefetch.view import watch

pytest_plugins = ("harness_fixtures", "watched")

# ---- it is not felt -----------------------------------------------------------------------------


def test_watchers_come_and_go_and_the_summary_knows_nothing_of_them(
    env: dict[str, str], tmp_path: Path, records: Records
) -> None:
    """The same job twice, watched and not: same status, bytes, and kind of summary."""
    summaries = []
    for watching in (False, True):
        cwd = tmp_path / str(watching)
        cwd.mkdir()
        with watched(cwd, records, "same") as one:
            clients = [one.watcher() for _ in range(5 if watching else 0)]
            for _ in range(20 if watching else 0):
                with contextlib.closing(one.watcher()) as passing:
                    assert passing.snapshot(HANG_SECONDS).run == "same"
                one.read()
            if not watching:
                for _ in range(20):
                    one.read()
            one.job.tell("end")
            done = one.job.finish().good()  # with five watchers still there
            assert done.stderr == "" and done.summary is not None
            summaries.append(done.summary)
            for client in clients:
                client.close()
    plain, seen = summaries
    assert plain.keys() == seen.keys() and plain["totals"].keys() == seen["totals"].keys()
    for name in ("engine", "rung", "degradations", "refused"):
        assert plain[name] == seen[name]
    assert len(plain["ranks"]) == len(seen["ranks"]) == 1
    assert "watch" not in json.dumps(seen)


def test_no_watcher_holds_the_service_whether_it_stays_or_comes_again_and_again(
    own: Watched,
) -> None:
    stays = own.watcher()
    own.job.tell("end")
    own.job.finish().good()

    def gone() -> bool:
        quiet = contextlib.suppress(OSError, watch.ServiceGone, TimeoutError)
        with quiet, contextlib.closing(own.watcher()) as again:
            again.snapshot()
        return process_gone(own.pid)

    wait_until(gone, "the service to end in spite of its watchers")
    with pytest.raises(watch.ServiceGone):
        stays.snapshot()
    stays.close()


def test_as_many_watchers_as_are_allowed_and_one_more_is_told(run: Watched) -> None:
    before = settle(lambda: fd_count(run.pid), "the service's descriptors")
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(contextlib.closing(run.watcher())) for _ in range(WATCHERS_MAX)
        ]
        assert {c.snapshot(HANG_SECONDS).run for c in clients} == {"alpha-1"}
        with pytest.raises(UffdPrefetchError, match="16 watchers already"):
            run.watcher()
        clients[0].close()
        wait_until(lambda: _comes_in(run), "room for another watcher")
        run.read()
    most = before + OWN_DESCRIPTORS
    wait_until(lambda: fd_count(run.pid) <= most, "the service's descriptors to be given back")


def _comes_in(run: Watched) -> bool:
    try:
        run.watcher().close()
    except UffdPrefetchError:
        return False
    return True


# ---- hostile watchers ---------------------------------------------------------------------------


def hello(run: Watched) -> socket.socket:
    """A raw connection that has been welcomed as a watcher."""
    peer = connect(run.env)
    values = [wire.Role.WATCHER, os.getpid(), 1, -1, -1, -1, 0, 0, 0, 0, 0, 4096]
    peer.send(wire.pack(wire.Type.HELLO, wire.HELLO.pack(*values, b"hostile")))
    kind, body = wire.unpack(peer.recv(512))
    assert kind == wire.Type.WELCOME and wire.WELCOME.unpack_from(body) == (0,)
    return peer


def hung_up(peer: socket.socket) -> bool:
    """Whether the service has hung up; what it had sent is thrown away."""
    with contextlib.suppress(ConnectionResetError):
        while True:
            data, descriptors, _, _ = socket.recv_fds(peer, 512, 4)
            for fd in descriptors:
                os.close(fd)
            if not data:
                break
    return True


def is_served(run: Watched, descriptors: int) -> bool:
    """The job, by the same service, which has given all back; fails if not."""
    run.read()
    assert not process_gone(run.pid)
    most = descriptors + OWN_DESCRIPTORS
    wait_until(lambda: fd_count(run.pid) <= most, "descriptors to be given back")
    return True


def test_random_messages_of_watchers_reach_nobody_else(run: Watched) -> None:
    descriptors = settle(lambda: fd_count(run.pid), "the service's descriptors")
    source = random.Random(17)
    for _ in range(100):
        with hello(run) as peer, contextlib.suppress(OSError):
            for _ in range(source.randrange(1, 12)):
                body = source.randbytes(wire.MESSAGE_BYTES - wire.HEADER.size)
                kind = source.choice(list(wire.Type))
                data = wire.pack(kind, body) if source.random() < 0.8 else source.randbytes(256)
                peer.send(data, socket.MSG_NOSIGNAL)
    assert is_served(run, descriptors)


def test_a_watcher_that_speaks_as_somebody_else_is_hung_up_on(run: Watched) -> None:
    descriptors = settle(lambda: fd_count(run.pid), "the service's descriptors")
    for kind in (wire.Type.HELLO, wire.Type.JOB, wire.Type.FINISH, wire.Type.ATTACH):
        with hello(run) as peer:
            peer.send(wire.pack(kind))
            assert hung_up(peer)
    assert is_served(run, descriptors)


def test_a_watcher_that_asks_and_never_reads_is_hung_up_on(run: Watched) -> None:
    descriptors = settle(lambda: fd_count(run.pid), "the service's descriptors")
    with hello(run) as peer:

        def refused() -> bool:
            try:
                peer.send(wire.pack(wire.Type.SNAPSHOT), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError:
                return True
            return False

        wait_until(refused, "the service to hang up")
    assert is_served(run, descriptors)


def test_a_watcher_that_asks_without_end_is_hung_up_on(run: Watched) -> None:
    descriptors = settle(lambda: fd_count(run.pid), "the service's descriptors")
    with hello(run) as peer, contextlib.suppress(OSError):
        for _ in range(20_000):
            peer.send(wire.pack(wire.Type.SNAPSHOT), socket.MSG_NOSIGNAL)
            for fd in socket.recv_fds(peer, 512, 4)[1]:
                os.close(fd)
        pytest.fail("20 000 questions were answered without a pause")
    assert is_served(run, descriptors)


def test_descriptors_that_a_watcher_sends_are_closed(run: Watched) -> None:
    descriptors = settle(lambda: fd_count(run.pid), "the service's descriptors")
    with hello(run) as peer:
        for _ in range(3):
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 0, 0]))]
            peer.sendmsg([wire.pack(wire.Type.SNAPSHOT)], rights)
            for fd in socket.recv_fds(peer, 512, 4)[1]:
                os.close(fd)
        wait_until(
            lambda: fd_count(run.pid) <= descriptors + 2 + OWN_DESCRIPTORS,
            "only the connection and the document",
        )
    assert is_served(run, descriptors)


def test_a_watcher_cannot_change_what_the_others_are_told(run: Watched) -> None:
    with hello(run) as peer:
        peer.send(wire.pack(wire.Type.SNAPSHOT))
        _, (memfd,), _, _ = socket.recv_fds(peer, 512, 4)
        try:
            with pytest.raises(PermissionError):
                os.pwrite(memfd, b"x", 0)
            with pytest.raises(PermissionError):
                os.ftruncate(memfd, 0)
        finally:
            os.close(memfd)


# ---- the service's side, with a clock of our own -------------------------------------------------


def test_the_document_is_made_once_for_all_who_ask_at_a_time() -> None:
    made: list[int] = []

    def make(now: int) -> dict[str, Any]:
        made.append(now)
        return {"at": now}

    watchers = Watchers(make)
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    second = 1_000_000_000
    try:
        for ours, theirs in pairs:
            assert watchers.welcome(ours)
            theirs.recv(512)
        for now in (10 * second, 10 * second + 1000, 11 * second):
            for ours, theirs in pairs:
                watchers.message(ours.fileno(), wire.Type.SNAPSHOT, now)
                for fd in socket.recv_fds(theirs, 512, 1)[1]:
                    os.close(fd)
        assert made == [10 * second, 11 * second]
        fd = pairs[0][0].fileno()
        with pytest.raises(wire.WireError, match="more than 32 times"):
            for _ in range(ASKS_MAX + 1):
                watchers.message(fd, wire.Type.SNAPSHOT, 12 * second)
                for got in socket.recv_fds(pairs[0][1], 512, 1)[1]:
                    os.close(got)
    finally:
        for ours, theirs in pairs:
            watchers.leave(ours.fileno())
            ours.close()
            theirs.close()


def test_answers_that_nobody_takes_do_not_pile_up() -> None:
    """Slow questions, so that it is not their number that ends it."""
    watchers = Watchers(lambda now: {"at": now})
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        watchers.welcome(ours)
        asked = 0
        with pytest.raises(wire.WireError, match="does not read"):
            for asked in range(1000):
                watchers.message(ours.fileno(), wire.Type.SNAPSHOT, asked * 1_000_000_000)
        assert asked < 20
        watchers.leave(ours.fileno())


def test_a_watcher_is_no_client_and_no_launcher(tmp_path: Path) -> None:
    """A service that waits for its first client waits on, and no job is counted."""
    publisher, nobody = EventPublisher(), types.SimpleNamespace()
    nobody.clients = {}
    parts_of_core: Any = [nobody] * 6
    agents = Agents(*parts_of_core, publisher, -1)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer,
        select.epoll() as epoll,
    ):
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.setblocking(False)
        parts: Any = (listener, epoll, agents, publisher, Ledger(), dict, 7)
        peers = Peers(*parts, Watchers(lambda now: {"at": now}))
        assert peers.none
        peer.connect(str(tmp_path / "s"))
        peers.accept()
        (fd,) = peers._arrivals.all
        assert not peers.none and peers.only_strangers
        values = [wire.Role.WATCHER, 1, 1, -1, -1, -1, 0, 0, 0, 0, 0, 4096]
        peer.send(wire.pack(wire.Type.HELLO, wire.HELLO.pack(*values, b"watcher")))
        peers.receive(fd)
        assert peers.none and not peers.launchers.any and not peers.launchers.jobs()
        assert wire.unpack(peer.recv(512))[0] == wire.Type.WELCOME
        peer.send(wire.pack(wire.Type.SNAPSHOT))
        peers.receive(fd)
        _, (memfd,), _, _ = socket.recv_fds(peer, 512, 4)
        assert json.loads(os.pread(memfd, 100, 0)).keys() == {"at"}
        os.close(memfd)
        peer.close()
        peers.receive(fd)
        assert peers.none and peers._watchers.socket_of(fd) is None
