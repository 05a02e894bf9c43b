# SPDX-License-Identifier: Apache-2.0
"""Where the nodes of a run meet: a directory on a file system that all of them see.

Everything is a small JSON file that comes by rename(2), so nobody reads half of one. A node writes
only what bears its number; what is for all is written by the node that leads. NFS clients keep
attributes, directories and absent names in mind for up to a minute (acregmax, acdirmax): a change
of the directory by the client itself makes it ask the server, so each look makes one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uffdprefetch.base import file_systems, rundir
from uffdprefetch.base.errors import EXIT_OURS, UffdPrefetchError
from uffdprefetch.base.identity import file_name_safe

#: Longest wait of nodes for each other at the beginning: launchers start them within seconds.
ARRIVAL_SECONDS = 20.0
PREFIX, SUMMARY, WHO = "uffdprefetch-meet-", "summary-", "who-"
#: Name of the leading node's note that says why it can start no MPI.
FAILED = "failed"
#: Interval of a waiting node's signs of life, and the silence after which it counts as dead; a node
#: that is asked has GONE_SECONDS to answer, too.
ALIVE_SECONDS, GONE_SECONDS = 1.0, 4.0
#: Name of the note by which the process that started hold.py's programs says that the run is over.
OVER = "over"
#: Age above which a meeting without any node to ask is left over: a younger one may be a run's that
#: begins or ends.
LEFT_SECONDS = 60.0
#: Most nodes of a run that are asked whether they live; one answer is enough.
ASKED_MOST = 8
_NODE = re.compile(r"node-([0-9]{1,6})")
#: Notes of processes that answer ask(): conveners, and programs of hold.py.
_ANSWERS = re.compile(r"(node|held)-([0-9]{1,6})")
Values = dict[str, Any]
Signs = set[tuple[str, int]]


class Meeting:
    """One run's directory, as one of its nodes sees it."""

    def __init__(self, base: Path, run: str, node: int) -> None:
        """``base``: a directory that all nodes see; ``run``: the job and how often it has been
        restarted; ``node``: this one's number, from 0. Raises UffdPrefetchError where the run's
        directory cannot be made, or is not ours alone."""
        self.path = path_of(base, run)
        self.node = node
        self._is_coherent: bool | None = None  # not known yet
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise UffdPrefetchError(
                f"nodes cannot meet in {self.path}: {error.strerror}; name a directory on a "
                "shared file system with --meet",
                EXIT_OURS,
            ) from None
        rundir.check(str(self.path), os.geteuid(), "meeting directory", "name another with --meet")

    @classmethod
    def at(cls, path: Path, node: int = -1) -> Meeting:
        """One that is there already, of a process of one of its nodes."""
        one = cls.__new__(cls)
        one.path, one.node, one._is_coherent = path, node, None
        return one

    # -------------------------------------------------------------- notes

    def post(self, name: str, values: Values) -> None:
        """Write ``name``.json in the place of the last one. Raises OSError."""
        self._write(f"{name}.json", json.dumps(values).encode())

    def note(self, name: str) -> Values | None:
        """The values of ``name``.json; None: there is none, or none that we could have written."""
        try:
            values = json.loads((self.path / f"{name}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return values if isinstance(values, dict) else None

    def take(self, name: str) -> Values | None:
        """The same, which is then gone."""
        values = self.note(name)
        if values is not None:
            try:
                (self.path / f"{name}.json").unlink()
            except OSError:
                return None  # another has it
        return values

    def names(self) -> list[str]:
        """The notes that there are, as the server has them now."""
        self._ask_the_server()
        try:
            found = os.listdir(self.path)
        except OSError:
            return []
        return sorted(name[:-5] for name in found if name.endswith(".json"))

    def _write(self, name: str, data: bytes) -> None:
        beside = self.path / f".{name}.{self.node}.{os.getpid()}.{secrets.token_hex(4)}"
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.path / name)
        except OSError:
            beside.unlink(missing_ok=True)
            raise

    def _ask_the_server(self) -> None:
        """Have a client that keeps directories in mind forget what it knows of this one."""
        if self._is_coherent is None:
            try:
                self._is_coherent = file_systems.at(str(self.path)).is_coherent
            except OSError:
                self._is_coherent = False
        if self._is_coherent:
            return
        probe = self.path / f".look.{self.node}.{os.getpid()}"
        try:
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            probe.unlink()
        except OSError:
            pass  # a full file system: what is known has to do

    # -------------------------------------------------------------- who is there

    def arrive(self, values: Values) -> None:
        """Say that this node is there. Raises OSError."""
        self.post(f"node-{self.node}", values)

    def leave(self) -> None:
        """Remove this node's notes."""
        (self.path / f"node-{self.node}.json").unlink(missing_ok=True)
        own = re.compile(
            rf"(again-{self.node}|files-{self.node}|key-{self.node}|start-{self.node}-.*|{WHO}.*-{self.node})"
        )
        for name in filter(own.fullmatch, self.names()):
            (self.path / f"{name}.json").unlink(missing_ok=True)

    def begin(self) -> None:
        """Remove notes with this node's number: a run of the same name was killed."""
        with contextlib.suppress(OSError):
            self.leave()
            (self.path / f"{SUMMARY}{self.node}.json").unlink(missing_ok=True)

    def numbers(self) -> list[int]:
        """The nodes that have said that they are there, ascending."""
        return numbers_in(self.names())

    def said(self, node: int) -> Values | None:
        """A node's note about itself."""
        return self.note(f"node-{node}")

    def present(self) -> dict[int, Values]:
        """The notes of the nodes that are there, by number."""
        said = {node: self.said(node) for node in self.numbers()}
        return {node: values for node, values in said.items() if values is not None}

    # -------------------------------------------------------------- who is alive

    def is_fresh(self, node: int) -> bool:
        """Whether a node has said something in the last GONE_SECONDS before this one last did, or
        left, by the file server's clock."""
        own = self.path / f"node-{self.node}.json"
        try:
            now = (own if own.exists() else self.path).stat().st_mtime
            return now - (self.path / f"node-{node}.json").stat().st_mtime < GONE_SECONDS
        except OSError:
            return False

    def ask(self, node: int, asker: str) -> str:
        """Have a node say that it is alive: it takes this note, whose name this is. Raises
        OSError."""
        name = f"{WHO}{node}-{asker}"
        self.post(name, {})
        return name

    def is_asked(self, names: Sequence[str]) -> bool:
        """Whether anybody has asked that of this node: they have their answer."""
        asked = [name for name in names if name.startswith(f"{WHO}{self.node}-")]
        return any([self.take(name) is not None for name in asked])

    # -------------------------------------------------------------- the end

    def end(self) -> None:
        """This node has left; who is the last that lives clears. Never raises."""
        others = [node for node in self.numbers() if node != self.node and self._may_live(node)]
        with contextlib.suppress(OSError):
            self.leave()
        if not others:
            self.clear()

    def _may_live(self, node: int) -> bool:
        """Whether a node may be alive, without asking it: one that shares is in the last
        generation, one that waits says so."""
        said = self.said(node) or {}
        if said.get("joined"):
            last = self.note("generation") or {}
            return bool(said["joined"] == last.get("generation"))
        return self.is_fresh(node)

    def clear(self) -> None:
        """The run has ended: nothing of it is left, unless a summary still has to be taken (then
        who takes it does this). Never raises."""
        try:
            names = os.listdir(self.path)
            if any(name.startswith((SUMMARY, f".{SUMMARY}")) for name in names):
                return
            for name in names:
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()
        except OSError:
            pass  # another node is just writing: whoever is last does it


class Sweep:
    """Removes what runs that were killed as a whole have left beside a meeting: directories for
    which no node answers."""

    def __init__(self, meeting: Meeting) -> None:
        self._since: float | None = None
        self._own = meeting.path
        self._asked: dict[Path, tuple[set[str], Signs, bool]] = {}

    def turn(self, now: float) -> None:
        """Ask, and later look at the answers. Never raises."""
        if self._since is None:
            self._since = now
            with contextlib.suppress(OSError):
                for path in self._own.parent.glob(f"{PREFIX}*"):
                    if path != self._own:
                        self._ask(path)
        elif self._asked and now - self._since > GONE_SECONDS:
            for path, (asked, signs, is_old) in self._asked.items():
                self._judge(path, asked, signs, is_old)
            self._asked = {}

    def _ask(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            if path.lstat().st_uid != os.geteuid() or not path.is_dir() or path.is_symlink():
                return
            now = self._own.stat().st_mtime  # the file server's clock, as theirs
            is_old = now - path.stat().st_mtime > LEFT_SECONDS
            other = Meeting.at(path)
            names = other.names()
            found = [match[2] for name in names if (match := _ANSWERS.fullmatch(name))]
            if OVER in names:
                found = []  # they have ended, and who has started them takes their summaries
            asker = f"sweep{os.getpid()}x{secrets.token_hex(4)}"
            signs = _signs(path)
            self._asked[path] = (
                {other.ask(int(n), asker) for n in found[:ASKED_MOST]},
                signs,
                is_old,
            )

    def _judge(self, path: Path, asked: set[str], signs: Signs, is_old: bool) -> None:
        other = Meeting.at(path)
        with contextlib.suppress(OSError):
            silent = asked <= set(other.names()) and _signs(path) == signs
            if silent and (asked or is_old):
                shutil.rmtree(path, ignore_errors=True)
        for name in asked:
            with contextlib.suppress(OSError):
                (path / f"{name}.json").unlink(missing_ok=True)


def _signs(path: Path) -> Signs:
    """The part of a directory's state that changes while one of its nodes lives."""
    found = set()
    for one in path.iterdir():
        if _ANSWERS.fullmatch(one.stem):
            with contextlib.suppress(OSError):
                found.add((one.name, one.stat().st_mtime_ns))
    return found


def path_of(base: Path, run: str) -> Path:
    """The path of a run's directory."""
    return base / f"{PREFIX}{file_name_safe(run)}"


def numbers_in(names: Sequence[str]) -> list[int]:
    """The nodes that are named by notes of theirs, ascending."""
    return sorted(int(match[1]) for name in names if (match := _NODE.fullmatch(name)))


def node_of(directory: Path, host: str) -> int | None:
    """The number of the node of the present generation that has this host name; None: none has."""
    nodes = (Meeting.at(directory).note("generation") or {}).get("nodes", {})
    return next((int(node) for node, name in nodes.items() if name == host), None)


def socket_of(directory: Path, host: str) -> str:
    """Where the service of the node with this host name listens. Raises FileNotFoundError."""
    node = node_of(directory, host)
    said = Meeting.at(directory).said(node) if node is not None else None
    if said is not None and isinstance(said.get("socket"), str):
        return str(said["socket"])
    raise FileNotFoundError(f"no node of {directory} is {host}")
