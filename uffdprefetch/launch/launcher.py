# SPDX-License-Identifier: Apache-2.0
"""The launcher of `wrap`: finds or starts the node's service, runs the job, reports.

The job never depends on the service: on any error the job runs without it, after a line on stderr
(with --strict: exit 125 before it starts).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from uffdprefetch.base import spawn
from uffdprefetch.base.config import Config, why_fallen_back
from uffdprefetch.base.errors import EXIT_OURS, EXIT_USAGE, UffdPrefetchError
from uffdprefetch.base.identity import identify, job_key
from uffdprefetch.base.messages import say
from uffdprefetch.base.rundir import runtime_directory, socket_path
from uffdprefetch.launch import engine_choice
from uffdprefetch.native.preload import preload_object
from uffdprefetch.ownlock import SUFFIX as LOCKS_SUFFIX
from uffdprefetch.ownlock import VARIABLE as LOCKS_VARIABLE
from uffdprefetch.ownlock import OwnLocks
from uffdprefetch.predict.checkpoints import spacing_bytes
from uffdprefetch.protocol import leftovers
from uffdprefetch.protocol.node import NodeClient, NotOurService, ServiceGone
from uffdprefetch.report import output

if TYPE_CHECKING:
    from uffdprefetch.trace.record.starter import Recording

START_TIMEOUT_SECONDS = 10.0
SUMMARY_TIMEOUT_SECONDS = 5.0
#: Wait of the last launcher for the service's clean-up: a job manager kills remaining processes
#: when the launcher ends.
TIDY_TIMEOUT_SECONDS = 2.0
_POLL_SECONDS = 0.02
#: Without it AddressSanitizer's run-time aborts when another library is preloaded before it.
ASAN_NO_ORDER_CHECK = "verify_asan_link_order=0"
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: Directory of the sitecustomize.py that hooks PyTorch (docs/pytorch.md).
SITE = os.path.join(PACKAGE, "job", "site")
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


@dataclass(frozen=True)
class Meeting:
    """Where the processes of this job find their service on this node."""

    key: str
    key_source: str
    directory: str
    socket: str

    @property
    def log(self) -> str:
        return f"{self.socket}.log"


def meeting_place(environ: Mapping[str, str]) -> Meeting:
    """Key, runtime directory and socket of this job; raises UffdPrefetchError (125)."""
    key = job_key(environ, os.getpid(), os.getppid(), f"{time.time_ns():x}")
    directory = runtime_directory(environ)
    return Meeting(key.key, key.source, directory, socket_path(directory, key.key))


# ---- the service --------------------------------------------------------------------------------


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of our own interpreters beside the job, started in our directory."""
    environment = dict(environ)
    # Neither our preload object nor a profiler of the job's is loaded.
    environment.pop("LD_PRELOAD", None)
    environment.pop("PYTHONINSPECT", None)
    # It changes its directory, so that a queue.py beside the training script does not shadow the
    # library's; relative entries and a package in the current directory must still be found.
    entries = [os.path.abspath(e) for e in environ.get("PYTHONPATH", "").split(os.pathsep) if e]
    home = os.path.dirname(PACKAGE)
    if sys.path and os.path.realpath(sys.path[0] or ".") == os.path.realpath(home):
        entries.append(home)
    if entries:
        environment["PYTHONPATH"] = os.pathsep.join(entries)
    return environment


def _service_environment(
    environ: Mapping[str, str], config: Config, meeting: Meeting
) -> dict[str, str]:
    environment = own_environment(environ)
    environment["UFFDPREFETCH_SERVE_CONFIG"] = config.to_json()
    environment["UFFDPREFETCH_RUN"] = meeting.key
    environment["UFFDPREFETCH_RUNDIR"] = meeting.directory
    return environment


def start_service(
    environ: Mapping[str, str], config: Config, meeting: Meeting
) -> subprocess.Popen[bytes]:
    """Start ``uffdprefetch serve`` as a daemon that outlives us; a lock makes it the only one."""
    service = subprocess.Popen(
        [
            *(sys.executable, "-m", "uffdprefetch", "serve"),
            *("--socket", meeting.socket, "--log", meeting.log, "--starter", str(os.getpid())),
        ],
        env=_service_environment(environ, config, meeting),
        cwd=meeting.directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=True,  # an inherited pipe of the job's would never reach EOF
        start_new_session=True,  # Ctrl-C is for the job
        preexec_fn=spawn.shield_from_the_start,  # safe: this process has one thread
    )
    try:
        # mpirun binds a rank, and so us, to a core; the service works for all ranks. The kernel
        # restricts this to the cgroup's CPUs.
        os.sched_setaffinity(service.pid, range(os.cpu_count() or 1))
    except OSError:
        pass
    return service


