# SPDX-License-Identifier: Apache-2.0
"""`wrap --learn`: the order in which each rank has come to a mapped file in an earlier run, the
last source of orders; and what there is to be learned of this run (docs/learn.md).

An order that was learned is a plan: it is followed, judged and dropped as one of `--plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from uffdprefetch.orders.indexer_client import Answer, IndexerClient
from uffdprefetch.orders.learned_ranges import name_of
from uffdprefetch.predict.first_touches import RankOf, RankTouches
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers.known_order import KnownOrders, PlannedReader
from uffdprefetch.readers.order_sources import PlanOrders
from uffdprefetch.readers.reader_streams import come_over
from uffdprefetch.sense.observation import Batch
from uffdprefetch.state.files import FileState, Key
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.reader import Reader
from uffdprefetch.state.touch_book import TouchBook, TouchedFile

if TYPE_CHECKING:
    from uffdprefetch.predict.order.extents import OrderExtents


class PlanFate(Enum):
    """What became of the order that was known of a rank in a file."""

    NONE = "there was none"
    FOLLOWED = "it was followed"
    DROPPED = "it was wrong"


class RankRun(NamedTuple):
    """What a rank has done with a file in this run. ``name``: by which its order is kept;
    ``plan``: the plan file with the order that there was, None: there was none."""

    name: str
    plan: str | None
    file: TouchedFile
    touches: RankTouches
    fate: PlanFate
    known_bytes: int  # of the order that there was


class LearnedPlans(PlanOrders):
    """Of one run. The service's thread calls everything here."""

    option = "--learn"

    def __init__(
        self, resolver: IndexerClient, known_orders: KnownOrders, ledger: Ledger,
        came: Callable[[], None],
    ) -> None:  # fmt: skip
        """See PlanOrders."""
        super().__init__(resolver, known_orders, ledger, came)
        self._kept: Mapping[str, str] = {}  # by name, the paths of plans
        self._paths: dict[tuple[Key, int], str | None] = {}  # of the readers that there were
        self._book = TouchBook()
        self._is_over = False

    def found(self, kept: Mapping[str, str]) -> None:
        """Orders are kept, by name, in these plan files."""
        self._kept = kept
        if kept:
            self._known_orders.begin()
            self._resolver.start()  # the job has yet to map its files
            self._came()

    # ---- a source of orders ---------------------------------------------------------------------

    def readers(self, reader: Reader) -> list[PlannedReader]:
        """See known_order.OrderSource."""
        return super().readers(reader) if self._kept and self._path(reader) else []

    def _path(self, reader: Reader) -> str | None:
        """Of the plan file; None: nothing is kept."""
        name = reader.file.key, reader.rank
        if name not in self._paths:
            file = reader.file
            self._paths[name] = self._kept.get(name_of(file.path, file.guard.times, _rank(reader)))
        return self._paths[name]

    def question(self, file: FileState, rank: int, epoch: int) -> dict[str, Any]:
        """See PlanOrders."""
        plan = self._paths[file.key, rank]
        return {"do": "learned", "plan": plan, **super().question(file, rank, epoch)}

    def order(self, answer: Answer) -> OrderExtents | None:
        """See PlanOrders."""
        found = super().order(answer)
        if found is not None:
            found.in_blocks = True
        return found

    # ---- what is to be learned ------------------------------------------------------------------

    def saw(self, batch: Batch) -> None:
        """What was seen of a reader: of the page cache what is mapped that was not, of the pool its
        faults, as that maps more than is touched."""
        region, reader = batch.region, batch.region.reader
        if self._is_over or region.mode == ServingMode.READS:
            return
        file, rank = region.file, _rank(reader)
        if reader.order.announced and self._is_others(reader):
            self._book.give_up(file, rank)
        elif region.mode == ServingMode.POOL:
            self._book.came(file, rank, [come_over(seen) for seen in batch.touches if seen.told])
        else:
            self._book.came(file, rank, batch.found)

    def _is_others(self, reader: Reader) -> bool:
        """Whether the order that it follows is known from elsewhere."""
        followed = self._known_orders.order_of(reader)
        return followed is not None and followed is not self._order(reader.file.key, reader.rank)

    def _order(self, key: Key, rank: int) -> PlannedReader | None:
        return self._readers.get((key, rank))

    def end(self) -> list[RankRun]:
        """What this run has shown, but for orders that were known from elsewhere. Nothing more is
        noted."""
        self._is_over = True
        return list(self._runs())

    def _runs(self) -> Iterator[RankRun]:
        for key, file, rank, touches in self._book:
            fate, known_bytes = PlanFate.NONE, 0
            order = self._order(key, rank.rank)
            if order is not None and order.cursor is not None:
                fate = PlanFate.DROPPED if order.dropped else PlanFate.FOLLOWED
                known_bytes = order.cursor.here_bytes
            name = name_of(file.path, file.times, rank)
            yield RankRun(name, self._paths.get((key, rank.rank)), file, touches, fate, known_bytes)

    def counts(self) -> tuple[int, int]:
        """(orders that were followed, of these: that were dropped)."""
        known = [order for order in self._readers.values() if order.cursor is not None]
        return len(known), sum(order.dropped is not None for order in known)


def _rank(reader: Reader) -> RankOf:
    return RankOf(reader.rank, reader.client.world)
