# SPDX-License-Identifier: Apache-2.0
"""Executes a plan in bulk-synchronous steps over all nodes: the time that it takes. Pure.

[HDMLP] chapters 3.1.3 and 4.1.4. A batch begins for all nodes when the last of them has finished
the one before. Two regimes:

- on demand: a node requests a sample, waits for it, preprocesses and computes. Batches share no
  state but the clock, so they are simulated in parallel (vectorised), event by event, with the
  exact number of clients gamma at each request.
- staged: see staged.py.
"""

from __future__ import annotations

import numpy as np

from uffdprefetch.sim.model import Readings, System
from uffdprefetch.sim.outcome import PFS, Outcome, fixed_costs, parts
from uffdprefetch.sim.plan import LoadingPlan, Phase
from uffdprefetch.sim.staged import StagedPhase


def execute(system: System, readings: Readings, sizes: np.ndarray, plan: LoadingPlan) -> Outcome:
    """The outcome of ``plan``; ``sizes`` is (F + 1,) with a last 0 (Workload.with_zero)."""
    sources = 2 * system.J + 1
    out = Outcome(read_mb=np.zeros(sources), stall_seconds=np.zeros(sources))
    out.preload_seconds = out.seconds = plan.preload
    out.fill_mb = plan.preload_mb
    for phase in plan.phases:
        mode = Readings(write=phase.write) if phase.write else readings
        if phase.how == "perfect":
            seconds = _compute(system, sizes, phase.order).sum()
            out.consumed_mb += float(sizes[phase.order].sum())
        elif phase.how == "demand":
            seconds = _on_demand(system, sizes, phase, out)
        else:
            seconds = StagedPhase(system, mode, sizes, phase, out).run()
        out.compute_seconds += float(_compute(system, sizes, phase.order).sum())
        out.seconds += float(seconds)
    return out


def _compute(system: System, sizes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """(batches,): seconds that the slowest node computes on each batch."""
    return (
        np.concatenate([sizes[part].sum(axis=2).max(axis=1) for part in parts(order)]) / system.c
        if len(order)
        else np.zeros(0)
    )


def _on_demand(system: System, sizes: np.ndarray, phase: Phase, out: Outcome) -> float:
    """Seconds of a phase without prefetching."""
    total = 0.0
    done = 0
    for order in parts(phase.order):
        source = (
            np.zeros(order.shape, np.int8)
            if phase.source is None
            else phase.source[done : done + len(order)]
        )
        total += _demand_part(system, sizes[order], source, order >= 0, out)
        done += len(order)
    return total


def _demand_part(
    system: System, mb: np.ndarray, source: np.ndarray, real: np.ndarray, out: Outcome
) -> float:
    """As :func:`_on_demand`, of batches in parallel; ``mb``, ``source``: (batches, N, b)."""
    batches, nodes, _ = mb.shape
    lengths = real.sum(axis=2)
    fixed = fixed_costs(system, 1)
    write, compute = system.write(), 1.0 / system.c
    # gamma is an integer here: tabulated instead of interpolated at each event.
    per_mb = np.concatenate([[0.0], system.pfs_demand(np.arange(1, nodes + 1))])
    rows = np.arange(batches)
    ready = np.where(lengths > 0, 0.0, np.inf)  # when a node requests its next sample
    reading = np.zeros((batches, nodes))  # until when it reads from the file system
    ended = np.zeros((batches, nodes))
    turn = np.zeros((batches, nodes), np.int64)
    waits = np.zeros(len(fixed))
    for _ in range(int(lengths.sum(axis=1).max(initial=0))):
        node = ready.argmin(axis=1)
        now = ready[rows, node]
        live = np.isfinite(now)
        at = np.minimum(turn[rows, node], mb.shape[2] - 1)
        size = np.where(live, mb[rows, node, at], 0.0)
        now = np.where(live, now, 0.0)
        kind = source[rows, node, at]
        gamma = 1 + (reading > now[:, None]).sum(axis=1) - (reading[rows, node] > now)
        fetch = np.where(kind == PFS, per_mb[np.minimum(gamma, nodes)], fixed[kind]) * size
        waits += np.bincount(kind, fetch + size * write, len(fixed))
        reading[rows, node] = np.where(live & (kind == PFS), now + fetch, reading[rows, node])
        end = now + fetch + size * (write + compute)
        ended[rows, node] = np.where(live, end, ended[rows, node])
        turn[rows, node] += live
        more = turn[rows, node] < lengths[rows, node]
        ready[rows, node] = np.where(live & more, end, np.inf)
    took = ended.max(axis=1)
    stall = took.sum() - (mb.sum(axis=2).max(axis=1) * compute).sum()
    out.stall_seconds += stall * waits / max(waits.sum(), 1e-300)
    out.read_mb += np.bincount(source.ravel(), mb.ravel(), len(fixed))
    out.consumed_mb += float(mb.sum())
    return float(took.sum())
