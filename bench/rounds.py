# SPDX-License-Identifier: Apache-2.0
"""Variants of a job in turns, in rounds that a report keeps: bench/harm.py and bench/reads.py.

A round that the report has is not run again: a bench may be cut off and goes on.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import os
import pwd
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from apps_bench import Bench, Run, wait_until_quiet
from harm_beds import BEDS, LINKS
from harm_cases import Case
from harm_table import PLAIN, WARM, forget, missing
from reports import ROOT, command, commit_of, conditions, load, save

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.demo.jobrun import read_tool_summary

#: Files are sparse, some of them: a run is given the time that so many bytes take at most.
MOST_BYTES_OF_A_RUN = 2 << 30
SAYS = "uffdprefetch: "
#: Those of them that a summary has.
KEPT_OF_SUMMARY = ("engine", "degradations", "totals", "service", "reads")
#: Requests that a bed counts beside those for data.
NAME_REQUESTS = ("lookups", "getattrs", "opens", "opendirs", "readdirs")
User = pwd.struct_passwd


@dataclass(frozen=True)
class Variant:
    """How a job is run. ``way``: plain, warm (plain, with all in memory), or how `wrap` is called,
    with ``options``; ``build`` is empty for this checkout."""

    way: str = PLAIN
    options: tuple[str, ...] = ()
    build: str = ""
    executable: Path | None = None

    @property
    def name(self) -> str:
        """`pool:survival`, `cache@before` ..."""
        return f"{self.way}{f'@{self.build}' if self.build else ''}"

    @property
    def root(self) -> Path:
        """Of the checkout that has it."""
        return ROOT if self.executable is None else self.executable.resolve().parents[2]

    def words(self, bench: Bench, case: Case) -> list[str]:
        """What goes before the command."""
        if self.way in (PLAIN, WARM):
            return []
        options = (*self.options, *case.wrap, *bench.options)
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


def last_line_of_log(lines: Sequence[str]) -> str:
    """Of the service's log that one of these lines names; empty where there is none."""
    named = [word.rstrip(".;,") for line in lines for word in line.split() if ".log" in word]
    with contextlib.suppress(OSError, IndexError):
        return Path(named[0]).read_text().strip().splitlines()[-1]
    return ""


def started(
    bench: Bench, case: Case, variant: Variant, words: Sequence[str], file_bytes: int
) -> Run:
    """Run a job whose files are as they are to be; what is told of it."""
    bench.bed.reset()
    before = variant.words(bench, case)
    done = bench.start([*before, *words], min(file_bytes, MOST_BYTES_OF_A_RUN))
    counters = bench.bed.counters()
    summary = read_tool_summary(bench.scratch / "tool") if before else None
    lines = [line.removeprefix(SAYS) for line in done.stderr.splitlines() if line.startswith(SAYS)]
    if before and summary is None:
        raise UffdPrefetchError(f"wrap has left no summary: {' '.join(lines)}")
    if summary is not None and summary["service"].get("died"):
        # Its log goes with this bench's directories.
        raise UffdPrefetchError(f"THE SERVICE DIED: {last_line_of_log(lines) or ' '.join(lines)}")
    return {
        "variant": variant.name,
        "seconds": done.job["seconds"],
        "total_seconds": done.wall_seconds,
        "digest": done.job["digest"],
        "value_bytes": done.job["bytes"],
        "major_faults": done.job["major_faults"],
        "bytes_read": counters["bytes"],
        "requests": counters["requests"],
        **{name: counters[name] for name in NAME_REQUESTS if name in counters},
        "cpu_seconds": done.children_cpu_seconds,
        "program_cpu_seconds": done.job.get("cpu_seconds"),
        "machine_busy_seconds": done.machine_busy_seconds,
        "steal_seconds": done.steal_seconds,
        "said": lines,
        "tool": None
        if summary is None
        else {name: summary[name] for name in KEPT_OF_SUMMARY if name in summary},
    }


# ---- rounds ------------------------------------------------------------------------------------


