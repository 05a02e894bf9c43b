# SPDX-License-Identifier: Apache-2.0
"""The plan file: who reads which records or files in which order, epoch by epoch (docs/plans.md).

load() checks everything that needs no data file; whether a record or key exists is checked when an
order is resolved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from uffdprefetch.base.errors import usage_error
from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.formats.reader import FileReader
from uffdprefetch.orders import path_plan, stated
from uffdprefetch.orders.path_plan import PathPlan
from uffdprefetch.orders.plan_of_file import FilePlan, Identity
from uffdprefetch.orders.plan_parser import Parser
from uffdprefetch.predict.order.order import Order

#: A number as parsed JSON takes up to ten times its size: longer orders belong in .npy files.
FILE_MAX_BYTES = 32 << 20


@dataclass(frozen=True, eq=False)
class ParsedPlan:
    """A parsed plan file. ``index``: opens a data file's index."""

    path: str
    files: Sequence[FilePlan]
    index: Callable[[FilePlan, str], RecordIndex | None] = FilePlan.index
    paths: PathPlan | None = None  # of whole files
    _indices: dict[tuple[str, str, int, int], RecordIndex | None] = field(default_factory=dict)

    def file(self, path: str, identity: Identity | None = None) -> FilePlan | None:
        """The first entry for a data file."""
        return next((plan for plan in self.files if plan.is_of(path, identity)), None)

    def order(
        self, path: str, identity: Identity | None, rank: int | None, epoch: int
    ) -> Order | None:
        """The order in which a rank reads a file (by path, and device and inode where known) in an
        epoch, from 0 on; None when the plan does not say. Raises UffdPrefetchError (exit 2) when it
        does not fit the file."""
        plan = self.file(path, identity)
        spec = None if plan is None else plan.spec(rank, epoch)
        if plan is None or spec is None:
            return None
        return self.resolve(plan, spec, path)

    def resolve(self, plan: FilePlan, spec: stated.OrderSpec, path: str) -> Order:
        """The order in bytes of this data file. Raises UffdPrefetchError (exit 2)."""
        try:
            status = os.stat(path)
            name = (plan.where, path, status.st_mtime_ns, status.st_size)
            if name not in self._indices:
                self._indices.clear()  # one at a time: they are large
                self._indices[name] = self.index(plan, path)
            return spec.resolve(self._indices[name], status.st_size)
        except OSError as error:
            raise usage_error(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise usage_error(f"{spec.where}: {error}") from None
        except MemoryError:
            raise usage_error(f"{spec.where}: no memory for {spec.items:,} items") from None


def load(path: str) -> ParsedPlan:
    """Read a plan file. Raises UffdPrefetchError (exit 2), one line with the place of the error."""
    lines = path_plan.load_lines(path)
    if lines is not None:
        return ParsedPlan(path, (), paths=lines)
    with FileReader(path) as reader:
        if reader.size_bytes > FILE_MAX_BYTES:
            raise usage_error(
                f"{path}: {reader.size_bytes} bytes: at most {FILE_MAX_BYTES} can be read; put long"
                " orders into .npy files beside it"
            )
        try:
            data = reader.read(0, FILE_MAX_BYTES)
        except OSError as error:
            raise usage_error(f"cannot read {path}: {error.strerror}") from None
    files, paths = Parser(path).plan(_json(path, data))
    return ParsedPlan(path, tuple(files), paths=paths)


def _json(path: str, data: bytes) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise ValueError(f"the key {twice[:60]!r} stands twice in one object")
        return found

    try:
        return json.loads(data, object_pairs_hook=unique)
    except RecursionError:
        raise usage_error(f"{path}: nested too deeply") from None
    except UnicodeDecodeError as error:
        raise usage_error(f"{path}: no UTF-8 text at byte {error.start}") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise usage_error(f"{path}: {place}: no JSON: {error.msg}") from None
    except ValueError as error:  # a number of thousands of digits, say
        raise usage_error(f"{path}: {str(error)[:100]}") from None
