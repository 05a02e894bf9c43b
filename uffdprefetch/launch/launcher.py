# SPDX-License-Identifier: Apache-2.0
"""The launcher of `wrap`: finds or starts the node's service, runs the job, reports.

The job never depends on the service: on any error the job runs without it, after a line on stderr
(with --strict: exit 125 before it starts).
"""

from __future__ import annotations

import fcntl
import os
import time

from uffdprefetch.base import cgroup, rundir, spawn
from uffdprefetch.base.config import LOCKS_VARIABLE, why_fallen_back
from uffdprefetch.base.errors import EXIT_OURS, UffdPrefetchError, named
from uffdprefetch.base.identity import identify
from uffdprefetch.base.messages import columns, say
from uffdprefetch.base.options import as_variables
from uffdprefetch.base.record import record
from uffdprefetch.launch import engine_choice, oom, service
from uffdprefetch.native.preload import preload_object
from uffdprefetch.protocol import leftovers
from uffdprefetch.protocol.node import JobRead, ServiceGone
from uffdprefetch.report import output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from uffdprefetch.base.config import Config
    from uffdprefetch.launch.service import Address, Service
    from uffdprefetch.ownlock import OwnLocks
    from uffdprefetch.trace.record.starter import Recording

SUMMARY_TIMEOUT_SECONDS = 5.0
#: Wait of the last launcher for the service's clean-up: a job manager kills remaining processes
#: when the launcher ends.
TIDY_TIMEOUT_SECONDS = 2.0
#: Interval of looks for the mark of another launcher's recorder, and the longest wait for it.
_POLL_SECONDS = 0.02
RECORDER_TIMEOUT_SECONDS = 10.0
#: Loaded while the job runs, as soon as its service is up: the job has ended when they are used.
FOR_THE_REPORT = ("json", "shlex", "uffdprefetch.report.summary")
#: In a memory group of less they are loaded when the job has ended: they take 3 MiB, since what the
#: launcher writes is copied for its bystander.
SMALL_BYTES = 1 << 30
#: Without it AddressSanitizer's run-time aborts when another library is preloaded before it.
ASAN_NO_ORDER_CHECK = "verify_asan_link_order=0"
#: Directory of the sitecustomize.py that hooks PyTorch (docs/pytorch.md).
SITE = os.path.join(service.PACKAGE, "job", "site")
#: Overrides the LD_PRELOAD list: a sanitizer's run-time and a build with it (`make asan`).
TEST_PRELOAD_VARIABLE = "UFFDPREFETCH_TEST_PRELOAD"


def preloadable(path: str, directory: str) -> str:
    """``path``, or a link to it in ``directory``: LD_PRELOAD cannot quote ' ' and ':'."""
    if not any(separator in path for separator in " :"):
        return path
    link = os.path.join(directory, f"preload-{os.stat(path).st_ino:x}.so")
    if any(separator in link for separator in " :"):
        raise UffdPrefetchError(
            f"LD_PRELOAD cannot name {path}: set UFFDPREFETCH_RUNDIR to a path without ' ' and ':'",
            EXIT_OURS,
        )
    temporary = f"{link}.{os.getpid()}"
    os.symlink(path, temporary)
    os.replace(temporary, link)  # ranks do this at the same time
    return link


def without_order_check(old: str | None) -> str:
    """ASAN_OPTIONS with which a program built with AddressSanitizer starts although its run-time is
    not the first library; the preload object is inactive in it. The user's options come later and
    win."""
    entries = [entry for entry in (old or "").split(":") if entry]
    return ":".join(dict.fromkeys([ASAN_NO_ORDER_CHECK, *entries]))


def prepend_preload(old: str | None, path: str) -> str:
    """LD_PRELOAD with ``path`` first and once; other entries keep their order."""
    entries = [entry for entry in (old or "").replace(" ", ":").split(":") if entry]
    return ":".join([path, *(entry for entry in entries if entry != path)])