@dataclass
class Rounds:
    """The measurement: what is asked for, what there is. A bench says how it runs a job `once`."""

    args: argparse.Namespace
    report: dict[str, Any]
    variants: list[Variant]
    cases: Sequence[Case]
    until: float
    #: In the order in which a report has them.
    every: ClassVar[Sequence[Case]] = ()

    def once(self, bench: Bench, case: Case, variant: Variant, bed: str) -> Run:
        """A run, from cold. Raises UffdPrefetchError."""
        raise NotImplementedError

    def variants_of(self, case: Case) -> list[Variant]:
        """Those that a case is run in."""
        return self.variants

    def left(self, case: Case, beds: Sequence[str]) -> list[tuple[int, str]]:
        """Rounds of a case that are to be run."""
        names = [variant.name for variant in self.variants_of(case)]
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
        job = case.job(bench.place(case.kind), reads)
        expected = bench.start(job, MOST_BYTES_OF_A_RUN).job["digest"]
        report["cases"][case.name] = described
        # In the order of `every`, whoever came first.
        there = report["cases"]
        report["cases"] = {one.name: there[one.name] for one in self.every if one.name in there}
        for number, bed in left:
            if time.monotonic() > self.until:
                return
            if bed in LINKS:
                link = LINKS[bed]
                bench = replace(
                    bench,
                    bandwidth=link.bandwidth,
                    latency_us=link.latency_us,
                    lookup_us=link.lookup_us,
                )
            forget(report, case.name, bed, number)
            # Each is the first one as often as the others.
            variants = self.variants_of(case)
            turn = number % len(variants)
            for variant in (*variants[turn:], *variants[:turn]):
                where = {"bed": bed, "case": case.name, "round": number}
                if self.args.quiet:
                    wait_until_quiet()
                try:
                    run = where | self.once(bench, case, variant, bed)
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

    def run_place(self, bench: Bench, beds: Sequence[str], keep_files: bool) -> None:
        """All cases on beds that show the same files, which go with the last that reads them."""
        for number, case in enumerate(self.cases):
            if time.monotonic() > self.until:
                return
            self.run_case(bench, case, beds)
            size = case.scaled(self.args.files, 1)[0]
            later = self.cases[number + 1 :]
            if not keep_files and all(
                (case.kind, size) != (one.kind, one.scaled(self.args.files, 1)[0]) for one in later
            ):
                shutil.rmtree(replace(bench, size_bytes=size).place(case.kind), ignore_errors=True)

    def some_left(self, beds: Sequence[str]) -> bool:
        """Whether rounds are left that can be run."""
        return any(
            self.left(case, beds) for case in self.cases if case.name not in self.report["skipped"]
        )


# ---- where, what, how long ---------------------------------------------------------------------


@contextlib.contextmanager
def scratch(name: str, user: User | None) -> Iterator[Callable[[str | None], Path]]:
    """Makes temporary directories (in another one, or None), which go at the end. Services and
    caches of whatever runs meanwhile are its own, in the first of them."""
    with contextlib.ExitStack() as stack:

        def directory(where: str | None) -> Path:
            made = tempfile.TemporaryDirectory(prefix=f"uffdprefetch-{name}-", dir=where)
            path = Path(stack.enter_context(made))
            if user is not None:
                os.chown(path, user.pw_uid, user.pw_gid)
            return path

        own = directory(None)
        os.environ["UFFDPREFETCH_RUNDIR"] = str(own / "run")
        os.environ["XDG_CONFIG_HOME"] = str(own / "no-config")
        os.environ["HF_HOME"] = str(own / "hf")
        yield directory


