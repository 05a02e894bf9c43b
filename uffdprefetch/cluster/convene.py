# SPDX-License-Identifier: Apache-2.0
"""One process beside each node's service: meets the others, and has the transports started.

    python -m uffdprefetch.cluster.convene < OPTIONS

OPTIONS is one line of JSON (Options); the end of the standard input is the end of all. The node
with the lowest number leads: it makes the run's key, and starts MPI, whose launcher leaves each
node's command with that node (rsh.py). When a transport job has ended before the run has, the next
generation is started over the nodes that are still there, a few times, with growing pauses.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.cluster import mpi_start
from uffdprefetch.cluster.meeting import ARRIVAL_SECONDS, Meeting

PACKAGE = "uffdprefetch.cluster"
TURN_SECONDS = 0.05
#: Generations that are tried, and the pause before the second; it doubles.
TRIES = 8
PAUSE_SECONDS = 0.5
#: A job that has lasted so long was a good one: pauses begin anew.
GOOD_SECONDS = 60.0
#: A node writes so often that it is there; who has not for so long is not.
ALIVE_SECONDS, GONE_SECONDS = 1.0, 4.0
#: Started processes that are asked to end have so long.
END_SECONDS = 1.0


@dataclass(frozen=True)
class Options:
    """``meet``: the base directory; ``run``: the run's name; ``nodes``: how many are expected;
    ``socket``: where this node's service listens."""

    meet: str
    run: str
    node: int
    nodes: int
    socket: str
    host: str = field(default_factory=platform.node)

    @classmethod
    def read(cls, text: str) -> Options:
        """Raises ValueError."""
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(str(error)) from None