def preloading(environ: Mapping[str, str], path: str) -> dict[str, str]:
    """The variables that make the job's programs load ``path``."""
    return {
        "LD_PRELOAD": prepend_preload(environ.get("LD_PRELOAD"), path),
        "ASAN_OPTIONS": without_order_check(environ.get("ASAN_OPTIONS")),
    }


# ---- the job ------------------------------------------------------------------------------------


def job_environment(
    environ: Mapping[str, str], config: Config, address: Address, preload: str | None
) -> dict[str, str]:
    """The job's environment: ``environ`` and the variables of the preload object and nested
    wraps."""
    environment = {**environ, **as_variables(config)}
    environment["UFFDPREFETCH_RUN"] = address.key
    environment["UFFDPREFETCH_RUNDIR"] = address.directory
    environment["UFFDPREFETCH_SOCKET"] = address.socket
    environment["UFFDPREFETCH_MIN_SIZE"] = str(config.min_size_bytes)
    environment["UFFDPREFETCH_LISTEN"] = str(config.spacing_bytes())
    if config.engine == "pool" or "UFFDPREFETCH_ENGINE" in environment:
        environment["UFFDPREFETCH_ENGINE"] = config.engine  # the one in use, not the one asked for
    environment.pop("UFFDPREFETCH_KEEP_ADVICE", None)
    if config.policy == "none":
        # Only observing: MAP_POPULATE is the kernel's affair.
        environment["UFFDPREFETCH_KEEP_ADVICE"] = "1"
    if preload is not None:
        environment.update(preloading(environ, preload))
    if config.torch != "off" and config.policy != "none":
        before = [entry for entry in [environ.get("PYTHONPATH", "")] if entry]
        environment["PYTHONPATH"] = os.pathsep.join([SITE, *before])
    if not config.ownlock:
        environment.pop(LOCKS_VARIABLE, None)
    elif config.engine == "off":
        del environment["UFFDPREFETCH_SOCKET"]  # the preload object only serves --ownlock
    return environment


def _with_an_engine(config: Config, environ: Mapping[str, str]) -> Config:
    """``config`` with an engine that works here; raises UffdPrefetchError with --strict."""
    chosen = engine_choice.choose(config, environ)
    if chosen.engine_asked and config.strict:
        raise UffdPrefetchError(f"engine {chosen.engine_asked}: {chosen.engine_reason}", EXIT_OURS)
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
    if config.strict:
        raise UffdPrefetchError(f"--cluster: {why}", EXIT_OURS)
    if not config.quiet:
        say(f"each node reads for itself: {why}")
    return cluster.alone(config)


def _own_locks(config: Config, address: Address) -> OwnLocks | None:
    """Join the job's directory of lock files; raises UffdPrefetchError with --strict only."""
    from uffdprefetch.ownlock import SUFFIX, OwnLocks

    try:
        return OwnLocks.enter(f"{address.socket}{SUFFIX}")
    except UffdPrefetchError as error:
        if config.strict:
            raise
        say(f"the ranks share the LMDB lock files: {error.message}")
        return None


def _record(
    config: Config, environ: Mapping[str, str], address: Address | None, argv: Sequence[str]
) -> Recording | None:
    """Start the recorder of this job and node, unless another launcher has.

    Where that cannot be the job runs without it after a line; with --strict raises
    UffdPrefetchError.
    """
    from uffdprefetch.trace.record.program import Spec
    from uffdprefetch.trace.record.starter import MAX_EVENTS, MIN_SIZE_BYTES, Recording, output_path

    assert config.trace is not None
    key = address.key if address else ""
    name = output.expand(config.trace, key, identify(environ).rank, environ, option="--trace")
    mark = None
    if address is not None:
        mark = address.socket + leftovers.TRACE
        try:
            mark_fd = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            _wait_for_recorder(mark)
            return None
        except OSError as error:
            why = rundir.why_unusable(address.directory, error)
            _say_no_trace(config, UffdPrefetchError(why, EXIT_OURS))
            return None
        fcntl.flock(mark_fd, fcntl.LOCK_SH)  # ours until we end (protocol/leftovers.py)
    spec = Spec(
        output_path(name), config.force, list(config.include), MIN_SIZE_BYTES, MAX_EVENTS,
        list(argv), launcher=os.getpid(), quiet=config.quiet,
    )  # fmt: skip
    directory = address.directory if address else "/"
    try:
        recording = Recording.start(spec, service.own_environment(environ), directory)
    except UffdPrefetchError as error:
        if mark is not None:
            os.unlink(mark)
        _say_no_trace(config, error)
        return None
    if mark is not None:
        leftovers.mark(mark_fd)
    return recording


