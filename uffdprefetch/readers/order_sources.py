# SPDX-License-Identifier: Apache-2.0
"""Where the orders of planned readers come from: the plan file, and what the job announces.

The helper process (orders/indexer_client.py) finds the bytes; here is asked, and remembered what is
whose. A plan file names ranks. An announcement is of a process, and of its children (DataLoader
workers).
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uffdprefetch.base.record import dataclass, field
from uffdprefetch.job.channel import ENDED
from uffdprefetch.orders.indexer_client import Answer, IndexerClient
from uffdprefetch.predict.bounds import DECIDE_NS, ENTRIES_MAX, LATELY_NS
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers.announced_files import AnnouncedFiles, FileReaders
from uffdprefetch.readers.known_order import KnownOrders, PlannedReader, needs_order
from uffdprefetch.sense.pagetables import LOOKS
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState, Key
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.reader import Process, Reader

if TYPE_CHECKING:
    from uffdprefetch.orders.announcement import StoredAnnouncement
    from uffdprefetch.predict.order.extents import OrderExtents

log = logging.getLogger("uffdprefetch.serve")

_COUNT = struct.Struct("<Q")


def _load() -> None:
    """Load what an order needs, numpy first of all: 0.1 s, in which the job still loads torch."""
    import uffdprefetch.orders.announcement
    import uffdprefetch.predict.order.cursor
    import uffdprefetch.predict.order.extents
    import uffdprefetch.predict.order.pieces  # noqa: F401


class PlanOrders:
    """Orders by rank and epoch, of plan files. ``option``: by which they are named, for people."""

    option: str

    def __init__(
        self,
        resolver: IndexerClient,
        known_orders: KnownOrders,
        ledger: Ledger,
        came: Callable[[], None],
    ) -> None:
        """``came`` is called when an order has come."""
        self._resolver, self._known_orders = resolver, known_orders
        self._ledger, self._came = ledger, came
        self._readers: dict[tuple[Key, int], PlannedReader] = {}

    def question(self, file: FileState, rank: int, epoch: int) -> dict[str, Any]:
        """What the helper is asked for an order."""
        return {"path": file.path, "key": file.key, "rank": rank, "epoch": epoch}

    def readers(self, reader: Reader) -> list[PlannedReader]:
        """See known_order.OrderSource."""
        name = reader.file.key, reader.rank
        order = self._readers.get(name)
        if order is None:
            source = _Epochs(self, reader.file, reader.rank)
            order = PlannedReader(reader.file, reader.rank, source, self._known_orders.clock)
            self._readers[name] = order
            self._known_orders.add(order)
        order.file = reader.file  # it may have been closed, and opened again
        return [order]

    def mapped(self, client: Process) -> None:
        """See known_order.OrderSource."""

    def pending(self, reader: Reader) -> bool:
        """See known_order.OrderSource."""
        order = self._readers.get((reader.file.key, reader.rank))
        return order is not None and order.cursor is None and not order.over

    def ask(self, file: FileState, rank: int, epoch: int, done: Callable[[Answer], None]) -> None:
        """Ask for an order."""

        def heard(answer: Answer) -> None:
            if "error" in answer and file.guard.changed is None:  # of that one has been told
                self._ledger.degrade(f"{self.option}: {answer['error']}")
            done(answer)
            self._came()

        self._resolver.ask(self.question(file, rank, epoch), heard)

    def order(self, answer: Answer) -> OrderExtents | None:
        """The order of an answer, None when there is none."""
        if answer.get("order") is None:
            return None
        try:
            return self._resolver.order(answer["order"])
        except (OSError, ValueError) as error:
            self._ledger.degrade(f"{self.option}: an order cannot be mapped: {error}")
            return None


class PlanFile(PlanOrders):
    """`--plan`: one file says them all."""

    option = "--plan"

    def question(self, file: FileState, rank: int, epoch: int) -> dict[str, Any]:
        """See PlanOrders."""
        return {"do": "plan", **super().question(file, rank, epoch)}


class _Epochs:
    """The orders of one rank in one file, asked for one after the other."""

    exact = False

    def __init__(self, plan: PlanOrders, file: FileState, rank: int) -> None:
        self._plan, self._file, self._rank = plan, file, rank
        self.how = plan.option
        self._asked = -1  # the latest epoch
        self._come: dict[int, OrderExtents] = {}
        self._end: int | None = None  # the first epoch that there is none of

    def order(self, epoch: int) -> OrderExtents | None:
        """See predict/order/epochs.Source."""
        if epoch > self._asked and not self.over(epoch):
            self._asked = epoch
            self._plan.ask(
                self._file, self._rank, epoch, lambda answer: self._answered(epoch, answer)
            )
        return self._come.pop(epoch, None)

    def _answered(self, epoch: int, answer: Answer) -> None:
        order = self._plan.order(answer)
        self.how = self._plan.option + (", estimated" if answer.get("early") else "")
        if order is None:
            self._end = epoch
        else:
            self._come[epoch] = order

    def over(self, epoch: int) -> bool:
        """See predict/order/epochs.Source."""
        return self._end is not None and epoch >= self._end


class _Stated:
    """One order, of an announcement."""

    exact = True

    def __init__(self, order: OrderExtents, how: str) -> None:
        self._order: OrderExtents | None = order
        self.how = how

    def order(self, epoch: int) -> OrderExtents | None:
        """See predict/order/epochs.Source."""
        order, self._order = self._order, None
        return order

    def over(self, epoch: int) -> bool:
        """See predict/order/epochs.Source."""
        return epoch > 0


@dataclass
class TrackedAnnouncement:
    """An announcement that is followed. ``peer``: its process, as we number them."""

    peer: int
    said: StoredAnnouncement
    whole_files: AnnouncedFiles
    asked: bool = False  # and not answered
    first: bool = True  # nothing has been asked
    settled: bool = False  # nothing is left to be asked, ...
    more: bool = False  # ... but for files of the data set that are mapped later
    again_ns: int = 0
    since_ns: int = 0  # that it is asked what could not be told
    items: int = 0  # read so far
    done: set[tuple[int, str]] = field(default_factory=set)  # (part, path) of known orders
    readers: list[PlannedReader] = field(default_factory=list)


class Announcements:
    """What processes of the job have announced."""

    def __init__(
        self, resolver: IndexerClient, known_orders: KnownOrders, ledger: Ledger,
        clients: Callable[[], list[Client]], came: Callable[[], None],
        file_readers: FileReaders | None = None,
    ) -> None:  # fmt: skip
        self._file_readers = file_readers
        self._resolver, self._known_orders, self._ledger = resolver, known_orders, ledger
        self._clients, self._came = clients, came
        self._clock = known_orders.clock
        self._heard: dict[tuple[int, str], TrackedAnnouncement] = {}  # (pid, reader)
        self._progress: dict[int, int] = {}  # pid -> descriptor
        self._indexed: set[Key] = set()
        self.next_ns = 0

    @property
    def any(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self._heard)

    def readers(self, reader: Reader) -> list[PlannedReader]:
        """See known_order.OrderSource."""
        found = [
            order
            for heard in self._heard.values()
            if reader.client.descends_from(heard.peer)
            for order in heard.readers
            if order.file.key == reader.file.key
        ]
        for order in found:
            order.file = reader.file  # it may have been closed, and opened again
        return found

    def pending(self, reader: Reader) -> bool:
        """See known_order.OrderSource."""
        return any(
            not heard.settled and reader.client.descends_from(heard.peer)
            for heard in self._heard.values()
        )

    def announced(self, peer: int, pid: int, number: int) -> None:
        """A process tells that there is something. Raises AnnounceError."""
        from uffdprefetch.orders import announcement

        if not number:  # there will be some: when they come nothing is to wait for modules to load
            self._resolver.start()
            _load()
            return
        said = announcement.load(self._resolver.directory, pid, number)
        if said.items == 0:
            self._noted(said)
            return
        name = pid, said.reader
        old = self._heard.pop(name, None)
        if old is not None:
            self._end(old)
        if len(self._heard) >= ENTRIES_MAX:
            raise announcement.AnnounceError(f"more than {ENTRIES_MAX} orders at a time")
        whole_files = AnnouncedFiles(peer, said, self._file_readers)
        self._heard[name] = TrackedAnnouncement(peer, said, whole_files)
        self._known_orders.begin()
        self._resolver.start()  # it takes some tenths of a second: not when it is needed
        self.next_ns = 0
        self.look(self._clock.now_ns())

    def _noted(self, said: StoredAnnouncement) -> None:
        """Something that is no order."""
        for part in said.parts:
            if part.what == "nothing":
                why = f"{said.reader}: in which order it reads is not known: {part.why}"
                self._ledger.degrade(why)
        if not any(part.what == "lists" for part in said.parts):
            said.remove()
            return

        def heard(answer: Answer) -> None:
            if "error" in answer:
                log.warning("announcement: %s", answer["error"])
            said.remove()
            for each in self._heard.values():
                each.again_ns = 0

        self._resolver.ask(
            {
                "do": "announced",
                "pid": said.pid,
                "number": said.number,
                "files": [],
                "process": 0,
                "said": 0,
                "done": [],
                "first": True,
            },
            heard,
        )

    def look(self, now: int) -> None:
        """Progress, and questions that are due: once a turn, before what was touched is taken."""
        if not self._heard:
            return
        self.next_ns = now + DECIDE_NS
        for name, heard in list(self._heard.items()):
            count = self._count(heard.said.pid, heard.said.slot)
            items = (count or 0) & ~ENDED
            if items > heard.items:
                heard.items = items
                heard.again_ns, heard.since_ns = 0, now  # there is more to tell by
                heard.whole_files.said(items)
                for reader in heard.readers:
                    reader.said(items, now)
                self._came()
            if count is None or count & ENDED:
                self._end(heard)
                del self._heard[name]
                continue
            if not heard.settled and not heard.asked and now >= heard.again_ns:
                self._ask(heard)
        self._close_unused()

    def _count(self, pid: int, slot: int) -> int | None:
        """The items that have been read; None when it cannot be told."""
        try:
            if pid not in self._progress:
                path = os.path.join(self._resolver.directory, f"{pid}.progress")
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                self._progress[pid] = os.open(path, flags)
            data = os.pread(self._progress[pid], _COUNT.size, slot * _COUNT.size)
        except OSError:
            return None
        return int(_COUNT.unpack(data)[0]) if len(data) == _COUNT.size else None

    def _close_unused(self) -> None:
        used = {pid for pid, _ in self._heard}
        for pid in self._progress.keys() - used:
            os.close(self._progress.pop(pid))

    def _ask(self, heard: TrackedAnnouncement) -> None:
        files: dict[int, tuple[FileState, list[list[int]]]] = {}
        for client in self._clients():
            if client.descends_from(heard.peer):
                for region in client.regions.values():
                    mapped = region.mode != ServingMode.READS
                    if mapped and region.file.guard.changed is None:
                        regions = files.setdefault(id(region.file), (region.file, []))[1]
                        regions.append(
                            [client.pid, region.address, region.offset_bytes, region.length_bytes]
                        )
        needed = any(needs_order(file, self._clock) for file, _ in files.values())
        if not needed and not heard.whole_files.may_come:
            heard.again_ns = self._clock.now_ns() + DECIDE_NS
            return
        if not needed:  # what is asked of mapped files before something is read of them is in vain
            files = {}
        heard.asked = True
        states = [file for file, _ in files.values()]
        question = {
            "do": "announced", "pid": heard.said.pid, "number": heard.said.number,
            "process": heard.peer, "said": heard.items, "done": sorted(heard.done),
            "first": heard.first,
            "files": [{"path": file.path, "regions": regions} for file, regions in files.values()],
        }  # fmt: skip
        opens = heard.whole_files.question(heard.items)
        if opens is not None:
            question["opens"] = opens
        heard.first = False
        self._resolver.ask(question, lambda answer: self._answered(heard, states, answer))

    def _answered(self, heard: TrackedAnnouncement, files: list[FileState], answer: Answer) -> None:
        heard.asked = False
        if heard is not self._heard.get((heard.said.pid, heard.said.reader)):
            return  # it has ended, or there is a new one
        now = self._clock.now_ns()
        # what could not be told is asked again, the more rarely the longer it takes
        heard.since_ns = heard.since_ns or now
        waited_ns = (now - heard.since_ns) // LOOKS
        heard.again_ns = now + min(LATELY_NS, max(DECIDE_NS, waited_ns))
        heard.settled = not answer.get("again", False)
        heard.more = answer.get("more", False)
        if "error" in answer:
            self._ledger.degrade(answer["error"])
        for text in answer.get("findings", []):
            self._ledger.degrade(text)
        for each in answer.get("orders", []):
            file = files[each["file"]]
            heard.done.add((each["part"], file.path))
            self._follow(heard, file, each, now)
        for done, why in heard.whole_files.answered(answer, self._resolver, heard.items):
            heard.done.add(done)
            if why is not None:
                self._ledger.degrade(why)
        self._came()

    def _follow(
        self, heard: TrackedAnnouncement, file: FileState, each: dict[str, Any], now: int
    ) -> None:
        try:
            order = self._resolver.order(each["order"])
        except (OSError, ValueError) as error:
            self._ledger.degrade(f"{heard.said.reader}: its order cannot be mapped: {error}")
            return
        rank = next((c.rank for c in self._clients() if c.descends_from(heard.peer)), 0)
        source = _Stated(order, f"{heard.said.reader}: {each['how']}")
        ahead_items = max((part.ahead for part in heard.said.parts), default=0)
        reader = PlannedReader(file, rank, source, self._clock, ahead_items)
        heard.readers.append(reader)
        self._known_orders.add(reader)
        if heard.items:
            reader.said(heard.items, now)

    def _end(self, heard: TrackedAnnouncement) -> None:
        heard.items = max(heard.items, (self._count(heard.said.pid, heard.said.slot) or 0) & ~ENDED)
        for reader in heard.readers:
            if reader.live:
                reader.said(heard.items, self._clock.now_ns())
            self._known_orders.remove(reader)
        heard.whole_files.end()
        heard.said.remove()

    def mapped(self, client: Process) -> None:
        """A process has mapped a file: perhaps the one that was missing. Where orders are to be
        expected, its index is made meanwhile."""
        for region in client.regions.values() if self._resolver.fd >= 0 else ():
            if region.file.key not in self._indexed and needs_order(region.file, self._clock):
                self._indexed.add(region.file.key)
                self._resolver.ask({"do": "prepare", "path": region.file.path}, lambda _: None)
        for heard in self._heard.values():
            if (heard.more or not heard.settled) and client.descends_from(heard.peer):
                heard.settled, heard.again_ns = False, 0
                self.next_ns = 0

    def forget_process(self, peer: int) -> None:
        """A process has ended without a word: nothing is read any more."""
        for name, heard in list(self._heard.items()):
            if heard.peer == peer:
                self._end(heard)
                del self._heard[name]
        self._close_unused()
