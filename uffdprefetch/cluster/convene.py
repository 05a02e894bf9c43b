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
import re
import secrets
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.oom import goes_first
from uffdprefetch.cluster import brood, identity, mpi_start
from uffdprefetch.cluster.meeting import (
    ALIVE_SECONDS,
    ARRIVAL_SECONDS,
    ASKED_MOST,
    FAILED,
    GONE_SECONDS,
    Meeting,
    Sweep,
    numbers_in,
)
from uffdprefetch.cluster.mpi_start import Host
from uffdprefetch.cluster.sealed import KEY_BYTES, Pair
from uffdprefetch.protocol import leftovers

PACKAGE = "uffdprefetch.cluster"
#: A path that launchers take unquoted as their rsh agent: Open MPI splits its plm_rsh_agent into
#: commands and words, and hands it to other nodes through a shell.
_PLAIN = re.compile(r"[\w/.,+@%=~-]+")
#: Interval of looks into the directory while something is waited for: TURN_SECONDS, and
#: TURN_NODES for each node where that is longer, so that all nodes together look at most 2,000
#: times a second.
TURN_SECONDS, TURN_NODES = 0.05, 1 / 2000
#: Interval of looks while the nodes share and nothing is waited for.
CALM_SECONDS = 1.0
#: Generations that are tried, and the pause before the second; it doubles.
TRIES = 8
PAUSE_SECONDS = 0.5
#: A generation that lasted this long succeeded: the pauses begin anew.
GOOD_SECONDS = 60.0
#: Time limit for nodes to notice a loss, else the next generation goes without them; and for a node
#: that shares to answer (it looks every CALM_SECONDS), else it counts as dead.
GATHER_SECONDS = 2.0
#: Time limit for the launcher to end by itself when the transports have, and again after SIGTERM.
END_SECONDS = 1.0
#: Prefix of the note with a generation's key, sealed for one node.
KEY = "key-"
#: Interval at which a node compares its shared files with its neighbour's of the same paths.
COMPARE_SECONDS = 5.0
#: Most files that a node tells of: all of them are written with each new one.
FILES_MAX = 1024


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


@dataclass
class _Doubted:
    """A node of which another one wants to know whether it lives: its count then, and when."""

    count: int
    at: float
    answered: bool = False


