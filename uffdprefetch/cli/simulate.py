# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch simulate SCENARIO [--only NAMES] [--nodes LIST] [--json] [--png F]``"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from uffdprefetch.errors import usage_error

if TYPE_CHECKING:
    from uffdprefetch.sim.scenario import Scenario
    from uffdprefetch.sim.simulate import Progress


class Command:
    """Predict what data-loading policies cost on a cluster, before node hours are spent on it.

    SCENARIO is a TOML file that describes the nodes, the file system, the data set and the training
    (docs/simulate.md), or the name of one that comes along (--list). Each of its policies is
    simulated: seconds, stall, bytes by source. Exit status: 0; 2 when the scenario is wrong (one
    line says where).
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("scenario", metavar="SCENARIO", nargs="?", help="a file, or a name")
        parser.add_argument("--list", action="store_true", help="the scenarios that come along, "
                            "and the policies")
        parser.add_argument("--only", metavar="WORDS", help="only policies with one of these "
                            "comma-separated words in their names")
        parser.add_argument("--nodes", metavar="N,N,...", help="simulate these numbers of nodes, "
                            "1..512 for all powers of two between (strong scaling)")
        parser.add_argument("--seed", type=int, help="of the sizes and orders, instead of the "
                            "scenario's")
        parser.add_argument("--access-frequency", metavar="DELTA", type=float, help="instead: how "
                            "many samples a node reads more than (1 + DELTA) E / N times")
        parser.add_argument("--png", metavar="F", help="also draw it: time by source, or by nodes")
        parser.add_argument("--json", action="store_true", help="one JSON document on stdout")

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        if rest is not None:
            raise usage_error("simulate starts nothing: nothing goes after --")
        from uffdprefetch.sim import scenario as scenarios

        if args.list:
            return _list()
        if args.scenario is None:
            raise usage_error("simulate: which SCENARIO? (--list shows those that come along)")
        scenario = scenarios.load(args.scenario)
        if args.seed is not None:
            if args.seed < 0:
                raise usage_error(f"--seed {args.seed}: from 0 on")
            scenario = replace(scenario, training=replace(scenario.training, seed=args.seed))
        if args.access_frequency is not None:
            return _frequency(scenario, args)
        if args.only:
            scenario = _only(scenario, args.only)
        return _simulate(scenario, args)


def _simulate(scenario: Scenario, args: argparse.Namespace) -> int:
    from uffdprefetch.report import simulate as report
    from uffdprefetch.sim import simulate

    nodes = node_counts(args.nodes) if args.nodes else []
    began = time.perf_counter()
    with _progress() as progress:
        rows = list(simulate.run(scenario, nodes, progress))
    workload = simulate.workload_of(scenario)
    document = report.document(
        scenario, args.scenario, workload, rows, time.perf_counter() - began)
    if args.png:
        from uffdprefetch.report import simulate_png

        simulate_png.write(document, args.png)
    if args.json:
        print(json.dumps(document, indent=2))
    elif sys.stdout.isatty():
        report.table(document)
    else:
        sys.stdout.write(report.plain(document))
    return 0


def _frequency(scenario: Scenario, args: argparse.Namespace) -> int:
    from uffdprefetch.report import frequency as report
    from uffdprefetch.sim import frequency, simulate

    if not args.access_frequency > -1:
        raise usage_error(f"--access-frequency {args.access_frequency}: more than -1")
    workload = simulate.workload_of(scenario)
    found = frequency.drawn(workload, scenario.system.N)
    document = report.document(args.scenario, workload, scenario.system.N, args.access_frequency,
                               found)
    if args.png:
        report.draw(document, args.png)
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        sys.stdout.write(report.plain(document))
    return 0


def _list() -> int:
    from uffdprefetch.sim.policies import POLICIES
    from uffdprefetch.sim.scenario import shipped

    lines = ["scenarios:", *(f"  {name:<18} {title}" for name, title in shipped().items())]
    lines.append("policies:")
    for name, policy in POLICIES.items():
        said = " ".join((policy.__doc__ or "").split())
        lines.append(f"  {name:<18} {said}")
    print("\n".join(lines))
    return 0


def _only(scenario: Scenario, words: str) -> Scenario:
    wanted = [word.strip().lower() for word in words.split(",") if word.strip()]
    chosen = [p for p in scenario.policies if any(word in p.name.lower() for word in wanted)]
    if not chosen:
        raise usage_error(f"--only {words}: none of {', '.join(p.name for p in scenario.policies)}")
    return replace(scenario, policies=chosen)


def node_counts(text: str) -> list[int]:
    """[1, 2, 4, 8] of '1..8', and what is written out: '1,3,12'. Raises UffdPrefetchError."""
    from uffdprefetch.sim.scenario import N_MAX

    counts: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        try:
            low, high = int(first), int(last) if dots else int(first)
        except ValueError:
            raise usage_error(f"--nodes {text}: {part!r} is no number (1,2,4 or 1..512)") from None
        if not 1 <= low <= high <= N_MAX:
            raise usage_error(f"--nodes {text}: {part!r}: from 1 to {N_MAX}, the smaller first")
        while low < high:
            counts.append(low)
            low *= 2
        counts.append(high)
    return counts


class _progress:
    """A bar on stderr while it is a terminal, for sweeps that take minutes."""

    def __enter__(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.bar = Progress(
            BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"),
            TimeElapsedColumn(), console=Console(stderr=True), transient=True,
            disable=not sys.stderr.isatty())
        self.task = self.bar.add_task("", total=None)
        self.bar.start()
        return self._told

    def _told(self, done: int, of: int, name: str) -> None:
        self.bar.update(self.task, completed=done, total=of, description=name)

    def __exit__(self, *exc: object) -> None:
        self.bar.stop()
