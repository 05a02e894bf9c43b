# SPDX-License-Identifier: Apache-2.0
"""The job's service on this node, from the launcher's side: found, or started beside the job.

The launcher that starts a service listens on its socket before the service does anything: who
connects waits in the kernel's queue, and neither the job nor another rank waits for an interpreter.
The service inherits the socket and the lock that makes it the only one (protocol/leftovers.py).
Until it says that it is up the launcher keeps both too. So it can see whether anybody has come, and
where the job ends before that and nobody has, it ends the service again.
"""

from __future__ import annotations

import _socket  # the standard socket module loads enum, selectors and collections around it
import os
import select
import signal
import sys
import time

from uffdprefetch.base import cgroup, spawn
from uffdprefetch.base.bystander import state_of
from uffdprefetch.base.config import SERVED_VARIABLE
from uffdprefetch.base.errors import EXIT_NO_ROOM, EXIT_OURS, UffdPrefetchError
from uffdprefetch.base.identity import identify
from uffdprefetch.base.rundir import is_of_node
from uffdprefetch.protocol import leftovers, start_log
from uffdprefetch.protocol.node import JobRead, NodeClient, NotOurService, ServiceGone

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from uffdprefetch.base.config import Config
    from uffdprefetch.base.identity import Identity
    from uffdprefetch.launch.address import Address

#: Time without its socket after which a service is ended: removing it is a service's last act.
LOST_SECONDS = 1.0
START_TIMEOUT_SECONDS = 10.0
#: Connections that wait for the service while it starts: those of all ranks of a node, and of all
#: their processes. The kernel takes no more than net.core.somaxconn.
BACKLOG = 4096
#: Interval of looks for a service that is waited for.
_POLL_SECONDS = 0.002
#: Interval of looks whether one that is waited for stands still.
_LOOK_SECONDS = 0.1
#: Time limit for a service to end after its connections have: the kernel ends them together.
_ENDING_SECONDS = 0.5
#: Time limit for the kernel to close what a killed service had open, its locks after marks of
#: directories (fanotify, inotify), which take 10 to 50 ms. Beside busy processes 0.8 s was seen.
_CLOSING_SECONDS = 5.0
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


# ---- starting it --------------------------------------------------------------------------------


class Started:
    """A service that this launcher has started and that is not known to be up.

    ``listener`` and ``lock_fd`` are the launcher's own descriptors of what the service inherits.
    """

    def __init__(self, pid: int, listener: _socket.socket, lock_fd: int) -> None:
        self.pid = pid
        self.cpu_seconds = 0.0  # once it has ended
        self.status: int | None = None  # as of waitpid(2), once it has ended
        self.read = JobRead(0, 0, 0)  # what it has read, which counts for us from then on
        self._listener = listener
        self._lock_fd = lock_fd

    def has_ended(self) -> bool:
        """Whether it has; a service that died must not stay a zombie."""
        self._reap(os.WNOHANG)
        return self.status is not None

    def _reap(self, options: int) -> None:
        if self.status is not None:
            return
        before = JobRead.now()
        try:
            pid, status, usage = os.wait4(self.pid, options)
        except ChildProcessError:  # we were started with SIGCHLD ignored
            self.status = 0
            return
        if pid:
            self.status, self.read = status, JobRead.now().since(before)
            self.cpu_seconds = usage.ru_utime + usage.ru_stime

    def signal(self, number: signal.Signals) -> None:
        """Send it one, unless it has ended."""
        if self.status is None:
            os.kill(self.pid, number)

    def let_go(self) -> None:
        """Close our copies of a service's socket and lock, once it is up or has ended."""
        self._listener.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _somebody_came(self) -> bool:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        return bool(poll.poll(0))

    def _has_lock(self, socket: str) -> bool:
        """Whether the lock beside the socket is the one that we keep, and so no other service's."""
        try:
            status = os.stat(socket + leftovers.LOCK)
        except OSError:
            return False
        return os.path.samestat(status, os.fstat(self._lock_fd))

    def end_unused(self, socket: str) -> bool:
        """End it where it is not up yet and nobody has ever connected; whether that was so.

        First its socket gets another name, so that nobody can come any more, as where somebody has
        removed it. Then nobody waits in the queue, and then it has not said that it is up: so it
        had accepted nobody before.
        """
        if self._lock_fd < 0 or self._somebody_came():
            return False
        away = socket + leftovers.AWAY
        try:
            os.rename(socket, away)
        except OSError:
            pass
        if not self._has_lock(socket):  # it has ended, and has just removed its names
            return False
        if self._somebody_came() or not leftovers.is_starting(socket):
            if os.path.exists(away):
                os.rename(away, socket)
            return False
        os.kill(self.pid, signal.SIGKILL)
        self._reap(0)
        self._listener.close()
        leftovers.remove_names(socket, self._lock_fd)
        self._lock_fd = -1
        return True


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
    environ: Mapping[str, str], config: Config, address: Address
) -> dict[str, str]:
    environment = own_environment(environ)
    environment[SERVED_VARIABLE] = config.to_json()
    environment["UFFDPREFETCH_RUN"] = address.key
    environment["UFFDPREFETCH_RUNDIR"] = address.directory
    return environment


