# SPDX-License-Identifier: Apache-2.0
"""Records that ranks skip, and the page tables that reading them leaves."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np

from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.formats.places import Listed, RecordPlaces, one_part

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4 * KIB
#: Records whose B-tree nodes are on one leaf page.
LEAF = 100


def index_of(sizes: Iterable[int]) -> RecordIndex:
    """As LMDB lays records out that were appended: each in pages of its own, 16 bytes behind their
    beginning, and a leaf page after each hundredth."""
    starts, lengths, at = [], [], 3 * PAGE
    for number, size in enumerate(sizes):
        if number % LEAF == 0:
            at += PAGE
        starts.append(at + 16)
        lengths.append(size)
        at += -(-(size + 16) // PAGE) * PAGE
    column = Listed(np.array(starts, np.int64), np.array(lengths, np.uint32))
    return RecordIndex("lmdb", at, RecordPlaces(one_part(len(starts)), [column]))


def uneven(count: int, seed: int = 0) -> list[int]:
    """12 to 192 KiB, more small than large."""
    source = random.Random(seed)
    return [round((12 + 180 * source.random() ** 1.6) * KIB) for _ in range(count)]


def mapped_by(
    index: RecordIndex, order: Iterable[int], cached: bool = True, leaves: bool = True
) -> list[tuple[int, int]]:
    """The runs that reading these records leaves in a page table, leaf pages included; ``cached``:
    all of the file is, so that each fault maps all of its aligned 64 KiB."""
    pages = set()
    for record in order:
        (start,), (end,) = index.extents(record)
        touched = list(range(int(start) // PAGE, -(-int(end) // PAGE)))
        if leaves and record % LEAF == 0:
            touched.append(touched[0] - 1)
        for page in touched:
            block = page // 16 * 16
            pages.update(range(block, block + 16) if cached else [page])
    last = index.file_bytes // PAGE
    numbers = sorted(page for page in pages if page < last)
    runs: list[tuple[int, int]] = []
    for page in numbers:
        if runs and sum(runs[-1]) == page * PAGE:
            runs[-1] = runs[-1][0], runs[-1][1] + PAGE
        else:
            runs.append((page * PAGE, PAGE))
    return runs
