# SPDX-License-Identifier: Apache-2.0
"""A known reading order. Pure.

The *plan coordinate* is the number of bytes of the order before a place in it. Where an order goes
through several files there is an Order of each, and the coordinate of all of them is that of the
whole: what lies ahead in one of them is as far away as in another. numpy is imported when the first
Order is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Order:
    """One rank's reading order of one file in one epoch.

    starts, ends: int64, file bytes, in reading order; item: int64, ascending from 0, which item
    (record) each extent is of: one may have several, or none, and may be empty. items: how many
    there are (-1: no more than have extents).

    Where the order goes on in other files, before: int64, the plan coordinate of each extent, that
    is the bytes of all files that come before it; whole_bytes: those of the whole order. item and
    items are the whole order's too. Raises ValueError when that does not hold.
    """

    starts: Array
    ends: Array
    item: Array
    items: int = -1
    before: Array | None = None
    whole_bytes: int = -1

    def __post_init__(self) -> None:
        import numpy as np

        for name in ("starts", "ends", "item"):
            array = np.ascontiguousarray(getattr(self, name), np.int64)
            object.__setattr__(self, name, array)
        if self.before is not None:
            object.__setattr__(self, "before", np.ascontiguousarray(self.before, np.int64))
        if not self.starts.shape == self.ends.shape == self.item.shape == (len(self.item),):
            raise ValueError("an order's starts, ends and item must be as long as each other")
        least = int(self.item[-1]) + 1 if len(self.item) else 0
        if self.items < 0:
            object.__setattr__(self, "items", least)
        if self.items < least:
            raise ValueError(f"an order of {self.items} items has an extent of item {least - 1}")
        if not len(self.item):
            return
        if self.item[0] < 0 or (self.item[1:] < self.item[:-1]).any():
            raise ValueError("an order's items must ascend from 0")
        if (self.starts < 0).any() or (self.ends < self.starts).any():
            raise ValueError("an order's extents must begin at 0 or later and not end before")
        if self.before is not None:
            ends = np.append(self.before, self.whole_bytes)
            if (ends[:1] < 0).any() or (ends[1:] - ends[:-1] < self.ends - self.starts).any():
                raise ValueError("an order's extents must have room in the whole order")
