# SPDX-License-Identifier: Apache-2.0
"""Runs a scenario's policies, for several numbers of nodes. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from uffdprefetch.base.errors import usage_error
from uffdprefetch.sim.execute import execute
from uffdprefetch.sim.outcome import Outcome
from uffdprefetch.sim.plan import CannotRun
from uffdprefetch.sim.scenario import NamedPolicy, Scenario
from uffdprefetch.sim.workload import Workload

#: Called before each policy: (number done, total, name of the next).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Row:
    """The result of one policy in one scenario."""

    nodes: int
    policy: NamedPolicy
    outcome: Outcome | None  # None: it does not apply
    why: str  # it does not apply, or a note on its result
    took_seconds: float  # of simulating


def _no_progress(done: int, of: int, name: str) -> None:
    pass


def workload_of(scenario: Scenario) -> Workload:
    """The data set's sizes, drawn or read, and its training.

    Raises UffdPrefetchError (exit 2) where drop_last drops the only batch.
    """
    training = scenario.training
    sizes = scenario.dataset.sizes(training.seed)
    if len(sizes) < training.B:
        if training.drop_last:
            raise usage_error(
                f"training.B: {training.B} is more than the data set's {len(sizes)} "
                "samples, and a batch that is not full is dropped (drop_last)"
            )
        training = replace(training, B=len(sizes))
    return Workload(sizes, training)


def run_one(scenario: Scenario, workload: Workload, named: NamedPolicy) -> Row:
    """Simulate one policy."""
    began = time.perf_counter()
    system = scenario.system
    if named.classes is not None:
        system = replace(system, classes=named.classes)
    outcome, why = None, ""
    try:
        plan = named.policy.plan(system, workload)
        why = "; ".join(plan.notes)
        outcome = execute(system, named.readings or scenario.readings, workload.with_zero(), plan)
    except CannotRun as error:
        why = str(error)
    return Row(system.N, named, outcome, why, time.perf_counter() - began)


def run(
    scenario: Scenario,
    workload: Workload,
    nodes: Sequence[int] = (),
    progress: Progress = _no_progress,
) -> Iterator[Row]:
    """Simulate all policies with each of these numbers of nodes (none: the scenario's own).

    ``workload``: workload_of(scenario).
    """
    counts = list(nodes) or [scenario.system.N]
    of = len(counts) * len(scenario.policies)
    for i, count in enumerate(counts):
        scaled = scenario
        if count != scenario.system.N:
            # Published figures hold for the scenario's own number of nodes.
            scaled = replace(
                scenario,
                system=replace(scenario.system, N=count),
                policies=[replace(each, published=None) for each in scenario.policies],
            )
        for k, named in enumerate(scaled.policies):
            progress(i * len(scenario.policies) + k, of, f"{named.name}, {count} nodes")
            yield run_one(scaled, workload, named)
    progress(of, of, "")