def command(
    address: Address, listener_fd: int, lock_fd: int, start_log_fd: int | None = None
) -> list[str]:
    """The command line of a service that inherits these descriptors."""
    words = [
        *(sys.executable, "-m", "uffdprefetch", "serve"),
        *("--socket", address.socket, "--log", address.log, "--starter", str(os.getpid())),
        *("--listener", str(listener_fd), "--lock", str(lock_fd)),
    ]
    return words if start_log_fd is None else [*words, "--start-log", str(start_log_fd)]


def is_command(words: Sequence[str]) -> bool:
    """Whether command() has made it."""
    return list(words[1:4]) == ["-m", "uffdprefetch", "serve"]


def start_service(
    environ: Mapping[str, str], config: Config, address: Address, lock_fd: int
) -> Started:
    """Start ``uffdprefetch serve`` as a daemon that outlives us, by who holds its lock.

    On return somebody listens on its socket. Raises OSError; then the names are gone.
    """
    lock_fd = spawn.above_standard(lock_fd)
    try:
        leftovers.make_names(address.socket, plan=config.policy != "none")
        bound = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        listener = _socket.socket(fileno=spawn.above_standard(bound.detach()))
        listener.bind(address.socket)
        os.chmod(address.socket, 0o600)
        listener_fd = listener.fileno()
        start_log_fd = _start_log(config)
        inherited = (listener_fd, lock_fd, start_log_fd)

        def prepare(error_fd: int) -> None:
            os.setsid()  # Ctrl-C is for the job
            spawn.shield_from_the_start()
            nothing = spawn.above_standard(os.open(os.devnull, os.O_RDWR))
            for fd in (0, 1, 2):
                os.dup2(nothing, fd)
            for name in os.listdir("/proc/self/fd"):
                # an inherited pipe of the job's would never reach EOF
                if int(name) > 2 and int(name) != error_fd:
                    _set_inheritable(int(name), int(name) in inherited)
            os.chdir(address.directory)
            leftovers.show_holder(lock_fd)
            # Here, and not before: SO_PEERCRED of who connects says who has called it.
            listener.listen(BACKLOG)

        environment = _service_environment(environ, config, address)
        words = command(address, listener_fd, lock_fd, start_log_fd)
        pid = spawn.start(words, environment, prepare)
        if start_log_fd is not None:
            _publish(address, pid, start_log_fd)
    except BaseException:
        leftovers.remove_names(address.socket, lock_fd)
        raise
    try:
        # mpirun binds a rank, and so us, to a core; the service works for all ranks. The kernel
        # restricts this to the cgroup's CPUs.
        os.sched_setaffinity(pid, range(os.cpu_count() or 1))
    except OSError:
        pass
    return Started(pid, listener, lock_fd)


def _start_log(config: Config) -> int | None:
    """The memory in which the job's processes note what they open (`--learn`), for the service to
    inherit; None where none is to be had: the service tells."""
    if config.learn.name is None:
        return None
    try:
        return spawn.above_standard(start_log.make())
    except OSError:
        return None


def _publish(address: Address, pid: int, start_log_fd: int) -> None:
    try:
        start_log.publish(address.socket, pid, start_log_fd)
    except OSError:
        pass  # the directory is full: nothing is noted
    os.close(start_log_fd)


