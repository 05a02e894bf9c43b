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

from uffdprefetch.base import rundir
from uffdprefetch.base.errors import EXIT_OURS, UffdPrefetchError
from uffdprefetch.base.identity import file_name_safe
from uffdprefetch.state.file_systems import LUSTRE, type_of

#: How long nodes wait for each other at the beginning: launchers start them within seconds.
ARRIVAL_SECONDS = 20.0
KEY_BYTES = 32
PREFIX, SUMMARY = "uffdprefetch-meet-", "summary-"
#: The note of a node that leads, why it can start no MPI.
FAILED = "failed"
#: One that is in use is touched so often, and one that nobody has touched for so long is nobody's.
KEEP_SECONDS, LEFT_SECONDS = 3600.0, 48 * 3600.0
#: File systems on which every look is the server's answer (GPFS: its token manager's), or of which
#: there is one kernel: a look need not make a change. f_type of statfs(2).
COHERENT = {LUSTRE, 0x47504653, 0xEF53, 0x58465342, 0x9123683E, 0x01021994}
_NODE = re.compile(r"node-([0-9]{1,6})")
Values = dict[str, Any]


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
        """What ``name``.json says; None: there is none, or nothing that we could have written."""
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
                self._is_coherent = type_of(str(self.path)) in COHERENT
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
        """It is there no more."""
        (self.path / f"node-{self.node}.json").unlink(missing_ok=True)

    def numbers(self) -> list[int]:
        """The nodes that have said that they are there, ascending."""
        return numbers_in(self.names())

    def said(self, node: int) -> Values | None:
        """What a node has said of itself."""
        return self.note(f"node-{node}")

    def present(self) -> dict[int, Values]:
        """What each node that is there has said of itself, by number."""
        said = {node: self.said(node) for node in self.numbers()}
        return {node: values for node, values in said.items() if values is not None}

    # -------------------------------------------------------------- the key

    def make_key(self) -> bytes:
        """The run's key, which the node that leads makes, once. Raises OSError."""
        key = self.key()
        if key is None:
            key = secrets.token_bytes(KEY_BYTES)
            self._write("key", key)
        return key

    def key(self) -> bytes | None:
        """The run's key, if it is there: whoever cannot read this directory does not have it."""
        try:
            key = (self.path / "key").read_bytes()
        except OSError:
            return None
        return key if len(key) == KEY_BYTES else None

    # -------------------------------------------------------------- the end

    def end(self) -> None:
        """This node has left; who is the last clears. Never raises."""
        with contextlib.suppress(OSError):
            self.leave()
        if not self.numbers():
            self.clear()

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

    def keep(self) -> None:
        """It is in use, in case that nothing else shows that for a long time. Never raises."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def sweep(self) -> None:
        """Remove what runs have left behind that were killed as a whole. Never raises."""
        with contextlib.suppress(OSError):
            uid, now = os.geteuid(), self.path.stat().st_mtime  # the file server's clock, as theirs
            for other in self.path.parent.glob(f"{PREFIX}*"):
                with contextlib.suppress(OSError):
                    status = other.lstat()
                    if status.st_uid == uid and now - status.st_mtime > LEFT_SECONDS:
                        shutil.rmtree(other, ignore_errors=True)


def path_of(base: Path, run: str) -> Path:
    """Of a run's directory."""
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
