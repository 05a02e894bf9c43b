# SPDX-License-Identifier: Apache-2.0
"""cffi binding of csrc/service/listing.c: the names in a directory, and the orders of them."""

from __future__ import annotations

import os
from typing import Any

from uffdprefetch import _uffd  # type: ignore[attr-defined]

_ffi: Any = _uffd.ffi
_lib: Any = _uffd.lib


class ListedNames:
    """Files or subdirectories of a directory. ``c``: its struct up_names; ``owner``: what keeps
    that."""

    def __init__(self, c: Any, owner: Any) -> None:
        self._c = c
        self._owner = owner
        self._count: int = c.count
        self._orders = (None, c.by_name, c.by_inode)
        self._places = (None, c.name_place, c.inode_place)

    def __len__(self) -> int:
        return self._count

    def find(self, name: str) -> int:
        """The index of a name in the order of readdir(3), or -1."""
        return int(_lib.up_names_find(self._c, os.fsencode(name)))

    def name(self, index: int) -> str:
        """Raises IndexError."""
        if not 0 <= index < self._count:
            raise IndexError(index)
        return os.fsdecode(_ffi.string(self._c.text + self._c.offset[index]))

    def inode(self, index: int) -> int:
        """Its number. Raises IndexError."""
        if not 0 <= index < self._count:
            raise IndexError(index)
        return int(self._c.inode[index])

    def place(self, order: int, index: int) -> int:
        """Where an order (predict/name_orders.NameOrder) has an index."""
        return self._through(self._places, order, index)

    def index(self, order: int, place: int) -> int:
        """What an order has at a place."""
        return self._through(self._orders, order, place)

    def _through(self, of: tuple[Any, ...], order: int, number: int) -> int:
        if not 0 <= number < self._count:
            raise IndexError(number)
        if order == 3:
            return self._count - 1 - number
        return int(of[order][number]) if order else number


def read(directory: int, most: int) -> tuple[ListedNames, ListedNames]:
    """The files and the subdirectories of a directory, whose descriptor may be O_PATH. Raises
    OSError (E2BIG: it has more than ``most`` names). The interpreter's lock is not held."""
    pointer = _ffi.new("struct up_listing **")
    ret = _lib.up_listing_read(pointer, directory, most)
    if ret < 0:
        raise OSError(-ret, os.strerror(-ret))
    owner = _ffi.gc(pointer[0], _lib.up_listing_free)
    return ListedNames(owner.files, owner), ListedNames(owner.directories, owner)
