# SPDX-License-Identifier: Apache-2.0
"""What wrong guesses cost: `python bench/harm.py --json F`, `show F`, `draw F PNG`.

The jobs (bench/harm_cases.py) read a part of what they map: some columns, images, records, pages.
Each variant is run in turn (A B C A B C ...), from cold, which is checked, and must read the same
values: plain; under `wrap` by the page cache and by the pool, with each --policy, and by each other
--build. What is told: the seconds in the program and from start to exit, the bytes over the link as
the bed counts them, and what the run's summary said.

A round that F has is not run again: a run may be cut off and goes on, and --minutes does so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from apps_bench import Bench, Run
from harm_beds import BEDS, EXT4, LINKS, loop_disk, named, why_no_loop
from harm_cases import EVERY, Case, chosen
from harm_table import PLAIN, SCHEMA, forget, markdown, missing
from reports import ROOT, a_line_for_errors, command, commit_of, conditions, load, save

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.demo.bed import SlowBed, drop_cache, resident_bytes
from uffdprefetch.demo.jobrun import read_tool_summary

ENGINES = ("cache", "pool")
#: Files are sparse, some of them: a run is given the time that so many bytes take at most.
MOST_BYTES_OF_A_RUN = 2 << 30
SAYS = "uffdprefetch: "
KEPT_OF_SUMMARY = ("engine", "degradations", "totals")
#: Of sysexits.h: there are rounds left.
TEMPFAIL = 75


@dataclass(frozen=True)
class Variant:
    """How a job is run; ``engine`` is empty for plain, ``build`` for this checkout."""

    engine: str = ""
    policy: str = ""
    build: str = ""
    executable: Path | None = None

    @property
    def name(self) -> str:
        """`pool:survival`, `cache@before` ..."""
        policy = f":{self.policy}" if self.policy else ""
        return f"{self.engine or PLAIN}{policy}{f'@{self.build}' if self.build else ''}"

    @property
    def root(self) -> Path:
        """Of the checkout that has it."""
        return ROOT if self.executable is None else self.executable.resolve().parents[2]

    def words(self, bench: Bench, case: Case) -> list[str]:
        """What goes before the command."""
        if not self.engine:
            return []
        options = [f"--engine={self.engine}", *case.wrap, *bench.options]
        if self.policy:
            options.append(f"--policy={self.policy}")
        words = replace(bench, options=()).wrap(*options)
        if self.executable is None:
            return words
        # The other checkout's modules, and a service of its own: the two may not understand
        # each other.
        directory = bench.scratch / f"run-{self.build}"
        return [
            *("env", "-u", "PYTHONPATH", f"UFFDPREFETCH_RUNDIR={directory}"),
            *(str(self.executable), *words[words.index("wrap") :]),
        ]


def variants_of(args: argparse.Namespace) -> list[Variant]:
    """Plain, the engines with each policy, and each other build's with what is its default."""
    engines = [engine for engine in ENGINES if engine in args.engines]
    ours = [Variant(engine, policy) for policy in args.policies for engine in engines]
    others = [
        Variant(engine, "", name, executable)
        for name, executable in args.build
        for engine in engines
    ]
    return [Variant(), *ours, *others]


# ---- one run -----------------------------------------------------------------------------------


def read_source(paths: Sequence[Path]) -> None:
    """What lies below the bed, into memory: no disk of this machine is to be measured."""
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            at, end = 0, os.fstat(file.fileno()).st_size
            while at < end:
                try:
                    first = os.lseek(file.fileno(), at, os.SEEK_DATA)
                except OSError:
                    break  # a hole to the end
                at = os.lseek(file.fileno(), first, os.SEEK_HOLE)
                for place in range(first, at, 1 << 20):
                    os.pread(file.fileno(), min(1 << 20, at - place), place)


def measure(
    bench: Bench, case: Case, variant: Variant, files: Sequence[Path], words: Sequence[str]
) -> Run:
    """One run, from cold."""
    for path in files:
        drop_cache(path)
    bench.bed.set(bandwidth=bench.bandwidth, latency_us=bench.latency_us)
    bench.bed.reset()
    before = variant.words(bench, case)
    file_bytes = min(sum(path.stat().st_size for path in files), MOST_BYTES_OF_A_RUN)
    resident = sum(map(resident_bytes, files))
    done = bench.start([*before, *words], file_bytes)
    counters = bench.bed.counters()
    summary = read_tool_summary(bench.scratch / "tool") if before else None
    lines = [line.removeprefix(SAYS) for line in done.stderr.splitlines() if line.startswith(SAYS)]
    if before and summary is None:
        raise UffdPrefetchError(f"wrap has left no summary: {' '.join(lines)}")
    return {
        "variant": variant.name,
        "seconds": done.job["seconds"],
        "total_seconds": done.wall_seconds,
        "digest": done.job["digest"],
        "value_bytes": done.job["bytes"],
        "major_faults": done.job["major_faults"],
        "resident_bytes_at_start": resident,
        "bytes_read": counters["bytes"],
        "requests": counters["requests"],
        "cpu_seconds": done.children_cpu_seconds,
        "machine_busy_seconds": done.machine_busy_seconds,
        "steal_seconds": done.steal_seconds,
        "said": lines,
        "tool": None if summary is None else {name: summary[name] for name in KEPT_OF_SUMMARY},
    }