def _set_inheritable(fd: int, inheritable: bool) -> None:
    try:
        os.set_inheritable(fd, inheritable)
    except OSError:
        pass  # the one by which the directory was listed


def _last_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file.read()[-4096:].splitlines() if line.strip()]
        return lines[-1] if lines else "its log is empty"
    except OSError:
        return "it left no log"


# ---- speaking with it ---------------------------------------------------------------------------


class JobService:
    """The job's service: connected to, or started by us and not up yet."""

    def __init__(
        self, address: Address, identity: Identity, client: NodeClient | None = None,
        started: Started | None = None,
    ) -> None:  # fmt: skip
        """One of ``client`` and ``started`` is given."""
        self.address = address
        self.started = started
        self._identity = identity
        self._client = client
        self._job = 0
        self._missing_since = 0.0

    @property
    def had_no_room(self) -> bool:
        """Whether it has ended since the job needed the memory; known to who has started it."""
        status = self.started.status if self.started and self.started.has_ended() else None
        return status is not None and os.waitstatus_to_exitcode(status) == EXIT_NO_ROOM

    @property
    def is_welcome(self) -> bool:
        """Whether the service is up and has answered."""
        return self._client is not None and self._client.welcomed

    def job_started(self, pid: int) -> None:
        """Tell the job's pid, now or when the service is up; one that is gone is noticed at the
        end."""
        self._job = pid
        if self._client is not None:
            self._client.job_started(pid)

    def child_changed(self) -> None:
        """A child of ours has ended, perhaps the service."""
        if self.started is not None and self.started.has_ended():
            self.started.let_go()

    def is_awaited(self) -> bool:
        """Connect as soon as the service that we have started is up; false when there is nothing
        (more) to be waited for. Does not wait."""
        if self.started is None or self._client is not None or self.started.has_ended():
            return False
        if leftovers.is_starting(self.address.socket):
            return True
        try:
            self._client = NodeClient.call(self.address.socket, self._identity)
        except FileNotFoundError:  # it is just ending, or somebody has removed its socket
            return not self._is_lost()
        except (OSError, ServiceGone):
            return True  # it has ended, perhaps: its status will tell
        finally:
            self.started.let_go()
        if self._job:
            self._client.job_started(self._job)
        return False

    def _is_lost(self) -> bool:
        """Whether its socket has been gone for LOST_SECONDS, and it has not ended; then it does, as
        nobody can come any more."""
        assert self.started is not None
        self._missing_since = self._missing_since or time.monotonic()
        if time.monotonic() < self._missing_since + LOST_SECONDS or self.started.has_ended():
            return False
        self.started.signal(signal.SIGTERM)
        return True

    def let_it_end(self) -> bool:
        """Whether a service that does not answer is stopped (SIGSTOP); then it is continued, as it
        ends by itself when nobody is left. Another launcher's service is left alone."""
        if self.started is None or not self.lives_on:
            return False
        stands = state_of(self.started.pid) == "T"
        if stands:
            self.started.signal(signal.SIGCONT)
        return stands

    def client(self, *, job_is_over: bool = False) -> NodeClient:
        """The connection, once the service has answered.

        Raises ServiceGone where it has ended or cannot be reached any more, NotOurService for a
        stranger, TimeoutError when it does not answer within START_TIMEOUT_SECONDS. With
        ``job_is_over`` where it has not answered yet, and stands still (launch/getting_on.py).
        """
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        stands = self._stands_still() if job_is_over and not self.is_welcome else lambda: False
        while self.is_awaited():
            if time.monotonic() >= deadline or stands():
                raise TimeoutError("it does not start")
            time.sleep(_POLL_SECONDS)
        if self._client is None and self.started is not None and not self.started.has_ended():
            raise ServiceGone(f"somebody has removed {self.address.socket}")
        if self._client is None:
            assert self.started is not None and self.started.status is not None
            status = os.waitstatus_to_exitcode(self.started.status)
            raise ServiceGone(f"it ended with status {status} ({_last_line(self.address.log)})")
        while not self._client.welcomed:
            try:
                self._client.await_welcome(min(deadline, time.monotonic() + _LOOK_SECONDS))
            except TimeoutError:
                if time.monotonic() >= deadline or stands():
                    raise
        return self._client

    def _stands_still(self) -> Callable[[], bool]:
        from uffdprefetch.launch.getting_on import GettingOn

        pid = self._client.service_pid if self._client is not None else 0
        return GettingOn(self.started.pid if self.started is not None else pid).stands

    def come_up(self) -> JobService:
        """Wait for it, before the job: returns itself. Raises UffdPrefetchError (125)."""
        try:
            self.client()
        except NotOurService as error:
            raise no_service(f"on {self.address.socket} {error}") from None
        except (ServiceGone, TimeoutError) as error:
            raise no_service(f"{error}{self.address.see_log}") from None
        return self

    @property
    def is_starting(self) -> bool:
        """Whether a service has not said yet that it is up."""
        return leftovers.is_starting(self.address.socket)

    @property
    def lives_on(self) -> bool:
        """Whether it is one that we have started and that has not ended: it ends by itself, when
        nobody is left, and removes its names."""
        return self.started is not None and not self.started.has_ended()

    def cpu_seconds(self) -> float:
        """CPU time of a service that has ended; 0 while that is unknown."""
        if self.started is None or not self.started.has_ended():
            return 0.0
        return self.started.cpu_seconds

    def was_killed(self) -> bool | None:
        """Whether a service that is gone was killed by SIGKILL; None where another launcher has
        started it, or it does not end."""
        if self.started is None:
            return None
        deadline = time.monotonic() + _ENDING_SECONDS
        while not self.started.has_ended() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if self.started.status is None:
            return None
        return os.waitstatus_to_exitcode(self.started.status) == -signal.SIGKILL

    def end_unused(self) -> bool:
        """End the service where we have started it, it is not up yet, and nobody has ever
        connected to it: whether that was so."""
        if self.started is None or self._client is not None or self.started.has_ended():
            return False
        if not self.started.end_unused(self.address.socket):
            return False
        leftovers.sweep(self.address.socket, is_of_node)  # what else its service would have removed
        return True

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self.started is not None:
            self.started.let_go()


