# SPDX-License-Identifier: Apache-2.0
"""The launcher of `wrap`: finds or starts the node's service, runs the job, reports.

The job never depends on the service: on any error the job runs without it, after a line on stderr
(with --strict: exit 125 before it starts).
"""

from __future__ import annotations

import os
import time

from uffdprefetch.base import cgroup, rundir, spawn
from uffdprefetch.base.config import LOCKS_VARIABLE, why_fallen_back
from uffdprefetch.base.errors import EXIT_OURS, UffdPrefetchError, named
from uffdprefetch.base.limits import why_no_descriptors
from uffdprefetch.base.messages import say
from uffdprefetch.launch import engine_choice, environment, job_report, oom, service
from uffdprefetch.launch.address import address_of
from uffdprefetch.protocol.node import JobRead
from uffdprefetch.report import output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from uffdprefetch.base.config import Config
    from uffdprefetch.launch.address import Address
    from uffdprefetch.launch.panel import LivePanel
    from uffdprefetch.launch.replay import Replay
    from uffdprefetch.launch.service import JobService
    from uffdprefetch.ownlock import OwnLocks
    from uffdprefetch.trace.record.starter import Recording

#: Loaded while the job runs, as soon as its service is up: the job has ended when they are used.
FOR_THE_REPORT = ("json", "shlex", "uffdprefetch.report.summary")
#: In a memory group of less they are loaded when the job has ended: they take 3 MiB, since what the
#: launcher writes is copied for its bystander.
SMALL_BYTES = 1 << 30


def run(
    config: Config,
    argv: Sequence[str],
    recording: Recording | None = None,
    only_record: bool = False,
    replay: Replay | None = None,
) -> int:
    """Run ``argv`` under ``config`` and return its exit status, or die of its signal.

    ``recording``: a running one, to be connected to the service; with ``only_record`` there is no
    summary. ``replay``: what is read ahead of the job's start meanwhile. Raises UffdPrefetchError:
    126/127 if it cannot be executed, 125 with --strict if there is no service, 2 for an output
    pattern with an unknown token.
    """
    environ = spawn.inherited_environment()
    _check(config, environ)
    setup = _Setup(config, environ)
    setup.prepare(is_recorded=recording is not None or config.wrap.trace is not None)
    config, node, address = setup.config, setup.node, setup.address
    if replay is not None and node is not None:
        replay.follow(node.address.socket)
    if node is not None and node.started is not None and not only_record:
        job_report.say_if_unwritable(config, environ, node.address)
    # an earlier recording is not overwritten for a command that is not there
    if config.wrap.trace is not None and spawn.can_execute(argv[0], environ):
        from uffdprefetch.launch import recorder

        recording = recorder.start(config, environ, address, argv)
    if recording is not None and node is not None:
        recording.tell(socket=node.address.socket)
    if config.wrap.verbose and node is not None:
        say(f"job {node.address.key} (from {node.address.key_source}), log {node.address.log}")

    try:
        ended = _Job(setup, recording, replay, loads_report=not only_record).run(argv)
    except UffdPrefetchError:  # it cannot be executed
        if recording is not None:
            recording.discard()
        raise
    ended_ns = time.monotonic_ns()
    is_last = True
    if node is not None:
        report = job_report.JobReport(config, environ, node, ended, only_record)
        is_last = report.make()
        node.close()
    if address is not None and is_last:
        if recording is not None:
            recording.let_go()
        service.tidy(address.socket)
    if recording is not None:
        recording.end(os.waitstatus_to_exitcode(ended.status), ended_ns, wait=is_last)
    return spawn.end_like(ended.status)


def _check(config: Config, environ: Mapping[str, str]) -> None:
    """Errors of an output pattern and of a plan file are reported before the job."""
    output.expand(config.wrap.output or "", "", None, environ)
    if config.orders.plan is not None and config.engine != "off":
        from uffdprefetch.orders import plan_file

        named("--plan", plan_file.load, config.orders.plan)


# ---- before the job -----------------------------------------------------------------------------


