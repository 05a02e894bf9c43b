# SPDX-License-Identifier: Apache-2.0
"""Runs a program transparently: its signals, descriptors, environment and status.

Known differences from a plain run: two more processes (its parent and that one's other child,
base/bystander.py), and an inherited *ignored* SIGPIPE or SIGXFSZ is reset to the default, since the
interpreter overwrites both before our code runs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys

from uffdprefetch.base.bystander import Bystander
from uffdprefetch.base.errors import EXIT_CANNOT_EXECUTE, EXIT_NOT_FOUND, UffdPrefetchError
from uffdprefetch.base.follow import PASSED_ON, Follower, Nothing, pending, send, unless_it_fails
from uffdprefetch.base.oom import goes_first

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import NoReturn

#: Timers of setitimer(2), which survive execve(2) and not fork(2).
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
#: Not ignored by our processes beside the job: synchronous faults, SIGCHLD, lease and termination
#: signals, and those without an effect by default.
_OUR_OWN = frozenset({
    signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE,
    signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS, signal.SIGCHLD, signal.SIGCONT, signal.SIGIO,
    signal.SIGTERM, signal.SIGURG, signal.SIGWINCH,
})  # fmt: skip


def shield() -> None:
    """Ignore signals meant for the job: job managers signal all processes of a step, ours too."""
    for number in signal.valid_signals() - _OUR_OWN:
        signal.signal(number, signal.SIG_IGN)


def stand_aside() -> None:
    """In our child before exec: neither the job's signals nor its memory are for it."""
    goes_first()
    shield()


def shield_from_the_start() -> None:
    """stand_aside(); SIGTERM is ignored, too, until it has its own handler."""
    stand_aside()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def inherited_environment() -> dict[str, str]:
    """The environment that we were started with.

    In the C locale the interpreter sets LC_CTYPE for itself and its children (PEP 538), which must
    not reach the job. /proc/self/environ has the environment at execve().
    """
    environment = dict(os.environ)
    if "LC_CTYPE" in environment:
        try:
            with open("/proc/self/environ", "rb") as file:
                names = {entry.partition(b"=")[0] for entry in file.read().split(b"\0")}
            if b"LC_CTYPE" not in names:
                del environment["LC_CTYPE"]
        except OSError:
            pass
    return environment