def tidy(socket: str) -> None:
    """Remove what the service of a socket has left; one that stays for another job does so itself.
    One that was killed has its lock until the kernel has closed all that it had open, its listening
    socket among the first."""
    deadline = time.monotonic() + _CLOSING_SECONDS
    while not leftovers.tidy(socket):
        if _is_listening(socket) or time.monotonic() >= deadline:
            return
        time.sleep(_POLL_SECONDS)


def _is_listening(socket: str) -> bool:
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        connection.setblocking(False)
        connection.connect(socket)
    except BlockingIOError:  # many wait there
        return True
    except OSError:
        return False
    finally:
        connection.close()
    return True


def no_service(why: str) -> UffdPrefetchError:
    return UffdPrefetchError(f"no service: {why}", EXIT_OURS)


def _check_room(address: Address, lock_fd: int) -> None:
    """Raises UffdPrefetchError where the memory group is too full for a service; then the names are
    gone."""
    why = cgroup.why_no_room(cgroup.SERVICE_BYTES)
    if why is not None:
        leftovers.remove_names(address.socket, lock_fd)
        raise no_service(why)


def find_or_start(environ: Mapping[str, str], config: Config, address: Address) -> JobService:
    """The job's service on this node, started if nobody listens. One that runs has answered; one
    that is just starting, by whomever, is not waited for.

    Raises UffdPrefetchError (125) if neither succeeds within START_TIMEOUT_SECONDS.
    """
    identity = identify(environ)
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        client = None
        try:
            client = NodeClient.call(address.socket, identity)
            if not leftovers.is_starting(address.socket):
                client.await_welcome(deadline)
            return JobService(address, identity, client)
        except NotOurService as error:
            raise no_service(f"on {address.socket} {error}") from None
        except (ServiceGone, TimeoutError) as error:
            detail = str(error)  # it is just ending: retry
        except OSError as error:
            detail = f"{address.socket}: {error.strerror}"
            lock_fd = leftovers.hold(address.socket + leftovers.LOCK)
            if lock_fd is not None:
                _check_room(address, lock_fd)
                started = start_service(environ, config, address, lock_fd)
                return JobService(address, identity, started=started)
        if client is not None:
            client.close()
        if time.monotonic() >= deadline:
            raise no_service(f"{detail}{address.see_log}")
        time.sleep(_POLL_SECONDS)
