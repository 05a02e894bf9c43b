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
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from uffdprefetch.base.clock import CLOCK
from uffdprefetch.base.config import Config, fall_back, why_fallen_back
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.limits import is_of_a_limit, words_of
from uffdprefetch.base.oom import goes_first
from uffdprefetch.base.rundir import is_of_node
from uffdprefetch.native import uffd
from uffdprefetch.protocol import leftovers
from uffdprefetch.service import door
from uffdprefetch.service.agents import Agents
from uffdprefetch.service.coordinator import Coordinator
from uffdprefetch.service.ending import Ending
from uffdprefetch.service.found import FoundMappings
from uffdprefetch.service.freshness import Freshness, reads_allowed
from uffdprefetch.service.known_orders import OrderService
from uffdprefetch.service.observe import Observer
from uffdprefetch.service.peers import Peers
from uffdprefetch.service.reads import FollowedReads
from uffdprefetch.service.threads import Threads
from uffdprefetch.service.told import Told
from uffdprefetch.service.turn import Turn
from uffdprefetch.service.waits import Waits
from uffdprefetch.service.watchers import Watchers
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import Opener
from uffdprefetch.state.publisher import WARM, EventPublisher
from uffdprefetch.warm.scheduler import Extent

if TYPE_CHECKING:
    from uffdprefetch.cluster.link import PoolNetwork
    from uffdprefetch.pool.node_pool import NodePool
    from uffdprefetch.protocol.snapshot import Snapshot
    from uffdprefetch.service.cluster import Cluster, Place
    from uffdprefetch.service.learning import Learning

log = logging.getLogger("uffdprefetch.serve")

BACKLOG = 4096
#: Of some hundred mapped files; 32 KiB of the kernel's memory.
DESCRIPTORS = 4096
#: What takes longer at the end than this is left to the kernel.
CLOSE_SECONDS = 5


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


class Seat:
    """Who is elected has it: the lock beside a socket's path, and the socket."""

    def __init__(self, listener: socket.socket, lock_fd: int) -> None:
        self.listener, self.path = listener, str(listener.getsockname())
        self._lock_fd = lock_fd

    def close(self) -> None:
        """Nobody else can come."""
        self.listener.close()

    def leave(self) -> None:
        """Another may be elected."""
        leftovers.remove_names(self.path, self._lock_fd)