def source_of_beds(args: argparse.Namespace, directory: Callable[[str | None], Path]) -> Path:
    """Where the files of slow beds lie: --work, or in memory."""
    source: Path = args.work or directory("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    source.mkdir(exist_ok=True, parents=True)
    return source


def become(user: User | None, scratch: Path) -> tuple[str, ...]:
    """What goes before a program that is to run as a user, with a home in ``scratch``."""
    if user is None:
        return ()
    ids = (f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")
    return ("setpriv", *ids, "env", f"HOME={scratch}")


def options_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Of wrap: --wrap; files that are smaller than is usual are to be served, too."""
    return (*(["--min-size=16KiB"] if args.files < 1 else []), *args.wrap)


def opened(
    args: argparse.Namespace, variants: Sequence[Variant], schema: str, script: str
) -> dict[str, Any]:
    """The report to go on with; what is run has its bytecode, as in an installed package. Raises
    UffdPrefetchError where it has runs of other sizes."""
    report: dict[str, Any] = {name: {} for name in ("cases", "skipped", "commits", "settings")} | {
        name: [] for name in ("runs", "failures", "beds", "variants")
    }
    scale = {"files": args.files, "reads": args.reads, "wrap": args.wrap}
    if args.user is not None:
        scale["user"] = args.user.pw_name
    if args.json.exists():
        report = load(args.json, schema)
        if report["scale"] != scale:
            raise UffdPrefetchError(
                f"{args.json} has runs of {report['scale']}, not of {scale}: give another --json"
            )
    names = [variant.name for variant in variants]
    report |= {
        "schema": schema,
        **conditions(),
        "command": command(script, ["--json", str(args.json)]),
        "scale": scale,
        "beds": [bed for bed in BEDS if bed in (*report["beds"], *args.beds)],
        "variants": list(dict.fromkeys([*report["variants"], *names])),
    }
    for root in {variant.root for variant in variants}:  # the service's imports take twice as long
        compileall.compile_dir(root / "uffdprefetch", quiet=1)
    for variant in variants:
        commits = report["commits"].setdefault(variant.build or "this checkout", [])
        if (commit := commit_of(variant.root)) not in commits:
            commits.append(commit)
    return report


def chosen_or_told(cases: Sequence[Case], args: argparse.Namespace, every: Sequence[Case]) -> None:
    """Raises UffdPrefetchError, with all names, where no case was chosen."""
    if not cases:
        names = "; ".join(case.name for case in every)
        raise UffdPrefetchError(f"no case is called {args.cases}: {names}")


def deadline(args: argparse.Namespace) -> float:
    """After which no round begins, on time.monotonic()'s clock."""
    return time.monotonic() + 60 * args.minutes if args.minutes is not None else float("inf")


def build(words: str) -> tuple[str, Path]:
    """NAME=EXECUTABLE."""
    name, _, path = words.partition("=")
    if not name or not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(f"NAME=EXECUTABLE, of another checkout, and not {words!r}")
    return name, Path(path).absolute()


def user(name: str) -> User:
    """By its name, and only for root."""
    if os.geteuid() != 0:
        raise argparse.ArgumentTypeError("only root can run jobs as another user")
    try:
        return pwd.getpwnam(name)
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"there is no user {name!r}") from error


def parser_of(script: str, doc: str, beds: Sequence[str]) -> argparse.ArgumentParser:
    """The options that the benches share."""
    parser = argparse.ArgumentParser(prog=f"bench/{script}", description=doc.splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="F", help="goes on where it was cut off")
    add("--bed", default=beds[0], help=f"with commas: {', '.join(beds)} (MB/s / ms / ms of a name)")
    add("--cases", default="*", metavar="GLOB", help="by name; several with commas")
    add("--rounds", type=int, default=3)
    add("--build", type=build, action="append", default=[], metavar="NAME=EXECUTABLE",
        help="the uffdprefetch of another checkout, to be run in turn (repeatable)")  # fmt: skip
    add("--wrap", type=str.split, default=[], metavar="OPTIONS", help="of wrap, in one word")
    add("--files", type=float, default=1.0, help="size of the files, of what is usual")
    add("--reads", type=float, default=1.0, help="how much is read, of what is usual")
    add("--user", type=user, metavar="NAME", help="whose the jobs are, not their files (root only)")
    add("--quiet", action="store_true", help="before a run wait, 10 s at most, until all is quiet")
    add("--minutes", type=float, help="begin no round after so long; status 75: some are left")
    add("--work", type=Path, help="where the bed's files lie, and stay (default: anew in /dev/shm)")
    return parser
