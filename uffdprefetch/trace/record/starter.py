# SPDX-License-Identifier: Apache-2.0
"""The starter's side of a recording: start the recorder, wait until it looks, tell it the end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from uffdprefetch.base import spawn
from uffdprefetch.base.errors import EXIT_OURS, UffdPrefetchError
from uffdprefetch.trace.file import trace_file
from uffdprefetch.trace.file.trace_file import SUFFIX
from uffdprefetch.trace.record.program import Spec

#: Time limit for compiling and loading the BPF programs: about a second, on a busy node longer.
READY_SECONDS = 30.0
#: Time limit for the recorder to write its rest at the job's end.
END_SECONDS = 20.0
MAX_EVENTS = 4_000_000
MIN_SIZE_BYTES = 1 << 20


def output_path(name: str) -> str:
    """The absolute path of a trace file; .uptrace is appended where it is missing. In a directory
    that is there it has our pid's name."""
    if os.path.isdir(name):
        name = os.path.join(name, f"uffdprefetch.{os.getpid()}")
    return os.path.abspath(name if name.endswith(SUFFIX) else name + SUFFIX)


class Recording:
    """A recorder that runs. Everything here is bounded in time: the job comes first."""

    def __init__(self, process: subprocess.Popen[bytes], control_fd: int, answer_fd: int) -> None:
        self._process = process
        self._control_fd, self._answer_fd = control_fd, answer_fd
        self.witness = self.sees_faults = False
        self.missing: list[dict[str, Any]] = []
        self._mark_fd = -1

    def keep(self, mark_fd: int) -> None:
        """The lock by which others see that the run is recorded: until let_go(), or our end."""
        self._mark_fd = mark_fd

    def let_go(self) -> None:
        """The run has ended: another one of its name has a recorder of its own."""
        if self._mark_fd >= 0:
            os.close(self._mark_fd)
            self._mark_fd = -1

    @classmethod
    def start(cls, spec: Spec, environment: Mapping[str, str], directory: str) -> Recording:
        """Start a recorder and wait until it sees the kernel's events.

        ``environment`` and ``directory`` are for its interpreter. Raises UffdPrefetchError: what
        the recorder says (the file exists, cannot be written), or 125 when it does not come up.
        """
        if not spec.force and os.path.exists(spec.output):  # said before anything is started
            raise trace_file.exists_error(spec.output)
        control_read, control_write = os.pipe()
        ready_read, ready_write = os.pipe()
        spec.control_fd, spec.ready_fd = control_read, ready_write
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "uffdprefetch", "record", spec.write()],
                env=dict(environment),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(control_read, ready_write),
                start_new_session=True,  # Ctrl-C is for the job
                preexec_fn=spawn.stand_aside,  # so is SIGUSR1 to all of a batch job; one thread
            )
        except OSError as error:
            os.close(control_write)
            os.close(ready_read)
            raise UffdPrefetchError(f"no recorder: {error}", EXIT_OURS) from None
        finally:
            os.close(control_read)
            os.close(ready_write)
        recording = cls(process, control_write, ready_read)
        try:
            recording._wait_ready()
        except UffdPrefetchError:
            recording.abandon()
            raise
        return recording

    def _wait_ready(self) -> None:
        fd = self._answer_fd
        data, deadline = b"", time.monotonic() + READY_SECONDS
        while not data.endswith(b"\n"):
            seconds = deadline - time.monotonic()
            if seconds <= 0 or not select.select([fd], [], [], seconds)[0]:
                raise UffdPrefetchError(
                    f"the recorder is not ready after {READY_SECONDS:.0f} s", EXIT_OURS
                )
            piece = os.read(fd, 65536)
            if not piece:
                raise UffdPrefetchError("the recorder ended before it began", EXIT_OURS)
            data += piece
        answer = json.loads(data)
        if "error" in answer:
            raise UffdPrefetchError(answer["error"], answer["exit_code"])
        self.witness, self.missing = answer["witness"], answer["missing"]
        self.sees_faults = answer["sees_faults"]

    def tell(self, **what: Any) -> None:
        """Say something to the recorder; one that is gone does not mind."""
        with contextlib.suppress(OSError):
            os.write(self._control_fd, json.dumps(what).encode() + b"\n")

    def began(self) -> None:
        """The job begins now: what came before was the recorder's own start."""
        self.tell(meta={"job_started_ns": time.monotonic_ns()})

    def end(self, status: int | None, ended_ns: int | None = None, *, wait: bool = True) -> None:
        """The job has ended with this exit status (negative: by that signal), now or at that time
        (CLOCK_MONOTONIC). ``wait``: until the file is whole."""
        self.tell(status=status, meta={"job_ended_ns": ended_ns or time.monotonic_ns()})
        os.close(self._control_fd)
        # it says nothing more: readable is the end
        if wait and not select.select([self._answer_fd], [], [], END_SECONDS)[0]:
            self._process.terminate()
        os.close(self._answer_fd)

    def discard(self) -> None:
        """The job could not be started: no file is left."""
        self.tell(discard=True)
        self.end(None)

    def ended(self) -> bool:
        """Whether the recorder is gone (reaped here)."""
        return self._process.poll() is not None

    def is_whole(self) -> bool:
        """Whether the file is, or the recorder is gone."""
        return self.ended() or bool(select.select([self._answer_fd], [], [], 0)[0])

    def abandon(self) -> None:
        """Give the recorder up."""
        os.close(self._control_fd)
        os.close(self._answer_fd)
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()
