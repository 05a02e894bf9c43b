# SPDX-License-Identifier: Apache-2.0
"""Shuffled LMDB through a PyTorch DataLoader: `python bench/shuffle.py [--json F]`, `show F`.

The training script is bench/shuffle_job.py, unchanged except in the variants that users make by
hand: DataLoader workers, readahead=False, a prefetcher of 8 threads that knows the order. It
reads every record once an epoch in the DistributedSampler's order and computes for --compute of the
link's time for the bytes.

The variants take turns (A B C A B C ...). Times are epoch 1's, cold, of the slowest rank; ratios
are within a round: to plain, and to the limit, the larger of that round's warm run and the file's
bytes over the link's bandwidth; in brackets the bootstrap's 95 % interval of the median. Stall is
the time in next(iterator). Each rank's SHA-256 over its bytes in order is checked against the file.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pool import conditions
from pool_bench import Bench, NotHere, Run, by_variant, cases_of, median, open_bench, paired
from pool_bench import report_of as pool_report_of
from render import markdown_table, number, ratio
from reports import a_line_for_errors, command, load, save
from runs import bootstrap_interval
from shuffle_case import Shuffle, need_plans

from uffdprefetch.base.units import parse_rate, parse_size
from uffdprefetch.demo.bed import DEFAULT_BANDWIDTH, DEFAULT_LATENCY_US
from uffdprefetch.demo.run import COMPUTE_SHARE

SCHEMA = "uffdprefetch.bench.shuffle/1"
PLAIN = "plain"
WARM = "warm"
PEER_THREADS = 8


@dataclass(frozen=True)
class Variant:
    """One way to run the script. ``engine``: of `wrap`; None: without it. ``hook``: the order comes
    from the DataLoader."""

    name: str
    job: tuple[str, ...] = ()
    engine: str | None = None
    plan: bool = False
    hook: bool = False
    warm: bool = False
    slow: bool = False


VARIANTS = (
    Variant(PLAIN),
    Variant(WARM, warm=True),
    Variant("2 workers", job=("--workers=2",)),
    Variant("4 workers", job=("--workers=4",)),
    Variant(f"own prefetcher, {PEER_THREADS} threads", job=(f"--peer-threads={PEER_THREADS}",)),
    Variant("wrap --plan", engine="cache", plan=True),
    Variant("wrap --plan, pool", engine="pool", plan=True),
    Variant("wrap, torch hook", engine="cache", hook=True),
    Variant("wrap, torch hook, pool", engine="pool", hook=True),
    Variant("wrap, torch hook, 2 workers", job=("--workers=2",), engine="cache", hook=True),
    # A latency for each page of 4 KiB: some 40 times as long.
    Variant("readahead=False", job=("--no-readahead",), slow=True),
)


# ---- tables ----------------------------------------------------------------------------------


def to_limit(
    runs: Sequence[Run], variant: str, file_bytes: int, bandwidth: int
) -> tuple[float, tuple[float, float]] | None:
    """(median, 95 % interval) of the ratio of a variant's seconds to the limit of its round."""
    warm = {run["round"]: run["seconds"] for run in runs if run["variant"] == WARM}
    transfer_seconds = file_bytes / bandwidth if bandwidth else 0.0
    ratios = [
        run["seconds"] / max(warm[run["round"]], transfer_seconds)
        for run in runs
        if run["variant"] == variant and run["round"] in warm
    ]
    return (statistics.median(ratios), bootstrap_interval(ratios)) if ratios else None


def case_table(report: dict[str, Any], case: str) -> str:
    """One row a variant."""
    every = [run for run in report["runs"] if run["case"] == case]
    file_bytes = report["dataset"]["file_bytes"]
    bandwidth = report["bed"]["bandwidth_bytes_per_second"]
    rows = []
    for name, runs in by_variant(every, case).items():
        limit, plain = to_limit(every, name, file_bytes, bandwidth), paired(every, name, PLAIN)
        second = paired(every, name, WARM, "second_seconds")
        stalls = [run["epoch_stall_seconds"] for run in runs]
        read = [run["bytes_read"] / run["needed_bytes"] for run in runs]
        later = statistics.median(row[1] for row in stalls) if len(stalls[0]) > 1 else None
        rows.append(
            [
                name,
                number(median(runs, "seconds")),
                ratio(*limit) if limit else "n/a",
                ratio(*plain) if plain else "n/a",
                number(statistics.median(row[0] for row in stalls)),
                number(median(runs, "second_seconds")),
                ratio(*second) if second else "n/a",
                number(later),
                number(statistics.median(read), 3),
                number(median(runs, "requests"), 0),
                str(len(runs)),
            ]
        )
    head = [case, "epoch 1 s", "ratio to limit", "ratio to plain", "stall s"]
    head += ["epoch 2 s", "ratio to warm", "stall s", "bytes read / needed", "requests", "runs"]
    return markdown_table(head, rows)