def _say_no_trace(config: Config, error: UffdPrefetchError) -> None:
    """With --strict it is raised."""
    if config.strict:
        raise error
    say(f"running the job without a trace: {error.message}")


def _wait_for_recorder(mark: str) -> None:
    """Wait for the recorder of another launcher, so that the job's first events are recorded."""
    deadline = time.monotonic() + RECORDER_TIMEOUT_SECONDS
    try:
        while os.stat(mark).st_size == 0 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    except OSError:
        pass


def _service_of(
    config: Config, environ: Mapping[str, str], address: Address, recorded: bool
) -> Service:
    """The job's service; up before the job only where that must be so.

    With --strict because there may be none. With the pool because a mapping is the pool's from its
    beginning or never. With a recording because it has the service's first events.
    """
    found = service.find_or_start(environ, config, address)
    if config.strict or config.engine == "pool" or recorded:
        found.come_up()
    return found


def run(
    config: Config,
    argv: Sequence[str],
    recording: Recording | None = None,
    only_record: bool = False,
) -> int:
    """Run ``argv`` under ``config`` and return its exit status, or die of its signal.

    ``recording``: a running one, to be connected to the service; with ``only_record`` there is no
    summary. Raises UffdPrefetchError: 126/127 if it cannot be executed, 125 with --strict if
    there is no service, 2 for an output pattern with an unknown token.
    """
    environ = spawn.inherited_environment()
    output.expand(config.output or "", "", None, environ)  # errors are reported before the job
    if config.plan is not None and config.engine != "off":
        from uffdprefetch.orders import plan_file

        named("--plan", plan_file.load, config.plan)  # likewise
    node: Service | None = None
    address: Address | None = None
    locks: OwnLocks | None = None
    environment = environ
    try:
        address = service.address_of(environ)
        config = _with_an_engine(config, environ)
        if config.cluster is not None:
            config = _in_a_cluster(config, environ)
        preload = None
        if config.engine != "off" or config.ownlock:
            preload = environ.get(TEST_PRELOAD_VARIABLE)
            if not preload:
                preload = preloadable(preload_object(), address.directory)
        locks = _own_locks(config, address) if config.ownlock else None
        if locks is not None and preload is not None:  # no service needed
            environment = {**environ, **preloading(environ, preload)}
            environment[LOCKS_VARIABLE] = locks.directory
        recorded = recording is not None or config.trace is not None
        node = _service_of(config, environ, address, recorded)
        if config.engine_asked and node.started is not None:  # by the rank that started it only
            say(why_fallen_back(config))
        if node.is_welcome:
            _say_if_other_options_hold(config, node)
        environment = job_environment(environment, config, address, preload)
    except (UffdPrefetchError, OSError) as error:
        if isinstance(error, UffdPrefetchError):
            text = error.message
        else:
            text = rundir.why_unusable(address.directory if address else "", error)
        if config.strict:
            raise UffdPrefetchError(text, EXIT_OURS) from None
        say(f"running the job without prefetching: {text}")
    if node is not None and node.started is not None and not only_record:
        _say_if_unwritable(config, environ, node.address)
    if config.trace is not None:
        recording = _record(config, environ, address, argv)
    if recording is not None and node is not None:
        recording.tell(socket=node.address.socket)
    if config.verbose and node is not None:
        say(f"job {node.address.key} (from {node.address.key_source}), log {node.address.log}")

    view = None
    if config.live and node is not None:
        from uffdprefetch.launch.panel import Live

        view = Live(node.address.socket, config.interval_seconds, environ)
    began, read_before, kills_before = time.monotonic(), JobRead.now(), oom.Counts.now()

    def started(pid: int) -> None:
        if node is not None:
            node.job_started(pid)
        if view is not None:
            view.start(pid)

    def child_changed() -> None:
        if node is not None:
            node.child_changed()
        if recording is not None:
            recording.ended()

    def is_small() -> bool:
        return any(limit < SMALL_BYTES for limit, _ in cgroup.own_memory_levels())

    def awaits() -> bool:
        if node is not None and node.is_awaited():
            return True
        if not only_record and not is_small():  # now there is time
            for module in FOR_THE_REPORT:
                __import__(module)
        return False

    try:
        status = spawn.run(
            argv,
            environment,
            started,
            child_changed,
            view.suspended if view is not None else spawn.Nothing,
            awaits,
        )
    finally:
        if view is not None:
            view.stop()
        if locks is not None:
            locks.leave()
    ended_ns = time.monotonic_ns()
    last, read = True, JobRead.now().since(read_before)
    if node is not None and node.started is not None:
        read = read.since(node.started.read)  # that was no read of the job's
    if node is not None:
        if node.end_unused():
            if not only_record:
                from uffdprefetch.launch import nothing_reported

                cpu = node.started.cpu_seconds if node.started is not None else 0.0
                document = nothing_reported.summary(
                    config, node.address.key, time.monotonic() - began, cpu, read.by_calls
                )
                document["oom"] = oom.verdict(kills_before, oom.Counts.now(), status, False)
                document["job"] = _job(argv, status, config)
                write_and_print(config, environ, node.address, document)
        else:
            ended = _Ended(argv, status, time.monotonic() - began, read, kills_before)
            last = _report(config, environ, node, ended, only_record)
        node.close()
    if address is not None and last:
        leftovers.tidy(address.socket)
    if recording is not None:
        recording.end(os.waitstatus_to_exitcode(status), ended_ns, wait=last)
    return spawn.end_like(status)