class Convener:
    """One node's."""

    def __init__(self, options: Options, out: Any = sys.stdout) -> None:
        """Raises UffdPrefetchError where nobody can meet."""
        self._options, self._out = options, out
        self._meeting = Meeting(Path(options.meet), options.run, options.node)
        self._started: dict[str, subprocess.Popen[bytes]] = {}  # commands of this node, by number
        self._job: subprocess.Popen[bytes] | None = None
        self._job_since = self._alive_since = 0.0
        self._generation, self._tries, self._next = 0, 0, 0.0
        self._mpi: mpi_start.Mpi | None = None
        self._beats: dict[int, tuple[int, float]] = {}  # of each node: (count, when it came)
        self._count = 0
        self._key_told = False

    def tell(self, **values: Any) -> None:
        """One line of JSON to the service."""
        with contextlib.suppress(BrokenPipeError):
            self._out.write(json.dumps(values) + "\n")
            self._out.flush()

    def run(self, stdin: int = 0) -> None:
        """Until the standard input ends."""
        self._arrive()
        end, present = time.monotonic() + ARRIVAL_SECONDS, self._meeting.present()
        try:
            while len(present) < self._options.nodes and time.monotonic() < end:
                if self._hung_up(stdin):
                    return
                present = self._meeting.present()
            missing = self._options.nodes - len(present)
            self.tell(present=sorted(present), missing=max(0, missing), seconds=ARRIVAL_SECONDS)
            while not self._hung_up(stdin):
                self.turn(time.monotonic())
        finally:
            self._end()

    @staticmethod
    def _hung_up(stdin: int) -> bool:
        ready, _, _ = select.select([stdin], [], [], TURN_SECONDS)
        return bool(ready) and not os.read(stdin, 4096)

    def _arrive(self) -> None:
        self._count += 1
        self._meeting.arrive(
            {"host": self._options.host, "socket": self._options.socket, "beat": self._count}
        )

    def turn(self, now: float) -> None:
        """Start what was left for this node; lead, where it is the first one that is there."""
        if now - self._alive_since > ALIVE_SECONDS:
            self._alive_since = now
            with contextlib.suppress(OSError):  # a full file system: it may be taken for gone
                self._arrive()
        if not self._key_told and (key := self._meeting.key()) is not None:
            self._key_told = True
            self.tell(key=key.hex())
        self._start_commands()
        self._reap()
        there = self._there(now)
        if there and min(there) == self._options.node:
            self._lead(there, now)

    def _there(self, now: float) -> dict[int, dict[str, Any]]:
        """The nodes that have lately said that they are there. Clocks are not compared: a node is
        there as long as its count goes up."""
        found = {}
        for node, said in self._meeting.present().items():
            count = int(said.get("beat", 0))
            last, since = self._beats.get(node, (-1, now))
            if count != last:
                self._beats[node] = count, now
                since = now
            if now - since < GONE_SECONDS:
                found[node] = said
        return found

    def _start_commands(self) -> None:
        prefix = f"start-{self._options.node}-"
        for name in self._meeting.names():
            if not name.startswith(prefix):
                continue
            note = self._meeting.take(name)
            if note is None or not isinstance(note.get("command"), str):
                continue
            self._started[name[len(prefix) :]] = subprocess.Popen(
                ["/bin/sh", "-c", note["command"]], stdin=subprocess.DEVNULL,
                stdout=sys.stderr, start_new_session=True,
            )  # fmt: skip

    def _reap(self) -> None:
        for number, process in list(self._started.items()):
            status = process.poll()
            if status is not None:
                del self._started[number]
                with contextlib.suppress(OSError):
                    self._meeting.post(f"ended-{number}", {"status": status & 0xFF})

    # -------------------------------------------------------------- who leads

    def _lead(self, there: dict[int, dict[str, Any]], now: float) -> None:
        if self._job is not None:
            status = self._job.poll()
            if status is None:
                return
            self._job = None
            if now - self._job_since > GOOD_SECONDS:
                self._tries = 0
            self._next = now + PAUSE_SECONDS * 2 ** max(0, self._tries - 1)
            self.tell(ended=self._generation, status=status)
        if now < self._next or len(there) < 2 or self._tries >= TRIES:
            return
        self._tries += 1
        try:
            self._mpi = self._mpi or mpi_start.find()
            self._meeting.make_key()
            self._begin(there, self._mpi, now)
        except (mpi_start.NoMpiError, OSError) as error:
            self._tries = TRIES
            self.tell(failed=str(error))

    def _begin(self, there: dict[int, dict[str, Any]], mpi: mpi_start.Mpi, now: float) -> None:
        last = self._meeting.note("generation") or {}
        self._generation = max(self._generation, int(last.get("generation", 0))) + 1
        self._meeting.post("generation", {"generation": self._generation, "nodes": sorted(there)})
        # This node first: a launcher starts what is to run beside it by itself.
        hosts = [there[node]["host"] for node in sorted(there)]
        argv = mpi_start.command(
            mpi, hosts, str(self._agent()),
            [
                *(sys.executable, "-m", f"{PACKAGE}.carry"),
                *(str(self._meeting.path), str(self._generation), str(len(hosts))),
            ],
        )  # fmt: skip
        self._job_since = now
        self._job = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
        )
        self.tell(started=self._generation, nodes=sorted(there), mpi=mpi.kind)

    def _agent(self) -> Path:
        """A script: launchers take one word for what is called as ssh is."""
        path = self._meeting.path / "rsh"
        if not path.exists():
            beside = path.with_name(f".rsh.{os.getpid()}")
            beside.write_text(
                f'#!/bin/sh\nexec "{sys.executable}" -m {PACKAGE}.rsh "{self._meeting.path}" "$@"\n'
            )
            beside.chmod(0o700)
            beside.rename(path)
        return path

    # -------------------------------------------------------------- the end

    def _end(self) -> None:
        """All that was started here ends: a transport has seen that its service has gone."""
        started = [*self._started.values(), *([self._job] if self._job is not None else [])]
        deadline = time.monotonic() + END_SECONDS
        while any(p.poll() is None for p in started) and time.monotonic() < deadline:
            time.sleep(TURN_SECONDS / 5)
        for process in started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._meeting.leave()
        if not self._meeting.present():
            self._meeting.clear()


def main(argv: Sequence[str]) -> int:
    """See the module."""
    line = sys.stdin.readline()
    try:
        Convener(Options.read(line)).run()
    except (UffdPrefetchError, ValueError, OSError) as error:
        print(json.dumps({"failed": str(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