def _last_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file.read()[-4096:].splitlines() if line.strip()]
        return lines[-1] if lines else "its log is empty"
    except OSError:
        return "it left no log"


def find_or_start(
    environ: Mapping[str, str], config: Config, meeting: Meeting
) -> tuple[NodeClient, subprocess.Popen[bytes] | None]:
    """Connect to the job's service on this node, starting it if it does not answer.

    Of many ranks at once the one with the lock starts it, the others wait.
    Raises UffdPrefetchError (125) if there is no service after START_TIMEOUT_SECONDS.
    """
    identity = identify(environ)
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    started: subprocess.Popen[bytes] | None = None
    detail = "nobody listens"
    mark = meeting.socket + leftovers.START
    lock_fd: int | None = None
    try:
        while True:
            try:
                return NodeClient.connect(meeting.socket, identity, deadline), started
            except NotOurService as error:
                raise UffdPrefetchError(
                    f"no service: on {meeting.socket} {error}", EXIT_OURS
                ) from None
            except (ServiceGone, TimeoutError) as error:
                detail = str(error)  # it is just ending: retry
            except OSError as error:
                detail = f"{meeting.socket}: {error.strerror}"
            if lock_fd is None:
                lock_fd = leftovers.hold(mark)
                if lock_fd is not None:
                    continue  # it may have been started before we had the lock
            elif started is None:
                started = start_service(environ, config, meeting)
            elif started.poll() == 0:
                started = None  # another service was running, and is just ending
            elif started.poll():
                detail = f"it ended with status {started.returncode} ({_last_line(meeting.log)})"
                break
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_SECONDS)
    finally:
        if lock_fd is not None:
            leftovers.release(mark, lock_fd)
    raise UffdPrefetchError(f"no service: {detail}; see {meeting.log}", EXIT_OURS)


# ---- the job ------------------------------------------------------------------------------------


def job_environment(
    environ: Mapping[str, str], config: Config, meeting: Meeting, preload: str | None
) -> dict[str, str]:
    """The job's environment: ``environ`` and the variables of the preload object and nested
    wraps."""
    environment = {**environ, **config.environment()}
    environment["UFFDPREFETCH_RUN"] = meeting.key
    environment["UFFDPREFETCH_RUNDIR"] = meeting.directory
    environment["UFFDPREFETCH_SOCKET"] = meeting.socket
    environment["UFFDPREFETCH_MIN_SIZE"] = str(config.min_size_bytes)
    environment["UFFDPREFETCH_LISTEN"] = str(spacing_bytes(config.distance_bytes))
    if config.engine == "pool" or "UFFDPREFETCH_ENGINE" in environment:
        environment["UFFDPREFETCH_ENGINE"] = config.engine  # the one in use, not the one asked for
    environment.pop("UFFDPREFETCH_KEEP_ADVICE", None)
    if config.policy == "none":
        # Only observing: the job's own MADV_RANDOM stays in force.
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


def _own_locks(config: Config, meeting: Meeting) -> OwnLocks | None:
    """Join the job's directory of lock files; raises UffdPrefetchError with --strict only."""
    try:
        return OwnLocks.enter(f"{meeting.socket}{LOCKS_SUFFIX}")
    except UffdPrefetchError as error:
        if config.strict:
            raise
        say(f"the ranks share the LMDB lock files: {error.message}")
        return None


def _record(
    config: Config, environ: Mapping[str, str], meeting: Meeting | None, argv: Sequence[str]
) -> Recording | None:
    """Start the recorder of this job and node, unless another launcher has.

    Raises UffdPrefetchError when the file cannot be created; on other errors, after a line, the job
    runs without it.
    """
    from uffdprefetch.trace.record.program import Spec
    from uffdprefetch.trace.record.starter import MAX_EVENTS, MIN_SIZE_BYTES, Recording, output_path

    assert config.trace is not None
    key = meeting.key if meeting else ""
    name = output.expand(config.trace, key, identify(environ).rank, environ)
    mark = None
    if meeting is not None:
        mark = meeting.socket + leftovers.TRACE
        try:
            mark_fd = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            _wait_for_recorder(mark)
            return None
        fcntl.flock(mark_fd, fcntl.LOCK_SH)  # ours until we end (protocol/leftovers.py)
    spec = Spec(
        output_path(name), config.force, list(config.include), MIN_SIZE_BYTES, MAX_EVENTS,
        list(argv), launcher=os.getpid(), quiet=config.quiet,
    )  # fmt: skip
    directory = meeting.directory if meeting else "/"
    try:
        recording = Recording.start(spec, own_environment(environ), directory)
    except UffdPrefetchError as error:
        if mark is not None:
            os.unlink(mark)
        if error.exit_code == EXIT_USAGE:
            raise
        say(f"running the job without a trace: {error.message}")
        return None
    if mark is not None:
        with open(mark, "w") as file:
            file.write("ready\n")
    return recording


