# SPDX-License-Identifier: Apache-2.0
"""The watcher's end of the service's socket: find the runs of this node, ask one how it goes.

watcher                          service
HELLO (role 3)              ->
                            <-   WELCOME (1: there are watchers enough)
SNAPSHOT                    ->
                            <-   SUMMARY, with a sealed memfd that holds the JSON
... as often as one likes (32 times a second at most); the hang-up tells that the service is gone
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from uffdprefetch.base import rundir
from uffdprefetch.base.errors import EXIT_CANNOT, EXIT_USAGE, UffdPrefetchError
from uffdprefetch.base.identity import Identity
from uffdprefetch.job import messages
from uffdprefetch.protocol.node import NodeClient, NotOurService, ServiceGone
from uffdprefetch.protocol.snapshot import Snapshot, decode

#: Time limit for an answer: a service takes milliseconds, a stopped one never answers.
ANSWER_SECONDS = 2.0
NOBODY = Identity(None, None, None, "a watcher")
#: A listening socket's line of /proc/net/unix: flag __SO_ACCEPTCON, type SOCK_SEQPACKET
#: (include/linux/net.h).
_LISTENING = re.compile(r"^\S+ \S+ \S+ 00010000 0005 \S+ +\d+ (/.*\.sock)$", re.MULTILINE)


class WatchClient(NodeClient):
    """A connection that only watches. Raises what NodeClient raises."""

    role = messages.WATCHER
    _waiting = False  # a question is on its way: not to be asked again

    @classmethod
    def open(cls, path: str) -> WatchClient:
        """Connect; UffdPrefetchError when there are watchers enough already."""
        client = cls.connect(path, NOBODY, time.monotonic() + ANSWER_SECONDS)
        if client.options:
            client.close()
            raise UffdPrefetchError("this run has 16 watchers already: end one of them")
        return client

    def snapshot(self, seconds: float = ANSWER_SECONDS) -> Snapshot:
        """The run as the service tells of it; TimeoutError when no answer comes within the time.

        After a TimeoutError the answer may still come: the next call takes it.
        """
        if not self._waiting:
            self._send(messages.pack(messages.SNAPSHOT))
            self._waiting = True
        document = self._receive_summary(time.monotonic() + seconds).summary
        self._waiting = False
        try:
            return decode(document)
        except ValueError as error:
            raise NotOurService(str(error)) from None

    def answer_waits(self) -> bool:
        """Whether a question was asked whose answer has not been taken."""
        return self._waiting

    def fileno(self) -> int:
        """For select(): readable, when no answer is due, means that the service has hung up."""
        return self._socket.fileno()

    def hang_up(self) -> None:
        """End the conversation from any thread; who waits for an answer gets ServiceGone."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class WatchedService:
    """A service that answers, its run's key and its first snapshot."""

    key: str
    client: WatchClient
    snapshot: Snapshot


def sockets(environ: Mapping[str, str], net_unix: str | None = None) -> list[str]:
    """Paths of sockets that may be services' of ours on this node, without connecting.

    An explicit UFFDPREFETCH_RUNDIR is the only place that is looked at. Else also what
    /proc/net/unix (``net_unix`` is its text) shows in directories of ours: a job may have been
    started with another TMPDIR.
    """
    directories = rundir.existing_directories(environ)
    found = []
    for directory in directories:
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(directory)):
                if name.endswith(".sock"):
                    found.append(os.path.join(directory, name))
    if not environ.get("UFFDPREFETCH_RUNDIR"):
        if net_unix is None:
            with contextlib.suppress(OSError):
                net_unix = Path("/proc/net/unix").read_text(errors="surrogateescape")
        for path in _LISTENING.findall(net_unix or ""):
            with contextlib.suppress(UffdPrefetchError):
                if path not in found and rundir.is_of_node(os.path.basename(path)):
                    rundir.check(os.path.dirname(path), os.geteuid())
                    found.append(path)
    return [path for path in found if rundir.is_of_node(os.path.basename(path))]


def runs(environ: Mapping[str, str]) -> list[WatchedService]:
    """The runs of this user on this node that answer; the caller closes their clients.

    Sockets of dead services are passed over, and so is what is no service of ours.
    """
    found = []
    for path in sockets(environ):
        try:
            client = WatchClient.open(path)
            snapshot = client.snapshot()
        except (OSError, ServiceGone, TimeoutError):
            continue
        found.append(WatchedService(snapshot.run, client, snapshot))
    return sorted(found, key=lambda run: run.key)


def choose(environ: Mapping[str, str], wanted: str | None) -> WatchedService:
    """The run that ``wanted`` (a key or the beginning of one) names, or the only one.

    Raises UffdPrefetchError: 1 when there is none, 2 when it is not clear which.
    """
    every = runs(environ)
    fits = [run for run in every if wanted is None or run.key.startswith(wanted)]
    exact = [run for run in fits if run.key == wanted]
    chosen = exact or fits
    for run in every:
        if len(chosen) != 1 or run is not chosen[0]:
            run.client.close()
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        lines = "".join(f"\n  {_describe(run)}" for run in chosen)
        name = "RUN" if wanted is None else repr(wanted)
        raise UffdPrefetchError(f"{name} may be any of {len(chosen)}, name one:{lines}", EXIT_USAGE)
    where = environ.get("UFFDPREFETCH_RUNDIR")
    if wanted is None or not every:
        place = f" in {where}" if where else ""
        what = f"no job of yours runs under uffdprefetch on this node{place}"
        if wanted is not None:
            what += _of_somebody_else(wanted)
        raise UffdPrefetchError(what, EXIT_CANNOT)
    keys = ", ".join(run.key for run in every)
    raise UffdPrefetchError(
        f"no run {wanted!r} of yours on this node{_of_somebody_else(wanted)}; running: {keys}",
        EXIT_CANNOT,
    )


def _describe(run: WatchedService) -> str:
    from uffdprefetch.base.units import format_duration

    ranks = run.snapshot.ranks
    commands = sorted({c for rank in ranks for c in rank.commands}) or ["no process yet"]
    count = f"{len(ranks)} rank{'' if len(ranks) == 1 else 's'}"
    return f"{run.key}  {count}, {format_duration(run.snapshot.seconds)}, {commands[0]}"


def _of_somebody_else(wanted: str) -> str:
    """A word more where the run is there, but another user's."""
    with contextlib.suppress(OSError):
        for path in _LISTENING.findall(Path("/proc/net/unix").read_text(errors="replace")):
            name = os.path.basename(path)
            if name.startswith(wanted) and rundir.is_of_node(name):
                uid = os.stat(os.path.dirname(path)).st_uid
                if uid != os.geteuid():
                    with contextlib.suppress(KeyError):
                        return f" (it is {pwd.getpwuid(uid).pw_name}'s: only they can watch it)"
                    return f" (it belongs to uid {uid}: only they can watch it)"
    return ""
