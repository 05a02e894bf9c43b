# SPDX-License-Identifier: Apache-2.0
"""Orders of whole files that one process has announced: what the helper is told of its opens, and
what comes of the answers. Who watches directories and reads files is behind FileReaders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from uffdprefetch.orders.opens import OPENS_MAX

if TYPE_CHECKING:  # they bring numpy, which a service without orders spares
    from uffdprefetch.orders.announcement import StoredAnnouncement
    from uffdprefetch.orders.file_order import FileOrder
    from uffdprefetch.orders.indexer_client import Answer, IndexerClient


class FileReaders(Protocol):
    """Reads whole files ahead of the processes that follow an order of them, and sees what they
    open. Never blocks."""

    def watch(self, peer: int, directories: Sequence[str]) -> bool:
        """Have opens in these directories seen, real paths as the process has them; whether all
        were since it was asked last. Asked again and again: where opens were lost (a queue has
        overflowed), what is compared with them begins anew."""

    def opened(self, peer: int) -> Sequence[str]:
        """Real paths of files that a process and its children opened since forget(), as far as
        that was seen, the latest last; of those in watched directories, all."""

    def follow(self, peer: int, order: FileOrder, after: FileOrder | None = None) -> None:
        """Read ahead in an order, and tell it what is opened (FileOrder.opened()). ``after``: of
        which it is the next epoch: it is read ahead after that one, and told of the opens that the
        other does not expect near its end."""

    def forget(self, peer: int, orders: Sequence[FileOrder]) -> None:
        """These have ended; nothing is watched for the process any more but for other orders."""


class AnnouncedFiles:
    """One announcement's orders of files."""

    def __init__(self, peer: int, said: StoredAnnouncement, readers: FileReaders | None) -> None:
        """``readers``: None, where no files are read ahead."""
        self._peer, self._said, self._readers = peer, said, readers
        self._orders: list[FileOrder] = []
        self._watched: list[str] = []
        self._since_items: int | None = None  # read when all these were watched

    @property
    def may_come(self) -> bool:
        """Whether an order of files may come of it, be no file mapped."""
        wanted = any(part.what in ("paths", "samples") for part in self._said.parts)
        return wanted and self._readers is not None

    def question(self, items: int) -> dict[str, Any] | None:
        """What was opened, for the helper; ``items``: that were read."""
        if self._readers is None:
            return None
        self._look(items)
        return {
            "paths": list(self._readers.opened(self._peer))[-OPENS_MAX:],
            "directories": self._watched, "since_items": self._since_items,
        }  # fmt: skip

    def _look(self, items: int) -> None:
        if self._readers is None or not self._watched:
            return
        if not self._readers.watch(self._peer, self._watched):
            self._since_items = None
        elif self._since_items is None:
            self._since_items = items

    def answered(
        self, answer: Answer, resolver: IndexerClient, items: int
    ) -> list[tuple[tuple[int, str], str | None]]:
        """Take an answer: for each order in it (what the next question says is done, why it cannot
        be followed)."""
        from uffdprefetch.orders.file_order import FileOrder

        if self._readers is None:
            return []
        if not self._watched:  # the first ones stay: what is seen since then is compared
            self._watched = list(answer.get("watch", ()))
        self._look(items)
        found: list[tuple[tuple[int, str], str | None]] = []
        for each in answer.get("file_orders", ()):
            why = None
            try:
                paths = resolver.file_order(each["order"])
            except (OSError, ValueError) as error:
                why = f"{self._said.reader}: its order of files cannot be mapped: {error}"
            else:
                ahead_items = self._said.parts[each["part"]].ahead
                order = FileOrder(paths, f"{self._said.reader}: {each['how']}", ahead_items)
                order.said(items)
                self._orders.append(order)
                self._readers.follow(self._peer, order)
            found.append(((each["part"], ""), why))
        return found

    def said(self, items: int) -> None:
        """So many items have been read."""
        for order in self._orders:
            order.said(items)

    def end(self) -> None:
        """It has ended."""
        if self._readers is not None:
            self._readers.forget(self._peer, self._orders)
