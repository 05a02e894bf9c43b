# SPDX-License-Identifier: Apache-2.0
"""Looks at a job while it runs, plainly or under `wrap`, in the same way: which files it has, and
how long its threads wait.

A thread waits for storage that sleeps uninterruptibly (state D), or that sleeps and is in no system
call: then it is in a page fault (/proc/PID/task/TID/syscall says -1; proc(5)). So FUSE has it sleep
for a single page (fs/fuse/dev.c, request_wait_answer), and userfaultfd for what the pool reads
(fs/userfaultfd.c). Our processes are none of the job's.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from uffdprefetch.base import procfs
from uffdprefetch.launch import service

#: Least interval of looks at the threads' states, and at the files; and the share of a core that
#: each kind may take, which makes the interval longer for many threads.
STATES_SECONDS, FILES_SECONDS, SHARE = 0.005, 0.05, 0.01
#: The same for the files in the learning run, which is not measured: a cached file may be read
#: within a few ms.
LEARNING_SECONDS, LEARNING_SHARE = 0.001, 0.5


#: Most threads of a process in one look.
THREADS_MOST = 64


@dataclass
class RunObservations:
    """What was seen of a run. ``elsewhere``: files that are not here by the names that the job has
    for them."""

    files: set[str] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)
    waited_seconds: float = 0.0
    looks: int = 0


def waiting_threads(pid: int, turn: int = 0) -> int:
    """How many of a process's threads wait for storage. Of more than THREADS_MOST every n-th is
    looked at, in another ``turn`` others, and stands for the n. Who may not trace the process sees
    state D alone."""
    waiting, n = 0, 1
    with contextlib.suppress(OSError):  # a thread, or all of it, has ended meanwhile
        tids = os.listdir(f"/proc/{pid}/task")
        n = -(-len(tids) // THREADS_MOST)
        for tid in tids[turn % n :: n]:
            waiting += _waits(f"/proc/{pid}/task/{tid}")
    return waiting * n


def _waits(task: str) -> bool:
    with open(f"{task}/stat", "rb", buffering=0) as file:
        state = file.read(128).rpartition(b")")[2][1:2]
    if state != b"S":
        return state == b"D"
    try:
        with open(f"{task}/syscall", "rb", buffering=0) as file:
            return file.read(3) == b"-1 "
    except PermissionError:
        return False


def job_processes(pid: int, is_wrapped: bool, before: Collection[int] = ()) -> list[int]:
    """Processes of a run: those started as ``pid`` and those left behind for us to adopt, but
    `wrap` itself and what it has started beside the job. ``before``: children that we had."""
    roots = [child for child in procfs.children(os.getpid()) if child not in before]
    if is_wrapped:
        wrap = procfs.command_line(pid)  # also of a child that has not become the job yet
        roots = [child for child in roots if child != pid] + procfs.children(pid)
        words = {child: procfs.command_line(child) for child in roots}
        roots = [one for one in roots if words[one] != wrap and not service.is_command(words[one])]
    return [one for root in roots for one in procfs.descendants(root)]


class RunWatcher:
    """A thread that looks, from __enter__ to __exit__."""

    def __init__(
        self, pid: int, is_wrapped: bool, before: Collection[int], is_learning: bool = False
    ) -> None:
        """See job_processes()."""
        self.seen = RunObservations()
        self._pid, self._is_wrapped, self._before = pid, is_wrapped, before
        self._files_seconds = LEARNING_SECONDS if is_learning else FILES_SECONDS
        self._files_share = LEARNING_SHARE if is_learning else SHARE
        self._processes: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def __enter__(self) -> RunObservations:
        self._thread.start()
        return self.seen

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        files_due, states_due, last = 0.0, 0.0, time.monotonic()
        while not self._ended.wait(max(0.0, min(files_due, states_due) - time.monotonic())):
            now, began = time.monotonic(), time.thread_time()
            if now >= files_due:
                self._look_at_files()
                files_due = now + max(self._files_seconds, _took(began) / self._files_share)
                began = time.thread_time()
            if now >= states_due:
                self._look_at_states(now - last)
                last = now
                states_due = now + max(STATES_SECONDS, _took(began) / SHARE)

    def _look_at_files(self) -> None:
        self._processes = job_processes(self._pid, self._is_wrapped, self._before)
        for pid in self._processes:
            for path in procfs.files_in_use(pid) - self.seen.files - self.seen.elsewhere:
                here = self.seen.files if os.path.exists(path) else self.seen.elsewhere
                here.add(path)

    def _look_at_states(self, seconds: float) -> None:
        waiting = sum(waiting_threads(pid, self.seen.looks) for pid in self._processes)
        self.seen.waited_seconds += waiting * seconds
        self.seen.looks += 1


def _took(began: float) -> float:
    return time.thread_time() - began
