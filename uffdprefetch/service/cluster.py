# SPDX-License-Identifier: Apache-2.0
"""The service's part in a cluster: its convener, its transports, and which files it shares.

All of it is the service's thread's, and none of it waits: the convener is a process
(cluster/convene.py), a transport comes as a peer, and whether a file is the same one elsewhere is
found out by a thread that may wait for storage (state/opening.py).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from uffdprefetch.cluster.link import PoolNetwork
from uffdprefetch.native.net import AHEAD_HELD, AHEAD_SOON
from uffdprefetch.service.convener_pipe import ConvenerPipe
from uffdprefetch.service.shared_files import SharedFiles

if TYPE_CHECKING:
    from uffdprefetch.state.files import FileState
    from uffdprefetch.state.ledger import Ledger
    from uffdprefetch.state.opening import Opener

#: Of the map of who keeps what: parts of a file, and files.
MAP_CELLS, MAP_FILES = 64, 16
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
        self._place, self._make_link, self._ledger = place, make_link, ledger
        self._convener = ConvenerPipe(argv)
        self._files = SharedFiles(ledger, opener, share_globs, chunk_bytes, self._convener.tell)
        self.link: PoolNetwork | None = None
        self._key_of = 0  # the generation whose key it has
        self.present: list[int] = []
        self._named: set[int] = set()  # who has sent other bytes than it was asked for
        self.mpi: str | None = None
        self._why_not: str | None = None  # no node shares with this one, for people
        self._convener.tell(**vars(place), socket=socket_path)

    @property
    def fd(self) -> int:
        """Readable when the convener has said something."""
        return self._convener.fd

    # -------------------------------------------------------------- the convener

    def hear(self) -> bool:
        """What the convener has said; False: it has ended, and ``fd`` says nothing any more."""
        heard = self._convener.hear()
        if heard is None:
            self._ledger.degrade("the nodes do not meet any more: the convener has ended")
            self._why_not = self._why_not or "the convener has ended"
            return False
        for said in heard:
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
            self._files.use(self.link)
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
        self._convener.tell(joined=generation)
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
            self._convener.tell(left=generation)

    def housekeep(self) -> None:
        """Once a second: a transport of which half is lost goes, so that another one comes."""
        self._files.housekeep()
        if self.link is not None and self.link.is_failed:
            self.left()
        if self.link is not None:
            self.link.sample_cpu()
            self._name_who_sends_other_bytes(self.link)
        self._convener.housekeep()

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
        """See OtherNodes."""
        self._files.opened(file, number)

    def closed(self, number: int, why: str | None = None) -> None:
        """See OtherNodes."""
        self._files.closed(number, why)

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
        return self._files.is_shared(number)

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
            "generations": self.link.totals.generations if self.link is not None else 0,
            "why_not": self._why_not,
            "not_shared": [
                {"path": path, "why": why} for path, why in self._files.unshared.items()
            ],
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
            **document, **link.counts(), "transport_cpu_seconds": round(link.totals.cpu_seconds, 2),
            "network_bytes_per_second": network, "file_system_bytes_per_second": storage,
            "links": links, "keepers": self.keepers(),
        }  # fmt: skip

    def keepers(self) -> dict[str, list[int | None]]:
        """For MAP_CELLS equal parts of each shared file, the first of MAP_FILES, a node that keeps
        some of it, as far as this node knows."""
        if self.link is None:
            return {}
        shared = self._files.shared[:MAP_FILES]
        return {path: self.link.keepers(number, MAP_CELLS) for number, path in shared}

    def close(self) -> None:
        """End the convener, and with it what it has started."""
        if self.link is not None:
            self.link.leave()
        self._convener.close()
