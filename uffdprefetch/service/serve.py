# SPDX-License-Identifier: Apache-2.0
"""The service: elected by a lock beside its socket, ends with its last client.

One thread runs everything here; the workers (C) only read. It never reads anything that the job
writes, and no fault waits for it: stopped, slow or dead, the job goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import resource
import select
import signal
import socket
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from uffdprefetch.base import spawn
from uffdprefetch.base.clock import CLOCK, MS
from uffdprefetch.base.config import Config, fall_back, why_fallen_back
from uffdprefetch.base.errors import EXIT_NO_ROOM, UffdPrefetchError
from uffdprefetch.base.oom import goes_first
from uffdprefetch.base.rundir import is_of_node
from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native import uffd
from uffdprefetch.native.memory import Pressure
from uffdprefetch.protocol import leftovers
from uffdprefetch.service import door
from uffdprefetch.service.agents import Agents
from uffdprefetch.service.attachments import OPENED_FOR_WRITING
from uffdprefetch.service.found import FoundMappings
from uffdprefetch.service.freshness import Freshness, reads_allowed
from uffdprefetch.service.known_orders import OrderService
from uffdprefetch.service.observe import Observer
from uffdprefetch.service.peers import Peers
from uffdprefetch.service.standstill import Standstill
from uffdprefetch.service.summary import read_so_far, summary
from uffdprefetch.service.waits import Waits
from uffdprefetch.service.watchers import Watchers
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import Opener
from uffdprefetch.state.publisher import NODES, WARM, EventPublisher
from uffdprefetch.warm.scheduler import Extent

if TYPE_CHECKING:
    from uffdprefetch.cluster.link import PoolNetwork
    from uffdprefetch.pool.node_pool import NodePool
    from uffdprefetch.protocol.snapshot import Snapshot
    from uffdprefetch.service.cluster import Cluster, Place
    from uffdprefetch.service.live import Live

log = logging.getLogger("uffdprefetch.serve")

WORKERS = 16
BACKLOG = 4096
#: Of some hundred mapped files; 32 KiB of the kernel's memory.
DESCRIPTORS = 4096
#: Nobody connected: how long to wait for the first client, and for another after the last. Where
#: the last launcher has said how its job ended, nobody is waited for.
FIRST_CLIENT_SECONDS = 30.0
LAST_CLIENT_SECONDS = 0.5
#: What takes longer at the end than this is left to the kernel.
CLOSE_SECONDS = 5
HOUSEKEEPING_NS = 1000 * MS
#: What may lie ahead is asked again when this part of it has been read since: meanwhile the job may
#: have taken the memory.
ASK_SHARE = 0.25
#: Interval at which the time line is added to.
NOTE_NS = 10 * MS
#: A file given back: how long the agents have before a waiting writer is let in.
DETACH_NS = 1000 * MS


def elect(path: str, plan: bool) -> tuple[int, socket.socket] | None:
    """Take the lock beside a socket's path and listen there: (lock, listening socket); None when
    another service has the lock. Raises OSError. A launcher does it for whom it starts."""
    lock_fd = leftovers.hold(path + leftovers.LOCK)
    if lock_fd is None:
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        leftovers.make_names(path, plan=plan)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        leftovers.remove_names(path, lock_fd)
        raise
    return lock_fd, listener


class Service:
    """Sockets and clocks around the core (door.py)."""

    def __init__(
        self, listener: socket.socket, lock_fd: int, config: Config, run: str, starter: int
    ) -> None:
        """``lock_fd``: of the election; ``starter``: the pid of the launcher that started us."""
        self.run_key = run
        self._lock_fd = lock_fd
        self._starter = starter
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._workers = uffd.Workers(WORKERS, self._wake_fd)
        self._ledger = Ledger()
        config, pool = self._with_a_pool(config)
        self.config = config
        self._publisher = EventPublisher()
        self._opener = Opener(self._wake_fd)
        self._pressure = self._with_an_eye_on_memory(pool)
        self._epoll = select.epoll()
        self._cluster = cluster = self._with_others(config, pool, listener.getsockname())
        self._waits = Waits()
        self.coordinator = door.build(
            config, self._workers, self._ledger, publisher=self._publisher, opener=self._opener,
            on_warmed=self._warmed, defer=cluster.defer if cluster is not None else None,
            waiting=lambda: self._waits.side_by_side, pool=pool,
        )  # fmt: skip
        self._scheduler = self.coordinator.scheduler
        core = self.coordinator
        clients = core.mappings.clients
        found = FoundMappings(
            clients, core.mappings, core.attachments.observed, core.table, self._opener,
            self._ledger,
        )  # fmt: skip
        self._observer = Observer(
            clients, found, self._ledger, config.min_size_bytes, everybody=config.engine == "off"
        )
        self._freshness = Freshness(
            core.table.files, clients, self._ledger, core.mappings.give_up, self._reads_allowed,
            self._wake_fd, pool,
        )  # fmt: skip
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._order_service = self._with_orders(listener.getsockname())
        self._listener, self._path = listener, listener.getsockname()
        self._live: Live | None = None
        self._standstill = Standstill()
        agents = Agents(
            core.mappings, core.attachments, core.scanner, core.events, core.table, self._ledger,
            self._publisher, self._wake_fd, core.bridge, pool,
        )  # fmt: skip
        self._peers = Peers(
            listener,
            self._epoll,
            agents,
            self._publisher,
            self._ledger,
            self._summary,
            config.fingerprint(),
            Watchers(self._snapshot),
            self._order_service.announcements if self._order_service is not None else None,
            self._cluster,
        )
        self._housekeeping_ns = 0
        self._next_pump_ns = 0
        self._signal_fd = -1
        self._asked_to_end = 0  # how often: SIGTERM
        self._empty_since: float | None = time.monotonic()
        self._noted_ns = 0
        self._noted_bytes = 0  # of the scheduler's, on the time line
        self._leaving: dict[int, tuple[FileState, int]] = {}
        self._heed_signals()

    def _with_a_pool(self, config: Config) -> tuple[Config, NodePool | None]:
        """The pool where it is asked for, or the run as it goes without one."""
        pool = None
        if config.engine == "pool":
            try:
                pool = door.make_pool(config, self._wake_fd, self._ledger)
            except (OSError, ImportError) as error:
                config = fall_back(config, str(error))
                log.warning("%s", why_fallen_back(config))
        if config.engine_asked:
            self._ledger.degrade(why_fallen_back(config))
        return config, pool

    def _with_an_eye_on_memory(self, pool: NodePool | None) -> Pressure | None:
        """From now on what is left of memory is looked at; before anything is read into ours."""
        try:
            pressure = Pressure(pool.pool.pointer if pool is not None else None, EXIT_NO_ROOM)
        except OSError as error:  # the pool's size is still looked at once a second
            self._ledger.degrade(f"memory is looked at once a second only: {error}")
            return None
        if pool is not None:
            pool.watched_by(pressure)
        return pressure

    def _with_others(
        self, config: Config, pool: NodePool | None, socket_path: str
    ) -> Cluster | None:
        """The run's other nodes, where they are to share."""
        if config.place is None or pool is None:
            return None
        from uffdprefetch.cluster.link import PoolNetwork
        from uffdprefetch.service.cluster import Cluster, Place

        def link(place: Place, key: bytes) -> PoolNetwork:
            return PoolNetwork(
                pool.pool,
                place.node,
                key,
                chunk_bytes=pool.chunk_bytes,
                serve_cpu=config.serve_cpu,
            )

        try:
            place = Place(**json.loads(config.place))
            cluster = Cluster(
                place, socket_path, partial(link, place), self._ledger, self._opener, config.share,
                chunk_bytes=pool.chunk_bytes,
            )  # fmt: skip
        except (OSError, ValueError, TypeError) as error:
            self._ledger.degrade(f"cluster: each node reads for itself: {error}")
            return None
        pool.share_with(cluster)
        self._epoll.register(cluster.fd, select.EPOLLIN)
        return cluster

    def _reads_allowed(self) -> int:
        """Pages that a round of comparing may ask storage for, by all that share what they read."""
        nodes = len(self._cluster.present) if self._cluster is not None else 1
        bandwidth = self._scheduler.meter.storage.bandwidth_bytes_per_second
        return reads_allowed(bandwidth, max(1, nodes))

    def _with_orders(self, socket_path: str) -> OrderService | None:
        if self.config.policy == "none":
            return None
        try:
            core = self.coordinator
            windows, clients = core.windows, core.mappings.clients
            service = OrderService(
                socket_path, self.config, self._epoll, self._scheduler, self._ledger, CLOCK,
                core.arbiter, clients, windows.room_bytes,
                lambda pooled: windows.reader_bytes(pooled, len(clients)),
            )  # fmt: skip
        except OSError as error:
            self._ledger.degrade(f"no order can be told: {error}")
            return None
        core.use_known_orders(service.known_orders)
        return service

    def _heed_signals(self) -> None:
        """Two signals mean something to us. SIGIO tells that somebody wants to write a leased file.
        SIGTERM asks us to end: where the job manager sends it to everybody, the job has it too and
        may be writing its last checkpoint, so we stay as long as somebody is connected, or until
        the second one. The others are the job's (spawn.shield)."""
        self._signal_fd, wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        spawn.shield()
        signal.signal(signal.SIGIO, lambda *_: None)
        signal.signal(signal.SIGTERM, self._terminate)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        self._epoll.register(self._signal_fd, select.EPOLLIN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked by serve()

    def _terminate(self, *_: object) -> None:
        self._asked_to_end += 1

    # -------------------------------------------------------------- the loop

    def run(self) -> None:
        """Serve until the last client has gone."""
        while True:
            timeout = self._timeout_seconds()
            ready = self._epoll.poll(timeout)
            self._standstill.waited(int(timeout * 1e9))
            self._turn(ready)
            if self._finished():
                break
            self._peers.part()
        log.info("last client gone")
        self._close()

    def _finished(self) -> bool:
        # a launcher that was killed while we started will not come
        awaited = self._starter not in self._peers.launcher_pids and os.getppid() == self._starter
        over = self._peers.over and not awaited
        if self._asked_to_end > 1 or (over and self._freshness.may_end()):
            return True
        if not self._peers.none:
            if not self._peers.only_strangers:  # a watcher that comes again and again is no client
                self._empty_since = None
            return False
        if self._asked_to_end and not awaited:
            return True
        if self._empty_since is None:
            self._empty_since = time.monotonic()
        patience = FIRST_CLIENT_SECONDS if awaited else LAST_CLIENT_SECONDS
        if time.monotonic() - self._empty_since <= patience:
            return False
        if self._freshness.may_end():
            return True
        self._empty_since = time.monotonic()  # asked again then
        return False

    def _timeout_seconds(self) -> float:
        now = CLOCK.now_ns()
        due = min(self._housekeeping_ns, self._observer.due_ns, self._freshness.due_ns)
        if self._next_pump_ns:
            due = min(due, self._next_pump_ns)
        if self.coordinator.table.look_ns:
            due = min(due, self.coordinator.table.look_ns)
        if self.coordinator.due_ns is not None:
            due = min(due, self.coordinator.due_ns)
        if self.coordinator.pool:
            due = min(due, now + uffd_pool.TICK_NS)
            if self.coordinator.pool.orphans:
                due = min(due, self.coordinator.pool.orphans_due_ns(now))
        if self._order_service is not None and self._order_service.due_ns is not None:
            due = min(due, self._order_service.due_ns)
        if self._live is not None and self._live.sampling.slow.due_ns:
            due = min(due, self._live.sampling.slow.due_ns)
        for client in self.coordinator.mappings.clients.values():
            for region in client.regions.values():
                if not region.agent.detaching:
                    due = min(due, region.scan.due_ns, self._waits.due_ns)
        if self._empty_since is not None:
            due = min(due, now + 100 * MS)
        if self._peers.parting:
            due = min(due, now + 5 * MS)
        # epoll counts whole milliseconds, rounded up
        return max(0.0, (due - now) / 1e9)

    def _turn(self, ready: list[tuple[int, int]]) -> None:
        for fd, _ in ready:
            if fd == self._listener.fileno():
                self._peers.accept()
            elif fd in (self._wake_fd, self._signal_fd):
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 8 if fd == self._wake_fd else 64)
                if fd == self._signal_fd:
                    self._look_for_writers()
            elif self._cluster is not None and fd == self._cluster.fd:
                if not self._cluster.hear():
                    self._epoll.unregister(fd)
            elif self._order_service is not None and fd == self._order_service.resolver.fd:
                self._order_service.resolver.ready()
            else:
                self._peers.receive(fd)
        if self._order_service is not None:  # what has ended first, then what was touched since
            self._order_service.announcements.look(CLOCK.now_ns())
        for client in self.coordinator.mappings.clients.values():
            self.coordinator.events.take(client, client.ring.drain())
        pool = self.coordinator.pool
        if pool:
            pool.pool.alive()
            if pool.orphans:
                pool.look_for_orphans()
        if self.coordinator.bridge is not None:
            self.coordinator.bridge.take_events()
        self._scheduler.reap()
        windows = self.coordinator.windows
        if windows.read_since_bytes > ASK_SHARE * windows.allowed_bytes:
            self._ask_memory()
        self._opener.step()
        now = CLOCK.now_ns()
        if self.coordinator.table.waits or 0 < self.coordinator.table.look_ns <= now:
            self.coordinator.table.look(now)
        self._observer.look(self._peers.jobs(), now)
        self.coordinator.look(now)
        self._freshness.step(now)
        self._waits.step(self.coordinator.mappings.clients)
        if now >= self._housekeeping_ns:
            self._housekeep(now)
        elif self._leaving:  # the last agent has perhaps just told: the writer waits
            self._look_for_writers()
        self.coordinator.plan()
        self.coordinator.plan_evictions(CLOCK.now_ns())
        wait = self._scheduler.pump(CLOCK.now_ns())
        self._next_pump_ns = CLOCK.now_ns() + wait if wait else 0
        if now - self._noted_ns >= NOTE_NS:
            self._note(now)
        self._publisher.flush()
        if self._live is not None and self._live.sampling.slow.due_ns:
            self._live.sampling.slow.step(CLOCK.now_ns())
        for fd, client in list(self.coordinator.mappings.clients.items()):
            if client.agent.waiting:
                client.agent.flush()
            if client.agent.gone:
                self._peers.drop_client(fd, client)

    def _reading_cpu_seconds(self) -> float:
        pool = self.coordinator.pool
        return self._workers.cpu_seconds() + (pool.pool.cpu_seconds() if pool else 0.0)

    def _with_live(self) -> Live:
        """What watchers are told of, and its history: made when the first one asks, or in the run's
        second second, as it takes longer to load than all that a short job needs of the service."""
        if self._live is None:
            from uffdprefetch.service.live import Live, LiveNode
            from uffdprefetch.service.live_ranks import LiveRanks
            from uffdprefetch.service.sampling import PoolTrack, Sampling

            core, ledger, scheduler = self.coordinator, self._ledger, self._scheduler
            sampling = Sampling(core.table.files, core.mappings.clients, scheduler, ledger)
            ranks = LiveRanks(
                ledger.processes, core.mappings.readers, core.windows, scheduler, sampling.ranks
            )
            node = LiveNode(
                self.config, ledger, scheduler,
                lambda: (core.windows.allowed_bytes, core.windows.allowed_by), sampling.history,
                self._reading_cpu_seconds,
            )  # fmt: skip
            self._live = Live(
                self.config, self.run_key, ledger, scheduler, core.table, sampling, ranks, node,
                self._peers.jobs, PoolTrack(core.pool) if core.pool else None, core.known_orders,
                self._described,
            )  # fmt: skip
            self._live.tick(CLOCK.now_ns())
        return self._live

    def _snapshot(self, now: int) -> Snapshot:
        return self._with_live().snapshot(now)

    def _warmed(self, extent: Extent, result: uffd.WarmResult) -> None:
        consumer, took = extent.consumer, result.done_ns - result.submit_ns
        self._publisher.put(
            WARM, result.submit_ns, consumer.reader if consumer else 0, extent.file, extent.start,
            extent.end - extent.start, took, result.resident_bytes >> 10, os.getpid(),
        )  # fmt: skip

    def _tell_what_went(self, cluster: Cluster, now: int) -> None:
        pool = self.coordinator.pool
        if pool is None or not self._publisher.active:
            return
        for number, file in pool.files.items():
            if cluster.is_shared(number):
                counts = pool.pool.file_counts(number)
                self._publisher.put(
                    NODES, now, 0, file, counts.others_bytes, counts.given_bytes, counts.read_bytes
                )

    def _sample(self) -> None:
        for process in self._ledger.processes.single:
            self._publisher.sample(process.watched, CLOCK.now_ns())

    def _note(self, now: int) -> None:
        """Put what was read, windows and rates on the time line."""
        self._noted_ns = now
        seconds = max(0.0, now / 1e9 - self._ledger.started)
        more = self._scheduler.prefetched_bytes - self._noted_bytes
        if more:
            self._ledger.timeline.at(seconds).prefetched_bytes += more
            self._noted_bytes += more
        streams = [
            s for reader in self.coordinator.mappings.readers() for s in reader.table.active()
        ]
        if not streams:
            return
        streams = [s for s in streams if now - s.last_ns < 1000 * MS] or streams[:1]
        bin_ = self._ledger.timeline.at(seconds)
        widest = max(streams, key=lambda s: s.rate_bytes_per_second)
        windows = self.coordinator.windows
        bin_.window_bytes = windows.shown_bytes(widest)
        bin_.distance_bytes = windows.of(widest).step_bytes
        bin_.under_way_bytes = self._scheduler.under_way_bytes
        bin_.bandwidth_bytes_per_second = round(self._scheduler.meter.bandwidth)
        bin_.reader_bytes_per_second = round(sum(s.rate_bytes_per_second for s in streams))

    def _summary(self) -> dict[str, Any]:
        self._note(CLOCK.now_ns())
        self._sample()
        core = self.coordinator
        read = read_so_far(
            self._ledger, core.table, core.mappings.clients, core.windows, core.arbiter,
            core.known_orders, core.pool,
        )  # fmt: skip
        return summary(
            self.config, self.run_key, self._ledger, self._scheduler, read,
            self._reading_cpu_seconds(), self._waits, self._described(), self._standstill.ns,
        )  # fmt: skip

    def _described(self) -> dict[str, Any] | None:
        return self._cluster.describe() if self._cluster is not None else None

    # -------------------------------------------------------------- once a second

    def _housekeep(self, now: int) -> None:
        is_first = not self._housekeeping_ns
        self._housekeeping_ns = now + HOUSEKEEPING_NS
        self._peers.housekeep(now)
        for client in self.coordinator.mappings.clients.values():
            client.agent.look_for_lost_rights()
        self._sample()
        self._ask_memory()
        if self.coordinator.pool:
            self.coordinator.pool.housekeep()
        if self._cluster is not None:
            self._cluster.housekeep()
            self._tell_what_went(self._cluster, now)
        if self._live is not None:
            self._live.tick(now)
        elif not is_first:
            with contextlib.suppress(OSError):  # no descriptor is free to load it by: later, then
                self._with_live()
        self._look_for_writers()
        self.coordinator.refresh_all()

    def _ask_memory(self) -> None:
        windows = self.coordinator.windows
        if windows.ask_memory():
            limit = windows.allowed_by.words
            self._ledger.degrade(f"less is read ahead than --budget allows: {limit} leaves no more")

    def _look_for_writers(self) -> None:
        """A broken lease: detach everywhere, then let the writer in."""
        now = CLOCK.now_ns()
        for file in self.coordinator.table.files.values():
            if not file.guard.leased or not file.guard.lease_breaking(file.opened.fd):
                continue
            if file.guard.changed is None:
                self.coordinator.mappings.give_up(file, OPENED_FOR_WRITING)
            self._leaving.setdefault(id(file), (file, now + DETACH_NS))
        for key, (file, deadline) in list(self._leaving.items()):
            if not file.mappings.attached or now >= deadline:
                self._freshness.let_in(file)
                file.guard.release_lease(file.opened.fd)
                del self._leaving[key]

    def _close(self) -> None:
        """Our names first: the last launcher waits until they are gone, and where it ends a job
        manager kills us."""
        # a worker that hangs in a read of far storage must not keep us here
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CLOSE_SECONDS)
        self._listener.close()
        if self._order_service is not None:
            self._order_service.close()
        if self._cluster is not None:
            self._cluster.close()
        leftovers.remove_names(self._path, self._lock_fd)
        self._peers.part(now=True)
        self._workers.close()
        none_waits = self._freshness.close()
        if self._pressure is not None:
            self._pressure.stop()
        if self.coordinator.pool and none_waits:
            self.coordinator.pool.close()
        for file in self.coordinator.table.all:
            file.close()


