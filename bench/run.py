# SPDX-License-Identifier: Apache-2.0
"""Measure: `python bench/run.py --suite paper1|peers|patterns|adapt|pool --pairs 5 --json F`.

Everything runs on the slow-storage bed (bench/slowfs.c) over a data set in tmpfs. The variants of
a case take turns (A B C A B C ...), so that a drift of the machine affects all of them; reported
are medians, and ratios *within a round*: to the baseline, and to the limit, which is
the larger of that round's warm run and the file's bytes over the link's bandwidth. An interval is
the bootstrap's 95 % of the median ratio. Cold and warm are counted before each run, and every run
must have read all record bytes.

`--suite pool` is the four measurements of bench/pool.py, each with a JSON of its own: F.ranks.json,
F.epochs.json, F.scan.json, F.fill.json.

The JSON holds every run; bench/render.py makes tables and pictures of it. Nothing here asserts a
time: CI runs it in small (--size 32MiB --pairs 1) for its counters.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reports import conditions, save
from runs import Run, summarize
from suites import ADAPT_BANDWIDTHS, BASELINE, WARM, Case, Variant, plan_of

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.units import parse_rate, parse_size
from uffdprefetch.demo.bed import (
    DEFAULT_BANDWIDTH,
    DEFAULT_LATENCY_US,
    SlowBed,
    drop_cache,
    warm_fully,
)
from uffdprefetch.demo.dataset import (
    DATABASE_NAME,
    INDEX_NAME,
    Manifest,
    make_dataset,
)
from uffdprefetch.demo.jobrun import (
    JobRun,
    job_command,
    read_tool_summary,
    run_job,
    wrap_command,
)

SCHEMA = "uffdprefetch.bench/1"
MIB = 1 << 20


# ---- one run --------------------------------------------------------------------------------


@dataclass
class Bench:
    """The bed and the settings common to all runs."""

    bed: SlowBed
    manifest: Manifest
    bandwidth: int
    latency_us: int
    scratch: Path
    adapt: bool = False
    only: tuple[str, ...] = ()
    include_slow: bool = False
    runs: list[Run] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)

    @property
    def database(self) -> Path:
        """The LMDB on the bed."""
        return self.bed.path(DATABASE_NAME)

    @property
    def data(self) -> Path:
        """Its file."""
        return self.database / "data.mdb"

    def why_not(self, variant: Variant) -> str | None:
        """Why a variant cannot run here, None if it can."""
        for command in (variant.before, variant.beside):
            if command and shutil.which(command[0]) is None:
                return f"{command[0]} is not installed (Debian package vmtouch, or --vmtouch)"
        if variant.needs_module and importlib.util.find_spec(variant.needs_module) is None:
            return f"the Python package {variant.needs_module} is not installed"
        if variant.read_ahead_kb is not None and os.geteuid() != 0:
            return "only root may set read_ahead_kb"
        if variant.slow and not self.include_slow:
            return f"{variant.slow}; --include-slow runs it"
        if variant.wrap is not None and importlib.util.find_spec("uffdprefetch.cli.wrap") is None:
            return "this checkout has no `uffdprefetch wrap`"
        return None

    def prepare(self, warm: bool) -> None:
        """Make the file cold or warm, verified; filled without the link, which is restored."""
        if not warm:
            drop_cache(self.data)
        else:
            self.bed.set(bandwidth=0, latency_us=0)
            warm_fully(self.data)
        self.bed.set(bandwidth=self.bandwidth, latency_us=self.latency_us)
        self.bed.reset()

    def command_of(self, case: Case, variant: Variant, output: Path) -> list[str]:
        """The whole command line of a run."""
        # All ranks together need the link's whole bandwidth: each computes longer per byte.
        per_byte_seconds = case.compute_share / self.bandwidth * case.ranks
        pattern = "contiguous" if case.pattern == "sweep" else case.pattern
        job = job_command(
            self.database,
            f"--pattern={pattern}",
            f"--ranks={case.ranks}",
            "--spawn",
            f"--epochs={variant.epochs}",
            f"--compute-seconds-per-byte={per_byte_seconds!r}",
            *variant.job,
        )
        if variant.wrap is None:
            return job
        env = ["env", *variant.environment] if variant.environment else []
        return [*env, *wrap_command("-f", "-o", str(output), "--strict", *variant.wrap), *job]

    def measure(self, case: Case, variant: Variant, number: int) -> Run:
        """One run of one variant in one round, checked for its bytes."""
        output = self.scratch / "tool"
        Path(f"{output}.summary.json").unlink(missing_ok=True)
        self.prepare(variant.warm)
        usual_read_ahead_kb = self.bed.read_ahead_kb
        command = self.command_of(case, variant, output)
        expected_seconds = self.manifest.file_bytes / min(self.bandwidth, *ADAPT_BANDWIDTHS)
        timeout_seconds = 120 + 60 * variant.epochs * expected_seconds
        bed_cpu_before = self._bed_cpu_seconds()
        with contextlib.ExitStack() as stack:
            if variant.read_ahead_kb is not None:
                self.bed.read_ahead_kb = variant.read_ahead_kb
                stack.callback(setattr, self.bed, "read_ahead_kb", usual_read_ahead_kb)
            begin = time.perf_counter()
            if variant.before:
                self._tool(variant.before)
            before_seconds = time.perf_counter() - begin if variant.before else 0.0
            if variant.beside:
                stack.enter_context(self._beside(variant.beside))
            events: list[dict[str, float]] = []
            if self.adapt:
                stack.enter_context(self._changing_link(events))
            job_run = run_job(command, timeout_seconds=timeout_seconds, cwd=self.scratch)
        counters = self.bed.counters()
        run = self._run_of(case, variant, number, job_run, before_seconds)
        run.bed = counters
        run.bed_cpu_seconds = self._bed_cpu_seconds() - bed_cpu_before
        # A cold run's pages come over the link (except unneeded tree pages), a warm run's do not
        # (except what proactive reclaim has dropped since the check).
        run.as_prepared = (
            counters["bytes"] < self.manifest.file_bytes // 100
            if variant.warm
            else counters["bytes"] >= self.manifest.record_bytes
        )
        run.events = events
        run.tool_summary = read_tool_summary(output)
        self._check(run, case)
        return run

    def _run_of(
        self, case: Case, variant: Variant, number: int, job_run: JobRun, before_seconds: float
    ) -> Run:
        first = job_run.job["epochs"][0]
        return Run(
            case=case.name,
            variant=variant.name,
            round=number,
            seconds=first["seconds"] + before_seconds,
            before_seconds=before_seconds,
            stall_seconds=first["stall_seconds"],
            epochs=job_run.job["epochs"],
            bed={},
            bed_cpu_seconds=0.0,
            as_prepared=None,
            tool_summary=None,
            events=[],
            wall_seconds=job_run.wall_seconds,
            steal_seconds=job_run.steal_seconds,
            machine_busy_seconds=job_run.machine_busy_seconds,
            children_cpu_seconds=job_run.children_cpu_seconds,
            command=shlex.join(job_run.command),
        )

    def _check(self, run: Run, case: Case) -> None:
        for epoch in run.epochs:
            if (epoch["bytes"], epoch["records"]) != (
                self.manifest.record_bytes,
                self.manifest.records,
            ):
                raise UffdPrefetchError(
                    f"{run.variant}, {case.name}: {epoch['records']} records of "
                    f"{epoch['bytes']} bytes were read, not all {self.manifest.records}"
                )

    def _bed_cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.bed.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _tool(self, words: Sequence[str]) -> None:
        subprocess.run(
            [word.format(self.data) for word in words], check=True, stdout=subprocess.DEVNULL
        )

    @contextlib.contextmanager
    def _beside(self, words: Sequence[str]) -> Iterator[None]:
        process = subprocess.Popen(
            [word.format(self.data) for word in words], stdout=subprocess.DEVNULL
        )
        try:
            yield
        finally:
            process.kill()
            process.wait()

    @contextlib.contextmanager
    def _changing_link(self, events: list[dict[str, float]]) -> Iterator[None]:
        """Set the link to the next of ADAPT_BANDWIDTHS after each third of the file."""
        done = threading.Event()
        begin = time.perf_counter()

        def change(bandwidth: int) -> None:
            self.bed.set(bandwidth=bandwidth)
            events.append(
                {
                    "seconds": time.perf_counter() - begin,
                    "bytes": float(self.bed.counters()["bytes"]),
                    "bandwidth_bytes_per_second": float(bandwidth),
                }
            )

        def follow() -> None:
            change(ADAPT_BANDWIDTHS[0])
            for part, bandwidth in enumerate(ADAPT_BANDWIDTHS[1:], start=1):
                from_bytes = self.manifest.file_bytes * part // len(ADAPT_BANDWIDTHS)
                while self.bed.counters()["bytes"] < from_bytes:
                    if done.wait(0.02):
                        return
                change(bandwidth)

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def run_plan(
        self,
        plan: Sequence[tuple[list[Case], list[Variant]]],
        pairs: int,
        save: Callable[[], None],
    ) -> None:
        """All cases, each in `pairs` rounds over its variants; `save` after each round."""
        # Warm-up: on a virtual machine memory not yet backed by the host is slow on first touch,
        # at the first variant's expense.
        self.prepare(warm=True)
        for cases, variants in plan:
            able = []
            for variant in variants:
                if self.only and variant.name not in (*self.only, BASELINE, WARM):
                    continue
                reason = self.why_not(variant)
                if reason is None:
                    able.append(variant)
                else:
                    self.skipped[variant.name] = reason
                    print(f"bench: skip {variant.name}: {reason}", file=sys.stderr)
            for case in cases:
                for number in range(pairs):
                    for variant in able:
                        try:
                            run = self.measure(case, variant, number)
                        except UffdPrefetchError as error:
                            # Go on with the other runs; the status and the JSON report it.
                            self.failures.append(
                                {"case": case.name, "variant": variant.name, "error": error.message}
                            )
                            print(f"bench: FAILED {variant.name}: {error.message}", file=sys.stderr)
                            continue
                        self.runs.append(run)
                        print(
                            f"bench: {case.name} | round {number + 1}/{pairs} | {variant.name}: "
                            f"{run.seconds:.2f} s, stall {run.stall_seconds:.2f} s, "
                            f"{run.bed['requests']} requests, steal {run.steal_seconds:.2f} s",
                            file=sys.stderr,
                            flush=True,
                        )
                    save()


# ---- the report -----------------------------------------------------------------------------


def report(bench: Bench, args: argparse.Namespace, settings: dict[str, int]) -> dict[str, Any]:
    """The JSON file: how it was measured, every run, and the summary."""
    return {
        "schema": SCHEMA,
        "suite": args.suite,
        **conditions(),
        "bed": settings,
        "dataset": asdict(bench.manifest),
        "pairs": args.pairs,
        "adapt_bandwidths_bytes_per_second": list(ADAPT_BANDWIDTHS) if bench.adapt else None,
        "skipped": [{"variant": name, "reason": reason} for name, reason in bench.skipped.items()],
        "failures": bench.failures,
        "runs": [asdict(run) for run in bench.runs],
        "summary": summarize(bench.runs, bench.manifest.file_bytes, bench.bandwidth, bench.adapt),
    }


def places_of(bench: Bench, source: Path) -> dict[str, str]:
    """What of this machine's paths has another name in a report."""
    return {
        str(bench.bed.mountpoint): "BED",
        str(bench.scratch): "SCRATCH",
        str(source): "DATA",
        sys.executable: "python",
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench/run.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--suite", choices=("paper1", "peers", "patterns", "adapt", "pool"), required=True)
    add("--pairs", type=int, default=5, help="rounds over all variants")
    add("--json", type=Path, required=True, metavar="F")
    add("--size", type=parse_size, default=parse_size("2GiB"))
    add("--bandwidth", type=parse_rate, default=DEFAULT_BANDWIDTH, help="of the link, per second")
    add("--latency-us", type=int, default=DEFAULT_LATENCY_US)
    add("--work", type=Path, help="where the data set lies (default: made anew in /dev/shm)")
    add("--only", default="", help="comma-separated variants; plain and warm always run")
    add("--case", default="", help="only cases whose name this finds, a regular expression")
    add("--vmtouch", default="vmtouch", help="the program, where it is not in PATH")
    add("--include-slow", action="store_true", help="also peers that take many times as long")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run a suite; 0, or 1 if it or one of its runs failed, with a line on stderr."""
    args = parse(argv)
    if args.suite == "pool":
        import pool

        return pool.run_all(args.json, pool.words_of(args))
    try:
        with contextlib.ExitStack() as stack:
            source = args.work
            if source is None:
                shm = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
                source = Path(
                    stack.enter_context(
                        tempfile.TemporaryDirectory(prefix="uffdprefetch-bench-", dir=shm)
                    )
                )
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="uffdprefetch-")))
            manifest = make_dataset(source, args.size)
            bed = stack.enter_context(
                SlowBed(source, bandwidth=args.bandwidth, latency_us=args.latency_us)
            )
            bench = Bench(
                bed=bed,
                manifest=manifest,
                bandwidth=args.bandwidth,
                latency_us=args.latency_us,
                scratch=scratch,
                adapt=args.suite == "adapt",
                only=tuple(name.strip() for name in args.only.split(",") if name.strip()),
                include_slow=args.include_slow,
            )
            settings = bed.settings()

            def keep() -> None:
                save(args.json, report(bench, args, settings), places_of(bench, source))

            plan = [
                ([case for case in cases if re.search(args.case, case.name)], variants)
                for cases, variants in plan_of(args.suite, args.vmtouch, source / INDEX_NAME)
            ]
            bench.run_plan([part for part in plan if part[0]], args.pairs, keep)
            keep()
            return 1 if bench.failures else 0
    except UffdPrefetchError as error:
        print(f"bench: {error.message}", file=sys.stderr)
    except OSError as error:
        print(f"bench: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
