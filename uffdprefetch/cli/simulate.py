# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch simulate SCENARIO [--only NAMES] [--nodes LIST] [--json] [--png F]``, and
``uffdprefetch simulate --replay TRACE (SCENARIO | --bandwidth RATE --latency TIME)``"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, TypeVar

from uffdprefetch.base.errors import UffdPrefetchError, named, usage_error

if TYPE_CHECKING:
    from uffdprefetch.sim.replay.choices import RunConfiguration
    from uffdprefetch.sim.replay.link import StorageModel
    from uffdprefetch.sim.scenario import NamedPolicy, Scenario
    from uffdprefetch.sim.simulate import Progress


Named = TypeVar("Named", "NamedPolicy", "RunConfiguration")


class Command:
    """Predict what data-loading policies cost on a cluster, before node hours are spent on it.

    SCENARIO is a TOML file that describes the nodes, the file system, the data set and the training
    (docs/simulate.md), or the name of one that comes along (--list). Each of its policies is
    simulated: seconds, stall, bytes by source.

    With --replay, the accesses of a job that `uffdprefetch trace` has recorded go through the
    kernel's readahead, windows, known orders and pools; storage is a calibrated SCENARIO's, or
    given by --bandwidth and --latency. The quickest choice's command line is printed. Exit status:
    0; 2 when the scenario or the trace is wrong (one line says where).
    """

    examples = (
        "uffdprefetch simulate --list",
        "uffdprefetch simulate paper5-1 --nodes 1..64",
        "uffdprefetch simulate --replay run.uptrace --bandwidth 1GB/s --latency 1ms",
    )

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("scenario", metavar="SCENARIO", nargs="?", help="a file, or a name")
        parser.add_argument(
            "--list", action="store_true", help="the scenarios that come along, and the policies"
        )
        parser.add_argument(
            "--only",
            metavar="WORDS",
            help="only policies with one of these "
            "comma-separated words in their names, or of these kinds (--list)",
        )
        parser.add_argument(
            "--nodes",
            metavar="N,N,...",
            help="simulate these numbers of nodes, "
            "1..512 for all powers of two between (strong scaling)",
        )
        parser.add_argument(
            "--seed", type=int, help="of the sizes and orders, instead of the scenario's"
        )
        parser.add_argument(
            "--access-frequency",
            metavar="DELTA",
            type=float,
            help="instead: how many samples a node reads more than (1 + DELTA) E / N times",
        )
        parser.add_argument(
            "--replay", metavar="TRACE", help="what the job of this recording would take"
        )
        parser.add_argument(
            "--bandwidth",
            metavar="RATE",
            help="of storage, such as 300MB/s: with --replay and no SCENARIO",
        )
        parser.add_argument(
            "--latency", metavar="TIME",
            help="of a request, such as 1ms: with --replay and no SCENARIO",
        )  # fmt: skip
        parser.add_argument(
            "--size",
            metavar="SIZE,...",
            help="windows to try, with --replay (default: 16MiB,50MiB,128MiB)",
        )
        parser.add_argument(
            "--distance",
            metavar="SIZE,...",
            help="between checkpoints, with --replay (default: 8MiB)",
        )
        parser.add_argument(
            "--budget",
            metavar="SIZE,...",
            help="pools to try, with --replay (default: half and all of what the job reads)",
        )
        parser.add_argument(
            "--epochs",
            metavar="N",
            type=int,
            help="repetitions of the recorded accesses, with --replay (default: 1; of a "
            "mapping that stays only the first epoch is recorded)",
        )
        parser.add_argument(
            "--memory", metavar="SIZE", help="for the page cache, with --replay (default: enough)"
        )
        parser.add_argument(
            "--png", metavar="F.png", help="also draw it: time by source, or by nodes"
        )
        parser.add_argument("--json", action="store_true", help="one JSON document on stdout")

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        if rest is not None:
            raise usage_error("simulate starts nothing: nothing goes after --")
        from uffdprefetch.sim import scenario as scenarios

        _refuse_what_does_not_apply(args)
        if args.list:
            return _list()
        if args.png is not None:
            from uffdprefetch.report import simulate_png

            simulate_png.refuse_what_cannot_be_drawn(args.png)
        for name in (args.scenario, args.replay):
            _refuse_a_pipe(name)
        if args.replay is not None:
            return _replay(args)
        if args.scenario is None:
            raise usage_error("simulate: which SCENARIO? (--list shows those that come along)")
        scenario = scenarios.load(args.scenario)
        if args.seed is not None:
            if args.seed < 0:
                raise usage_error(f"--seed {args.seed}: from 0 on")
            scenario = replace(scenario, training=replace(scenario.training, seed=args.seed))
        if args.access_frequency is not None:
            return _frequency(scenario, args)
        if args.only is not None:
            scenario = _only(scenario, args.only)
        return _simulate(scenario, args)


