# SPDX-License-Identifier: Apache-2.0
"""Small clusters and data sets for the simulator's tests."""

from __future__ import annotations

import numpy as np

from uffdprefetch.sim.execute import execute
from uffdprefetch.sim.model import Curve, Readings, StorageClass, System, Training
from uffdprefetch.sim.outcome import Outcome
from uffdprefetch.sim.policies.base import LoadingPolicy
from uffdprefetch.sim.workload import Workload

#: [HDMLP] listing 4.1.
T = {1: 66.0, 2: 86.0, 3: 129.0, 4: 146.0}
RAM = {1: 16550.0, 2: 21164.0, 3: 21186.0, 4: 21415.0}
FAST = 1e12


def storage(name: str, d: float, r: dict[int, float] | float, p: int = 2) -> StorageClass:
    curve = Curve(r) if isinstance(r, dict) else Curve.flat(r)
    return StorageClass(name, d, p, curve, curve)


def system(
    N: int = 4,
    staging: float = 100.0,
    ram: float = 200.0,
    ssd: float = 400.0,
    c: float = 100.0,
    beta: float = 200.0,
    t: dict[int, float] | float = 0.0,
    b_c: float = 10_000.0,
) -> System:
    """The paper's cluster with storage small enough for small data sets; 0 MB: no such class."""
    classes = [storage("staging", staging, RAM)]
    if ram:
        classes.append(storage("RAM", ram, RAM))
    if ssd:
        classes.append(storage("SSD", ssd, T))
    curve = Curve.flat(t) if isinstance(t, float) and t else Curve(t if isinstance(t, dict) else T)
    return System(N, c, beta, b_c, 2000.0, curve, classes)


def workload(
    F: int = 600,
    E: int = 3,
    B: int = 20,
    mean: float = 1.0,
    spread: float = 0.1,
    seed: int = 0,
    **training: object,
) -> Workload:
    sizes = np.random.default_rng(seed).normal(mean, spread, F).clip(0)
    return Workload(sizes, Training(E, B, seed=seed, **training))  # type: ignore[arg-type]


def outcome(
    policy: LoadingPolicy, at: System, work: Workload, write: str = "overlapped"
) -> Outcome:
    return execute(at, Readings(write), work.with_zero(), policy.plan(at, work))


#: A scenario file that is right.
SMALL = """
title = "two nodes"

[system]
N = 2
c = "100MB/s"
beta = "200MB/s"
b_c = "1GB/s"
b_fs = "2GB/s"
t = { 1 = "66MB/s", 4 = "146MB/s" }

[[system.classes]]
name = "staging"
d = "10MB"
p = 2
r = "10GB/s"

[[system.classes]]
name = "RAM"
d = "1GiB"
p = 4
r = { 1 = "5GB/s", 4 = "20GB/s" }
w = "8GB/s"

[dataset]
F = 100
size = "110kB"

[training]
E = 2
B = 10

[[policies]]
policy = "naive"

[[policies]]
name = "ours"
policy = "node-pool"
evict = "lru"
"""
