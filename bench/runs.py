# SPDX-License-Identifier: Apache-2.0
"""Measured runs, and a suite's statistics: medians and paired ratios. Pure."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from suites import ADAPT_BANDWIDTHS, BASELINE, WARM

BOOTSTRAP_SAMPLES = 2000


@dataclass
class Run:
    """One measured run. seconds is epoch 1 of the slowest rank plus what `before` took."""

    case: str
    variant: str
    round: int
    seconds: float
    before_seconds: float
    stall_seconds: float
    epochs: list[dict[str, Any]]
    bed: dict[str, Any]
    bed_cpu_seconds: float
    as_prepared: bool | None
    tool_summary: dict[str, Any] | None
    events: list[dict[str, float]]
    wall_seconds: float
    steal_seconds: float
    machine_busy_seconds: float
    children_cpu_seconds: float
    command: str


def limit_seconds(
    round_runs: Sequence[Run], file_bytes: int, bandwidth: int, adapt: bool
) -> float | None:
    """The least time a round allows: its warm run or the transfer, the larger; None if unknown.

    In the adapt suite the transfer is that of each third at its bandwidth.
    """
    if adapt:
        third = file_bytes / len(ADAPT_BANDWIDTHS)
        return sum(third / bandwidth for bandwidth in ADAPT_BANDWIDTHS)
    warm = [run.seconds for run in round_runs if run.variant == WARM]
    return max(warm[0], file_bytes / bandwidth) if warm else None


def bootstrap_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the median of `values` by resampling (percentile method)."""
    generator = random.Random(seed)
    medians = sorted(
        statistics.median(generator.choices(values, k=len(values)))
        for _ in range(BOOTSTRAP_SAMPLES)
    )
    return medians[int(0.025 * len(medians))], medians[int(0.975 * len(medians))]


def summarize(
    runs: Sequence[Run], file_bytes: int, bandwidth: int, adapt: bool = False
) -> list[dict[str, Any]]:
    """Per case and variant: median seconds and the paired ratios with their intervals; pure."""
    rows: list[dict[str, Any]] = []
    for case in dict.fromkeys(run.case for run in runs):
        rounds: dict[int, dict[str, Run]] = {}
        for run in runs:
            if run.case == case:
                rounds.setdefault(run.round, {})[run.variant] = run
        variants = dict.fromkeys(run.variant for run in runs if run.case == case)
        for variant in variants:
            mine = [one[variant] for one in rounds.values() if variant in one]
            row: dict[str, Any] = {
                "case": case,
                "variant": variant,
                "runs": len(mine),
                "median_seconds": statistics.median(run.seconds for run in mine),
                "median_stall_seconds": statistics.median(run.stall_seconds for run in mine),
            }
            to_limit, to_baseline = [], []
            for one in rounds.values():
                if variant not in one:
                    continue
                limit = limit_seconds(list(one.values()), file_bytes, bandwidth, adapt)
                if limit is not None:
                    to_limit.append(one[variant].seconds / limit)
                if BASELINE in one:
                    to_baseline.append(one[variant].seconds / one[BASELINE].seconds)
            for name, ratios in (("limit", to_limit), ("baseline", to_baseline)):
                row[f"ratio_to_{name}"] = statistics.median(ratios) if ratios else None
                row[f"ratio_to_{name}_interval"] = bootstrap_interval(ratios) if ratios else None
            rows.append(row)
    return rows