def _refuse_what_does_not_apply(args: argparse.Namespace) -> None:
    """Reject options that would be ignored."""
    for name, value in vars(args).items():
        if value == "":
            raise usage_error(f"{_written(name)} '': nothing is given")
        if args.list and name != "list" and value is not None and value is not False:
            raise usage_error(f"--list stands alone: without {_written(name)}")
    if args.replay is None:
        for name in ("bandwidth", "latency", "size", "distance", "budget", "epochs", "memory"):
            if getattr(args, name) is not None:
                raise usage_error(f"--{name} belongs to --replay TRACE")
    with_it = {
        "replay": ("nodes", "seed", "access_frequency"),
        "access_frequency": ("nodes", "only"),
    }
    for mode, strangers in with_it.items():
        for name in strangers if getattr(args, mode) is not None else ():
            if getattr(args, name) is not None:
                raise usage_error(f"{_written(name)} has no meaning with {_written(mode)}")


def _written(name: str) -> str:
    """An option's spelling on the command line."""
    return "SCENARIO" if name == "scenario" else "--" + name.replace("_", "-")


def _refuse_a_pipe(path: str | None) -> None:
    """Reject FIFOs, which would wait for a writer; a shell's <(...) has one."""
    if path is None or path.startswith("/dev/"):
        return
    if os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
        raise usage_error(f"{path} is a pipe: give a file")


@contextmanager
def _enough_memory(of: str) -> Iterator[None]:
    """Turn MemoryError into one line, since sizes may be typing errors; ``of``: the sizes."""
    try:
        yield
    except (MemoryError, OverflowError):
        raise UffdPrefetchError(f"simulate: needs more memory than there is ({of})") from None


def _extent(scenario: Scenario, nodes: int) -> str:
    F, E = scenario.dataset.F, scenario.training.E
    many = f"F x E = {F:,} x {E:,} = {F * E:,}" if F else f"E = {E:,}"
    return f"{many}, {nodes:,} nodes"


def _simulate(scenario: Scenario, args: argparse.Namespace) -> int:
    from uffdprefetch.report import simulate as report
    from uffdprefetch.report.columns import show
    from uffdprefetch.sim import simulate

    nodes = node_counts(args.nodes) if args.nodes is not None else []
    began = time.perf_counter()
    with _enough_memory(_extent(scenario, max(nodes, default=scenario.system.N))):
        workload = simulate.workload_of(scenario)
        with _progress() as progress:
            rows = list(simulate.run(scenario, workload, nodes, progress))
    document = report.document(scenario, args.scenario, workload, rows, time.perf_counter() - began)
    show(document, report.text(document), args.json)
    if args.png is not None:
        from uffdprefetch.report import simulate_png

        simulate_png.write(document, args.png)
    return 0


def _replay(args: argparse.Namespace) -> int:
    from uffdprefetch.base.config import POOL_LEAST_BYTES
    from uffdprefetch.base.units import format_size
    from uffdprefetch.report import replay as report
    from uffdprefetch.report.columns import show
    from uffdprefetch.sim.replay.choices import DISTANCES, WINDOWS, check, choices, predict
    from uffdprefetch.sim.replay.demand import demand_of
    from uffdprefetch.trace.file import trace_file as traces

    storage = _storage(args)
    windows = _sizes("--size", args.size) or list(WINDOWS)
    distances = _sizes("--distance", args.distance) or list(DISTANCES)
    memory = None
    if args.memory is not None:
        if len(_sizes("--memory", args.memory)) != 1:
            raise usage_error(f"--memory {args.memory}: one size")
        memory = _sizes("--memory", args.memory)[0]
    epochs = 1 if args.epochs is None else args.epochs
    if epochs < 1:
        raise usage_error(f"--epochs {epochs}: from 1 on")
    given = _sizes("--budget", args.budget, POOL_LEAST_BYTES)
    with _enough_memory(f"epochs: {epochs:,}, windows up to {format_size(max(windows))}"):
        recorded = demand_of(traces.read(args.replay))
        demand = recorded.repeated(epochs)
        wanted = demand.wanted_bytes
        budgets = given or sorted({_rounded(part * wanted) for part in (0.5, 1.05)})
        files_bytes = sum(file.size_bytes for file in demand.files)
        which = choices(windows, distances, memory, budgets, files_bytes)
        if args.only is not None:
            which = _named(which, args.only)
        found = []
        with _progress() as progress:
            for done, one in enumerate(predict(demand, storage, which)):
                progress(done + 1, len(which), one.choice.name)
                found.append(one)
        checked = check(recorded, storage)
    document = report.document(args.replay, demand, storage, found, checked)
    show(document, report.text(document), args.json)
    if args.png is not None:
        from uffdprefetch.report import simulate_png

        simulate_png.write(report.picture(document), args.png)
    return 0


