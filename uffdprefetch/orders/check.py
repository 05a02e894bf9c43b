# SPDX-License-Identifier: Apache-2.0
"""Counts of an order, and its requests and time in a simulated epoch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import covered, edges, of_mask, total, union
from uffdprefetch.predict.order.cursor import OrderCursor, OrderRange
from uffdprefetch.predict.order.order import Order

Pair = tuple[Array, Array]

GIB = 1 << 30
#: Longer orders are simulated up to here: requests are alike throughout, and CPU time is bounded.
SIMULATED_BYTES = 64 * GIB
SIMULATED_ITEMS = 2_000_000


@dataclass(frozen=True)
class ReadRates:
    """Storage's bandwidth, and the reader's own time for an item."""

    bandwidth_bytes_per_second: float
    seconds_per_item: float


def counts(order: Order) -> dict[str, int]:
    """items, bytes, unique_bytes (each byte of the file once) and repeated_items (whose first
    non-empty extent is an earlier item's)."""
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


def simulated_epoch(
    order: Order, file_bytes: int, lookahead_bytes: int, link: ReadRates | None
) -> dict[str, Any]:
    """The requests of a reader that goes through the order with ``lookahead_bytes`` requested ahead
    of it; with a ``link``, how long that takes.

    The link serves the requests in turn at its bandwidth. The lower bound of any prefetcher is all
    items' own time, or that of transferring each byte once ([HDMLP] section 4.1: its "perfect
    prefetcher", and the bandwidth).
    """
    part = _beginning(order)
    cursor = OrderCursor(part, file_bytes)
    ends = _coordinates(part)
    clock = _LinkClock(link) if link is not None else None
    requests = request_bytes = at = 0
    while at < part.items:
        ranges = cursor.due(lookahead_bytes)
        requests += len(ranges)
        request_bytes += sum(one.end - one.start for one in ranges)
        upto = part.items
        if cursor.sent_bytes < cursor.total_bytes:  # the item whose end makes room for more
            room = cursor.sent_bytes - lookahead_bytes
            upto = max(at, int(np.searchsorted(ends, room, "right"))) + 1
        if clock is not None:
            clock.ask(ranges)
            clock.read(ends[at:upto])
        cursor.said(at := min(upto, part.items), 0)
    found: dict[str, Any] = {
        "walked_items": part.items,
        "walked_bytes": cursor.total_bytes,
        "requests": requests,
        "request_bytes": request_bytes,
        "mean_request_bytes": round(request_bytes / requests) if requests else None,
        "amplification": round(request_bytes / cursor.total_bytes, 4)
        if cursor.total_bytes
        else None,
    }
    if clock is not None:
        found["prediction"] = _prediction(part, clock.link, clock.clock)
    return found


class _LinkClock:
    """A link that serves requests in turn, and a reader that waits for them. Times in seconds."""

    def __init__(self, link: ReadRates) -> None:
        self.link = link
        self.clock = 0.0  # the reader's
        self._free = 0.0  # when the link has served every request
        self._needed: Array = np.zeros(0, np.int64)  # by unused requests: plan coordinate
        self._arrivals: Array = np.zeros(0)  # of unused requests, ascending
        self._last_arrival = 0.0  # of the last used request

    def ask(self, ranges: Sequence[OrderRange]) -> None:
        """Issue requests now."""
        sizes = np.array([one.end - one.start for one in ranges], np.float64)
        begin = max(self._free, self.clock)
        arrivals = begin + np.cumsum(sizes) / self.link.bandwidth_bytes_per_second
        needed = np.array([one.need_bytes for one in ranges], np.int64)
        self._needed = np.concatenate((self._needed, needed))
        self._arrivals = np.concatenate((self._arrivals, arrivals))
        self._free = float(arrivals[-1]) if len(arrivals) else self._free

    def read(self, ends: Array) -> None:
        """Read items that end at these plan coordinates, each once all requests that it needs have
        arrived."""
        each, count = self.link.seconds_per_item, len(ends)
        used: Any = np.searchsorted(self._needed, ends, "left")
        arrivals: Array = np.append(self._last_arrival, self._arrivals)[used]
        # item i begins once it has arrived and item i - 1 is done: the latest of these chains
        begun = float((arrivals - np.arange(count) * each).max())
        self.clock = max(self.clock, begun) + count * each
        self._last_arrival = float(arrivals[-1])
        done = used[-1]
        self._needed, self._arrivals = self._needed[done:], self._arrivals[done:]


def _beginning(order: Order) -> Order:
    upto = np.cumsum(order.ends - order.starts)
    last = int(np.searchsorted(upto, SIMULATED_BYTES, "right"))
    items = min(order.items, SIMULATED_ITEMS)
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


def _prediction(order: Order, link: ReadRates, seconds: float) -> dict[str, float]:
    compute = order.items * link.seconds_per_item
    transfer = total(union(order.starts, order.ends)) / link.bandwidth_bytes_per_second
    return {
        "seconds": round(seconds, 6),
        "stall_seconds": round(max(0.0, seconds - compute), 6),
        "compute_seconds": round(compute, 6),
        "transfer_seconds": round(transfer, 6),
        "lower_bound_seconds": round(max(compute, transfer), 6),
    }
