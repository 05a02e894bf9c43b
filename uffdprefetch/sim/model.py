# SPDX-License-Identifier: Apache-2.0
"""The performance model of [HDMLP] (chapter 3.1): seconds a sample takes from each source. Pure.

Names are those of its table 3.1. Sizes are MB (10^6 bytes), rates MB/s, times seconds;
functions take and return scalars or arrays of any one shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


class Curve:
    """A bandwidth in MB/s as a function of a number of clients or threads.

    Linear between two points, constant beyond the first and the last (equation 4.1). Raises
    ValueError for no points, points below one client, rates that are not positive.
    """

    def __init__(self, points: Mapping[int, float] | Mapping[float, float]) -> None:
        if not points:
            raise ValueError("a curve without a point")
        ordered = sorted((float(at), float(rate)) for at, rate in points.items())
        if not all(at >= 1 for at, _ in ordered):
            raise ValueError("a curve's points begin at 1")
        if not all(0 < rate < float("inf") for _, rate in ordered):
            raise ValueError("a curve's rates are positive")
        self.at = np.array([at for at, _ in ordered])
        self.rate = np.array([rate for _, rate in ordered])

    def __call__(self, count: float | np.ndarray) -> np.ndarray:
        """MB/s with ``count`` clients or threads."""
        return np.interp(count, self.at, self.rate)

    @classmethod
    def flat(cls, rate: float) -> Curve:
        """The same rate for any number."""
        return cls({1: rate})


@dataclass(frozen=True)
class StorageClass:
    """Storage class j of a node; class 0 is the staging buffer."""

    name: str
    d: float  # MB: capacity d_j
    p: int  # threads that prefetch into it: p_j
    r: Curve  # MB/s: random aggregate read throughput r_j(p)
    w: Curve  # MB/s: random aggregate write throughput w_j(p)


@dataclass(frozen=True)
class System:
    """N equal nodes, their storage and the parallel file system."""

    N: int  # nodes
    c: float  # MB/s: compute throughput of a node
    beta: float  # MB/s: preprocessing
    b_c: float  # MB/s: network between nodes
    b_fs: float  # MB/s: network to the parallel file system
    t: Curve  # MB/s: random aggregate read throughput t(gamma) of the parallel file system
    classes: Sequence[StorageClass]  # 0 the staging buffer, then the fastest first
    #: As t, of nodes that read with one thread each (no prefetching); None: as t.
    t_demand: Curve | None = None
    #: What t, b_fs, b_c and r are rates of: "thread", each thread of a node, as in the equations;
    #: or "node", shared by the threads that read at once, as in hardware.
    rates: str = "thread"

    @property
    def D(self) -> float:
        """MB: total local storage of a node, without the staging buffer."""
        return sum(one.d for one in self.classes[1:])

    @property
    def J(self) -> int:
        """Storage classes beside the staging buffer."""
        return len(self.classes) - 1

    def sharing(self, threads: float | np.ndarray) -> np.ndarray:
        """Slowdown of each of ``threads`` concurrent threads of a node, against one alone."""
        every = np.asarray(threads, np.float64)
        return every if self.rates == "node" else np.ones_like(every)

    # Seconds a MB; times s_k they are the equations' fetch and write. ``threads``: those of the
    # node that read at once.

    def pfs(self, gamma: float | np.ndarray) -> np.ndarray:
        """Rate from the file system, while gamma - 1 other nodes read from it as well (equation
        3.5); of one thread (times :meth:`sharing` of several)."""
        return 1.0 / np.minimum(self.b_fs, self.t(gamma) / gamma)

    def pfs_demand(self, gamma: float | np.ndarray) -> np.ndarray:
        """As :meth:`pfs`, for a node that waits for each sample before it requests the next."""
        t = self.t_demand or self.t
        return 1.0 / np.minimum(self.b_fs, t(gamma) / gamma)

    def remote(self, j: int, threads: int) -> float:
        """Rate from class j of another node (equation 3.6)."""
        return max(float(self.sharing(threads)) / self.b_c, self.local(j, threads))

    def local(self, j: int, threads: int) -> float:
        """Rate from class j of the node itself (equation 3.7: its own p_j threads)."""
        one = self.classes[j]
        reading = threads if self.rates == "node" else one.p
        return reading / float(one.r(reading))

    def write(self, j: int = 0) -> float:
        """To preprocess and write to class j, whichever takes longer (below equation 3.4)."""
        one = self.classes[j]
        return max(1.0 / self.beta, one.p / float(one.w(one.p)))

    def store(self, j: int) -> float:
        """To write to class j without preprocessing."""
        one = self.classes[j]
        return one.p / float(one.w(one.p))


RATES = ("thread", "node")
WRITES = ("overlapped", "once")


@dataclass(frozen=True)
class Readings:
    """Interpretations of [HDMLP] where its text is ambiguous.

    Its tables 5.1 to 5.6 agree with the defaults, except for the cases in docs/simulate.md.
    """

    #: "overlapped": a thread of the staging buffer preprocesses a sample while it fetches the next
    #: (read = max(fetch, write)). "once": after it, and storage keeps what has been preprocessed,
    #: so that only what comes from the file system pays for it (read = fetch + write, or fetch).
    write: str = "overlapped"

    def read(self, fetch: np.ndarray, write: float, from_pfs: np.ndarray) -> np.ndarray:
        """Seconds a MB of equation 3.4."""
        if self.write == "overlapped":
            return np.maximum(fetch, write)
        return fetch + np.where(from_pfs, write, 0.0)


@dataclass(frozen=True)
class Training:
    """How the data set is iterated over (chapter 3.1.3)."""

    E: int  # epochs
    B: int  # samples of a batch, over all nodes
    drop_last: bool = True
    scheme: str = "uniform"  # uniform, whole, imbalanced (chapter 4.1.3)
    order: str = "shuffled"  # each epoch anew, or "sequential"
    seed: int = 0
