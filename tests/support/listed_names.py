# SPDX-License-Identifier: Apache-2.0
"""Names of a directory without a directory, in the four orders (predict/name_orders.py)."""

from __future__ import annotations

from collections.abc import Sequence

from uffdprefetch.predict.name_orders import NameOrder


class GivenNames:
    """``names`` as readdir(3) has them, and their inode numbers."""

    def __init__(self, names: Sequence[str], inodes: Sequence[int] | None = None) -> None:
        numbers = range(len(names)) if inodes is None else inodes
        self.names = list(names)
        indices = range(len(self.names))
        self._orders = {
            NameOrder.READDIR: list(indices),
            NameOrder.SORTED: sorted(
                indices, key=lambda i: self.names[i].encode("utf-8", "surrogateescape")
            ),
            NameOrder.INODE: sorted(indices, key=lambda i: numbers[i]),
            NameOrder.REVERSED: list(reversed(indices)),
        }
        self._places = {
            order: {index: place for place, index in enumerate(indices)}
            for order, indices in self._orders.items()
        }
        self._index = {name: index for index, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def find(self, name: str) -> int:
        return self._index.get(name, -1)

    def name(self, index: int) -> str:
        return self.names[index]

    def place(self, order: NameOrder, index: int) -> int:
        return self._places[order][index]

    def index(self, order: NameOrder, place: int) -> int:
        return self._orders[order][place]

    def ordered(self, order: NameOrder) -> list[str]:
        """All of them."""
        return [self.names[index] for index in self._orders[order]]
