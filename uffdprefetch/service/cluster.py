# SPDX-License-Identifier: Apache-2.0
"""The service's part in a cluster: its convener, its transports, and which files it shares.

All of it is the service's thread's, and none of it waits: the convener is a process
(cluster/convene.py), a transport comes as a peer, and whether a file is the same one elsewhere is
found out by a thread that may wait for storage (state/opening.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from uffdprefetch.base import file_systems
from uffdprefetch.cluster import identity
from uffdprefetch.cluster.link import PoolNetwork
from uffdprefetch.native.net import AHEAD_HELD, AHEAD_SOON, FileId
from uffdprefetch.state.file_times import Times

if TYPE_CHECKING:
    import subprocess

    from uffdprefetch.state.files import FileState
    from uffdprefetch.state.ledger import Ledger
    from uffdprefetch.state.opening import Opener

LINE_MOST_BYTES = 1 << 16
#: The convener's own bounds (END_SECONDS of cluster/convene.py, twice), and some.
END_SECONDS = 3.5
#: How long what is read ahead of a file waits until it is known whether other nodes have it: some
#: pages of it are read, and its servers are asked.
PENDING_MS = 500
#: Of the map of who keeps what: parts of a file, and files.
MAP_CELLS, MAP_FILES = 64, 16
#: Of files that are not shared, and why.
UNSHARED_FILES = 16
LINK_COUNTS = ("from_bytes", "to_bytes", "late", "corrupt")
#: When to look again for who has what lies ahead: a message's way there and back.
SOON_NS = 1_000_000


@dataclass(frozen=True)
class Place:
    """Where and as whom this node meets the others."""

    meet: str
    run: str
    node: int
    nodes: int
    launcher: str | None = None


@dataclass
class _Shared:
    """What is known of one file of the pool."""

    path: str
    stamp: Times  # as of its opening: nothing in the pool is older
    fields: identity.Fields = field(default_factory=dict)
    identity: FileId | None = None  # None: not known yet, or none


class Cluster:
    """One service's."""

    def __init__(
        self, place: Place, socket_path: str, make_link: Callable[[bytes], PoolNetwork],
        ledger: Ledger, opener: Opener, share_globs: Sequence[str] = (),
        argv: Sequence[str] | None = None,
        chunk_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Starts the convener, ``argv``. ``make_link``: of the run's key; ``chunk_bytes``: of the
        pool's. Raises OSError."""
        import subprocess

        self._place, self._make_link = place, make_link
        self._ledger, self._opener, self._globs = ledger, opener, share_globs
        self._rest = b""
        self._files: dict[int, _Shared] = {}  # by number, as long as it is in the pool
        self._to_look_at: deque[Callable[[], bool]] = deque()  # when fewer are being looked at
        #: Messages count in chunks: who has others calls the same file by another name.
        self._units = {"chunk size (--huge-pages, --budget)": chunk_bytes}
        self.link: PoolNetwork | None = None
        self._key_of = 0  # the generation whose key it has
        self.present: list[int] = []
        self._named: set[int] = set()  # who has sent other bytes than it was asked for
        self.mpi: str | None = None
        self._why_not: str | None = None  # no node shares with this one, for people
        self._not_shared: dict[str, str] = {}  # by path, why not
        self._convener: subprocess.Popen[bytes] = subprocess.Popen(
            argv or [sys.executable, "-m", "uffdprefetch.cluster.convene"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._convener.stdin is not None and self._convener.stdout is not None
        self.fd = self._convener.stdout.fileno()
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_NONBLOCK)
        self._unsaid = b""
        os.set_blocking(self._convener.stdin.fileno(), False)
        self._tell(**vars(place), socket=socket_path)

    # -------------------------------------------------------------- the convener

    def _tell(self, **said: Any) -> None:
        """One line to the convener, as soon as that can be."""
        self._unsaid += json.dumps(said).encode() + b"\n"
        assert self._convener.stdin is not None
        try:
            self._unsaid = self._unsaid[os.write(self._convener.stdin.fileno(), self._unsaid) :]
        except BlockingIOError:
            pass  # with the next one
        except BrokenPipeError:
            self._unsaid = b""  # its end is heard of below

    def hear(self) -> bool:
        """What the convener has said; False: it has ended, and ``fd`` says nothing any more."""
        try:
            data = os.read(self.fd, LINE_MOST_BYTES)
        except BlockingIOError:
            return True
        if not data:
            self._ledger.degrade("the nodes do not meet any more: the convener has ended")
            self._why_not = self._why_not or "the convener has ended"
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if isinstance(said, dict):
                self._heard(said)
        return True

    def _heard(self, said: dict[str, Any]) -> None:
        if "key" in said:
            self._key_of = int(said.get("generation", 0))
        if "key" in said and self.link is not None:
            self.link.key = bytes.fromhex(said["key"])
        elif "key" in said:
            self.link = self._make_link(bytes.fromhex(said["key"]))
            self.link.present = self.present
            for number, one in self._files.items():
                if one.identity is not None:
                    self._share(number, one)
        if "present" in said:
            self.present = list(said["present"])
            if self.link is not None:
                self.link.present = self.present
            if said["missing"]:
                why = (
                    f"{len(self.present)} of {self._place.nodes} nodes have come within "
                    f"{said['seconds']:.0f} s"
                )
                if len(self.present) < 2:
                    why += f": do all nodes see {self._place.meet} (--meet)?"
                    self._why_not = why
                self._ledger.degrade(f"cluster: {why}")
        if "started" in said:
            self.mpi = said.get("mpi")
        if "differs" in said:
            self._ledger.degrade(
                f"not shared with node {said['node']}, which has another {said['fields']}",
                said["differs"],
            )
        if "failed" in said:
            self._why_not = str(said["failed"])
            self._ledger.degrade(f"cluster: each node reads for itself: {self._why_not}")

    # -------------------------------------------------------------- transports

    def join(self, sock: socket.socket, pid: int, generation: int) -> bool:
        """A transport has come; whether it is let in."""
        joined = self.link.joined if self.link is not None else None
        if self.link is None or generation != self._key_of:
            return False
        if joined is not None and joined.generation > generation:
            return False
        try:
            self.link.join(sock, pid, generation)
        except OSError as error:
            self._ledger.degrade(f"cluster: a transport is not let in: {error}")
            return False
        self._why_not = None
        self._tell(joined=generation)
        return True

    def is_transport(self, fd: int) -> bool:
        """Whether a connection is the present transport's."""
        sock = self.transport_socket
        return sock is not None and sock.fileno() == fd

    @property
    def transport_socket(self) -> socket.socket | None:
        """Of the present transport; None: there is none."""
        joined = self.link.joined if self.link is not None else None
        return joined.sock if joined is not None else None

    def left(self) -> None:
        """The transport has hung up, or is to."""
        if self.link is not None and self.link.joined is not None:
            generation = self.link.joined.generation
            self.link.leave()
            self._tell(left=generation)

    def housekeep(self) -> None:
        """Once a second: a transport of which half is lost goes, so that another one comes."""
        while self._to_look_at and self._to_look_at[0]():
            self._to_look_at.popleft()
        if self.link is not None and self.link.is_failed:
            self.left()
        if self.link is not None:
            self.link.sample_cpu()
            self._name_who_sends_other_bytes(self.link)
        if self._unsaid:
            self._tell()

    def _name_who_sends_other_bytes(self, link: PoolNetwork) -> None:
        for number, one in link.links().items():
            if one.corrupt and number not in self._named:
                self._named.add(number)
                self._ledger.degrade(
                    f"cluster: node {number} has sent bytes that are not what it was asked for, or "
                    "were changed on the way: not taken, and read from storage"
                )

    # -------------------------------------------------------------- files

    def opened(self, file: FileState, number: int) -> None:
        """A file has become the pool's: find out whether other nodes have the same."""
        path, f_type, globs = file.path, file.opened.f_type, self._globs
        kind = file_systems.known(f_type)
        if kind.one_machine and not identity.is_named(path, globs):
            self._keep_to_itself(path, f"{kind.name} is a local file system")
            return
        one = self._files[number] = _Shared(path, file.guard.times)
        if self.link is not None:
            self.link.pending(number, PENDING_MS)
        fd = os.dup(file.opened.fd)

        def look() -> tuple[identity.Fields, Times] | str:
            try:
                return identity.fields(fd, path, f_type, globs), Times.of(fd)
            except identity.NotSharedError as error:
                return str(error)
            finally:
                os.close(fd)

        def then(found: tuple[identity.Fields, Times] | str | OSError) -> None:
            if self._files.get(number) is not one:
                return  # it has left the pool meanwhile
            if isinstance(found, OSError):
                found = f"{found.strerror}"
            elif not isinstance(found, str) and found[1] != one.stamp:
                found = "it has changed since it was opened"
            if isinstance(found, str):
                if self.link is not None:
                    self.link.pending(number, 0)
                self._ledger.degrade(f"not shared with other nodes: {found}", path)
                self._keep_to_itself(path, found)
                return
            one.fields = {**found[0], **self._units}
            one.identity = struct.unpack("<QQ", identity.identity(one.fields))
            self._share(number, one)
            self._tell(file=path, fields=one.fields)

        def begin() -> bool:
            if self._files.get(number) is not one:
                os.close(fd)  # it has left the pool meanwhile
                return True
            return self._opener.run(look, then)

        if not begin():
            self._to_look_at.append(begin)

    def _keep_to_itself(self, path: str, why: str) -> None:
        if len(self._not_shared) < UNSHARED_FILES:
            self._not_shared[path] = why

    def _share(self, number: int, one: _Shared) -> None:
        assert one.identity is not None
        if self.link is not None:
            with contextlib.suppress(OSError):  # it has been closed meanwhile
                self.link.share(number, one.identity, one.stamp)

    def closed(self, number: int, why: str | None = None) -> None:
        """It has changed, or left the pool, or others may not have it any more, and ``why``."""
        one = self._files.pop(number, None)
        if one is not None and self.link is not None:
            self.link.unshare(number)
        if one is not None and one.identity is not None and why:
            self._ledger.degrade(f"not shared with other nodes any more: {why}", one.path)

    def defer(self, number: int, start: int, end: int, expected_end: int) -> int | None:
        """Scheduler.defer: what other nodes keep is read ahead where readers here come to such."""
        if self.link is None or number not in self._files:
            return None
        chunk = self.link.chunk_bytes
        first, last = start // chunk, (end - 1) // chunk
        found = self.link.ahead(number, first, last + 1 - first, (expected_end - 1) // chunk)
        return {AHEAD_SOON: SOON_NS, AHEAD_HELD: 0}.get(found)

    def is_shared(self, number: int) -> bool:
        """Whether other nodes may have the pool's file of this number."""
        one = self._files.get(number)
        return one is not None and one.identity is not None

    def reads_alike(self, number: int) -> bool:
        """See OtherNodes."""
        return self.link is not None and number in self._files and self.link.reads_alike(number)

    def keeps(self, budget_bytes: int) -> int:
        """See OtherNodes."""
        return self.link.keep_bytes(budget_bytes) if self.link else 0

    # -------------------------------------------------------------- the end

    def describe(self) -> dict[str, Any]:
        """What the summary says."""
        document = {
            "node": self._place.node,
            "nodes": self._place.nodes,
            "present": self.present,
            "mpi": self.mpi,
            "generations": self.link.generations if self.link is not None else 0,
            "why_not": self._why_not,
            "not_shared": [{"path": path, "why": why} for path, why in self._not_shared.items()],
        }
        link = self.link
        if link is None:
            return document
        self.housekeep()
        network, storage = link.rates()
        links = [
            {"node": number, **{name: getattr(one, name) for name in LINK_COUNTS},
             "longest_answer_seconds": one.answer_ns / 1e9}
            for number, one in sorted(link.links().items())
        ]  # fmt: skip
        return {
            **document, **link.counts(), "transport_cpu_seconds": round(link.cpu_seconds, 2),
            "network_bytes_per_second": network, "file_system_bytes_per_second": storage,
            "links": links, "keepers": self.keepers(),
        }  # fmt: skip

    def keepers(self) -> dict[str, list[int | None]]:
        """For MAP_CELLS equal parts of each shared file, the first of MAP_FILES, a node that keeps
        some of it, as far as this node knows."""
        if self.link is None:
            return {}
        shared = [(n, one) for n, one in self._files.items() if one.identity is not None]
        return {one.path: self.link.keepers(n, MAP_CELLS) for n, one in shared[:MAP_FILES]}

    def close(self) -> None:
        """End the convener, and with it what it has started."""
        if self.link is not None:
            self.link.leave()
        assert self._convener.stdin is not None and self._convener.stdout is not None
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            self._convener.stdin.close()
        import subprocess

        try:
            self._convener.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._convener.kill()
            self._convener.wait()
        self._convener.stdout.close()