class Service:
    """Sockets and clocks around the core (door.py)."""

    def __init__(
        self, listener: socket.socket, lock_fd: int, config: Config, run: str, starter: int,
        start_log_fd: int | None = None,
    ) -> None:  # fmt: skip
        """``lock_fd``: of the election; ``starter``: the pid of the launcher that started us;
        ``start_log_fd``: in which its job notes what it opens."""
        self._seat = seat = Seat(listener, lock_fd)
        self._threads = threads = Threads(config.keeps_copies, config.engine == "pool")
        ledger, publisher, waits = Ledger(), EventPublisher(), Waits()
        config, pool = _with_a_pool(config, threads.wake_fd, ledger)
        threads.watch_memory(pool, ledger)
        self._epoll = select.epoll()
        self._cluster = cluster = _with_others(
            config, pool, seat.path, ledger, threads.opener, self._epoll
        )
        self._core = core = door.build(
            config, threads.workers, ledger, publisher=publisher, opener=threads.opener,
            on_warmed=partial(_warmed, publisher),
            defer=cluster.defer if cluster is not None else None,
            waiting=lambda: waits.side_by_side, pool=pool,
        )  # fmt: skip
        clients = core.mappings.clients
        found = FoundMappings(
            clients, core.mappings, core.attachments.observed, core.table, threads.opener, ledger
        )
        observer = Observer(
            clients, found, ledger, config.files.min_size_bytes, everybody=config.engine == "off"
        )
        self._freshness = Freshness(
            core.table.files, clients, ledger, core.mappings.give_up, self._reads_allowed,
            threads.wake_fd, pool,
        )  # fmt: skip
        self._epoll.register(threads.wake_fd, select.EPOLLIN)
        self._reads = reads = _with_reads(
            config, core, found, threads, publisher, lambda: self._peers.launchers.jobs(),
            seat.path, self._epoll,
        )  # fmt: skip
        threads.learning = _with_learning(
            config, start_log_fd, core, lambda: self._peers.launchers.jobs()
        )
        self._orders = orders = _with_orders(config, seat.path, core, self._epoll, reads)
        if threads.learning is not None and orders is not None and orders.learned is not None:
            threads.learning.learn_orders(orders.learned, threads.opener)
        agents = Agents(
            core.mappings, core.attachments, core.scanner, core.events, core.table, ledger,
            publisher, threads.wake_fd, core.bridge, pool,
        )  # fmt: skip
        self._told = Told(
            config, run, core, ledger, publisher, waits, cluster, threads.cpu_seconds,
            lambda: self._peers.launchers.jobs(), reads,
        )  # fmt: skip
        self._peers = Peers(
            listener, self._epoll, agents, publisher, ledger, self._summary,
            config.fingerprint(), Watchers(self._snapshot),
            orders.announcements if orders is not None else None, cluster,
        )  # fmt: skip
        self._turn = Turn(
            core, threads, self._peers, self._told, observer, self._freshness, waits, orders,
            reads,
        )  # fmt: skip
        self._ending = Ending(starter, self._peers, self._freshness)
        self._ending.heed_signals(self._epoll)

    def _summary(self) -> dict[str, Any]:
        if self._orders is not None:
            self._orders.say_unopened()
        learning = self._threads.learning
        learned = learning.describe() if learning is not None else None  # it may add a note
        document = self._told.summary()
        return document | {"learn": learned} if learned is not None else document

    def _snapshot(self, now_ns: int) -> Snapshot:
        made, learning = self._told.snapshot(now_ns), self._threads.learning
        if learning is None:
            return made
        from dataclasses import replace

        return replace(made, start=learning.recorded())

    def _reads_allowed(self) -> int:
        """Pages that a round of comparing may ask storage for, by all that share what they read."""
        nodes = len(self._cluster.present) if self._cluster is not None else 1
        bandwidth = self._core.scheduler.meter.storage.bandwidth_bytes_per_second
        return reads_allowed(bandwidth, max(1, nodes))

    def run(self) -> None:
        """Serve until the last client has gone."""
        while True:
            timeout = self._timeout_seconds()
            ready = self._epoll.poll(timeout)
            self._told.standstill.waited(int(timeout * 1e9))
            for fd, _ in ready:
                self._hear(fd)
            self._turn.take()
            if self._ending.has_come:
                break
            self._peers.launchers.part()
        log.info("last client gone")
        self._close()

    def _timeout_seconds(self) -> float:
        now = CLOCK.now_ns()
        ending = self._ending.due_ns(now)
        due = self._turn.due_ns(now)
        # epoll counts whole milliseconds, rounded up
        return max(0.0, ((due if ending is None else min(due, ending)) - now) / 1e9)

    def _hear(self, fd: int) -> None:
        """Take what a descriptor has to say."""
        if fd == self._seat.listener.fileno():
            self._peers.accept()
        elif fd == self._threads.wake_fd:
            self._threads.woke()
        elif fd == self._ending.signal_fd:
            self._ending.signaled()
            self._turn.writers.look()
        elif self._cluster is not None and fd == self._cluster.fd:
            if not self._cluster.hear():
                self._epoll.unregister(fd)
        elif self._orders is not None and fd == self._orders.resolver.fd:
            self._orders.resolver.ready()
        elif self._reads is not None and self._reads.hears(fd):
            pass  # in the turn
        else:
            self._peers.receive(fd)

    def _close(self) -> None:
        """Our names first: the last launcher waits until they are gone, and where it ends a job
        manager kills us."""
        # a worker that hangs in a read of far storage must not keep us here
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CLOSE_SECONDS)
        self._seat.close()
        learning = self._threads.learning
        if learning is not None:
            learning.end()
        if self._orders is not None:
            self._orders.close()
        if self._reads is not None:
            self._reads.close()
        if self._cluster is not None:
            self._cluster.close()
        self._seat.leave()
        self._peers.launchers.part(now=True)
        self._threads.workers.close()
        none_waits = self._freshness.close()
        self._threads.end_watch()
        if self._core.pool is not None and none_waits:
            self._core.pool.close()
        for file in self._core.table.all:
            file.close()
        if learning is not None:  # its home may not answer: all else is done
            learning.close()


def _with_a_pool(config: Config, wake_fd: int, ledger: Ledger) -> tuple[Config, NodePool | None]:
    """The pool where it is asked for, or the run as it goes without one."""
    pool = None
    if config.engine == "pool":
        try:
            pool = door.make_pool(config, wake_fd, ledger)
            pool.loader.aside = True
        except (OSError, ImportError) as error:
            config = fall_back(config, str(error))
            log.warning("%s", why_fallen_back(config))
    if config.source.engine_asked:
        ledger.degrade(why_fallen_back(config))
    return config, pool


def _with_others(
    config: Config, pool: NodePool | None, socket_path: str, ledger: Ledger, opener: Opener,
    poll: select.epoll,
) -> Cluster | None:  # fmt: skip
    """The run's other nodes, where they are to share."""
    if config.cluster.place is None or pool is None:
        return None
    from uffdprefetch.cluster.link import PoolNetwork
    from uffdprefetch.service.cluster import Cluster, Place

    def link(place: Place, key: bytes) -> PoolNetwork:
        return PoolNetwork(
            pool.pool,
            place.node,
            key,
            chunk_bytes=pool.chunk_bytes,
            serve_cpu=config.cluster.serve_cpu,
        )

    try:
        place = Place(**json.loads(config.cluster.place))
        cluster = Cluster(
            place, socket_path, partial(link, place), ledger, opener, config.cluster.share,
            chunk_bytes=pool.chunk_bytes,
        )  # fmt: skip
    except (OSError, ValueError, TypeError) as error:
        ledger.degrade(f"cluster: each node reads for itself: {error}")
        return None
    pool.share_with(cluster)
    poll.register(cluster.fd, select.EPOLLIN)
    return cluster