def markdown(report: dict[str, Any]) -> str:
    """All of a report as text."""
    parts = ["## Shuffled LMDB through a PyTorch DataLoader", conditions(report)]
    parts += [case_table(report, case) for case in cases_of(report["runs"])]
    parts.append(
        "Epoch 1 is cold, of the slowest rank. The limit is the larger of the round's *warm* run "
        "and the file's bytes over the bandwidth. Epoch 2 has another order and finds the page "
        "cache full. Stall: time in next(iterator), of the rank that waited most. Needed: the "
        "pages of the records. Every rank's SHA-256 over its bytes in order is the file's."
    )
    odd = [f"{run['variant']} ({run['case']})" for run in report["runs"] if not run["as_prepared"]]
    if odd:
        parts.append(f"Not cold, or not warm, all the time: {', '.join(dict.fromkeys(odd))}.")
    if report["skipped"]:
        reasons = "; ".join(f"{one['variant']} ({one['reason']})" for one in report["skipped"])
        parts.append(f"Not run: {reasons}.")
    for failure in report["failures"]:
        parts.append(f"FAILED: {failure['case']}, {failure['variant']}: {failure['error']}.")
    return "\n\n".join(parts) + "\n"


# ---- the measurement -------------------------------------------------------------------------


def measure_variant(case: Shuffle, variant: Variant) -> Run:
    """One run of a variant; NotHere when this checkout cannot."""
    if variant.engine is None:
        return case.run([], variant.job, variant.warm)
    options = []
    if variant.plan:
        need_plans()
        options = ["--plan", str(case.write_plan(case.orders))]
    if variant.hook and importlib.util.find_spec("uffdprefetch.job.hook") is None:
        raise NotHere("this checkout has no uffdprefetch/job/hook.py")
    run = case.run(case.bench.wrapped(variant.engine, options), variant.job, variant.warm)
    if variant.engine == "pool":
        run["pool"] = case.bench.pool_summary()
    return run


def measure(bench: Bench, args: argparse.Namespace, save: Callable[[], None]) -> None:
    """All cases."""
    for ranks in (int(word) for word in args.ranks.split(",")):
        case = Shuffle(bench, ranks, args.epochs, args.batch, args.seed, args.compute)
        # On a virtual machine memory not yet backed by the host is slow on first touch.
        case.prepare(warm=True)
        name = f"{ranks} rank{'s' if ranks > 1 else ''}"
        for slow, pairs in ((False, args.pairs), (True, 1)):
            if args.slow or not slow:
                functions: dict[str, Callable[[], Run]] = {
                    one.name: functools.partial(measure_variant, case, one)
                    for one in VARIANTS
                    if one.slow == slow
                }
                bench.rounds(name, pairs, functions, save)


# ---- the command -----------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this and of bench/wrongplan.py."""
    add = parser.add_argument
    add("--pairs", type=int, default=5, help="rounds over all variants")
    add("--json", type=Path, metavar="F")
    add("--size", type=parse_size, default=parse_size("2GiB"))
    add("--bandwidth", type=parse_rate, default=DEFAULT_BANDWIDTH, help="of the link")
    add("--latency-us", type=int, default=DEFAULT_LATENCY_US)
    add("--work", type=Path, help="where the data set lies (default: anew in /dev/shm)")
    add("--only", default="", help="only variants with one of these words in their names")
    add("--batch", type=int, default=32, help="records per batch")
    add("--seed", type=int, default=0, help="of the sampler")
    add("--compute", type=float, default=COMPUTE_SHARE, help="of the link's time for the bytes")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="bench/shuffle.py", description=description)
    add_options(parser)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--ranks", default="1,4", help="numbers of ranks, with commas")
    parser.add_argument("--slow", action="store_true", help="readahead=False too, in one round")
    args = parser.parse_args(words)
    args.show, args.words = "shuffle", list(words)
    return args


def report_of(
    bench: Bench, args: argparse.Namespace, settings: dict[str, int], schema: str
) -> dict[str, Any]:
    """The JSON: how it was measured, and every run."""
    ours = {"schema": schema, "command": command(f"{args.show}.py", args.words)}
    return pool_report_of(bench, args, settings) | ours


def run_command(
    words: Sequence[str],
    schema: str,
    parse: Callable[[Sequence[str]], argparse.Namespace],
    measure: Callable[[Bench, argparse.Namespace, Callable[[], None]], None],
    markdown: Callable[[dict[str, Any]], str],
    anchors: Sequence[str],
) -> int:
    """A bench's command; 0, or 1 if a run failed. ``anchors``: run whatever --only says."""
    if words[:1] == ["show"]:
        print(markdown(load(Path(words[1]), schema)))
        return 0
    args = parse(words)
    with open_bench(args) as bench:
        chosen = [word.strip() for word in args.only.split(",") if word.strip()]
        bench.only = (*chosen, *anchors) if chosen else ()
        settings = bench.bed.settings()

        def report_now() -> dict[str, Any]:
            return report_of(bench, args, settings, schema)

        def keep() -> None:
            save(args.json, report_now())

        measure(bench, args, keep)
        keep()
        print(markdown(report_now()))
        return 1 if bench.failures else 0


@a_line_for_errors
def main(words: Sequence[str]) -> int:
    """The command."""
    return run_command(words, SCHEMA, parse, measure, markdown, (PLAIN, WARM))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
