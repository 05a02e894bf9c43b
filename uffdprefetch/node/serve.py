# SPDX-License-Identifier: Apache-2.0
"""The service: elected by a lock beside its socket, ends with its last client.

One thread runs everything here; the workers (C) only read. It never reads anything that the job
writes, and no fault waits for it: stopped, slow or dead, the job goes on.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import logging
import os
import resource
import select
import signal
import socket
import struct
import time
from typing import Any

from uffdprefetch import uffd
from uffdprefetch.config import Config
from uffdprefetch.errors import UffdPrefetchError
from uffdprefetch.node import wire
from uffdprefetch.node.client import Client, Launcher
from uffdprefetch.node.engine import MS, CacheEngine
from uffdprefetch.node.files import FileState
from uffdprefetch.node.ledger import Ledger
from uffdprefetch.node.observe import Observer
from uffdprefetch.node.snapshot import summary
from uffdprefetch.plan.checkpoints import DISTANCE_MIN_BYTES
from uffdprefetch.warm.limits import TokenBucket, allowed_bytes
from uffdprefetch.warm.scheduler import EXTENT_BYTES, Scheduler, now_ns

log = logging.getLogger("uffdprefetch.serve")

WORKERS = 16
BACKLOG = 128
#: Mappings of one process: UP_REGIONS of csrc/job.h.
REGIONS_MAX = 1024
#: Nobody connected: how long to wait for the first client, and for another after the last.
FIRST_CLIENT_SECONDS = 30.0
LAST_CLIENT_SECONDS = 0.5
#: Who has connected and not said hello by then is no agent and no launcher: they do it at once.
HELLO_NS = 2000 * MS
#: Addresses of a process end before this on every 64-bit Linux (five page-table levels).
ADDRESS_END = 1 << 56
HOUSEKEEPING_NS = 1000 * MS
#: A file given back: how long the agents have before a waiting writer is let in.
DETACH_NS = 1000 * MS


class Service:
    """Sockets and clocks around a :class:`CacheEngine`."""

    def __init__(self, socket_path: str, config: Config, run: str) -> None:
        self.config = config
        self.run_key = run
        self._path = socket_path
        self._lock_fd = -1
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pool = uffd.Pool(WORKERS, self._wake_fd)
        self._ledger = Ledger()
        grid = config.distance_bytes or DISTANCE_MIN_BYTES
        bucket = TokenBucket(config.max_rate_bytes_per_second, EXTENT_BYTES)
        self._scheduler = Scheduler(self._pool, bucket, self._pages_written, grid)
        self.engine = CacheEngine(config, self._scheduler, self._ledger)
        self._observer: Observer | None = None
        self._launchers: dict[int, Launcher] = {}
        self._unknown: dict[int, socket.socket] = {}
        self._accepted_ns: dict[int, int] = {}
        self._epoll = select.epoll()
        self._listener: socket.socket | None = None
        self._deaf = False  # no descriptor left to accept with
        self._housekeeping_ns = 0
        self._next_pump_ns = 0
        self._signal_fd = -1
        self._empty_since: float | None = time.monotonic()
        self._had_client = False
        self._noted_bytes = 0  # of the scheduler's, on the time line
        self._leaving: dict[int, tuple[FileState, int]] = {}

    # -------------------------------------------------------------- election

    def elect(self) -> bool:
        """Take the lock and listen; False when another service has it."""
        self._lock_fd = os.open(self._path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self._path)
        os.chmod(self._path, 0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self._listener = listener
        self._epoll.register(listener, select.EPOLLIN)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._catch_lease_breaks()
        if self.config.engine == "off":
            self._observer = Observer(self.engine, self._ledger, self.config.min_size_bytes)
        if self.config.resolve == "service":
            self.engine.resolver = uffd.Resolver(self._wake_fd)
        return True

    def _catch_lease_breaks(self) -> None:
        """SIGIO tells that somebody wants to write a leased file; without a handler it kills."""
        self._signal_fd, wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGIO, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        self._epoll.register(self._signal_fd, select.EPOLLIN)

    # -------------------------------------------------------------- the loop

    def run(self) -> None:
        """Serve until the last client has gone."""
        while not self._finished():
            self._turn(self._epoll.poll(self._timeout_seconds()))
        log.info("last client gone")
        self._close()

    def _finished(self) -> bool:
        if self.engine.clients or self._launchers or self._unknown:
            self._empty_since = None
            return False
        if self._empty_since is None:
            self._empty_since = time.monotonic()
        patience = LAST_CLIENT_SECONDS if self._had_client else FIRST_CLIENT_SECONDS
        return time.monotonic() - self._empty_since > patience

    def _timeout_seconds(self) -> float:
        now = now_ns()
        due = self._housekeeping_ns
        if self._observer is not None:
            due = min(due, self._observer.next_ns)
        if self._next_pump_ns:
            due = min(due, self._next_pump_ns)
        for client in self.engine.clients.values():
            for region in client.regions.values():
                due = min(due, region.look_at_ns)
        if self._empty_since is not None:
            due = min(due, now + 100 * MS)
        # epoll counts whole milliseconds, rounded up
        return max(0.0, (due - now) / 1e9)

    def _turn(self, ready: list[tuple[int, int]]) -> None:
        for fd, mask in ready:
            if self._listener is not None and fd == self._listener.fileno():
                self._accept()
            elif fd in (self._wake_fd, self._signal_fd):
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 8 if fd == self._wake_fd else 64)
                if fd == self._signal_fd:
                    self._look_for_writers()
            else:
                self._from_peer(fd, mask)
        for client in self.engine.clients.values():
            self.engine.on_events(client, client.ring.drain())
        self._scheduler.reap()
        now = now_ns()
        if self._observer is not None:
            jobs = [x.job_pid for x in self._launchers.values() if x.job_pid and not x.finished]
            self._observer.look(jobs, now)
        self.engine.look(now)
        if now >= self._housekeeping_ns:
            self._housekeep(now)
        elif self._leaving:  # the last agent has perhaps just told: the writer waits
            self._look_for_writers()
        self.engine.plan()
        wait = self._scheduler.pump(now_ns())
        self._next_pump_ns = now_ns() + wait if wait else 0
        self._note(now)
        for fd, client in list(self.engine.clients.items()):
            if client.waiting:
                client.flush()
            if client.gone:
                self._drop_client(fd)

    def _pages_written(self, file: FileState, pages: list[int]) -> None:
        self.engine.pages_written(file, pages)

    def _note(self, now: int) -> None:
        """Put what was read, windows and rates on the time line."""
        seconds = max(0.0, now / 1e9 - self._ledger.started)
        more = self._scheduler.prefetched_bytes - self._noted_bytes
        if more:
            self._ledger.timeline.at(seconds).prefetched_bytes += more
            self._noted_bytes += more
        streams = [
            s for c in self.engine.clients.values() for r in c.regions.values()
            for s in r.table.active()
        ]
        if not streams:
            return
        streams = [s for s in streams if now - s.last_ns < 1000 * MS] or streams[:1]
        bin_ = self._ledger.timeline.at(seconds)
        widest = max(streams, key=lambda s: s.rate_bytes_per_second)
        bin_.window_bytes = self.engine.layout.lookahead(widest)
        bin_.distance_bytes = self.engine.layout.distance(widest)
        bin_.under_way_bytes = self._scheduler.under_way_bytes
        bin_.bandwidth_bytes_per_second = round(self._scheduler.meter.bandwidth)
        bin_.reader_bytes_per_second = round(sum(s.rate_bytes_per_second for s in streams))

    # -------------------------------------------------------------- peers

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # EMFILE: whoever waits stays in the backlog, and epoll would tell us so without end
                log.warning("accept: %s; trying again in a second", error)
                self._epoll.unregister(self._listener)
                self._deaf = True
                return
            _, uid, _ = _credentials(sock)
            if uid != os.geteuid():
                log.warning("uid %d is not served", uid)
                sock.close()
                continue
            sock.setblocking(False)
            self._unknown[sock.fileno()] = sock
            self._accepted_ns[sock.fileno()] = now_ns()
            self._epoll.register(sock, select.EPOLLIN)

    def _from_peer(self, fd: int, mask: int) -> None:
        """Take what a peer sent, at most 64 messages a turn: no peer keeps the others waiting."""
        for _ in range(64):
            sock = self._socket(fd)
            if sock is None:
                return
            received: list[int] = []
            try:
                data, ancillary, flags, _ = sock.recvmsg(
                    wire.MESSAGE_BYTES + 1, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data, ancillary, flags = b"", [], 0
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(payload[: len(payload) - len(payload) % 4])
                    received += numbers
            try:
                if not data:
                    self._hang_up(fd)
                    return
                if flags & socket.MSG_CTRUNC:
                    raise wire.WireError("more descriptors than any message of ours has")
                kind_, body = wire.unpack(data)
                self._message(fd, kind_, body, received)
            except (wire.WireError, struct.error) as error:
                log.warning("peer dropped: %s", error)
                self._hang_up(fd)
                return
            except Exception:  # out of descriptors or memory, or a fault of ours: one peer's loss
                log.exception("peer dropped")
                self._hang_up(fd)
                return
            finally:
                for number in received:  # whoever kept one has taken it out of the list
                    os.close(number)

    def _socket(self, fd: int) -> socket.socket | None:
        peer: Any = self.engine.clients.get(fd) or self._launchers.get(fd)
        return self._unknown.get(fd) if peer is None else peer.sock

    def _message(self, fd: int, kind: wire.Type, body: bytes, received: list[int]) -> None:
        if fd in self._unknown:
            if kind != wire.Type.HELLO:
                raise wire.WireError(f"{kind.name} before HELLO")
            self._hello(fd, wire.hello(body), received)
        elif fd in self._launchers:
            self._from_launcher(self._launchers[fd], kind, body)
        else:
            self._from_agent(self.engine.clients[fd], kind, body, received)

    def _hello(self, fd: int, hello: wire.Hello, received: list[int]) -> None:
        sock = self._unknown[fd]
        pid, _, _ = _credentials(sock)
        if hello.role == wire.Role.LAUNCHER:
            launcher = Launcher(sock, hello, pid)
            del self._unknown[fd]
            self._launchers[fd] = launcher
            _reply(sock, wire.pack(wire.Type.WELCOME, wire.WELCOME.pack(0, 0, 0)))
        elif hello.role == wire.Role.AGENT:
            client = Client(sock, hello, pid)
            self._ledger.hello(client)
            del self._unknown[fd]
            self.engine.clients[fd] = client
            client.send(
                wire.pack(wire.Type.WELCOME, wire.WELCOME.pack(0, 0, 0)),
                [client.ring.fd, self._wake_fd],
            )
            os.close(client.ring.fd)
            resolver = self.engine.resolver if hello.flags & wire.HELLO_SENDS_UFFD else None
            if resolver and received and uffd.is_uffd(received[0]):
                client.resolver_slot = resolver.add(received.pop(0), client.ring)
        else:
            raise wire.WireError(f"role {hello.role}")
        self._accepted_ns.pop(fd, None)
        self._had_client = True

    def _from_agent(
        self, client: Client, kind: wire.Type, body: bytes, received: list[int]
    ) -> None:
        if kind == wire.Type.ATTACH:
            offered = wire.attach(body)
            self._check_attach(client, offered)
            self.engine.attach(client, offered, received.pop(0) if received else None)
        elif kind == wire.Type.GONE:
            self.engine.detached(client, wire.GONE.unpack_from(body)[0])
        elif kind == wire.Type.ACK:
            self.engine.lay_failed(client, wire.ack(body))
        elif kind == wire.Type.BYE:
            self.engine.on_events(client, client.ring.drain())
            self.engine.account_all(client)
            self._ledger.processes[client.pid].sample()
            client.send(wire.pack(wire.Type.BYE_OK))
        else:
            raise wire.WireError(f"{kind.name} from an agent")

    def _check_attach(self, client: Client, a: wire.Attach) -> None:
        if (
            a.address + a.length_bytes > ADDRESS_END
            or a.size_bytes >= 1 << 63
            or a.offset_bytes >= a.size_bytes
            # up to the last page of the file (job.h): so the file bounds all that we do for it
            or a.length_bytes >= a.size_bytes - a.offset_bytes + uffd.PAGE_BYTES
            or not a.length_bytes
            or a.address % uffd.PAGE_BYTES
            or a.offset_bytes % uffd.PAGE_BYTES
            or a.region in client.regions
            or len(client.regions) >= REGIONS_MAX
        ):
            raise wire.WireError("an ATTACH that cannot be")

    def _from_launcher(self, launcher: Launcher, kind: wire.Type, body: bytes) -> None:
        if kind == wire.Type.JOB:
            launcher.job_pid = wire.JOB.unpack_from(body)[0]
        elif kind == wire.Type.FINISH:
            launcher.finished = True
            self._send_summary(launcher)
        else:
            raise wire.WireError(f"{kind.name} from a launcher")

    def _send_summary(self, launcher: Launcher) -> None:
        self._note(now_ns())
        for process in self._ledger.processes.values():
            process.sample()
        others = [x for x in self._launchers.values() if not x.finished]
        text = json.dumps(
            summary(
                self.config, self.run_key, self.engine, self._scheduler, self._pool.cpu_seconds()
            )
        ).encode()
        memfd = os.memfd_create("uffdprefetch-summary", os.MFD_CLOEXEC)
        try:
            os.write(memfd, text)
            os.lseek(memfd, 0, os.SEEK_SET)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memfd]))]
            message = wire.pack(wire.Type.SUMMARY, wire.SUMMARY.pack(len(text), not others))
            with contextlib.suppress(OSError):
                launcher.sock.sendmsg([message], rights, socket.MSG_DONTWAIT)
        finally:
            os.close(memfd)

    def _hang_up(self, fd: int) -> None:
        if fd in self.engine.clients:
            self._drop_client(fd)
            return
        peer: Any = self._launchers.pop(fd, None) or self._unknown.pop(fd, None)
        self._accepted_ns.pop(fd, None)
        if peer is not None:
            self._epoll.unregister(fd)
            peer.close()

    def _drop_client(self, fd: int) -> None:
        client = self.engine.clients[fd]
        self.engine.on_events(client, client.ring.drain())
        self._ledger.processes[client.pid].sample()
        self._ledger.dropped_events += client.ring.counts().dropped
        for region in list(client.regions):
            self.engine.detached(client, region)
        del self.engine.clients[fd]
        self._epoll.unregister(fd)
        if client.resolver_slot >= 0 and self.engine.resolver:
            self.engine.resolver.remove(client.resolver_slot)
        client.close()

    # -------------------------------------------------------------- once a second

    def _housekeep(self, now: int) -> None:
        self._housekeeping_ns = now + HOUSEKEEPING_NS
        if self._deaf and self._listener is not None:
            self._deaf = False
            self._epoll.register(self._listener, select.EPOLLIN)
        for fd, accepted in list(self._accepted_ns.items()):
            if now - accepted > HELLO_NS:
                self._hang_up(fd)
        for process in self._ledger.processes.values():
            process.sample()
        before = self.engine.layout.allowed_bytes
        self.engine.layout.allowed_bytes, why = allowed_bytes(self.config.budget_bytes)
        if why != "--budget" and self.engine.layout.allowed_bytes < before // 2:
            self._ledger.degrade(f"windows are bounded by {why}, not by --budget")
        for file in list(self.engine.files.values()):
            if file.changed is None:
                what = file.look_for_change()
                if what:
                    self.engine.give_up(file, what)
        self._look_for_writers()
        self.engine.refresh_all()

    def _look_for_writers(self) -> None:
        """A broken lease: detach everywhere, then let the writer in."""
        now = now_ns()
        for file in self.engine.files.values():
            if not file.leased or not file.lease_breaking():
                continue
            if file.changed is None:
                self.engine.give_up(file, "opened for writing")
            self._leaving.setdefault(id(file), (file, now + DETACH_NS))
        for key, (file, deadline) in list(self._leaving.items()):
            if not file.attached or now >= deadline:
                file.release_lease()
                del self._leaving[key]

    def _close(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._listener.close()
        if self.engine.resolver:
            self.engine.resolver.close()
        self._pool.close()
        for file in self.engine.files.values():
            file.close()
        os.close(self._lock_fd)


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the peer, from the kernel."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, gid = struct.unpack("iII", data)
    return pid, uid, gid


def _reply(sock: socket.socket, message: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def serve(socket_path: str, config: Config, run: str) -> int:
    """Run the service on socket_path; 0 also when another one has been elected.

    Raises UffdPrefetchError when the socket or the workers cannot be had.
    """
    # two for each process of the job, five for each file: a login shell's soft limit is 1024
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        service = Service(socket_path, config, run)
        if not service.elect():
            return 0
    except OSError as error:
        raise UffdPrefetchError(f"the service cannot start on {socket_path}: {error}") from error
    log.info("serving %s", socket_path)
    service.run()
    return 0
