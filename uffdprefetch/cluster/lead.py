# SPDX-License-Identifier: Apache-2.0
"""Who leads a meeting: the node with the lowest number of those that wait. It starts MPI.

A way to start it that has not made one world is followed by the next; a generation that has ended,
by another one, with growing pauses.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from uffdprefetch.cluster import mpi_start
from uffdprefetch.cluster.generation_key import GenerationKey
from uffdprefetch.cluster.liveness import GATHER_SECONDS, Liveness
from uffdprefetch.cluster.meeting import ASKED_MOST, FAILED, Meeting, numbers_in
from uffdprefetch.cluster.mpi_start import Host
from uffdprefetch.cluster.presence import Presence
from uffdprefetch.cluster.service_pipe import ServicePipe
from uffdprefetch.cluster.started import StartedProcesses
from uffdprefetch.protocol import leftovers

PACKAGE = "uffdprefetch.cluster"
#: A path that launchers take unquoted as their rsh agent: Open MPI splits its plm_rsh_agent into
#: commands and words, and hands it to other nodes through a shell.
_PLAIN = re.compile(r"[\w/.,+@%=~-]+")
#: Generations that are tried, and the pause before the second; it doubles.
TRIES = 8
PAUSE_SECONDS = 0.5
#: A generation that lasted this long succeeded: the pauses begin anew.
GOOD_SECONDS = 60.0


def agent_script(meeting: Path, socket: str) -> Path:
    """A script for launchers, which take one word for what is called as ssh is. Raises
    NoMpiError."""
    places = meeting / "rsh", Path(socket + leftovers.AGENT)
    path = next((path for path in places if _PLAIN.fullmatch(str(path))), None)
    if path is None:
        raise mpi_start.NoMpiError(
            f"launchers take no path as {places[0]} or {places[1]}: name a directory of letters"
            " and digits with --meet"
        )
    if not path.exists():
        beside = path.with_name(f".rsh.{os.getpid()}")
        words = shlex.join([sys.executable, "-m", f"{PACKAGE}.rsh", str(meeting)])
        beside.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        beside.chmod(0o700)
        beside.rename(path)
    return path


class MpiStart:
    """How this node starts MPI over the others: by the best of the ways that are left to try."""

    def __init__(self, launcher: str | None, socket: str) -> None:
        self._launcher, self._socket = launcher, socket
        self._ways: list[mpi_start.LaunchMethod] | None = None

    def best(self) -> mpi_start.LaunchMethod:
        """Raises NoMpiError where there is none."""
        if self._ways is None:
            self._ways = mpi_start.ways(os.environ, self._launcher)
        return self._ways[0]

    def next_way(self) -> bool:
        """The best one makes no world; whether there is another, which is the best then."""
        if self._ways is None or len(self._ways) < 2:
            return False
        del self._ways[0]
        return True

    def command(
        self, way: mpi_start.LaunchMethod, hosts: Sequence[Host], meeting: Path, generation: int
    ) -> list[str]:
        """The words that start a transport on each host. Raises NoMpiError, OSError."""
        return way.command(
            hosts, str(agent_script(meeting, self._socket)),
            [
                *(sys.executable, "-m", f"{PACKAGE}.carry"),
                *(str(meeting), str(generation), str(len(hosts))),
            ],
        )  # fmt: skip


class Attempts:
    """How often MPI has been started for nothing, and when it may be again."""

    def __init__(self) -> None:
        self._count, self._next = 0, 0.0

    def may(self, now: float) -> bool:
        """Whether one may be made now."""
        return now >= self._next and self._count < TRIES

    def count(self, now: float) -> bool:
        """One has ended; whether that was the last."""
        self._next = now + PAUSE_SECONDS * 2**self._count
        self._count += 1
        return self._count >= TRIES

    def succeeded(self) -> None:
        """One has lasted."""
        self._count = 0

    def give_up(self) -> None:
        """None is made any more."""
        self._count = TRIES


class Leader:
    """One node's part as the leader, as long as it is the first one that waits."""

    def __init__(
        self, meeting: Meeting, service: ServicePipe, launcher: str | None, socket: str,
        presence: Presence, others: Liveness, key: GenerationKey, started: StartedProcesses,
    ) -> None:  # fmt: skip
        """``launcher``: see mpi_start.ways(); ``socket``: the service's."""
        self._meeting, self._service = meeting, service
        self._presence, self._others, self._key = presence, others, key
        self._started = started
        self._start = MpiStart(launcher, socket)
        self._generation = 0  # the last that this node has started
        self._since = 0.0  # when
        self._attempts = Attempts()
        self._failed_told = False

    def turn(self, names: Sequence[str], now: float) -> None:
        """Watch what this node has started, or start it where it is this node's to do."""
        if self._started.launcher is not None:
            self._watch(names, now)
        elif not self._presence.joined and self._leads(names, now):
            self._lead(names, now)

    def _fail(self, why: str) -> None:
        """No MPI can be started: the service is told, and who waits for that."""
        self._service.tell(failed=why)
        with contextlib.suppress(OSError):
            self._meeting.post(FAILED, {"why": why})

    def _waiting(self, node: int, now: float) -> dict[str, Any] | None:
        return self._others.waiting(node, self._presence.over, now)

    def _leads(self, names: Sequence[str], now: float) -> bool:
        """Whether nobody with a lower number waits, and the last generation is over."""
        for node in numbers_in(names):
            if node >= self._meeting.node:
                break
            if self._waiting(node, now) is not None:
                return False
        last = self._meeting.note("generation") or {}
        number = int(last.get("generation", 0))
        if number <= max(self._presence.over, self._generation):
            return True
        # it was another one's to start: whoever is in it says so, and lives
        told = ((int(node), self._meeting.said(int(node)) or {}) for node in last.get("nodes", {}))
        members = [(node, said) for node, said in told if said.get("joined") == number]
        if any([self._others.answers(node, said, now) for node, said in members[:ASKED_MOST]]):
            return False
        rest = members[ASKED_MOST:]
        return not any([self._others.answers(node, said, now) for node, said in rest])

    def _lead(self, names: Sequence[str], now: float) -> None:
        if not self._attempts.may(now):
            return
        there = {node: said for node in numbers_in(names) if (said := self._waiting(node, now))}
        expected = len((self._meeting.note("generation") or {}).get("nodes", {}))
        waited = now - self._presence.waits_since
        if len(there) < 2 or (len(there) < expected and waited < GATHER_SECONDS):
            return
        try:
            self._begin(there, self._start.best(), now)
        except mpi_start.NoMpiError as error:
            self._attempts.give_up()
            self._fail(str(error))
        except OSError as error:  # of a file system, or of fork: it may pass
            if self._attempts.count(now):
                self._fail(str(error))

    def _begin(
        self, there: Mapping[int, Mapping[str, Any]], way: mpi_start.LaunchMethod, now: float
    ) -> None:
        last = self._meeting.note("generation") or {}
        self._generation = max(self._generation, int(last.get("generation", 0))) + 1
        # This node first: a launcher starts what is to run beside it by itself.
        hosts = [Host(there[n]["host"], there[n].get("slurm", "")) for n in sorted(there)]
        nodes = {str(node): there[node]["host"] for node in sorted(there)}
        self._meeting.post("generation", {"generation": self._generation, "nodes": nodes})
        self._key.give(self._generation, there)
        argv = self._start.command(way, hosts, self._meeting.path, self._generation)
        self._since = now
        self._started.start_launcher(argv, way.environ, self._generation, way.everywhere)
        self._service.tell(started=self._generation, nodes=sorted(there), mpi=way.name)

    def _watch(self, names: Sequence[str], now: float) -> None:
        status = self._started.launcher_ended()
        if status is None:
            if any(name.startswith("again-") for name in names):
                self._begin_anew(names)
            return
        self._service.tell(ended=self._generation, status=status)
        presence = self._presence
        if presence.joined != self._generation and presence.over < self._generation:
            presence.never_joined(self._generation)
            if self._start.next_way():
                presence.wait_anew(now)
                return
            if not self._failed_told:
                self._failed_told = True
                self._fail(
                    f"{self._start.best().name} has brought up no MPI between them (its status is"
                    f" {status}); it is tried again"
                )
        if now - max(self._since, presence.joined_since) > GOOD_SECONDS:
            self._attempts.succeeded()
        self._attempts.count(now)

    def _begin_anew(self, names: Sequence[str]) -> None:
        """A node has lost its transport: who has still got one gives it up, and all meet again."""
        for name in names:
            if name.startswith("again-"):
                said = self._meeting.take(name)
                if said is not None and int(said.get("over", 0)) == self._generation:
                    self._started.stop_launcher()
