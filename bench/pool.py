# SPDX-License-Identifier: Apache-2.0
"""Measure the pool engine: `python bench/pool.py ranks|epochs|scan|fill|lookups|all [--json F]`.

ranks   4 and 8 ranks of mpirun: bytes from storage, context switches, time
epochs  a data set of twice the budget, several epochs: hit rates by epoch, and the optimum
scan    warm scans of every cache line: GB/s, faults, cost for each GB
fill    a cold sequential reader against fio, and what a page costs
lookups  records of a hot set looked up while scans go by: time, bytes from storage
all     the five in small; show F: the tables of an earlier run

The variants of a case take turns (A B C A B C ...); figures are medians, ratios are within a round
with the bootstrap's 95 % interval. What was read is checked against the file. What cannot run here
is one line on stderr and in the JSON; status 1 if a run failed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pool_bench import SCHEMA, disturbances, open_bench, report_of
from reports import a_line_for_errors, load, save

from uffdprefetch.base.units import parse_rate, parse_size
from uffdprefetch.demo.bed import DEFAULT_BANDWIDTH, DEFAULT_LATENCY_US

SHOWS = ("ranks", "epochs", "scan", "fill", "lookups")
#: Of `all`: enough to see that each of them works.
SMALL = ("--pairs", "1", "--size", "64MiB")


def conditions(report: dict[str, Any]) -> str:
    """The paragraph above the tables."""
    bed, data = report["bed"], report["dataset"]
    text = (
        f"`{report['command']}`\n\n{report['date']}, Linux {report['kernel']}, {report['cpus']} "
        f"CPUs. Bed: {bed['bandwidth_bytes_per_second'] / 1e6:g} MB/s, "
        f"{bed['latency_us'] / 1000:g} ms, read_ahead_kb {bed['read_ahead_kb']}. Data: "
        f"{data['file_bytes'] / 1e9:.2f} GB. {report['pairs']} rounds, the variants in turn; "
        "medians, in brackets the 95 % bootstrap interval of the median ratio within a round."
    )
    disturbed = disturbances(report)
    return f"{text}\n\nDisturbed: {' '.join(disturbed)}" if disturbed else text


def markdown(report: dict[str, Any]) -> str:
    """All of a report as text."""
    show = importlib.import_module(f"pool_{report['show']}")
    parts = [f"## {show.TITLE}", conditions(report), *show.tables(report), *show.notes(report)]
    if report["skipped"]:
        reasons = "; ".join(f"{one['variant']} ({one['reason']})" for one in report["skipped"])
        parts.append(f"Not run: {reasons}.")
    for failure in report["failures"]:
        parts.append(f"FAILED: {failure['case']}, {failure['variant']}: {failure['error']}.")
    return "\n\n".join(parts) + "\n"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench/pool.py", description=__doc__.splitlines()[0])
    shows = parser.add_subparsers(dest="show", required=True)
    for name in SHOWS:
        show = shows.add_parser(name)
        add = show.add_argument
        add("--pairs", type=int, default=5, help="rounds over all variants")
        add("--json", type=Path, metavar="F")
        add("--size", type=parse_size, default=parse_size("1GiB"))
        add("--bandwidth", type=parse_rate, default=DEFAULT_BANDWIDTH, help="of the link")
        add("--latency-us", type=int, default=DEFAULT_LATENCY_US)
        add("--work", type=Path, help="where the data set lies (default: anew in /dev/shm)")
        add("--only", default="", help="only variants with one of these words in their names")
        importlib.import_module(f"pool_{name}").add_options(show)
    every = shows.add_parser("all")
    every.add_argument("--json", type=Path, metavar="F", help="F.ranks.json and so on")
    shows.add_parser("show").add_argument("file", type=Path)
    args = parser.parse_args(words)
    args.words = list(words)
    return args


def run(args: argparse.Namespace) -> int:
    """One measurement; 0, or 1 if a run failed."""
    show = importlib.import_module(f"pool_{args.show}")
    with open_bench(args) as bench:
        bench.only = tuple(word.strip() for word in args.only.split(",") if word.strip())
        settings = bench.bed.settings()

        def keep() -> None:
            save(args.json, report_of(bench, args, settings))

        show.measure(bench, args, keep)
        keep()
        print(markdown(report_of(bench, args, settings)))
        return 1 if bench.failures else 0


def words_of(args: argparse.Namespace) -> list[str]:
    """What bench/run.py was asked for, as the words of each of ours."""
    words = ["--pairs", str(args.pairs), "--size", str(args.size)]
    words += ["--bandwidth", str(args.bandwidth), "--latency-us", str(args.latency_us)]
    return [*words, "--work", str(args.work)] if args.work else words


def run_all(path: Path | None, words: Sequence[str] = SMALL) -> int:
    """All five, one after the other; 0, or 1 if one failed. ``path`` F becomes F.ranks.json, ..."""
    status = 0
    for show in SHOWS:
        files = [] if path is None else ["--json", f"{path}.{show}.json"]
        status |= main([show, *words, *files])
    return status


@a_line_for_errors
def main(words: Sequence[str]) -> int:
    """The command; 0, or 1 if a run failed."""
    args = parse(words)
    if args.show == "all":
        return run_all(args.json)
    if args.show == "show":
        print(markdown(load(args.file, SCHEMA)))
        return 0
    return run(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
