# SPDX-License-Identifier: Apache-2.0
"""One process beside each node's service: meets the others, and has the transports started.

    python -m uffdprefetch.cluster.convene < LINES

The first of LINES is JSON (ConvenerOptions); later ones tell what the service knows: {"joined": G},
a transport of generation G has come; {"left": G}, it has gone; {"file": PATH, "fields": {...}}, a
file that is shared. The end of the standard input is the end of all.

Nodes without a transport *wait*; the one of them with the lowest number leads. It makes the
generation's key, seals it for each node (sealed.py), and starts MPI over those that wait: by a step
of the batch system, or by a launcher that leaves each node's command with that node (rsh.py). What
has not made one world of them is followed by the next way to try. When a generation has ended
before the run has, the next one is started over the nodes that wait by then, a few times, with
growing pauses. One of which no node answers is over: they are dead, or the run of that name was. A
node that has lost its transport while others have not asks them to begin anew.

The directory may lie on a file system that thousands of nodes use: while all is well nobody looks
more than once a second, and no node reads what all others have written.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.oom import goes_first
from uffdprefetch.cluster.compare_files import FileComparison
from uffdprefetch.cluster.generation_key import GenerationKey
from uffdprefetch.cluster.lead import Leader
from uffdprefetch.cluster.liveness import GATHER_SECONDS, Liveness
from uffdprefetch.cluster.meeting import ARRIVAL_SECONDS, Meeting, Sweep
from uffdprefetch.cluster.presence import Presence
from uffdprefetch.cluster.service_pipe import ServicePipe
from uffdprefetch.cluster.started import StartedProcesses

#: Interval of looks into the directory while something is waited for: TURN_SECONDS, and
#: TURN_NODES for each node where that is longer, so that all nodes together look at most 2,000
#: times a second.
TURN_SECONDS, TURN_NODES = 0.05, 1 / 2000
#: Interval of looks while the nodes share and nothing is waited for.
CALM_SECONDS = 1.0


@dataclass(frozen=True)
class ConvenerOptions:
    """``meet``: the base directory; ``run``: the run's name; ``nodes``: how many are expected;
    ``socket``: where this node's service listens; ``launcher``: see mpi_start.ways()."""

    meet: str
    run: str
    node: int
    nodes: int
    socket: str
    launcher: str | None = None
    host: str = field(default_factory=platform.node)
    slurm: str = field(default_factory=lambda: os.environ.get("SLURMD_NODENAME", ""))

    @classmethod
    def read(cls, text: str) -> ConvenerOptions:
        """Raises ValueError."""
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(str(error)) from None


class Convener:
    """One node's."""

    def __init__(self, options: ConvenerOptions, out: Any = sys.stdout) -> None:
        """Raises UffdPrefetchError where nobody can meet."""
        self._options = options
        self.service = ServicePipe(out)
        self.meeting = Meeting(Path(options.meet), options.run, options.node)
        self._key = GenerationKey(self.meeting, self.service)
        self.presence = Presence(
            self.meeting,
            {
                "host": options.host, "slurm": options.slurm, "socket": options.socket,
                "public": self._key.public,
            },
        )  # fmt: skip
        self.others = Liveness(self.meeting)
        self.started = StartedProcesses(self.meeting, options.socket)
        self._files = FileComparison(self.meeting, self.service)
        self._leader = Leader(
            self.meeting, self.service, options.launcher, options.socket, self.presence,
            self.others, self._key, self.started,
        )  # fmt: skip
        self._sweep = Sweep(self.meeting)
        self._gone_told = False

    def run(self, stdin: int = 0) -> None:
        """Until the standard input ends."""
        self.meeting.begin()
        self.others.begin()
        self.presence.arrive()
        end, present = time.monotonic() + ARRIVAL_SECONDS, list[int]()
        try:
            while time.monotonic() < end:
                present = self.here(time.monotonic())
                if len(present) >= self._options.nodes:
                    break
                if not self._listen(stdin, time.monotonic()):
                    return
            missing = max(0, self._options.nodes - len(present))
            self.service.tell(present=present, missing=missing, seconds=ARRIVAL_SECONDS)
            while self._listen(stdin, time.monotonic()):
                self.turn(time.monotonic())
        finally:
            self.end()

    def here(self, now: float) -> list[int]:
        """The nodes that have arrived, and live."""
        self.presence.say_that_it_waits(now)
        return self.others.here(now)

    def _listen(self, stdin: int, now: float) -> bool:
        """Take the service's lines until the next turn; False: it has hung up."""
        turn = max(TURN_SECONDS, self._options.nodes * TURN_NODES)
        # the rest of this node's commands may still be on their way
        started_lately = now - self.presence.joined_since < GATHER_SECONDS
        if self.presence.joined and not started_lately:
            turn = CALM_SECONDS
        lines = self.service.hear(stdin, turn)
        for said in lines or []:
            with contextlib.suppress(ValueError):  # a number that is none
                self.hear(said, now)
        return lines is not None

    def hear(self, said: Mapping[str, Any], now: float) -> None:
        """One line of the service's."""
        if "joined" in said:
            self.started.look_for_old(now)
            self.others.forget_asked()
            self.presence.join(int(said["joined"]), now)
        elif "left" in said and self.presence.joined:
            self.started.look_for_old(now)
            self.others.forget_waiting()
            self.presence.leave(now)
        elif isinstance(said.get("file"), str) and isinstance(said.get("fields"), dict):
            self._files.add(said["file"], said["fields"])

    def turn(self, now: float) -> None:
        """Start what was left for this node; lead, where it is the first one that waits."""
        self.presence.say_that_it_waits(now)
        names = self.meeting.names()
        self._key.take(names)
        if not names and not self._gone_told and not self.meeting.path.is_dir():
            self._gone_told = True
            self.service.tell(
                failed=f"the directory in which they meet is gone: {self.meeting.path}"
            )
        if self.meeting.is_asked(names):
            self.presence.arrive()
        self.started.start_commands(names)
        self.started.reap()
        self.started.end_old(max(self.presence.over, self.presence.joined - 1), now)
        self._sweep.turn(now)
        self._files.turn(names, now)
        self._leader.turn(names, now)

    def end(self) -> None:
        """End all that it has started, and leave the meeting."""
        self.started.end()
        self.meeting.end()


def main(argv: Sequence[str]) -> int:
    """See the module."""
    goes_first()
    # What comes after the first line stays there.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline().decode()
    try:
        convener = Convener(ConvenerOptions.read(line))
        convener.started.adopt()
        convener.run()
    except (UffdPrefetchError, ValueError, OSError) as error:
        print(json.dumps({"failed": str(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