def _with_reads(
    config: Config, core: Coordinator, found: FoundMappings, threads: Threads,
    publisher: EventPublisher, jobs: Callable[[], list[int]], socket_path: str,
    poll: select.epoll,
) -> FollowedReads | None:  # fmt: skip
    """Who follows what is read by calls, where something is read ahead on a guess."""
    if config.files.reads == "off" or config.engine == "off" or not config.guesses:
        return None
    try:
        return FollowedReads(
            config, core, found, threads.opener, core.ledger, publisher, jobs, threads.wake_fd,
            os.path.dirname(socket_path), poll,
        )  # fmt: skip
    except OSError as error:
        core.ledger.degrade(f"what is read by calls is not followed: {error}")
        return None


def _with_learning(
    config: Config, start_log_fd: int | None, core: Coordinator, jobs: Callable[[], list[int]]
) -> Learning | None:
    """Who records the start, where it is to be learned."""
    if not config.learn.name:
        return None
    from uffdprefetch.service.learning import Learning

    try:
        return Learning(config.learn, start_log_fd, jobs, core.table, core.ledger)
    except (OSError, RuntimeError) as error:  # no thread is to be had
        core.ledger.not_done(f"--learn: the start is not recorded: {error}")
        return None


def _with_orders(
    config: Config, socket_path: str, core: Coordinator, poll: select.epoll,
    reads: FollowedReads | None,
) -> OrderService | None:  # fmt: skip
    if config.policy == "none":
        if config.orders.plan is not None:
            core.ledger.not_done("--plan: it is not followed under --policy none")
        return None
    windows, clients = core.windows, core.mappings.clients
    try:
        service = OrderService(
            socket_path, config, poll, core.scheduler, core.ledger, CLOCK, core.arbiter, clients,
            windows.room_bytes, lambda pooled: windows.reader_bytes(pooled, len(clients)),
            reads.names.ordered if reads is not None else None,
        )  # fmt: skip
    except OSError as error:
        core.ledger.degrade(f"no order can be told: {error}")
        return None
    core.use_known_orders(service.known_orders)
    return service


def _warmed(publisher: EventPublisher, extent: Extent, result: uffd.WarmResult) -> None:
    """A read has ended."""
    consumer, took = extent.consumer, result.done_ns - result.submit_ns
    publisher.put(
        WARM, result.submit_ns, consumer.reader if consumer else 0, extent.file, extent.start,
        extent.end - extent.start, took, result.resident_bytes >> 10, os.getpid(),
    )  # fmt: skip


def _reserve_descriptors(fd: int) -> None:
    """Have the table of descriptors as large as it will be, while this process has one thread.
    Later the kernel waits for an RCU grace period, 10 to 70 ms, whenever the table grows
    (fs/file.c, expand_fdtable), and a job that maps many files for us."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = min(DESCRIPTORS, allowed) - 1 if allowed >= 0 else DESCRIPTORS - 1
    with contextlib.suppress(OSError):
        os.close(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, highest))


def _no_start(socket_path: str, error: OSError) -> UffdPrefetchError:
    why = words_of(error) if is_of_a_limit(error) else error
    return UffdPrefetchError(f"the service cannot start on {socket_path}: {why}")


def serve(
    socket_path: str,
    config: Config,
    run: str,
    starter: int = 0,
    inherited: tuple[int, int] | None = None,
    start_log_fd: int | None = None,
) -> int:
    """Run the service on socket_path; 0 also when another one has been elected. ``starter``: the
    pid of the launcher, which is our parent as long as it lives; 0: there is none. ``inherited``:
    what elect() returns, as descriptors, of the launcher's; ``start_log_fd``: its, too, of
    protocol/start_log.py.

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
            for fd in (*inherited, start_log_fd):  # not to be passed on to processes that we start
                if fd is not None:
                    os.set_inheritable(fd, False)
            listener = socket.socket(fileno=listener_fd)
        else:
            elected = elect(socket_path, plan=config.policy != "none")
            if elected is None:
                return 0
            lock_fd, listener = elected
        listener.setblocking(False)
        leftovers.show_holder(lock_fd)
        _reserve_descriptors(listener.fileno())
    except OSError as error:
        raise _no_start(socket_path, error) from error
    try:
        service = Service(listener, lock_fd, config, run, starter, start_log_fd)
    except BaseException as error:
        leftovers.remove_names(socket_path, lock_fd)
        if isinstance(error, OSError):
            raise _no_start(socket_path, error) from error
        raise
    leftovers.say_ready(lock_fd)
    log.info("serving %s", socket_path)
    leftovers.sweep(socket_path, is_of_node)
    service.run()
    return 0
