# SPDX-License-Identifier: Apache-2.0
"""The names by which files are seen to be opened: those to which symbolic links lead.

/proc/PID/fd and fanotify tell where a file is, a data set by which way it goes there. Asks the file
system, and may wait for it: called in the helper's threads (orders/indexer.py) only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from uffdprefetch.orders.file_order import PathOrder

#: Files of an order whose links are followed to find out where its directories lie.
LINKS_TRIED = 64
#: Beginnings of paths that are told apart: links within a data set lead to few other places.
ALIASES_MAX = 8


class RealNames:
    """Real paths, a directory's looked up once."""

    def __init__(self) -> None:
        self._directories: dict[str, str] = {}

    def directory(self, path: str) -> str:
        """The real path of the directory that a file is in."""
        name = os.path.dirname(path)
        found = self._directories.get(name)
        if found is None:
            found = self._directories[name] = os.path.realpath(name)
        return found

    def in_directory(self, path: str) -> str:
        """The real path of a file that is no link itself."""
        return os.path.join(self.directory(path), os.path.basename(path))

    def any_links(self, paths: Iterable[str]) -> bool:
        """Whether one of these files is a symbolic link itself."""
        return any(map(os.path.islink, map(self.in_directory, paths)))

    def file(self, path: str) -> str:
        """The real path of a file; one that does not exist is taken to be no link."""
        found = self.in_directory(path)
        try:
            return os.path.realpath(found) if os.path.islink(found) else found
        except OSError:
            return found


def aliases(paths: Iterable[str], names: RealNames) -> list[tuple[str, str]]:
    """(beginning of the real path, beginning of the path) of those whose real path is another: as
    short as they can be, the most frequent first."""
    found: dict[tuple[str, str], int] = {}
    for path in paths:
        real = names.file(path)
        if real != path:
            pair = _beginnings(real, path)
            if pair != (real, path):  # a link of its own: there is one for each file
                found[pair] = found.get(pair, 0) + 1
    return sorted(found, key=found.__getitem__, reverse=True)[:ALIASES_MAX]


def with_aliases(order: PathOrder, names: RealNames | None = None) -> PathOrder:
    """The order with the aliases of files all over it."""
    few = order.numbers[:: max(1, len(order) // LINKS_TRIED)][:LINKS_TRIED]
    paths = order.table.paths(np.asarray(few))
    return replace(order, aliases=aliases(paths, names or RealNames()))


def _beginnings(real: str, path: str) -> tuple[str, str]:
    """Both without the components that they end in alike."""
    same = 0
    for one, other in zip(reversed(real.split("/")), reversed(path.split("/")), strict=False):
        if one != other:
            break
        same += len(one) + 1
    return real[: len(real) - same + 1], path[: len(path) - same + 1]