def as_script(argv: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The shell command for a text file without a #! line, as execvp(3) runs it."""
    import shutil

    path = argv[0]
    if "/" not in path:
        path = shutil.which(path, path=environment.get("PATH", os.defpath)) or path
    return ["/bin/sh", path, *argv[1:]]


def can_execute(program: str, environment: Mapping[str, str]) -> bool:
    """Whether execvp(3) would find it, asked before anything is done for its run."""
    import shutil

    return shutil.which(program, path=environment.get("PATH", os.defpath)) is not None


def cannot_execute(program: str, error: OSError) -> UffdPrefetchError:
    """What execve(2) has refused, with exit code 126 or 127."""
    code = EXIT_NOT_FOUND if error.errno == errno.ENOENT else EXIT_CANNOT_EXECUTE
    return UffdPrefetchError(f"cannot execute {program!r}: {os.strerror(error.errno or 0)}", code)


def execute(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by the program; raises UffdPrefetchError with exit code 126 or 127."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        try:
            os.execvpe(argv[0], list(argv), dict(environment))
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            script = as_script(argv, environment)
            os.execve(script[0], script, dict(environment))
    except OSError as error:
        raise cannot_execute(argv[0], error) from None


def above_standard(fd: int) -> int:
    """``fd``, or in its place a duplicate, close-on-exec, where it is one of 0, 1 and 2, which may
    be closed when we start."""
    if fd > 2:
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def start(
    argv: Sequence[str], environment: Mapping[str, str], prepare: Callable[[int], None]
) -> int:
    """Start ``argv``, found in PATH as execvp(3) does: its pid. Raises OSError of execve(2).

    ``prepare`` is called in the child, with a descriptor that it must leave open. It may call
    anything, since this process has one thread. The child has the default actions for the signals
    that the interpreter ignores or handles, and what descriptors are inheritable.
    """
    reader, writer = map(above_standard, os.pipe2(os.O_CLOEXEC))
    try:
        pid = os.fork()
        if pid == 0:
            _become(argv, environment, prepare, writer)
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    failed = os.read(reader, 16)  # nothing when it is closed by execve()
    os.close(reader)
    if failed:
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:  # we were started with SIGCHLD ignored
            pass
        raise OSError(int(failed), os.strerror(int(failed)))
    return pid


def _become(
    argv: Sequence[str], environment: Mapping[str, str], prepare: Callable[[int], None], writer: int
) -> NoReturn:
    try:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a pending one is the program's
        prepare(writer)
        os.execvpe(argv[0], list(argv), dict(environment))
    except OSError as error:
        os.write(writer, b"%d" % (error.errno or errno.EINVAL))
    finally:
        os._exit(EXIT_CANNOT_EXECUTE)


def run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    started: Callable[[int], None],
    child_changed: Callable[[], None],
    around_stop: Callable[[], AbstractContextManager[None]] = Nothing,
    awaits: Callable[[], bool] = lambda: False,
) -> int:
    """Run ``argv`` to its end, follow it (base/follow.py) and return its status as of waitpid(2).

    ``started`` is called with the job's pid once it runs; ``child_changed`` whenever a child of
    ours has changed state; ``around_stop`` is entered before we stop with the job and left when we
    continue; ``awaits`` is called from time to time until it is false. What they raise does not end
    the job nor the wait for it. On return all signals are still blocked: a late one must not
    replace the job's own status. Raises UffdPrefetchError (126, 127) if it cannot run.
    """
    # Blocked and taken by sigwaitinfo() instead of handlers: none is lost between fork and the
    # first wait, and the sender is known. A blocked signal is queued even if it is ignored.
    original_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    # With SIGCHLD ignored (by some launchers) the kernel would discard the status.
    chld_ignored = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # An alarm set before execve() of us (`perl -e 'alarm 9; exec @ARGV'`) is meant for the job.
    timers = [(which, signal.setitimer(which, 0)) for which in _TIMERS]

    bystander = Bystander.start(PASSED_ON)

    def in_child(_: int) -> None:
        if chld_ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        for which, remaining in timers:
            signal.setitimer(which, *remaining)
        signal.pthread_sigmask(signal.SIG_SETMASK, original_mask)

    try:
        # What has come until now the job has not got, whether the bystander has or not. A signal to
        # the group that comes during fork(2) the kernel gives to the child as well (since 4.19).
        early = pending(PASSED_ON)
        try:
            job = start(argv, environment, in_child)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            job = start(as_script(argv, environment), environment, in_child)
    except OSError as error:
        bystander.end()
        signal.pthread_sigmask(signal.SIG_SETMASK, original_mask)
        raise cannot_execute(argv[0], error) from None
    try:
        for info in early:
            send(job, info.si_signo)
        unless_it_fails(started, None)(job)
        return Follower(job, bystander, child_changed, around_stop, awaits).wait()
    finally:
        bystander.end()


def end_like(status: int) -> NoReturn:
    """End as the job did: with its exit status, or of the signal that killed it. At once: the
    interpreter's own end takes 4 ms, for which whoever started us would wait."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):  # closed, now or when we started
                pass
        os._exit(code)
    import resource

    number = -code
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    try:
        # No core of ours. 1, not 0: a core_pattern with a pipe ignores 0 (fs/coredump.c), and a
        # file of one byte is never written.
        resource.setrlimit(resource.RLIMIT_CORE, (min(1, hard) if hard >= 0 else 1, hard))
    except (OSError, ValueError):
        pass
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os._exit(128 + number)  # if the signal did not end us: the shell's convention
