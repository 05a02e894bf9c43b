# SPDX-License-Identifier: Apache-2.0
"""What an order amounts to, and what it would cost: counts, requests, a simulated epoch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import covered, edges, of_mask, total, union
from uffdprefetch.predict.order.cursor import Order, OrderCursor, OrderRange

Pair = tuple[Array, Array]

GIB = 1 << 30
#: Of longer orders only the beginning is walked through: requests are alike all the way.
WALKED_BYTES = 64 * GIB
WALKED_ITEMS = 2_000_000


@dataclass(frozen=True)
class Link:
    """What brings the bytes, and what uses them."""

    bandwidth_bytes_per_second: float
    seconds_per_item: float


def counts(order: Order) -> dict[str, int]:
    """items, bytes, unique_bytes (each byte of the file once) and repeated_items (those whose first
    extent with bytes an earlier item had already)."""
    first = _first_extents(order)
    pairs = np.stack((order.starts[first], order.ends[first]), axis=1)
    return {
        "items": order.items,
        "bytes": int((order.ends - order.starts).sum()),
        "unique_bytes": total(union(order.starts, order.ends)),
        "repeated_items": len(pairs) - len(np.unique(pairs, axis=0)) if len(pairs) else 0,
    }


def _first_extents(order: Order) -> Array:
    some = np.flatnonzero(order.ends > order.starts)
    item = order.item[some]
    return some[np.flatnonzero(np.append(True, item[1:] != item[:-1])[: len(item)])]


def shared_bytes(orders: Sequence[Order]) -> list[int]:
    """For each order the bytes of the file that another one reads too."""
    sets = [union(order.starts, order.ends) for order in orders]
    starts, ends = (np.concatenate(part) for part in zip(*sets, strict=True))
    cuts = edges(starts, ends)
    readers: Array = np.zeros(len(cuts), np.int64)
    np.add.at(readers, np.searchsorted(cuts, starts), 1)
    np.add.at(readers, np.searchsorted(cuts, ends), -1)
    first, after = of_mask(np.cumsum(readers)[:-1] > 1)
    shared = cuts[first], cuts[after]
    return [int(covered(shared, *each).sum()) for each in sets]


def walked(
    order: Order, file_bytes: int, lookahead_bytes: int, link: Link | None
) -> dict[str, Any]:
    """The requests of a reader that goes through the order, each item after the other, with so much
    asked for ahead of it; with a ``link``, how long that takes.

    The link serves the requests in turn at its bandwidth. The lower bound is what no prefetcher can
    undercut: all items' own time, or that of bringing each byte once (paper 5, section 4.1: its
    "perfect prefetcher", and the bandwidth).
    """
    part = _beginning(order)
    walk = OrderCursor(part, file_bytes)
    ends = _coordinates(part)
    line = _Line(link) if link is not None else None
    requests = request_bytes = at = 0
    while at < part.items:
        pieces = walk.due(lookahead_bytes)
        requests += len(pieces)
        request_bytes += sum(piece.end - piece.start for piece in pieces)
        upto = part.items
        if walk.sent_bytes < walk.total_bytes:  # the item whose end makes room for more
            room = walk.sent_bytes - lookahead_bytes
            upto = max(at, int(np.searchsorted(ends, room, "right"))) + 1
        if line is not None:
            line.ask(pieces)
            line.read(ends[at:upto])
        walk.said(at := min(upto, part.items), 0)
    found: dict[str, Any] = {
        "walked_items": part.items,
        "walked_bytes": walk.total_bytes,
        "requests": requests,
        "request_bytes": request_bytes,
        "mean_request_bytes": round(request_bytes / requests) if requests else None,
        "amplification": round(request_bytes / walk.total_bytes, 4) if walk.total_bytes else None,
    }
    if line is not None:
        found["prediction"] = _prediction(part, line.link, line.clock)
    return found


class _Line:
    """A link that serves requests in turn, and a reader that uses what it brings. Seconds."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.clock = 0.0  # the reader's
        self._free = 0.0  # the link's: when all that was asked for is there
        self._needs: Array = np.zeros(0, np.int64)  # of requests still to be used, ascending
        self._there: Array = np.zeros(0)  # when they are there, ascending
        self._before = 0.0  # when the one before these was

    def ask(self, pieces: Sequence[OrderRange]) -> None:
        """Requests that are made now."""
        sizes = np.array([piece.end - piece.start for piece in pieces], np.float64)
        begin = max(self._free, self.clock)
        there = begin + np.cumsum(sizes) / self.link.bandwidth_bytes_per_second
        needs = np.array([piece.need_bytes for piece in pieces], np.int64)
        self._needs = np.concatenate((self._needs, needs))
        self._there = np.concatenate((self._there, there))
        self._free = float(there[-1]) if len(there) else self._free

    def read(self, ends: Array) -> None:
        """Go through items that end at these plan coordinates, each when all that is needed before
        its end is there."""
        each, count = self.link.seconds_per_item, len(ends)
        used: Any = np.searchsorted(self._needs, ends, "left")
        there: Array = np.append(self._before, self._there)[used]
        # item i begins when it is there and the one before is done: the latest of these chains
        begun = float((there - np.arange(count) * each).max())
        self.clock = max(self.clock, begun) + count * each
        self._before = float(there[-1])
        self._needs, self._there = self._needs[used[-1] :], self._there[used[-1] :]


def _beginning(order: Order) -> Order:
    upto = np.cumsum(order.ends - order.starts)
    last = int(np.searchsorted(upto, WALKED_BYTES, "right"))
    items = min(order.items, WALKED_ITEMS)
    if last < len(upto):
        items = min(items, max(1, int(order.item[last])))
    if items == order.items:
        return order
    cut = int(np.searchsorted(order.item, items))
    return Order(order.starts[:cut], order.ends[:cut], order.item[:cut], items)


def _coordinates(order: Order) -> Array:
    """The plan coordinate at which each item ends."""
    upto: Array = np.append(0, np.cumsum(order.ends - order.starts))
    ends: Array = upto[np.searchsorted(order.item, np.arange(order.items), "right")]
    return ends


def _prediction(order: Order, link: Link, seconds: float) -> dict[str, float]:
    compute = order.items * link.seconds_per_item
    transfer = total(union(order.starts, order.ends)) / link.bandwidth_bytes_per_second
    return {
        "seconds": round(seconds, 6),
        "stall_seconds": round(max(0.0, seconds - compute), 6),
        "compute_seconds": round(compute, 6),
        "transfer_seconds": round(transfer, 6),
        "lower_bound_seconds": round(max(compute, transfer), 6),
    }