def _job(argv: Sequence[str], status: int, config: Config) -> dict[str, Any]:
    """What the summary says of the command; ``status``: as waitpid(2) has it."""
    return {
        "command": list(argv),
        "status": os.waitstatus_to_exitcode(status),
        "min_size_bytes": config.min_size_bytes,
    }


def _say_if_other_options_hold(config: Config, node: Service) -> None:
    if node.client().options not in (0, config.fingerprint()) and not config.quiet:
        say("the job's service on this node was started with other options: those hold")


@record(frozen=True)
class _Ended:
    """The job's end. ``status``: as waitpid(2) has it; ``kills_before``: of its beginning."""

    argv: Sequence[str]
    status: int
    seconds: float
    read: JobRead
    kills_before: oom.Counts | str

    def oom(self, service_killed: bool | None) -> dict[str, Any]:
        return oom.verdict(self.kills_before, oom.Counts.now(), self.status, service_killed)


def _report(
    config: Config, environ: Mapping[str, str], node: Service, ended: _Ended, only_record: bool
) -> bool:
    """Request the summary, which the last launcher of the node and job prints and writes. Returns
    whether this is the last."""
    waited = not node.is_welcome
    try:
        client = node.client()
        deadline = time.monotonic() + SUMMARY_TIMEOUT_SECONDS
        finished = client.finish(ended.status, ended.read, deadline)
    except ServiceGone as error:
        why = f"the service died during the run ({error})"
        if node.had_no_room:
            why = "the service ended during the run, to leave its memory to the job"
        _say_that_it_died(config, environ, node, ended, why, only_record)
        return True
    except TimeoutError:
        stood = ", for it stood still (SIGSTOP)" if node.let_it_end() else ""
        why = f"the service did not answer within {SUMMARY_TIMEOUT_SECONDS:.0f} s{stood}"
        say(f"what was gained is not known: {why}{node.address.see_log}")
        _write_without_it(config, environ, node, ended, only_record, why, silent=True)
        return True
    if waited:
        _say_if_other_options_hold(config, node)
    client.part()
    if not finished.last:
        return False
    document: dict[str, Any] | None = finished.summary
    if document is not None:
        document["oom"] = ended.oom(service_killed=False)
    # the services of `cluster` hand theirs to it
    together = config.place is not None and service.GROUP_VARIABLE not in environ
    if not only_record and together:
        from uffdprefetch.launch import cluster

        document = cluster.one_summary(config, finished.summary)
    if not only_record and document is not None:
        document["job"] = _job(ended.argv, ended.status, config)
        write_and_print(config, environ, node.address, document)
    client.gone(time.monotonic() + TIDY_TIMEOUT_SECONDS)
    return True


