# SPDX-License-Identifier: Apache-2.0
"""How often a node reads a sample ([HDMLP] section 3.2.1, observation 2). Pure."""

from __future__ import annotations

import math

import numpy as np

from uffdprefetch.sim.workload import Workload


def most(E: int, N: int, delta: float) -> int:
    """floor((1 + delta) E / N) reads.

    (1 + delta) E / N is rounded first: 1.1 x 250 is 275.00000000000006 in a float.
    """
    return math.floor(round((1 + delta) * E / N, 9))


def expected(F: int, E: int, N: int, delta: float) -> float:
    """Expected number of F samples that a node reads more than (1 + delta) E / N times in E
    shuffled epochs: F P[X > (1 + delta) E / N], X ~ B(E, 1/N) (equation 3.8)."""
    above = range(max(0, most(E, N, delta) + 1), E + 1)
    if N == 1:
        return float(F) if E in above else 0.0
    p = 1.0 / N
    return F * math.fsum(
        math.exp(
            math.lgamma(E + 1)
            - math.lgamma(k + 1)
            - math.lgamma(E - k + 1)
            + k * math.log(p)
            + (E - k) * math.log1p(-p)
        )
        for k in above
    )


def drawn(workload: Workload, nodes: int) -> np.ndarray:
    """(N, F) int32: how often each node reads each sample of the workload's orders."""
    counts: np.ndarray = np.zeros((nodes, workload.F), np.int32)
    for order in workload.epochs(nodes):
        for node in range(nodes):
            mine = order[:, node].ravel()
            counts[node] += np.bincount(mine[mine >= 0], minlength=workload.F).astype(np.int32)
    return counts
