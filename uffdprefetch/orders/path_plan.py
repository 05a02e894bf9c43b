# SPDX-License-Identifier: Apache-2.0
"""A plan of whole files: a list of paths, and the order in which each rank reads them in each
epoch; in a plan file's JSON, or a text file of paths, one a line (format: docs/plans.md)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.errors import usage_error
from uffdprefetch.formats.reader import FileReader
from uffdprefetch.orders import stated
from uffdprefetch.orders.file_links import with_aliases
from uffdprefetch.orders.file_order import PathColumn, PathOrder, PathTable, check_paths, of_items
from uffdprefetch.orders.key_lists import KeyList
from uffdprefetch.orders.plan_of_file import ANY_RANK, spec_of

#: A list of paths: four million of them, say.
LIST_MAX_BYTES = 512 << 20
#: Files of a list of which it is looked whether they are there.
LOOKED_FOR_MAX = 4096
#: Of the first paths of a text one at least has to be a file's: else it is any text.
TRIED = 16


@dataclass(frozen=True, eq=False)
class PathPlan:
    """names: paths, relative ones of ``directory``. epochs: by rank, or ANY_RANK, the numbers of
    those that are read, in their order; repeat: the last epoch's orders go on."""

    where: str
    directory: str
    names: KeyList
    epochs: Sequence[Mapping[str, stated.RecordOrder]]
    repeat: bool

    @cached_property
    def table(self) -> PathTable:
        """The paths of all orders."""
        return PathTable([PathColumn(self.names, os.fsencode(os.path.join(self.directory, "")))])

    def order(self, rank: int | None, epoch: int) -> PathOrder | None:
        """The order of a rank (None: not known) in an epoch, from 0 on; None when the plan does not
        say. Raises UffdPrefetchError (exit 2) for a number that no path has."""
        spec = spec_of(self.epochs, self.repeat, rank, epoch)
        return None if spec is None else with_aliases(self.resolve(spec))

    def resolve(self, spec: stated.RecordOrder) -> PathOrder:
        """An order of the plan. Raises UffdPrefetchError (exit 2)."""
        numbers = spec.source.array()
        outside = np.flatnonzero((numbers < 0) | (numbers >= len(self.names)))
        if len(outside):
            at = int(outside[0])
            raise usage_error(
                f"{spec.where}[{at}]: path {numbers[at]}: the list has {len(self.names)}, from 0 on"
            )
        items: Array = np.arange(len(numbers))
        return of_items(self.table.columns, [numbers], items, len(numbers), self.table)

    def unique_files(self, order: PathOrder) -> int:
        """How many different paths an order of the plan has."""
        return len(np.unique(self._firsts[order.numbers]))

    @cached_property
    def _firsts(self) -> Array:
        """For each path the number of the first one that is the same."""
        firsts: dict[bytes, int] = {}
        every = self.names.take(np.arange(len(self.names)))
        return np.array([firsts.setdefault(name, i) for i, name in enumerate(every)], np.int64)

    def missing(self) -> tuple[int, int]:
        """(paths that are no files, paths that were looked for, all over the list)."""
        step = max(1, len(self.names) // LOOKED_FOR_MAX)
        paths = self.table.paths(np.arange(len(self.names))[::step][:LOOKED_FOR_MAX])
        return sum(not os.path.isfile(path) for path in paths), len(paths)


def in_list_order(where: str, path: str, names: KeyList) -> PathPlan:
    """All ranks read the files as they stand in a list, in each epoch."""
    order = stated.RecordOrder(where, stated.RangeNumbers(range(len(names))))
    return PathPlan(where, os.path.dirname(path), names, [{ANY_RANK: order}], True)


def of_lines(where: str, path: str) -> KeyList:
    """The paths of a text file, one a line; empty lines are passed over. Raises UffdPrefetchError
    (exit 2)."""
    with FileReader(path) as reader:
        if reader.size_bytes > LIST_MAX_BYTES:
            raise usage_error(
                f"{where}: {path}: {reader.size_bytes} bytes of paths: at most {LIST_MAX_BYTES}"
            )
        try:
            data = reader.read(0, reader.size_bytes)
        except OSError as error:
            raise usage_error(f"{where}: cannot read {path}: {error.strerror}") from None
    lines = [line.rstrip(b"\r") for line in data.split(b"\n")]
    return of_names(where, [line for line in lines if line])


def of_names(where: str, names: Sequence[bytes]) -> KeyList:
    """Paths as a list. Raises UffdPrefetchError (exit 2) for what cannot be any."""
    if not names:
        raise usage_error(f"{where}: no path")
    ends: Array = np.fromiter(accumulate(map(len, names)), np.int64, len(names))
    data: Array = np.frombuffer(b"".join(names), np.uint8)
    found = KeyList("paths", "bytes", ends[:0], ends, data)
    try:
        check_paths(found)
    except ValueError as error:
        raise usage_error(f"{where}: {error}") from None
    return found


def is_lines(path: str, head: bytes) -> bool:
    """Whether a plan file is of paths, one a line, by its name and first bytes."""
    begins = head.lstrip()[:1]
    return not path.endswith(".json") and begins not in (b"{", b"[", b"") and b"\0" not in head


def load_lines(path: str) -> PathPlan | None:
    """The plan of a text file of paths; None where it is none. Raises UffdPrefetchError."""
    try:
        with FileReader(path) as reader:
            if not is_lines(path, reader.read(0, min(reader.size_bytes, 256))):
                return None
    except OSError as error:
        raise usage_error(f"cannot read {path}: {error.strerror}") from None
    whole = os.path.abspath(path)
    plan = in_list_order(path, whole, of_lines(path, path))
    first = plan.table.paths(np.arange(min(len(plan.names), TRIED)))
    if not any(map(os.path.isfile, first)):
        raise usage_error(f"{path}: neither a plan in JSON nor paths: there is no {first[0]!r}")
    return plan
