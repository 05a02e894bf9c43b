# SPDX-License-Identifier: Apache-2.0
"""Orders of whole files that a plan file states (`--plan`): asked for by rank and epoch, one epoch
ahead, and handed to who reads files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from uffdprefetch.base.record import dataclass, field
from uffdprefetch.orders.indexer_client import Answer, IndexerClient
from uffdprefetch.readers.announced_files import FileReaders
from uffdprefetch.state.ledger import Ledger

if TYPE_CHECKING:  # it brings numpy, which a service without orders spares
    from uffdprefetch.orders.file_order import FileOrder


@dataclass
class _PlannedRank:
    """A process of a rank, and where it is in its epochs."""

    rank: int | None
    asked: int = -1  # the latest epoch
    answered: int = -1
    orders: list[FileOrder] = field(default_factory=list)  # that have come and are not done
    over: bool = False  # there is no further one


class PlannedFiles:
    """The processes of a run that follow the plan's orders of files."""

    def __init__(self, resolver: IndexerClient, readers: FileReaders, ledger: Ledger,
                 came: Callable[[], None]) -> None:  # fmt: skip
        """``came`` is called when an order has come."""
        self._resolver, self._readers, self._ledger, self._came = resolver, readers, ledger, came
        self._ranks: dict[int, _PlannedRank] = {}
        self._is_begun, self._most_files = False, 0  # of any order

    def begin(self, peer: int, rank: int | None) -> None:
        """A process that reads has come, and is none of its workers; ``rank``: None, not known."""
        if peer not in self._ranks:
            self._ranks[peer] = _PlannedRank(rank)
            self.step()

    def end(self, peer: int) -> None:
        """It has ended."""
        gone = self._ranks.pop(peer, None)
        if gone is not None:
            self._is_begun |= any(order.is_begun for order in gone.orders)
            self._readers.forget(peer, gone.orders)

    def say_unopened(self) -> None:
        """Say, at a job's end, where its processes were seen to open none of the plan's files."""
        orders = [order for one in self._ranks.values() for order in one.orders]
        if self._most_files and not self._is_begun and not any(one.is_begun for one in orders):
            self._ledger.not_done(
                f"--plan: of its {self._most_files:,} files none was seen to be opened: another"
                " job's, or by other paths"
            )

    def step(self) -> None:
        """Ask for epochs that are due: once a turn."""
        for peer, one in self._ranks.items():
            if one.over or one.answered < one.asked:
                continue
            if not one.orders or _is_near_its_end(one.orders[-1]):
                one.asked += 1
                self._ask(peer, one)

    def _ask(self, peer: int, one: _PlannedRank) -> None:
        def heard(answer: Answer) -> None:
            one.answered = one.asked
            if self._ranks.get(peer) is one:
                self._answered(peer, one, answer)

        question = {"do": "plan_paths", "rank": one.rank, "epoch": one.asked}
        self._resolver.ask(question, heard)

    def _answered(self, peer: int, one: _PlannedRank, answer: Answer) -> None:
        from uffdprefetch.orders.file_order import FileOrder

        if "error" in answer:
            self._ledger.not_done(f"--plan: {answer['error']}")
        if answer.get("file_order") is None:
            one.over = True
            return
        try:
            paths = self._resolver.file_order(answer["file_order"])
        except (OSError, ValueError) as error:
            self._ledger.not_done(f"--plan: an order of files cannot be mapped: {error}")
            one.over = True
            return
        order = FileOrder(paths, "--plan")
        self._readers.follow(peer, order, one.orders[-1] if one.orders else None)
        self._is_begun |= any(each.done for each in one.orders)
        self._most_files = max(self._most_files, len(order))
        one.orders = [*(each for each in one.orders if not each.done), order]
        self._came()


def say_unread(resolver: IndexerClient, ledger: Ledger) -> None:
    """Say, where a plan has orders of files, that nobody follows them in this run."""

    def heard(answer: Answer) -> None:
        if answer.get("file_order") is None:
            return
        with contextlib.suppress(OSError, ValueError):
            resolver.file_order(answer["file_order"])  # which removes what was stored for us
        ledger.not_done(
            "--plan: its files are not read ahead: that takes --reads auto, and --policy auto or"
            " stride"
        )

    resolver.ask({"do": "plan_paths", "rank": 0, "epoch": 0}, heard)


def _is_near_its_end(order: FileOrder) -> bool:
    """Whether its reader has begun, and the next epoch's files may be read ahead soon."""
    from uffdprefetch.orders.file_order import AROUND_FILES

    return order.position > 0 and order.position + AROUND_FILES >= len(order)
