# SPDX-License-Identifier: Apache-2.0
"""What a policy decides, as data: who reads what in which order, and where it then lies. Pure.

A policy (policies/) makes a :class:`Plan`; :mod:`uffdprefetch.sim.execute` gives it its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

#: Step numbers of holdings that were always there, or never leave.
ALWAYS = -1
NEVER = np.iinfo(np.int32).max


@dataclass
class Holdings:
    """Which node holds which sample in which storage class, and from when until when.

    Parallel arrays, one row a holding, sorted by sample (:func:`holdings`).
    """

    first: np.ndarray  # (F + 1,): sample k's rows are first[k] to first[k + 1]
    node: np.ndarray  # (rows,) int32
    storage: np.ndarray  # (rows,) int8: class j, from 1 on
    #: MB that the class has read when this sample is there; 0 what is there from the beginning.
    after: np.ndarray
    #: The steps between which it is there, both excluded: (ALWAYS, NEVER) but for what enters when
    #: it is first read and what leaves when it is last read.
    since: np.ndarray
    until: np.ndarray
    #: (N, J + 1) MB that each class's own prefetcher has to read; zeros if there is none.
    to_fill: np.ndarray
    #: (N, J + 1, batches + 1) MB that each class may have read by the beginning of a batch, where
    #: what has left makes room; None: all that it has to read has room.
    room: np.ndarray | None = None
    #: Whether nodes fetch from each other.
    shared: bool = True
    #: Whether what some node holds is not read from the file system again, be that quicker or not.
    once: bool = False


def holdings(
    F: int,
    shape: tuple[int, int],
    sample: np.ndarray,
    node: np.ndarray,
    storage: np.ndarray,
    after: np.ndarray | None = None,
    since: np.ndarray | None = None,
    until: np.ndarray | None = None,
    to_fill: np.ndarray | None = None,
) -> Holdings:
    """Holdings of rows in any order; ``shape`` is (N, J + 1)."""
    order = np.argsort(sample, kind="stable")
    rows = len(order)

    def sorted_or(values: np.ndarray | None, default: float, kind: type) -> np.ndarray:
        return np.full(rows, default, kind) if values is None else values[order].astype(kind)

    return Holdings(
        np.asarray(np.searchsorted(sample[order], np.arange(F + 1))),
        node[order].astype(np.int32),
        storage[order].astype(np.int8),
        sorted_or(after, 0.0, np.float64),
        sorted_or(since, ALWAYS, np.int32),
        sorted_or(until, NEVER, np.int32),
        np.zeros(shape) if to_fill is None else to_fill,
    )


@dataclass
class Phase:
    """A stretch of training under one regime.

    how: "perfect" (a sample is always there), "demand" (a node fetches a sample when it needs it)
    or "staged" (it is fetched in order into the staging buffer, as far ahead as that is large).
    """

    order: np.ndarray  # (batches, N, b), as Workload.epoch gives it
    how: str
    held: Holdings | None = None
    #: Or the source of every access (see System's sources), where it is known beforehand.
    source: np.ndarray | None = None
    write: str | None = None  # overrides Readings.write
    #: (batches, N, b) MB that are read from the file system beside each sample, for nobody.
    useless: np.ndarray | None = None


@dataclass
class Plan:
    """All that a policy decided."""

    phases: Sequence[Phase]
    #: Seconds before the first batch, by what is waited for.
    preload: float = 0.0
    #: MB that are read from the file system before the first batch, all nodes together.
    preload_mb: float = 0.0
    notes: Sequence[str] = field(default_factory=tuple)


class CannotRun(Exception):
    """A policy that does not apply to a scenario; the message says why (a table shows n/a)."""
