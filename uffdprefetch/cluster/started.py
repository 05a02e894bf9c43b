# SPDX-License-Identifier: Apache-2.0
"""The processes that a convener has started on its node: MPI's launcher, and launchers' commands.

They bear a mark (brood.py), by which what they leave behind is found and ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from uffdprefetch.cluster import brood
from uffdprefetch.cluster.liveness import GATHER_SECONDS
from uffdprefetch.cluster.meeting import Meeting
from uffdprefetch.protocol import leftovers

#: Time limit for the launcher to end by itself when the transports have, and again after SIGTERM.
END_SECONDS = 1.0


class StartedProcesses:
    """One node's."""

    def __init__(self, meeting: Meeting, socket: str) -> None:
        """``socket``: the service's, beside which their temporary files lie."""
        self._meeting, self._socket = meeting, socket
        self.brood = brood.Brood(socket)
        self._adopts = False
        self._commands: dict[str, subprocess.Popen[bytes]] = {}  # by number
        self.launcher: subprocess.Popen[bytes] | None = None
        self._old_since: float | None = None  # since then something of before may be left
        self._old_told = False

    def adopt(self) -> None:
        """This process is to be the parent of what its descendants leave behind."""
        brood.adopt()
        self._adopts = True

    # -------------------------------------------------------------- start

    def _environ(
        self, environ: Mapping[str, str], generation: int, everywhere: bool = False
    ) -> dict[str, str]:
        """Environment of started processes: with their mark, and the directory of their temporary
        files unless ``everywhere``, for processes of all nodes."""
        return {
            **environ, **self.brood.mark(generation),
            **({} if everywhere else brood.temporary(self._socket + leftovers.MPI)),
        }  # fmt: skip

    def start_commands(self, names: Sequence[str]) -> None:
        """What a launcher has left for this node in the meeting (rsh.py)."""
        prefix = f"start-{self._meeting.node}-"
        for name in names:
            if not name.startswith(prefix):
                continue
            note = self._meeting.take(name)
            if note is None or not isinstance(note.get("command"), str):
                continue
            environ = self._environ(os.environ, int(note.get("generation", 0)))
            with contextlib.suppress(OSError):  # of fork; who waits for it gives up
                self._commands[name[len(prefix) :]] = subprocess.Popen(
                    ["/bin/sh", "-c", note["command"]], stdin=subprocess.DEVNULL,
                    stdout=sys.stderr, start_new_session=True, env=environ,
                )  # fmt: skip

    def start_launcher(
        self, argv: Sequence[str], environ: Mapping[str, str], generation: int, everywhere: bool
    ) -> None:
        """MPI's. Raises OSError."""
        self.launcher = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True,
            env=self._environ(environ, generation, everywhere),
        )  # fmt: skip

    # -------------------------------------------------------------- end

    def launcher_ended(self) -> int | None:
        """Its status, once, when it has ended."""
        status = self.launcher.poll() if self.launcher is not None else None
        if status is not None:
            self.launcher = None
        return status

    def stop_launcher(self) -> None:
        """SIGTERM: it ends its programs on all nodes."""
        if self.launcher is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.launcher.pid, signal.SIGTERM)

    def reap(self) -> None:
        """Say in the meeting which commands have ended; take what others have left."""
        for number, process in list(self._commands.items()):
            status = process.poll()
            if status is not None:
                del self._commands[number]
                with contextlib.suppress(OSError):
                    self._meeting.post(f"ended-{number}", {"status": status & 0xFF})

        if self._adopts:
            self.brood.reap(but=[process.pid for process in self._children()])

    def _children(self) -> list[subprocess.Popen[bytes]]:
        return [*self._commands.values(), *([self.launcher] if self.launcher is not None else [])]

    def look_for_old(self, now: float) -> None:
        """A generation has begun or ended: an earlier one's processes may be left."""
        self._old_since = now

    def end_old(self, generation: int, now: float) -> None:
        """End the processes that an MPI has left of generations up to this one: its daemons wait
        minutes for a launcher that may be gone."""
        if self._old_since is None or now - self._old_since < GATHER_SECONDS:
            return
        left = self.brood.alive(generation)
        if not left:
            self._old_since, self._old_told = None, False
        elif not self._old_told:
            self._old_told = True
            brood.send(left, signal.SIGTERM)
        elif now - self._old_since > GATHER_SECONDS + END_SECONDS:
            brood.send(left, signal.SIGKILL)

    def end(self) -> None:
        """End all: transports see by themselves that their service has gone."""
        self.brood.end(END_SECONDS, END_SECONDS)
        for process in self._children():
            if process.poll() is None:  # a kernel that lists no children
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        leftovers.remove_mpi(self._socket)