def _storage(args: argparse.Namespace) -> StorageModel:
    from uffdprefetch.base.units import parse_duration, parse_rate
    from uffdprefetch.sim.replay.link import StorageModel
    from uffdprefetch.sim.scenario import load

    if args.scenario is not None:
        if args.bandwidth or args.latency:
            raise usage_error("--replay: a SCENARIO, or --bandwidth and --latency, not both")
        rates = load(args.scenario).storage_rates
        if not rates:
            raise usage_error(
                f"{args.scenario}: has no [measured.file_system] of calibrate's; "
                "give --bandwidth and --latency"
            )
        try:
            return StorageModel.fitted(rates)
        except ValueError as error:
            raise usage_error(f"{args.scenario}: measured.file_system: {error}") from None
    if not args.bandwidth or not args.latency:
        raise usage_error(
            "--replay: of which storage? a calibrated SCENARIO, or --bandwidth and --latency"
        )
    rate = named("--bandwidth", parse_rate, args.bandwidth)
    if rate < 1:
        raise usage_error(f"--bandwidth {args.bandwidth}: more than none")
    return StorageModel(rate, named("--latency", parse_duration, args.latency))


def _sizes(option: str, text: str | None, least: int = 1 << 16) -> list[int]:
    from uffdprefetch.base.units import format_size_exact, parse_size

    sizes = (
        [named(option, parse_size, part) for part in text.split(",")] if text is not None else []
    )
    if any(size < least for size in sizes):
        raise usage_error(f"{option} {text}: at least {format_size_exact(least)}")
    return sizes


def _rounded(size_bytes: float) -> int:
    """Rounded up to whole MiB."""
    return max(1, -(-int(size_bytes) // (1 << 20))) << 20


def _frequency(scenario: Scenario, args: argparse.Namespace) -> int:
    from uffdprefetch.report import frequency as report
    from uffdprefetch.report.columns import show
    from uffdprefetch.sim import frequency, simulate

    if not -1 < args.access_frequency < float("inf"):
        raise usage_error(f"--access-frequency {args.access_frequency}: more than -1")
    with _enough_memory(_extent(scenario, scenario.system.N)):
        workload = simulate.workload_of(scenario)
        found = frequency.drawn(workload, scenario.system.N)
    document = report.document(
        args.scenario, workload, scenario.system.N, args.access_frequency, found
    )
    show(document, report.text(document), args.json)
    if args.png is not None:
        report.draw(document, args.png)
    return 0


def _list() -> int:
    from uffdprefetch.sim.policies import POLICIES
    from uffdprefetch.sim.scenario import shipped

    lines = ["scenarios:", *(f"  {name:<18} {title}" for name, title in shipped().items())]
    lines.append("policies:")
    for name, policy in POLICIES.items():
        description = " ".join((policy.__doc__ or "").split())
        options = ", ".join(f"{one.name} = {json.dumps(one.default)}" for one in fields(policy))
        lines.append(f"  {name:<18} {description}" + (f" [{options}]" if options else ""))
    print("\n".join(lines))
    return 0


def _only(scenario: Scenario, words: str) -> Scenario:
    from uffdprefetch.sim.policies import POLICIES

    kinds = {made: name for name, made in POLICIES.items()}
    return replace(
        scenario, policies=_named(scenario.policies, words, lambda one: kinds[type(one.policy)])
    )


def _named(
    named: Sequence[Named], words: str, kind: Callable[[Named], str] = lambda one: ""
) -> list[Named]:
    """Those whose name contains one of the comma-separated words, or whose kind is one. Raises
    UffdPrefetchError for a word that matches none."""
    chosen: list[Named] = []
    for word in (word.strip().lower() for word in words.split(",")):
        found = [one for one in named if word and (word in one.name.lower() or word == kind(one))]
        if not found:
            raise usage_error(
                f"--only {word or words}: none of {', '.join(one.name for one in named)}"
            )
        chosen += found
    return [one for one in named if one in chosen]


def node_counts(text: str) -> list[int]:
    """[1, 2, 4, 8] of '1..8', [1, 3, 12] of '1,3,12'. Raises UffdPrefetchError."""
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
    """A progress bar on stderr if that is a terminal, for sweeps that take minutes."""

    def __enter__(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.bar = Progress(
            BarColumn(),
            TextColumn("{task.completed}/{task.total} {task.description}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self.task = self.bar.add_task("", total=None)
        self.bar.start()
        return self._update

    def _update(self, done: int, of: int, name: str) -> None:
        self.bar.update(self.task, completed=done, total=of, description=name)

    def __exit__(self, *exc: object) -> None:
        self.bar.stop()
