# SPDX-License-Identifier: Apache-2.0
"""A policy's plan: which node reads which samples in which order, and where they are kept. Pure.

A policy (policies/) makes a :class:`LoadingPlan`; :mod:`uffdprefetch.sim.execute` times it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

#: Steps of holdings that are there from the beginning, or never removed.
ALWAYS = -1
NEVER = np.iinfo(np.int32).max


@dataclass
class Holdings:
    """Which node holds which sample in which storage class, and during which steps.

    Parallel arrays, one row a holding, sorted by sample (:func:`holdings`).
    """

    first: np.ndarray  # (F + 1,): sample k's rows are first[k] to first[k + 1]
    node: np.ndarray  # (rows,) int32
    storage: np.ndarray  # (rows,) int8: class j, from 1 on
    #: MB that the class has read when this sample is there; 0: there from the beginning.
    after: np.ndarray
    #: The steps between which it is there, both excluded: (ALWAYS, NEVER), except for what is added
    #: at its first read and what is removed at its last.
    since: np.ndarray
    until: np.ndarray
    #: (N, J + 1) MB that each class's own prefetcher has to read; zeros if there is none.
    to_fill: np.ndarray
    #: (N, J + 1, batches + 1) MB that each class may have read by the beginning of a batch, where
    #: removals free room; None: no limit but to_fill.
    room: np.ndarray | None = None
    #: Whether nodes fetch from each other.
    shared: bool = True
    #: Whether a sample that some node holds is never read from the file system again.
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
    """A part of training under one regime.

    how: "perfect" (a sample is always there), "demand" (a node fetches a sample when it needs it)
    or "staged" (it is fetched in order into the staging buffer, as far ahead as that is large).
    """

    order: np.ndarray  # (batches, N, b), as Workload.epoch gives it
    how: str
    held: Holdings | None = None
    #: Or the source of every access (see System's sources), where it is known beforehand.
    source: np.ndarray | None = None
    write: str | None = None  # overrides Readings.write
    #: (batches, N, b) redundant MB that are read from the file system with each sample.
    useless: np.ndarray | None = None


@dataclass
class LoadingPlan:
    """All decisions of a policy."""

    phases: Sequence[Phase]
    #: Seconds of preloading before the first batch.
    preload: float = 0.0
    #: MB that are read from the file system before the first batch, all nodes together.
    preload_mb: float = 0.0
    notes: Sequence[str] = field(default_factory=tuple)


class CannotRun(Exception):
    """A policy that does not apply to a scenario; the message says why (a table shows n/a)."""