class Convener:
    """One node's."""

    def __init__(self, options: ConvenerOptions, out: Any = sys.stdout) -> None:
        """Raises UffdPrefetchError where nobody can meet."""
        self._options, self._out = options, out
        self._meeting = Meeting(Path(options.meet), options.run, options.node)
        self._started: dict[str, subprocess.Popen[bytes]] = {}  # commands of this node, by number
        self._count = 0
        self._alive_since = self._waits_since = 0.0
        self._pair, self._brood = Pair(), brood.Brood(options.socket)
        self._sweep = Sweep(self._meeting)
        self._asked: dict[int, _Doubted] = {}
        self._old_since: float | None = None  # since then something of before may be left
        self._old_told = False
        self.adopts = False  # what its descendants leave behind (brood.adopt())
        self._is_again = False  # somebody has led in this directory before
        self._joined = 0  # the generation of our transport; 0: none
        self._over = 0  # the last one that is over, as far as we know
        self._beats: dict[int, tuple[int, float]] = {}  # of nodes that wait: (count, since when)
        self._failed_told = self._gone_told = False
        # of who leads
        self._job: subprocess.Popen[bytes] | None = None
        self._job_since, self._tries, self._next = 0.0, 0, 0.0
        self._generation = 0
        self._ways: list[mpi_start.LaunchMethod] | None = (
            None  # those that are left to try, the best first
        )
        # of files
        self._rest = b""
        self._files: dict[str, identity.Fields] = {}
        self._untold = False  # the others have still to be told of some
        self._compared_since = 0.0
        self._differ: set[str] = set()

    def tell(self, **values: Any) -> None:
        """One line of JSON to the service."""
        with contextlib.suppress(BrokenPipeError):
            self._out.write(json.dumps(values) + "\n")
            self._out.flush()

    def _fail(self, why: str) -> None:
        """This node leads, and can start no MPI: the service is told, and who waits for that."""
        self.tell(failed=why)
        with contextlib.suppress(OSError):
            self._meeting.post(FAILED, {"why": why})

    def run(self, stdin: int = 0) -> None:
        """Until the standard input ends."""
        self._meeting.begin()
        self._is_again = self._meeting.note("generation") is not None
        self._arrive()
        end, present = time.monotonic() + ARRIVAL_SECONDS, list[int]()
        try:
            while time.monotonic() < end:
                present = self._here(time.monotonic())
                if len(present) >= self._options.nodes:
                    break
                if not self._listen(stdin, time.monotonic()):
                    return
            missing = max(0, self._options.nodes - len(present))
            self.tell(present=present, missing=missing, seconds=ARRIVAL_SECONDS)
            while self._listen(stdin, time.monotonic()):
                self.turn(time.monotonic())
        finally:
            self._end()

    def _here(self, now: float) -> list[int]:
        """The nodes that are there, and not only their notes: where somebody has led before, those
        of dead ones are old."""
        self._say_that_it_waits(now)
        if not self._is_again:
            return self._meeting.numbers()
        found = []
        for node in self._meeting.numbers():
            if self._meeting.is_fresh(node):
                found.append(node)
            else:
                self._answers(node, self._meeting.said(node) or {}, now)
        return found

    # -------------------------------------------------------------- the service

    def _listen(self, stdin: int, now: float) -> bool:
        """Take the service's lines until the next turn; False: it has hung up."""
        turn = max(TURN_SECONDS, self._options.nodes * TURN_NODES)
        if self._joined and not self._started_lately(now):
            turn = CALM_SECONDS
        ready, _, _ = select.select([stdin], [], [], turn)
        if not ready:
            return True
        data = os.read(stdin, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict):
                    self.hear(said, now)
        return bool(data)

    def _started_lately(self, now: float) -> bool:
        """Whether the rest of this node's commands may still be on their way."""
        return now - self._job_since < GATHER_SECONDS

    def hear(self, said: Mapping[str, Any], now: float) -> None:
        """One line of the service's."""
        if "joined" in said:
            self._joined, self._job_since = int(said["joined"]), now
            self._old_since, self._asked = now, {}
            self._arrive()
        elif "left" in said and self._joined:
            self._over, self._joined = max(self._over, self._joined), 0
            self._waits_since, self._beats, self._old_since = now, {}, now
            self._arrive()
            with contextlib.suppress(OSError):
                self._meeting.post(f"again-{self._options.node}", {"over": self._over})
        elif (
            isinstance(said.get("file"), str) and isinstance(said.get("fields"), dict)
            and len(self._files) < FILES_MAX
        ):  # fmt: skip
            self._files[said["file"]] = said["fields"]
            self._untold = True

    def _arrive(self) -> None:
        self._count += 1
        with contextlib.suppress(OSError):  # a full file system: it may be taken for gone
            self._meeting.arrive(
                {
                    "host": self._options.host, "slurm": self._options.slurm,
                    "socket": self._options.socket, "beat": self._count,
                    "joined": self._joined, "over": self._over, "public": self._pair.public,
                }
            )  # fmt: skip

    def _say_that_it_waits(self, now: float) -> None:
        if not self._joined and now - self._alive_since > ALIVE_SECONDS:
            self._alive_since = now
            self._arrive()

    # -------------------------------------------------------------- each turn

    def turn(self, now: float) -> None:
        """Start what was left for this node; lead, where it is the first one that waits."""
        self._say_that_it_waits(now)
        names = self._meeting.names()
        if f"{KEY}{self._options.node}" in names:
            self._take_key()
        if not names and not self._gone_told and not self._meeting.path.is_dir():
            self._gone_told = True
            self.tell(failed=f"the directory in which they meet is gone: {self._meeting.path}")
        if self._meeting.is_asked(names):
            self._arrive()
        self._start_commands(names)
        self._reap()
        self._end_old(now)
        self._sweep.turn(now)
        self._compare(names, now)
        if self._job is not None:
            self._watch_job(names, now)
        elif not self._joined and self._leads(names, now):
            self._lead(names, now)

    def _start_commands(self, names: Sequence[str]) -> None:
        prefix = f"start-{self._options.node}-"
        for name in names:
            if not name.startswith(prefix):
                continue
            note = self._meeting.take(name)
            if note is None or not isinstance(note.get("command"), str):
                continue
            environ = self._environ(os.environ, int(note.get("generation", 0)))
            with contextlib.suppress(OSError):  # of fork; who waits for it gives up
                self._started[name[len(prefix) :]] = subprocess.Popen(
                    ["/bin/sh", "-c", note["command"]], stdin=subprocess.DEVNULL,
                    stdout=sys.stderr, start_new_session=True, env=environ,
                )  # fmt: skip

    def _environ(
        self, environ: Mapping[str, str], generation: int, everywhere: bool = False
    ) -> dict[str, str]:
        """Environment of started processes: with their mark, and the directory of their temporary
        files unless ``everywhere``, for processes of all nodes."""
        return {
            **environ, **self._brood.mark(generation),
            **({} if everywhere else brood.temporary(self._options.socket + leftovers.MPI)),
        }  # fmt: skip

    def _reap(self) -> None:
        for number, process in list(self._started.items()):
            status = process.poll()
            if status is not None:
                del self._started[number]
                with contextlib.suppress(OSError):
                    self._meeting.post(f"ended-{number}", {"status": status & 0xFF})

        if self.adopts:
            self._brood.reap(but=[process.pid for process in self._children()])

    def _children(self) -> list[subprocess.Popen[bytes]]:
        return [*self._started.values(), *([self._job] if self._job is not None else [])]

    def _end_old(self, now: float) -> None:
        """End the processes that an MPI has left of earlier generations: its daemons wait minutes
        for a launcher that may be gone."""
        if self._old_since is None or now - self._old_since < GATHER_SECONDS:
            return
        left = self._brood.alive(max(self._over, self._joined - 1))
        if not left:
            self._old_since, self._old_told = None, False
        elif not self._old_told:
            self._old_told = True
            brood.send(left, signal.SIGTERM)
        elif now - self._old_since > GATHER_SECONDS + END_SECONDS:
            brood.send(left, signal.SIGKILL)

    # -------------------------------------------------------------- the key

    def _take_key(self) -> None:
        """Take the key of a generation that this node is to be in."""
        note = self._meeting.take(f"{KEY}{self._options.node}") or {}
        try:
            generation = int(note["generation"])
            about = f"{generation} {self._options.node}"
            key = self._pair.open(str(note["sealed"]), str(note["by"]), about)
        except (KeyError, TypeError, ValueError):
            return  # nothing that we could have written
        self.tell(key=key.hex(), generation=generation)

    def _give_key(self, there: Mapping[int, Mapping[str, Any]]) -> None:
        """A new one to each node of the generation. Raises OSError."""
        key = secrets.token_bytes(KEY_BYTES)
        self.tell(key=key.hex(), generation=self._generation)
        for node in there.keys() - {self._options.node}:
            with contextlib.suppress(ValueError):  # it would not be let in
                about = f"{self._generation} {node}"
                sealed = self._pair.seal(key, str(there[node].get("public")), about)
                self._meeting.post(
                    f"{KEY}{node}",
                    {"generation": self._generation, "by": self._pair.public, "sealed": sealed},
                )

    # -------------------------------------------------------------- files

    def _compare(self, names: Sequence[str], now: float) -> None:
        """Tell which files are shared here, and look whether the next node has others."""
        if now - self._compared_since < COMPARE_SECONDS or not self._files:
            return
        self._compared_since = now
        if self._untold:
            self._untold = False
            with contextlib.suppress(OSError):
                self._meeting.post(f"files-{self._options.node}", self._files)
        others = [node for node in numbers_in(names) if node != self._options.node]
        if not others:
            return
        one = next((node for node in others if node > self._options.node), others[0])
        theirs = self._meeting.note(f"files-{one}") or {}
        for path in self._files.keys() & theirs.keys() - self._differ:
            fields = identity.difference(self._files[path], theirs[path])
            if fields:
                self._differ.add(path)
                self.tell(differs=path, node=one, fields=fields)

    # -------------------------------------------------------------- who leads

    def _waiting(self, node: int, now: float) -> dict[str, Any] | None:
        """The note of a waiting node that is alive, which it is as long as its count goes up:
        clocks are not compared. At first sight it counts only if it knows of our loss."""
        said = self._meeting.said(node)
        if said is None or said.get("joined"):
            return None
        count, over = int(said.get("beat", 0)), int(said.get("over", 0))
        last, since = self._beats.get(node, (None, now if over >= self._over else now - 1e9))
        if count != last:
            since = now if last is not None else since
            self._beats[node] = count, since
        return said if now - since < GONE_SECONDS else None

    def _leads(self, names: Sequence[str], now: float) -> bool:
        """Whether nobody with a lower number waits, and the last generation is over."""
        for node in numbers_in(names):
            if node >= self._options.node:
                break
            if self._waiting(node, now) is not None:
                return False
        last = self._meeting.note("generation") or {}
        number = int(last.get("generation", 0))
        if number <= max(self._over, self._generation):
            return True
        # it was another one's to start: whoever is in it says so, and lives
        told = ((int(node), self._meeting.said(int(node)) or {}) for node in last.get("nodes", {}))
        members = [(node, said) for node, said in told if said.get("joined") == number]
        if any([self._answers(node, said, now) for node, said in members[:ASKED_MOST]]):
            return False
        return not any([self._answers(node, said, now) for node, said in members[ASKED_MOST:]])

    def _answers(self, node: int, said: Mapping[str, Any], now: float) -> bool:
        """Whether a node that says nothing by itself lives, as far as is known: it is asked, and
        has GATHER_SECONDS to say something."""
        count, one = int(said.get("beat", 0)), self._asked.get(node)
        if one is None or (one.answered and now - one.at > GONE_SECONDS):
            self._asked[node] = _Doubted(count, now)
            with contextlib.suppress(OSError):
                self._meeting.ask(node, str(self._options.node))
            return True
        one.answered = one.answered or count != one.count
        return one.answered or now - one.at < GATHER_SECONDS

    def _lead(self, names: Sequence[str], now: float) -> None:
        if now < self._next or self._tries >= TRIES:
            return
        there = {node: said for node in numbers_in(names) if (said := self._waiting(node, now))}
        expected = len((self._meeting.note("generation") or {}).get("nodes", {}))
        if len(there) < 2 or (len(there) < expected and now - self._waits_since < GATHER_SECONDS):
            return
        try:
            if self._ways is None:
                self._ways = mpi_start.ways(os.environ, self._options.launcher)
            self._begin(there, self._ways[0], now)
        except mpi_start.NoMpiError as error:
            self._tries = TRIES
            self._fail(str(error))
        except OSError as error:  # of a file system, or of fork: it may pass
            self._next = now + PAUSE_SECONDS * 2**self._tries
            self._tries += 1
            if self._tries >= TRIES:
                self._fail(str(error))

    def _begin(
        self, there: dict[int, dict[str, Any]], way: mpi_start.LaunchMethod, now: float
    ) -> None:
        last = self._meeting.note("generation") or {}
        self._generation = max(self._generation, int(last.get("generation", 0))) + 1
        # This node first: a launcher starts what is to run beside it by itself.
        hosts = [Host(there[n]["host"], there[n].get("slurm", "")) for n in sorted(there)]
        nodes = {str(node): there[node]["host"] for node in sorted(there)}
        self._meeting.post("generation", {"generation": self._generation, "nodes": nodes})
        self._give_key(there)
        argv = way.command(
            hosts, str(self._agent()),
            [
                *(sys.executable, "-m", f"{PACKAGE}.carry"),
                *(str(self._meeting.path), str(self._generation), str(len(hosts))),
            ],
        )  # fmt: skip
        self._job_since = now
        environ = self._environ(way.environ, self._generation, way.everywhere)
        self._job = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True, env=environ
        )
        self.tell(started=self._generation, nodes=sorted(there), mpi=way.name)

    def _watch_job(self, names: Sequence[str], now: float) -> None:
        """For the node that has started the launcher."""
        assert self._job is not None
        status = self._job.poll()
        if status is None:
            if any(name.startswith("again-") for name in names):
                self._begin_anew(names)
            return
        self._job = None
        self.tell(ended=self._generation, status=status)
        if self._joined != self._generation and self._over < self._generation:
            self._over = self._generation  # it was none
            self._arrive()
            assert self._ways is not None
            if len(self._ways) > 1:
                del self._ways[0]
                self._waits_since = now
                return
            if not self._failed_told:
                self._failed_told = True
                self._fail(
                    f"{self._ways[0].name} has brought up no MPI between them (its status is"
                    f" {status}); it is tried again"
                )
        if now - self._job_since > GOOD_SECONDS:
            self._tries = 0
        self._next = now + PAUSE_SECONDS * 2**self._tries
        self._tries += 1

    def _begin_anew(self, names: Sequence[str]) -> None:
        """A node has lost its transport: who has still got one gives it up, and all meet again."""
        assert self._job is not None
        for name in names:
            if name.startswith("again-"):
                said = self._meeting.take(name)
                if said is not None and int(said.get("over", 0)) == self._generation:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self._job.pid, signal.SIGTERM)

    def _agent(self) -> Path:
        """A script: launchers take one word for what is called as ssh is. Raises NoMpiError."""
        places = self._meeting.path / "rsh", Path(self._options.socket + leftovers.AGENT)
        path = next((path for path in places if _PLAIN.fullmatch(str(path))), None)
        if path is None:
            raise mpi_start.NoMpiError(
                f"launchers take no path as {places[0]} or {places[1]}: name a directory of letters"
                " and digits with --meet"
            )
        if not path.exists():
            beside = path.with_name(f".rsh.{os.getpid()}")
            words = shlex.join([sys.executable, "-m", f"{PACKAGE}.rsh", str(self._meeting.path)])
            beside.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            beside.chmod(0o700)
            beside.rename(path)
        return path

    # -------------------------------------------------------------- the end

    def _end(self) -> None:
        """End all started processes: transports see by themselves that their service has gone."""
        self._brood.end(END_SECONDS, END_SECONDS)
        for process in self._children():
            if process.poll() is None:  # a kernel that lists no children
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        leftovers.remove_mpi(self._options.socket)
        self._meeting.end()


def main(argv: Sequence[str]) -> int:
    """See the module."""
    goes_first()
    # What comes after the first line stays there.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline().decode()
    try:
        convener = Convener(ConvenerOptions.read(line))
        brood.adopt()
        convener.adopts = True
        convener.run()
    except (UffdPrefetchError, ValueError, OSError) as error:
        print(json.dumps({"failed": str(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