class _Setup:
    """What the job is run with. Each stage adds to it; what cannot be had stays as it was."""

    def __init__(self, config: Config, environ: Mapping[str, str]) -> None:
        self.config = config
        self.environ = environ  # ours
        self.environment = environ  # the job's
        self.address: Address | None = None
        self.locks: OwnLocks | None = None
        self.node: JobService | None = None

    def prepare(self, is_recorded: bool) -> None:
        """All stages; where one fails the job runs without prefetching, after a line. With --strict
        raises UffdPrefetchError."""
        try:
            if (why := why_no_descriptors()) is not None:
                raise UffdPrefetchError(why, EXIT_OURS)
            self.address = address_of(self.environ)
            self._choose()
            preload = environment.preload_path(self.config, self.environ, self.address.directory)
            if self.config.wrap.ownlock:
                self._own_locks(self.address, preload)
            self._serve(self.address, is_recorded)
            self.environment = environment.job_environment(
                self.environment, self.config, self.address, preload
            )
        except (UffdPrefetchError, OSError) as error:
            if isinstance(error, UffdPrefetchError):
                text = error.message
            else:
                text = rundir.why_unusable(self.address.directory if self.address else "", error)
            if self.config.wrap.strict:
                raise UffdPrefetchError(text, EXIT_OURS) from None
            say(f"running the job without prefetching: {text}")

    def _choose(self) -> None:
        """An engine, and a cluster, that can be had here."""
        self.config = _with_an_engine(self.config, self.environ)
        if self.config.cluster.nodes is not None:
            self.config = _in_a_cluster(self.config, self.environ)

    def _own_locks(self, address: Address, preload: str | None) -> None:
        """Lock files of the rank's own, for which no service is needed."""
        self.locks = _join_locks(self.config, address)
        if self.locks is not None and preload is not None:
            self.environment = {
                **self.environ,
                **environment.preloading(self.environ, preload),
                LOCKS_VARIABLE: self.locks.directory,
            }

    def _serve(self, address: Address, is_recorded: bool) -> None:
        """The job's service; up before the job only where that must be so.

        With --strict because there may be none. With a cluster because its nodes meet first. With
        a recording because it has the service's first events.
        """
        node = service.find_or_start(self.environ, self.config, address)
        is_in_cluster = self.config.cluster.nodes is not None
        if self.config.wrap.strict or is_in_cluster or is_recorded:
            node.come_up()
        self.node = node
        if (
            self.config.source.engine_asked and node.started is not None
        ):  # the rank that started it only
            say(why_fallen_back(self.config))
        if node.is_welcome:
            job_report.say_if_other_options_hold(self.config, node)


def _with_an_engine(config: Config, environ: Mapping[str, str]) -> Config:
    """``config`` with an engine that works here; raises UffdPrefetchError with --strict."""
    chosen = engine_choice.choose(config, environ)
    if chosen.source.engine_asked and config.wrap.strict:
        raise UffdPrefetchError(
            f"engine {chosen.source.engine_asked}: {chosen.source.engine_reason}", EXIT_OURS
        )
    return chosen


def _in_a_cluster(config: Config, environ: Mapping[str, str]) -> Config:
    """``config`` with the place at which this node meets the others, or without a cluster, after a
    line; raises UffdPrefetchError with --strict."""
    from uffdprefetch.launch import cluster

    why = cluster.why_not(config, environ)
    if why is None:
        try:
            return cluster.placed(config, environ)
        except UffdPrefetchError as error:
            why = error.message
    if config.wrap.strict:
        raise UffdPrefetchError(f"--cluster: {why}", EXIT_OURS)
    if not config.wrap.quiet:
        say(f"each node reads for itself: {why}")
    return cluster.alone(config)


def _join_locks(config: Config, address: Address) -> OwnLocks | None:
    """Join the job's directory of lock files; raises UffdPrefetchError with --strict only."""
    from uffdprefetch.ownlock import SUFFIX, OwnLocks

    try:
        return OwnLocks.enter(f"{address.socket}{SUFFIX}")
    except UffdPrefetchError as error:
        if config.wrap.strict:
            raise
        say(f"the ranks share the LMDB lock files: {error.message}")
        return None


# ---- the job ------------------------------------------------------------------------------------


class _Job:
    """The job while it runs, with those who watch it."""

    def __init__(
        self, setup: _Setup, recording: Recording | None, replay: Replay | None,
        loads_report: bool,
    ) -> None:  # fmt: skip
        self._setup = setup
        self._node = setup.node
        self._recording = recording
        self._replay = replay
        self._loads_report = loads_report
        self._view: LivePanel | None = None

    def run(self, argv: Sequence[str]) -> job_report.EndedJob:
        """To its end."""
        setup = self._setup
        if setup.config.wrap.live and self._node is not None:
            from uffdprefetch.launch.panel import LivePanel

            interval_seconds = setup.config.wrap.interval_seconds
            self._view = LivePanel(self._node.address.socket, interval_seconds, setup.environ)
        began, read_before, kills_before = time.monotonic(), JobRead.now(), oom.Counts.now()
        try:
            status = spawn.run(
                argv,
                setup.environment,
                self._started,
                self._child_changed,
                self._view.suspended if self._view is not None else spawn.Nothing,
                self._awaits,
            )
        finally:
            if self._view is not None:
                self._view.stop()
            if setup.locks is not None:
                setup.locks.leave()
        seconds, read = time.monotonic() - began, JobRead.now().since(read_before)
        if self._node is not None and self._node.started is not None:
            read = read.since(self._node.started.read)  # that was no read of the job's
        learn = None
        if self._replay is not None:
            read = read.since(self._replay.read) if self._replay.read is not None else read
            learn = self._replay.end()
        return job_report.EndedJob(argv, status, seconds, read, kills_before, learn)

    def _started(self, pid: int) -> None:
        if self._node is not None:
            self._node.job_started(pid)
        if self._view is not None:
            self._view.start(pid)

    def _child_changed(self) -> None:
        if self._node is not None:
            self._node.child_changed()
        if self._recording is not None:
            self._recording.ended()
        if self._replay is not None:
            self._replay.child_changed()

    def _awaits(self) -> bool:
        """Whether the service is still to come up; once it is, there is time to load."""
        if self._node is not None and self._node.is_awaited():
            return True
        if self._loads_report and not _is_small():
            for module in FOR_THE_REPORT:
                __import__(module)
        return False


def _is_small() -> bool:
    return any(limit < SMALL_BYTES for limit, _ in cgroup.own_memory_levels())