def _reserve_descriptors(fd: int) -> None:
    """Have the table of descriptors as large as it will be, while this process has one thread.
    Later the kernel waits for an RCU grace period, 10 to 70 ms, whenever the table grows
    (fs/file.c, expand_fdtable), and a job that maps many files for us."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = min(DESCRIPTORS, allowed) - 1 if allowed >= 0 else DESCRIPTORS - 1
    with contextlib.suppress(OSError):
        os.close(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, highest))


def serve(
    socket_path: str,
    config: Config,
    run: str,
    starter: int = 0,
    inherited: tuple[int, int] | None = None,
) -> int:
    """Run the service on socket_path; 0 also when another one has been elected. ``starter``: the
    pid of the launcher, which is our parent as long as it lives; 0: there is none. ``inherited``:
    what elect() returns, as descriptors, of the launcher's.

    Raises UffdPrefetchError when the socket or the workers cannot be had.
    """
    goes_first()
    # two for each process of the job, nine for each file: a login shell's soft limit is 1024
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uffd.settle_malloc()
    # numpy's, where an order brings it: a thread for each CPU, and no work for any
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    # who sees that we listen may ask us to end: from then on we end as we should
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        if inherited is not None:
            lock_fd, listener_fd = inherited
            for fd in inherited:  # not to be passed on to the processes that we start
                os.set_inheritable(fd, False)
            listener = socket.socket(fileno=listener_fd)
        else:
            elected = elect(socket_path, plan=config.policy != "none")
            if elected is None:
                return 0
            lock_fd, listener = elected
        listener.setblocking(False)
        _reserve_descriptors(lock_fd)
    except OSError as error:
        raise UffdPrefetchError(f"the service cannot start on {socket_path}: {error}") from error
    try:
        service = Service(listener, lock_fd, config, run, starter)
    except BaseException as error:
        leftovers.remove_names(socket_path, lock_fd)
        if isinstance(error, OSError):
            text = f"the service cannot start on {socket_path}: {error}"
            raise UffdPrefetchError(text) from error
        raise
    leftovers.say_ready(lock_fd)
    log.info("serving %s", socket_path)
    leftovers.sweep(socket_path, is_of_node)
    service.run()
    return 0
