# SPDX-License-Identifier: Apache-2.0
"""An order that `wrap --learn` has kept (orders/learned_ranges.py), read as the plan file that it
is, and bounded by the file that it is of: it may be a stranger's, or damaged."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass

import numpy as np

from uffdprefetch.base.errors import usage_error
from uffdprefetch.orders import plan_file
from uffdprefetch.orders.learned_ranges import DOCUMENT, rank_of
from uffdprefetch.orders.plan_file import ParsedPlan
from uffdprefetch.orders.stated import OrderSpec, RangeOrder
from uffdprefetch.predict.first_touches import FirstTouches, RankOf
from uffdprefetch.predict.storage import BLOCK_BYTES

#: A document names one file and one order.
_DOCUMENT_BYTES_MAX = 64 << 10


@dataclass(frozen=True, eq=False)
class LearnedPlan:
    """``file``: its absolute path; ``spec``: the one order."""

    plan: ParsedPlan
    file: str
    rank: RankOf
    spec: OrderSpec

    def check(self, file_bytes: int) -> None:
        """Raises UffdPrefetchError (exit 2) where it has more ranges than its file has blocks."""
        most = -(-file_bytes // BLOCK_BYTES)
        if self.spec.items > most:
            raise usage_error(f"{self.spec.where}: {self.spec.items:,} ranges: at most {most:,}")

    def spans(self, file_bytes: int) -> array[int]:
        """Starts and ends in turn. Raises UffdPrefetchError (exit 2) where they do not fit."""
        self.check(file_bytes)
        order = self.spec.resolve(None, file_bytes)
        found = array("q")
        found.frombytes(np.stack([order.starts, order.ends], axis=1).astype(np.int64).tobytes())
        return found


def load(path: str) -> LearnedPlan:
    """Raises UffdPrefetchError (exit 2), one line that says where in the file the error is."""
    rank = rank_of(os.path.basename(path).removesuffix(DOCUMENT))
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise usage_error(f"cannot read {path}: {error.strerror}") from None
    if rank is None or size > _DOCUMENT_BYTES_MAX:
        raise usage_error(f"{path}: it is no order that was learned")
    plan = plan_file.load(path)
    if len(plan.files) != 1 or plan.paths is not None or len(plan.files[0].epochs) != 1:
        raise usage_error(f"{path}: one order of one file was learned, and there is another number")
    file = plan.files[0]
    (ranks,) = file.epochs
    spec = ranks.get(str(rank.rank))
    if len(ranks) != 1 or not isinstance(spec, RangeOrder) or file.is_glob:
        raise usage_error(f"{path}: it is no order of rank {rank.rank} in bytes of a file")
    return LearnedPlan(plan, file.file, rank, spec)


def joined(old: array[int], new: array[int], file_bytes: int) -> array[int]:
    """An order, and behind it what of another one it has not."""
    whose, touches = RankOf(0, 0), FirstTouches(file_bytes)
    for spans in (old, new):
        for start, end in zip(spans[::2], spans[1::2], strict=True):
            touches.came(whose, start, end)
    return touches.of(whose).spans
