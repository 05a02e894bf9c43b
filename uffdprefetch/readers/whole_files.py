# SPDX-License-Identifier: Apache-2.0
"""Files that are visited here and there, and read whole where that pays (predict/visits.py).

One stream for a file and node, whatever the number of ranks, behind everything else that is wanted.
It keeps pace with what the visits bring and with what of it was used, so that a job that leaves
the file early has had little read for nothing; it ends when nobody comes any more.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from typing import Any

from uffdprefetch.base.record import dataclass, field, replace
from uffdprefetch.base.units import format_size
from uffdprefetch.predict.bounds import ENTRIES_MAX, LATELY_NS
from uffdprefetch.predict.fronts import FileFronts
from uffdprefetch.predict.randomness import Access
from uffdprefetch.predict.storage import (
    BLOCK_BYTES,
    FREE_BYTES,
    MISS_BYTES,
    PIECE_BYTES,
    SHY,
    Account,
    Link,
)
from uffdprefetch.predict.streams import RATE_SAMPLE_NS
from uffdprefetch.predict.visits import FREE_SHARE, LITTLE_SHARE, Visits
from uffdprefetch.readers.file_stream import (
    FileStream,
    Room,
    Stage,
    Streaming,
    Want,
)
from uffdprefetch.state.files import FileState, Key
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.reader import Reader
from uffdprefetch.warm.consumer import FileConsumer, Priority
from uffdprefetch.warm.scheduler import GUESSED_EXTENT_BYTES, Scheduler


@dataclass
class VisitedFile:
    """One file. Times in ns."""

    file: FileState
    fronts: FileFronts
    visits: Visits
    ranks: set[int] = field(default_factory=set)  # that have jumped about in it
    blocks: int = 0  # that were touched
    miss_bytes: int = MISS_BYTES  # what a miss of it brings without us
    judge_ns: int = 0
    goes_on: bool = False  # it is likely enough that its visits do to read all of it, ...
    gains: bool = False  # ... or as much of it as saves them time
    touched_ns: int = 0
    streaming: Streaming = field(
        default_factory=lambda: Streaming(why="reading it whole has not paid yet")
    )
    used_bytes: int = 0  # of what was read for it

    def touched(self, now_ns: int) -> None:
        """Somebody has come to it, or has come back."""
        if self.visits.is_over and now_ns - self.touched_ns > LATELY_NS:
            self.visits.forget()
            self.blocks = 0
        self.visits.goes_on()
        self.touched_ns = now_ns

    def left(self, now_ns: int) -> None:
        """Nobody maps it any more; it was touched last then."""
        self.visits.over()
        self.touched_ns = max(self.touched_ns, now_ns)

    def over_bytes(self, link: Link) -> int:
        """What was read for nothing, or may have been, beyond what its visits allow; less than 0:
        so much more may be."""
        if self.goes_on:
            return -self.file.size_bytes
        size, touched = self.file.size_bytes, self.blocks * BLOCK_BYTES
        own = replace(link, miss_bytes=self.miss_bytes)
        brought = self.visits.brought_bytes(size, touched, BLOCK_BYTES, own)
        share = 1 / SHY if self.gains else FREE_SHARE
        return self.streaming.streamed_bytes - self.used_bytes - int(share * brought)


class WholeFiles:
    """Of a service, whose thread calls everything here."""

    def __init__(
        self, scheduler: Scheduler, want: Want, ledger: Ledger, room: Room,
        link: Callable[[], Link], account: Account, missed_beside: Callable[[FileState], bool],
    ) -> None:  # fmt: skip
        """``account``: of all guesses of the run; ``missed_beside``: whether somebody has missed in
        another file."""
        self._scheduler, self._want, self._ledger = scheduler, want, ledger
        self._room, self._link, self._account = room, link, account
        self._missed_beside = missed_beside
        self._streamed: dict[Key, VisitedFile] = {}
        self.running: list[VisitedFile] = []
        room.holders.append(self._held)

    def judge(self, book: VisitedFile, reader: Reader, link: Link, now_ns: int) -> None:
        """A visit has come: whether the file is to be read whole from now on."""
        book.miss_bytes = mmap.PAGESIZE if reader.says_random else link.miss_bytes
        if reader.access is Access.JUMPS:
            book.ranks.add(reader.rank)
        if now_ns < book.judge_ns or not book.visits.places:
            return
        book.judge_ns = now_ns + RATE_SAMPLE_NS
        file, size = book.file, book.file.size_bytes
        missing, touched = book.fronts.unknown * BLOCK_BYTES, book.blocks * BLOCK_BYTES
        own = replace(link, miss_bytes=book.miss_bytes)
        book.goes_on = book.visits.are_enough(size, touched, BLOCK_BYTES, own)
        book.gains = book.visits.will_gain(size, touched, book.used_bytes, BLOCK_BYTES, now_ns, own)
        if book.streaming.stream is not None:
            return
        if not book.visits.is_worth_it(size, missing, touched, BLOCK_BYTES, now_ns, link):
            return
        book.ranks.add(reader.rank)
        pooled = file.pooled if reader.reads_pool else None
        room, limit = self._room.of(file, pooled, size - missing)
        if size > room:
            self._refuse(
                book,
                f"{format_size(size)} do not fit in {format_size(room)}"
                f" ({limit.value}): not read whole;"
                f" {self._room.made_by(file, pooled, size)} it could be, a plan needs less",
            )
            return
        consumer = FileConsumer(reader.rank, reader.pid)
        stream = FileStream(file, self._scheduler, self._want, consumer, reader.reads_pool, now_ns)
        stream.terms.yield_bytes = self._under_way_bytes(book, link)
        stream.terms.guess = True
        stream.add(0, size)
        book.streaming.begin(
            stream, f"{book.visits.places} places of it were read, and more are to be expected"
        )
        if not any(one is book for one in self.running):  # one that has just ended still is
            self.running.append(book)
        self._streamed[file.key] = book
        if len(self._streamed) > ENTRIES_MAX:
            idle = (key for key, one in self._streamed.items() if not one.file.mappings.attached)
            self._streamed.pop(next(idle, file.key))

    def _refuse(self, book: VisitedFile, why: str) -> None:
        if book.streaming.refuse(why):
            ranks = ", ".join(map(str, sorted(book.ranks)))
            many = "ranks" if len(book.ranks) > 1 else "rank"
            self._ledger.degrade(f"{many} {ranks} jumps about; {why}", book.file.path)

    def step(self, now_ns: int) -> None:
        """Once a turn: they go on, at their pace."""
        link = self._link()
        over = (book.over_bytes(link) for book in self._streamed.values())
        self._account.over = sum(max(0, each) for each in over)
        for book in self.running:
            stream = book.streaming.stream
            if stream is None or self._ends(book, stream, now_ns):
                continue
            if book.fronts.unknown * LITTLE_SHARE <= book.fronts.blocks:
                book.streaming.end(
                    Stage.DONE, book.streaming.why, now_ns
                )  # the rest has come with what was touched
                continue
            stream.give_way(Priority.BACKGROUND, self._under_way_bytes(book, link))
            spare = self._account.spare_bytes(0, FREE_BYTES, FREE_SHARE)
            own = max(0, -book.over_bytes(link))
            stream.most_bytes = stream.absent_bytes + spare + own
            if stream.go_on(now_ns):
                book.streaming.end(Stage.DONE, book.streaming.why, now_ns)
        self.running = [book for book in self.running if book.streaming.stream is not None]

    def _under_way_bytes(self, book: VisitedFile, link: Link) -> int:
        """How much of a file may be before a miss. Who misses in it, where it is likely that all of
        it will be needed, waits for what it needs next."""
        its_own = book.goes_on and not self._missed_beside(book.file)
        return link.reach_bytes + (GUESSED_EXTENT_BYTES if its_own else PIECE_BYTES)

    def _ends(self, book: VisitedFile, stream: FileStream, now_ns: int) -> bool:
        """Stop where the reason has gone; whether it has."""
        file, streaming = book.file, book.streaming
        if file.guard.changed or file.opened.fd < 0:
            streaming.end(Stage.STOPPED, "the file is not managed any more", now_ns)
        elif now_ns - book.touched_ns > LATELY_NS:
            streaming.end(Stage.WATCHED, "nobody has come for a second", now_ns)
        elif streaming.is_memory_due(now_ns):
            cached = file.size_bytes - book.fronts.unknown * BLOCK_BYTES
            room, limit = self._room.of(file, stream.pooled, cached)
            if room < file.size_bytes:
                why = f"memory became short ({limit.value})"
                if not streaming.told:
                    streaming.told = True
                    self._ledger.degrade(f"it is not read whole any more: {why}", file.path)
                streaming.end(Stage.STOPPED, why, now_ns)
        return streaming.stream is None

    def _held(self) -> Iterable[tuple[FileState, int]]:
        """See Room.holders."""
        for book in self._streamed.values():
            if book.streaming.stage in (Stage.STREAMED, Stage.DONE):
                yield book.file, book.file.size_bytes


def describe(book: VisitedFile) -> dict[str, Any] | None:
    """What the summary says of it (docs/whole.md); None: nobody has jumped about in it."""
    if not book.ranks:
        return None
    return {
        "state": book.streaming.stage.value,
        "why": book.streaming.why,
        "ranks": sorted(book.ranks),
        "read_bytes": book.streaming.streamed_bytes,
    }