# ---- all of them -------------------------------------------------------------------------------


@dataclass
class Harm:
    """The measurement: what is asked for, what there is."""

    args: argparse.Namespace
    report: dict[str, Any]
    variants: list[Variant]
    cases: list[Case]
    until: float

    def left(self, case: Case, beds: Sequence[str]) -> list[tuple[int, str]]:
        """Rounds of a case that are to be run."""
        names = [variant.name for variant in self.variants]
        return [
            (number, bed)
            for bed in beds
            for number in missing(self.report, bed, case.name, names, self.args.rounds)
        ]

    def run_case(self, bench: Bench, case: Case, beds: Sequence[str]) -> None:
        """Its rounds that are missing, as long as there is time."""
        report, (size_bytes, reads) = self.report, case.scaled(self.args.files, self.args.reads)
        bench = replace(bench, size_bytes=size_bytes)
        described = case.described(size_bytes, reads)
        if report["cases"].get(case.name, described) != described:
            forget(report, case.name)  # another job had this name
        left = self.left(case, beds)
        report["skipped"].pop(case.name, None)
        if not left:
            return
        reason = case.why_not(slow=True)
        if reason is not None:
            report["skipped"][case.name] = reason
            return
        bench.make(case.kind)
        beside = bench.place(case.kind)
        sources = sorted(path for path in beside.rglob("*") if path.is_file())
        files = bench.files(case.kind)
        expected = bench.start(case.job(beside, reads), MOST_BYTES_OF_A_RUN).job["digest"]
        report["cases"][case.name] = described
        # In the order of EVERY, whoever came first.
        there = report["cases"]
        report["cases"] = {one.name: there[one.name] for one in EVERY if one.name in there}
        words = case.job(bench.bed.path(beside.name), reads)
        below = sources if self.args.work is not None and EXT4 not in beds else []
        for number, bed in left:
            if time.monotonic() > self.until:
                return
            if bed in LINKS:
                link = LINKS[bed]
                bench = replace(bench, bandwidth=link.bandwidth, latency_us=link.latency_us)
            forget(report, case.name, bed, number)
            # Each is the first one as often as the others.
            turn = number % len(self.variants)
            for variant in (*self.variants[turn:], *self.variants[:turn]):
                where = {"bed": bed, "case": case.name, "round": number}
                read_source(below)
                try:
                    run = where | measure(bench, case, variant, files, words)
                    if run["digest"] != expected:
                        raise UffdPrefetchError(
                            f"WRONG VALUES: digest {run['digest']}, not {expected}"
                        )
                except UffdPrefetchError as error:
                    failed = {"variant": variant.name, "error": error.message}
                    self.keep("failures", where | failed, f"FAILED: {error.message}")
                else:
                    told = f"{run['seconds']:.2f} s, {run['bytes_read'] / 1e6:.1f} MB"
                    self.keep("runs", run, " | ".join([told, *run["said"][:1]]))

    def keep(self, part: str, one: dict[str, Any], told: str) -> None:
        """A run, or what became of it."""
        self.report[part].append(one)
        save(self.args.json, self.report)
        where = f"{one['bed']} | {one['case']} | round {one['round'] + 1}/{self.args.rounds}"
        print(f"bench: {where} | {one['variant']}: {told}", file=sys.stderr, flush=True)

    def run_place(self, bench: Bench, beds: Sequence[str]) -> None:
        """All cases on the beds that show the same files."""
        for number, case in enumerate(self.cases):
            if time.monotonic() > self.until:
                return
            self.run_case(bench, case, beds)
            size = case.scaled(self.args.files, 1)[0]
            later = self.cases[number + 1 :]
            if (self.args.work is None or EXT4 in beds) and all(
                (case.kind, size) != (one.kind, one.scaled(self.args.files, 1)[0]) for one in later
            ):
                shutil.rmtree(replace(bench, size_bytes=size).place(case.kind), ignore_errors=True)