def _wait_for_recorder(mark: str) -> None:
    """Wait for the recorder of another launcher, so that the job's first events are recorded."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    with contextlib.suppress(OSError):
        while os.stat(mark).st_size == 0 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


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
    output.expand(config.output, "", None, environ)  # errors are reported before the job runs
    if config.plan is not None and config.engine != "off":
        from uffdprefetch.orders import plan_file

        plan_file.load(config.plan)  # likewise
    client: NodeClient | None = None
    service: subprocess.Popen[bytes] | None = None
    meeting: Meeting | None = None
    locks: OwnLocks | None = None
    environment = environ
    try:
        meeting = meeting_place(environ)
        config = _with_an_engine(config, environ)
        preload = None
        if config.engine != "off" or config.ownlock:
            preload = environ.get(TEST_PRELOAD_VARIABLE)
            if not preload:
                preload = preloadable(preload_object(), meeting.directory)
        locks = _own_locks(config, meeting) if config.ownlock else None
        if locks is not None and preload is not None:  # no service needed
            environment = {**environ, **preloading(environ, preload)}
            environment[LOCKS_VARIABLE] = locks.directory
        client, service = find_or_start(environ, config, meeting)
        if config.engine_asked and service is not None:  # by the rank that started it only
            say(why_fallen_back(config))
        if client.options not in (0, config.fingerprint()) and not config.quiet:
            say("the job's service on this node was started with other options: those hold")
        environment = job_environment(environment, config, meeting, preload)
    except (UffdPrefetchError, OSError) as error:
        text = error.message if isinstance(error, UffdPrefetchError) else str(error)
        if config.strict:
            raise UffdPrefetchError(text, EXIT_OURS) from None
        say(f"running the job without prefetching: {text}")
    if config.trace is not None:
        recording = _record(config, environ, meeting, argv)
    if recording is not None and client is not None and meeting is not None:
        recording.tell(socket=meeting.socket)
    if config.verbose and meeting is not None and client is not None:
        say(f"job {meeting.key} (from {meeting.key_source}), log {meeting.log}")

    view = None
    if config.live and client is not None and meeting is not None:
        from uffdprefetch.launch.panel import Live

        view = Live(meeting.socket, config.interval_seconds, environ)

    def started(pid: int) -> None:
        if client is not None:
            client.job_started(pid)
        if view is not None:
            view.start()

    def child_changed() -> None:
        if service is not None:
            service.poll()  # a service that died must not stay a zombie
        if recording is not None:
            recording.ended()

    try:
        around_stop = view.suspended if view is not None else contextlib.nullcontext
        status = spawn.run(argv, environment, started, child_changed, around_stop)
    finally:
        if view is not None:
            view.stop()
        if locks is not None:
            locks.leave()
    last = True
    if client is not None and meeting is not None:
        last = _report(config, environ, client, meeting, status, only_record)
        if last:
            client.gone(time.monotonic() + TIDY_TIMEOUT_SECONDS)
        client.close()
    if meeting is not None and last:
        leftovers.tidy(meeting.socket)
    if recording is not None:
        recording.end(os.waitstatus_to_exitcode(status), wait=last)
    return spawn.end_like(status)


def _report(
    config: Config,
    environ: Mapping[str, str],
    client: NodeClient,
    meeting: Meeting,
    status: int,
    only_record: bool,
) -> bool:
    """Request the summary, which the last launcher of the node and job prints and writes. Returns
    whether this is the last."""
    try:
        finished = client.finish(status, time.monotonic() + SUMMARY_TIMEOUT_SECONDS)
    except ServiceGone as error:
        say(
            f"the service died during the run ({error}); the job went on without it,"
            f" there is no summary; see {meeting.log}"
        )
        return True
    except TimeoutError:
        say(f"no summary: the service did not answer within 5 s; see {meeting.log}")
        return True
    client.part()
    if not finished.last:
        return False
    if only_record:
        return True
    from uffdprefetch.report import summary

    rank = identify(environ).rank
    path = None
    try:
        name = output.expand(config.output, meeting.key, rank, environ)
        path = output.write(name, finished.summary, config.force)
    except (OSError, UffdPrefetchError) as error:
        say(f"summary not written: {error}")
    if not config.quiet:
        try:
            lines = summary.lines(finished.summary, path)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            lines = [f"the summary cannot be shown ({type(error).__name__}: {error})"]
        for line in lines:
            say(line)
    return True
