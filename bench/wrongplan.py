# SPDX-License-Identifier: Apache-2.0
"""The cost of a wrong plan: `python bench/wrongplan.py [--pairs 5] [--json F]`, `show F`.

bench/shuffle_job.py trains on the first half of an LMDB, cold, one epoch, on the slow bed with
compute as in bench/shuffle.py. A plan of the other half warms unused records; one of another seed
warms the right records at the wrong time. Loss is the time against `wrap` without a plan in the
same round (without the DataLoader's order: UFFDPREFETCH_TORCH=off); also shown are the bytes read
beyond the records' pages, and the finding.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pool import conditions
from pool_bench import Bench, Run, by_variant, cases_of, median, paired
from render import markdown_table, number, ratio
from reports import a_line_for_errors
from shuffle import add_options, run_command
from shuffle_case import Orders, Shuffle, need_plans, sampler_orders

SCHEMA = "uffdprefetch.bench.wrongplan/1"
NO_WRAP = "plain, no wrap"
NO_PLAN = "no plan"
RIGHT = "right plan"
#: Text of the degradation of a dropped plan (readers/known_order.py).
DROPPED = "not followed any more"
#: Acceptable loss.
MOST_LOSS = 0.05
MIB = 1 << 20


def wrong_orders(records: int, half: int, seed: int) -> dict[str, Orders]:
    """Plans by name, for a job that reads the first ``half`` of ``records`` in the order of
    ``seed``."""
    other: np.ndarray = sampler_orders(records - half, 1, 1, seed)[0][0] + half
    mixed = sampler_orders(half, 1, 1, seed)[0][0].copy()
    mixed[1::2] = other[: len(mixed)][1::2]  # every other record is of the other half
    return {
        "plan of the other half": [[other]],
        "plan with every other record wrong": [[mixed]],
        "plan of another seed": sampler_orders(half, 1, 1, seed + 1),
        "plan backwards": [[np.ascontiguousarray(sampler_orders(half, 1, 1, seed)[0][0][::-1])]],
    }


def measure_one(case: Shuffle, engine: str, name: str, orders: Orders | None) -> Run:
    """One run with a plan of these orders, or without one."""
    options = []
    if orders is not None:
        need_plans()
        options = ["--plan", str(case.write_plan(orders, name.replace(" ", "-")))]
    environment = ["UFFDPREFETCH_TORCH=off"]
    run = case.run(case.bench.wrapped(engine, options, environment))
    if engine == "pool":
        run["pool"] = case.bench.pool_summary()
    run["useless_bytes"] = run["bytes_read"] - run["needed_bytes"]
    findings = (run["tool"] or {}).get("degradations") or []
    run["findings"] = [line for line in findings if DROPPED in line]
    return run


def measure(bench: Bench, args: argparse.Namespace, save: Callable[[], None]) -> None:
    """All cases."""
    half = bench.manifest.records // 2
    case = Shuffle(bench, 1, 1, args.batch, args.seed, args.compute, first=half)
    case.prepare(warm=True)
    wrong = wrong_orders(bench.manifest.records, half, args.seed)
    for engine in args.engines.split(","):
        variants: dict[str, Callable[[], Run]] = {NO_WRAP: functools.partial(case.run, [])}
        plans: dict[str, Orders | None] = {NO_PLAN: None, RIGHT: case.orders, **wrong}
        for name, orders in plans.items():
            variants[name] = functools.partial(measure_one, case, engine, name, orders)
        bench.rounds(f"engine {engine}", args.pairs, variants, save)


# ---- tables ----------------------------------------------------------------------------------


def case_table(report: dict[str, Any], case: str) -> str:
    """One row a plan."""
    every = [run for run in report["runs"] if run["case"] == case]
    rows = []
    for name, runs in by_variant(every, case).items():
        loss = paired(every, name, NO_PLAN)
        useless = median(runs, "useless_bytes")
        dropped = sum(bool(run.get("findings")) for run in runs)
        rows.append(
            [
                name,
                number(median(runs, "seconds")),
                ratio(*loss) if loss else "n/a",
                number(median(runs, "stall_seconds")),
                number(None if useless is None else useless / MIB, 1),
                f"{dropped} of {len(runs)}",
            ]
        )
    head = [case, "epoch s", "ratio to no plan", "stall s", "useless MiB", "dropped, with a line"]
    return markdown_table(head, rows)


def markdown(report: dict[str, Any]) -> str:
    """All of a report as text."""
    parts = ["## A wrong plan", conditions(report)]
    parts += [case_table(report, case) for case in cases_of(report["runs"])]
    parts.append(
        "The job reads the first half of the records, each once, in its sampler's order; its "
        "SHA-256 over the bytes in order is the file's in every run. Useless: read over the link "
        f"beyond the pages of these records. The goal: a loss below {MOST_LOSS:.0%}."
    )
    for run in report["runs"]:
        for line in run.get("findings", ()) if run["round"] == 0 else ():
            parts.append(f"{run['case']}, {run['variant']}: {line}")
    for skipped in report["skipped"]:
        parts.append(f"Not run: {skipped['variant']} ({skipped['reason']}).")
    for failure in report["failures"]:
        parts.append(f"FAILED: {failure['case']}, {failure['variant']}: {failure['error']}.")
    return "\n\n".join(parts) + "\n"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="bench/wrongplan.py", description=description)
    add_options(parser)
    parser.add_argument("--engines", default="cache,pool", help="with commas")
    args = parser.parse_args(words)
    args.show, args.words = "wrongplan", list(words)
    return args


@a_line_for_errors
def main(words: Sequence[str]) -> int:
    """The command."""
    return run_command(words, SCHEMA, parse, measure, markdown, (NO_PLAN,))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