@contextlib.contextmanager
def places(args: argparse.Namespace) -> Iterator[list[tuple[Bench, list[str]]]]:
    """Where files are shown, and on which beds: the slow one with each link, the loop device."""
    with contextlib.ExitStack() as stack:

        def directory(where: str | None) -> Path:
            made = tempfile.TemporaryDirectory(prefix="uffdprefetch-harm-", dir=where)
            return Path(stack.enter_context(made))

        scratch = directory(None)
        os.environ["UFFDPREFETCH_RUNDIR"] = str(scratch / "run")
        os.environ["XDG_CONFIG_HOME"] = str(scratch / "no-config")
        os.environ["HF_HOME"] = str(scratch / "hf")
        # Files that are smaller than is usual are to be served, too.
        options = (*(["--min-size=16KiB"] if args.files < 1 else []), *args.wrap)
        rest = dict(columns=(), options=options, as_by_default=True)
        found: list[tuple[Bench, list[str]]] = []
        links = [bed for bed in args.beds if bed in LINKS]
        if links:
            source = args.work or directory("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
            source.mkdir(exist_ok=True, parents=True)
            bed = stack.enter_context(SlowBed(source))
            found.append((Bench(bed, source, scratch, 0, 0, 0, **rest), links))
        if EXT4 in args.beds:
            disk = stack.enter_context(loop_disk(directory(str(args.disk) if args.disk else None)))
            found.append((Bench(disk, disk.mountpoint, scratch, 0, 0, 0, **rest), [EXT4]))  # type: ignore[arg-type]
        yield found


def opened(args: argparse.Namespace, variants: Sequence[Variant]) -> dict[str, Any]:
    """The report to go on with. Raises UffdPrefetchError where it has runs of other sizes."""
    report: dict[str, Any] = {name: {} for name in ("cases", "skipped", "commits", "settings")} | {
        name: [] for name in ("runs", "failures", "beds", "variants")
    }
    scale = {"files": args.files, "reads": args.reads, "wrap": args.wrap}
    if args.json.exists():
        report = load(args.json, SCHEMA)
        if report["scale"] != scale:
            raise UffdPrefetchError(
                f"{args.json} has runs of {report['scale']}, not of {scale}: give another --json"
            )
    names = [variant.name for variant in variants]
    report |= {
        "schema": SCHEMA,
        **conditions(),
        "command": command("harm.py", ["--json", str(args.json)]),
        "scale": scale,
        "beds": [bed for bed in BEDS if bed in (*report["beds"], *args.beds)],
        "variants": list(dict.fromkeys([*report["variants"], *names])),
    }
    for variant in variants:
        commits = report["commits"].setdefault(variant.build or "this checkout", [])
        if (commit := commit_of(variant.root)) not in commits:
            commits.append(commit)
    return report


def build(words: str) -> tuple[str, Path]:
    """NAME=EXECUTABLE."""
    name, _, path = words.partition("=")
    if not name or not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(f"NAME=EXECUTABLE, of another checkout, and not {words!r}")
    return name, Path(path).absolute()


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="bench/harm.py", description=description)
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="F", help="goes on where it was cut off")
    add("--bed", default="300/1", help=f"with commas: {', '.join(BEDS)} (MB/s / ms)")
    add("--cases", default="*", metavar="GLOB", help="by name; several with commas")
    add("--rounds", type=int, default=3)
    add("--engines", default=",".join(ENGINES), help="beside plain, with commas")
    add("--policy", default="", help="with commas (default: what is the default)")
    add("--build", type=build, action="append", default=[], metavar="NAME=EXECUTABLE",
        help="the uffdprefetch of another checkout, to be run in turn (repeatable)")  # fmt: skip
    add("--wrap", type=str.split, default=[], metavar="OPTIONS", help="of wrap, in one word")
    add("--files", type=float, default=1.0, help="size of the files, of what is usual")
    add("--reads", type=float, default=1.0, help="how much is read, of what is usual")
    add("--minutes", type=float, help="begin no round after so long; status 75: some are left")
    add("--work", type=Path, help="where the bed's files lie, and stay (default: anew in /dev/shm)")
    add("--disk", type=Path, help="where the image of ext4 does (default: in /tmp)")
    args = parser.parse_args(words)
    args.beds = named(args.bed)
    args.policies = args.policy.split(",")
    args.engines = [word for word in args.engines.split(",") if word]
    unknown = [engine for engine in args.engines if engine not in ENGINES]
    if unknown:
        parser.error(f"no engine {unknown[0]!r}: {', '.join(ENGINES)}")
    return args


def measure_all(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The rounds that are asked for and not there; whether some are left."""
    variants, cases = variants_of(args), chosen(args.cases)
    if not cases:
        raise UffdPrefetchError(
            f"no case is called {args.cases}: {'; '.join(case.name for case in EVERY)}"
        )
    until = time.monotonic() + 60 * args.minutes if args.minutes is not None else float("inf")
    harm = Harm(args, opened(args, variants), variants, cases, until)
    harm.report["skipped"].pop(EXT4, None)
    if EXT4 in args.beds and (reason := why_no_loop()) is not None:
        harm.report["skipped"][EXT4] = reason
        args.beds.remove(EXT4)
    with places(args) as found:
        for bench, beds in found:
            harm.report["settings"] |= {bed: bench.bed.settings() for bed in beds}
            harm.run_place(bench, beds)
    save(args.json, harm.report)
    left = any(
        harm.left(case, args.beds) for case in cases if case.name not in harm.report["skipped"]
    )
    return harm.report, left


@a_line_for_errors
def main(words: Sequence[str]) -> int:
    """The command; 0, 1 if a run failed, 75 if some are left."""
    if words[:1] == ["draw"]:
        from harm_picture import draw

        draw(load(Path(words[1]), SCHEMA), Path(words[2]))
        return 0
    if words[:1] == ["show"]:
        report, left = load(Path(words[1]), SCHEMA), False
    else:
        report, left = measure_all(parse(words))
    print(markdown(report))
    return 1 if report["failures"] else TEMPFAIL if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
