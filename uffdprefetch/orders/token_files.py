# SPDX-License-Identifier: Apache-2.0
"""From the samples of a Megatron GPTDataset to bytes of its ``.bin`` file, through the arrays that
job/token_files.py names: its shuffled numbers, where each sample begins, its documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import spread
from uffdprefetch.orders.stated import ITEMS_MAX
from uffdprefetch.predict.order.order import Order

#: Arrays of integers that an announcement may name.
NAMES = ("shuffle", "sample", "document", "pointers", "lengths")
ARRAY_BYTES_MAX = 1 << 32


@dataclass(frozen=True)
class StoredArray:
    """An array of integers, in a file or in the announcement."""

    path: str | None
    array: str | None
    offset: int
    kind: str
    count: int

    def read(self, of_announcement: Callable[[str], Array]) -> Array:
        """Its numbers, int64. Raises OSError, ValueError."""
        kind = np.dtype(self.kind)
        size = self.count * kind.itemsize
        if kind.kind not in "iu" or size > ARRAY_BYTES_MAX:
            raise ValueError(f"an array of {self.count} {kind}")
        if self.array is not None:
            data = of_announcement(self.array).tobytes()
        else:
            assert self.path is not None
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(size)
        if len(data) != size:
            raise ValueError(f"an array of {size} bytes that has {len(data)}")
        return np.frombuffer(data, kind).astype(np.int64)


@dataclass(frozen=True)
class TokenFile:
    """``file``: the .bin; ``arrays``: by NAMES."""

    file: str
    token_bytes: int
    extra_tokens: int
    arrays: Mapping[str, StoredArray]

    def order(self, samples: Array, of_announcement: Callable[[str], Array]) -> Order:
        """The bytes of these samples; ``item``: index into ``samples``. Raises OSError, ValueError
        for numbers that lead nowhere."""
        read: dict[str, Array] = {
            name: stored.read(of_announcement) for name, stored in self.arrays.items()
        }
        try:
            return self._order(samples, read)
        except IndexError as error:
            raise ValueError(f"{self.file}: {error}") from None

    def _order(self, samples: Array, read: Mapping[str, Array]) -> Order:
        places = read["sample"].reshape(-1, 2)
        row = read["shuffle"][samples]
        first, skipped = places[row].T
        last, until = places[row + 1].T
        if (last < first).any() or int((last - first + 1).sum()) > ITEMS_MAX:
            raise ValueError(f"{self.file}: samples that end before they begin, or too many")
        item, inner = spread(last - first + 1)
        document = read["document"][first[item] + inner]
        length = read["lengths"][document]
        begin = np.where(inner == 0, skipped[item], 0)
        is_last = first[item] + inner == last[item]
        end = np.where(is_last, np.minimum(until[item] + self.extra_tokens, length), length)
        starts = read["pointers"][document] + begin * self.token_bytes
        ends = starts + np.maximum(end - begin, 0) * self.token_bytes
        return Order(starts, ends, item, len(samples))