def _say_that_it_died(
    config: Config, environ: Mapping[str, str], node: Service, ended: _Ended, why: str,
    only_record: bool,
) -> None:  # fmt: skip
    """The service is gone since some time of the run: lines, and a summary with what is known
    without it."""
    from uffdprefetch.report import summary

    document = _write_without_it(config, environ, node, ended, only_record, why, died=True)
    for line in summary.deaths(document, node.address.see_log):
        say(line)


def _write_without_it(
    config: Config, environ: Mapping[str, str], node: Service, ended: _Ended, only_record: bool,
    why: str, *, died: bool = False, silent: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Write the summary of a run of which the service has told nothing."""
    from uffdprefetch.launch import nothing_reported

    document = nothing_reported.summary(
        config, node.address.key, ended.seconds, node.cpu_seconds(), ended.read.by_calls, why,
        died=died, silent=silent,
    )  # fmt: skip
    document["oom"] = ended.oom(node.was_killed() if died else False)
    document["job"] = _job(ended.argv, ended.status, config)
    if not only_record and not identify(environ).local_rank:  # one for all ranks of the node
        write(config, environ, node.address, document)
    return document


#: Names of summaries of which it was said that they cannot be written.
_told: set[str] = set()


def _say_if_unwritable(config: Config, environ: Mapping[str, str], address: Address) -> None:
    """While the job can still be stopped. For the one of a node's launchers that has started the
    service. The job may still make the directory."""
    name = _summary_name(config, environ, address)
    why = output.why_not(name)
    if why is not None and config.output != os.devnull:
        _told.add(name)
        say(f"the summary will not be written: {why}")


def _summary_name(config: Config, environ: Mapping[str, str], address: Address) -> str:
    pattern = config.output or output.default_pattern(environ)
    return output.expand(pattern, address.key, identify(environ).rank, environ)


def speaks(environ: Mapping[str, str]) -> bool:
    """Whether this is the node of a run that speaks for the others: as many lines as nodes would
    hide the job's own. Theirs are in their files (`uffdprefetch summary` shows all of a run)."""
    from uffdprefetch.cluster.which_node import which_node

    told = which_node(environ)
    return not told.number or not told.nodes or told.nodes == 1


def write(
    config: Config, environ: Mapping[str, str], address: Address, document: dict[str, Any]
) -> tuple[str | None, str | None]:
    """Write a run's summary; its path, if it was written, and a line where that is not the one that
    was asked for."""
    path, name, beside = None, "", None
    try:
        if config.output != os.devnull:
            name = _summary_name(config, environ, address)
            path = output.write(name, document, config.force)
            if config.output is None and os.path.isabs(path):
                output.keep_last(os.path.dirname(path))
            elif path != output.named(name) and output.is_older(
                output.named(name), document["wall_seconds"]
            ):
                beside = f"{output.named(name)} was there: this run's is {path} (-f overwrites)"
    except (OSError, UffdPrefetchError) as error:
        if name not in _told or output.why_not(name) is None:
            say(f"summary not written: {error}")
    return path, beside


def write_and_print(
    config: Config, environ: Mapping[str, str], address: Address, document: dict[str, Any]
) -> None:
    """A run's summary, as the user has asked for it."""
    from uffdprefetch.report import summary

    path, beside = write(config, environ, address, document)
    if not config.quiet and (config.verbose or speaks(environ)):
        try:
            lines = summary.lines(document, path, config.verbose, columns())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            lines = [f"the summary cannot be shown ({type(error).__name__}: {error})"]
        for line in [beside, *lines] if beside is not None else lines:
            say(line)
