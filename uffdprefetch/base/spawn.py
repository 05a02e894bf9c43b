# SPDX-License-Identifier: Apache-2.0
"""Run a program as if we were not there: its signals, descriptors, environment and status.

What a program can see of its parent is what this file is about. Known differences from a plain
run: two more processes (its parent and that one's other child, base/bystander.py), and an inherited
*ignored* SIGPIPE or SIGXFSZ comes to the program as the default, since the interpreter overwrites
both before our first line runs.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

from uffdprefetch.base.bystander import Bystander
from uffdprefetch.base.errors import EXIT_CANNOT_EXECUTE, EXIT_NOT_FOUND, UffdPrefetchError

#: Taken and passed on. Batch systems signal the process that they started, and that is the wrapper
#: (Slurm's cgroup tracking signals the task, not the task's children). One that came to the job
#: anyway, because it was sent to its process group or to a whole tree of processes, is not passed
#: on: that would make it two, and the second Ctrl-C means "abort at once" to many programs.
FORWARDED = (
    *(signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT),
    *(signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP),
)
#: From the kernel these come from the terminal, which sends them to the whole foreground group.
FROM_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP})
#: What a process of ours beside the job does not ignore: faults of its own, its children's ends,
#: what tells of leases and of the wish that it should end, and what has no effect by default.
_OUR_OWN = frozenset({
    signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE,
    signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS, signal.SIGCHLD, signal.SIGCONT, signal.SIGIO,
    signal.SIGTERM, signal.SIGURG, signal.SIGWINCH,
})  # fmt: skip


def shield() -> None:
    """Ignore every signal that is meant for the job: job managers that signal all processes of a
    step reach ours as well."""
    for number in signal.valid_signals() - _OUR_OWN:
        signal.signal(number, signal.SIG_IGN)


def shield_from_the_start() -> None:
    """The same in a child of ours before its program is executed; SIGTERM too, until that has a
    handler of its own."""
    shield()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def inherited_environment() -> dict[str, str]:
    """The environment as we were given it.

    In the C locale the interpreter sets LC_CTYPE for itself and its children (PEP 538); the job
    must not see that. /proc/self/environ still holds what execve() was given.
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


def _as_script(argv: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """What execvp(3) does with a text file that has no #! line: the shell runs it."""
    path = argv[0]
    if "/" not in path:
        path = shutil.which(path, path=environment.get("PATH", os.defpath)) or path
    return ["/bin/sh", path, *argv[1:]]


def _cannot_execute(program: str, error: OSError) -> UffdPrefetchError:
    code = EXIT_NOT_FOUND if error.errno == errno.ENOENT else EXIT_CANNOT_EXECUTE
    return UffdPrefetchError(f"cannot execute {program!r}: {os.strerror(error.errno or 0)}", code)


def execute(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become the program; raises UffdPrefetchError with exit code 126 or 127."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        try:
            os.execvpe(argv[0], list(argv), dict(environment))
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            script = _as_script(argv, environment)
            os.execve(script[0], script, dict(environment))
    except OSError as error:
        raise _cannot_execute(argv[0], error) from None


def run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    started: Callable[[int], None],
    child_changed: Callable[[], None],
    around_stop: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> int:
    """Run ``argv`` to its end, passing signals on, and return its status as waitpid() gives it.

    ``started`` is called with the job's pid once it runs; ``child_changed`` whenever some child of
    ours changed its state; ``around_stop`` is entered before we stop (Ctrl-Z) and left when we go
    on. On return all handled signals are still blocked: a late one must not
    take the place of the job's own status. Raises UffdPrefetchError (126, 127) if it cannot run.
    """
    handled = [
        number
        for number in FORWARDED
        if signal.getsignal(number) != signal.SIG_IGN  # nohup's SIGHUP stays ignored, for both
    ]
    # Blocked and taken with sigwaitinfo() rather than in handlers: nothing is lost between fork
    # and the first wait, and the sender is told.
    original_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*handled, signal.SIGCHLD})
    # With SIGCHLD ignored (some launchers leave it so) the kernel would throw the status away.
    chld_ignored = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    bystander = Bystander.start(handled)

    def in_child() -> None:
        if chld_ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, original_mask)

    def spawn(words: Sequence[str]) -> subprocess.Popen[bytes]:
        # close_fds=False: the user's descriptors are the user's; ours are close-on-exec.
        # preexec_fn is safe here: this process has one thread.
        return subprocess.Popen(
            words, env=environment, close_fds=False, preexec_fn=in_child, restore_signals=True
        )

    try:
        try:
            job = spawn(argv)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            job = spawn(_as_script(argv, environment))
    except OSError as error:
        bystander.end()
        signal.pthread_sigmask(signal.SIG_SETMASK, original_mask)
        raise _cannot_execute(argv[0], error) from None
    try:
        started(job.pid)
        return _wait(job, bystander, {*handled, signal.SIGCHLD}, child_changed, around_stop)
    finally:
        bystander.end()


def _wait(
    job: subprocess.Popen[bytes],
    bystander: Bystander,
    waited: set[signal.Signals],
    child_changed: Callable[[], None],
    around_stop: Callable[[], AbstractContextManager[None]],
) -> int:
    while True:
        info = signal.sigwaitinfo(waited)
        number = signal.Signals(info.si_signo)
        if number == signal.SIGCHLD:
            pid, status = os.waitpid(job.pid, os.WNOHANG)
            if pid == job.pid:
                job.returncode = os.waitstatus_to_exitcode(status)  # reaped here, not by Popen
                return status
            child_changed()
            continue
        # si_code > 0: the kernel; else a process called kill(2) or a relative of it
        from_terminal = number in FROM_TERMINAL and info.si_code > 0
        if not from_terminal and not bystander.has_got(info.si_signo, info.si_pid):
            os.kill(job.pid, number)  # not reaped yet, so the pid is still the job's
        if number == signal.SIGTSTP:
            with around_stop(), bystander.ours_is_late():
                _stop_ourselves()


def _stop_ourselves() -> None:
    """Stop as SIGTSTP asks, so that the shell sees it; returns when somebody continues us."""
    os.kill(os.getpid(), signal.SIGTSTP)  # blocked, hence pending until the next line
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})


def end_like(status: int) -> int:
    """End as the job ended: return its exit status, or die of the signal that killed it."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    number = -code
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    try:
        # The job's core is of interest, ours is not. 1 and not 0: a core_pattern that is a pipe
        # ignores 0 (fs/coredump.c), and a file of one byte is never written.
        resource.setrlimit(resource.RLIMIT_CORE, (min(1, hard) if hard >= 0 else 1, hard))
    except (OSError, ValueError):
        pass
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    return 128 + number  # only if the signal did not end us; the shell's convention
