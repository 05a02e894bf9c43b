# SPDX-License-Identifier: Apache-2.0
"""One run of a command, from its start to its exit: what it took, and how it is ended early.

What the command leaves behind is adopted (a child subreaper, prctl(2)), so that its service is
waited for, and the kernel adds to our children's figures what that has used and read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from uffdprefetch.base import procfs, spawn
from uffdprefetch.cluster import brood
from uffdprefetch.compare import watch
from uffdprefetch.protocol.node import JobRead

#: Wait for processes that a run leaves behind: a service ends with its job's launcher. Those that
#: live longer are left alone.
LEFT_BEHIND_SECONDS = 2.0
#: Time limit for a run to end after a signal, and the interval of looks.
END_SECONDS, LOOK_SECONDS = 5.0, 0.01


class Ended(NamedTuple):
    """``status``: as subprocess has it, negative for a signal; ``cpu_seconds``, ``major_faults``,
    ``read_bytes`` (from devices that count it; None: this kernel does not): of all its processes
    that have ended; ``others_cpu_seconds``, ``stolen_seconds``: of the machine meanwhile."""

    status: int
    seconds: float
    cpu_seconds: float
    major_faults: int
    read_bytes: int | None
    others_cpu_seconds: float
    stolen_seconds: float


def adopt() -> None:
    """Before the first run."""
    brood.adopt()


def _spawn(
    argv: Sequence[str], environment: Mapping[str, str], output: tuple[int, int],
    mask: Collection[int],
) -> int:  # fmt: skip
    """Start a command in a session of its own (Ctrl-C is ours), with nothing to read."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output[0], 1),
        (os.POSIX_SPAWN_DUP2, output[1], 2),
    ]
    return os.posix_spawnp(
        argv[0], list(argv), environment, file_actions=actions, setsid=True,
        setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),  # the interpreter ignores them
        setsigmask=mask,
    )  # fmt: skip


def _start(
    argv: Sequence[str], environment: Mapping[str, str], output: tuple[int, int],
    mask: Collection[int],
) -> int:  # fmt: skip
    """Its pid. ``output``: descriptors of its stdout and stderr; ``mask``: the signals that it has
    blocked. Raises UffdPrefetchError (126, 127)."""
    try:
        try:
            return _spawn(argv, environment, output, mask)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            return _spawn(spawn.as_script(argv, environment), environment, output, mask)
    except OSError as error:
        raise spawn.cannot_execute(argv[0], error) from None


def run(
    argv: Sequence[str], environment: Mapping[str, str], output: tuple[int, int],
    is_wrapped: bool, is_learning: bool = False,
) -> tuple[Ended, watch.RunObservations]:  # fmt: skip
    """Run a command to its end, and what was seen of it. An exception, as a signal raises it, ends
    it."""
    usage, read = resource.getrusage(resource.RUSAGE_CHILDREN), JobRead.now()
    (busy, stolen), begin = procfs.machine_cpu_seconds(), time.monotonic()
    own, before = time.process_time(), procfs.children(os.getpid())
    # A signal that comes between a start and its number would leave the job to itself.
    mask, pid = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()), 0
    try:
        pid = _start(argv, environment, output, mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with watch.RunWatcher(pid, is_wrapped, before, is_learning) as seen:
            ended, status = 0, 0
            while ended != pid:  # or what it has left behind, for which nobody else waits
                ended, status = os.waitpid(-1, 0)
            seconds = time.monotonic() - begin
    except BaseException:
        if pid:
            end([pid, *watch.job_processes(pid, is_wrapped, before)])
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    _await_what_is_left()
    after, storage = resource.getrusage(resource.RUSAGE_CHILDREN), JobRead.now().since(read)
    cpu = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    busy_now, stolen_now = procfs.machine_cpu_seconds()
    # What was waited for afterwards is none of the run.
    part = seconds / (time.monotonic() - begin)
    figures = Ended(
        os.waitstatus_to_exitcode(status), seconds, cpu, after.ru_majflt - usage.ru_majflt,
        storage.from_storage,
        part * max(0.0, busy_now - busy - cpu - (time.process_time() - own)),
        part * (stolen_now - stolen),
    )  # fmt: skip
    return figures, seen


def _await_what_is_left() -> None:
    until = time.monotonic() + LEFT_BEHIND_SECONDS
    while _reap() and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)


def _reap() -> bool:
    """Take the status of what has ended; whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _has_ended(pids: Sequence[int]) -> bool:
    """Whether all of these are gone within END_SECONDS."""
    until = time.monotonic() + END_SECONDS
    while _reap() and any(os.path.exists(f"/proc/{pid}") for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def end(pids: Sequence[int]) -> None:
    """End a run, of which these processes are known; the first one leads its group. As Ctrl-C does,
    then by SIGKILL. Its service ends by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pids[0], signal.SIGINT)
    if not _has_ended(pids):
        brood.send(pids, signal.SIGKILL)
        _has_ended(pids)
    _await_what_is_left()
