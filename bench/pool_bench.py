# SPDX-License-Identifier: Apache-2.0
"""Shared by the measurements of bench/pool.py: the bed, the engines, the rounds, the report."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pool_cgroup import version as cgroup_version
from pool_gate import last_line
from render import DISTURBED_STEAL_SHARE
from reports import Report, command, conditions
from runs import bootstrap_interval
from slides import build, find_service

from uffdprefetch.base import config
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.demo.bed import SlowBed, drop_cache, resident_bytes
from uffdprefetch.demo.dataset import DATABASE_NAME, Manifest, make_dataset
from uffdprefetch.demo.jobrun import machine_cpu_seconds, read_tool_summary, wrap_command

SCHEMA = "uffdprefetch.bench.pool/1"
PLAIN = "plain mmap"
#: Load average from which a report mentions other work.
BUSY_LOAD_AVERAGE = 0.5
PROGRAMS = ("pool_read", "pool_copy")
Run = dict[str, Any]

#: Fields of the summary's "pool" that a run keeps.
POOL_FIELDS = (
    *("budget_bytes", "limited_by", "chunk_bytes", "block_bytes", "huge_pages"),
    *("huge_pages_reason", "evict", "resident_peak_bytes", "read_bytes", "unique_bytes"),
    *("demand_read_bytes", "prefetch_read_bytes", "waiters_peak"),
    *("reread_bytes", "evicted_bytes", "faults", "present_faults", "missing_faults"),
    *("demand_wait_ns", "fill_ns", "source", "mappings_given_back", "from_page_cache_bytes"),
)


class NotHere(UffdPrefetchError):
    """A variant cannot run on this machine or in this checkout: skipped with the reason."""


@dataclass
class Bench:
    """The bed with its data set, the reader programs, and the measurements."""

    bed: SlowBed
    source: Path
    manifest: Manifest
    scratch: Path
    bandwidth: int
    latency_us: int
    only: tuple[str, ...] = ()
    runs: list[Run] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    conditions: Report = field(default_factory=conditions)

    @property
    def data(self) -> Path:
        """The file on the bed."""
        return self.bed.path(DATABASE_NAME) / "data.mdb"

    @property
    def original(self) -> Path:
        """The same file beside the bed."""
        return self.source / DATABASE_NAME / "data.mdb"

    @property
    def file_bytes(self) -> int:
        return self.manifest.file_bytes

    def program(self, name: str) -> str:
        """One of PROGRAMS, compiled."""
        return str(self.scratch / name)

    def prepare(self, bandwidth: int | None = None, latency_us: int | None = None) -> None:
        """Make the file cold (verified), set the link, reset the counters."""
        drop_cache(self.data)
        self.bed.set(
            bandwidth=self.bandwidth if bandwidth is None else bandwidth,
            latency_us=self.latency_us if latency_us is None else latency_us,
        )
        self.bed.reset()

    def wrapped(
        self, engine: str, options: Sequence[str], environment: Sequence[str] = ()
    ) -> list[str]:
        """The command prefix for an engine; NotHere if this checkout lacks it."""
        if engine not in config.ENGINES:
            raise NotHere(f"`uffdprefetch wrap` has no --engine {engine} in this checkout")
        (self.scratch / "tool.summary.json").unlink(missing_ok=True)
        words = wrap_command(
            "-f", "-o", str(self.scratch / "tool"), "--min-size", "1MiB",
            "--engine", engine, *options,
        )  # fmt: skip
        return ["env", *environment, *words] if environment else words

    def pool_summary(self) -> dict[str, Any]:
        """The pool's part of the last summary. UffdPrefetchError if it was no run of the pool."""
        summary = read_tool_summary(self.scratch / "tool") or {}
        pool = summary.get("pool")
        if not pool:
            raise UffdPrefetchError(
                f"the pool engine did not run: engine {summary.get('engine')!r}, degradations "
                f"{summary.get('degradations')!r}; it said: {last_line(self.scratch / 'stderr')}"
            )
        return {name: pool.get(name) for name in POOL_FIELDS}

    def left_in_page_cache(self) -> int:
        """Bytes of the file in the kernel's page cache."""
        return resident_bytes(self.data)

    def rounds(
        self,
        case: str,
        pairs: int,
        variants: dict[str, Callable[[], Run]],
        save: Callable[[], None],
    ) -> None:
        """All variants of a case in turn, `pairs` times; failures and skips go into the report."""
        for number in range(pairs):
            for name, measure in variants.items():
                wanted = not self.only or any(word in name for word in self.only)
                if name in self.skipped or not wanted:
                    continue
                (_, steal_before), begin = machine_cpu_seconds(), time.perf_counter()
                try:
                    run = measure()
                except NotHere as reason:
                    self.skipped[name] = reason.message
                    print(f"bench: skip {name}: {reason.message}", file=sys.stderr)
                    continue
                except UffdPrefetchError as error:
                    self.failures.append({"case": case, "variant": name, "error": error.message})
                    print(f"bench: FAILED {case}, {name}: {error.message}", file=sys.stderr)
                    continue
                steal_seconds = machine_cpu_seconds()[1] - steal_before
                run = {"case": case, "variant": name, "round": number, **run}
                run |= {"turn_seconds": time.perf_counter() - begin, "steal_seconds": steal_seconds}
                self.runs.append(run)
                print(
                    f"bench: {case} | round {number + 1}/{pairs} | {name}: {run['seconds']:.3f} s",
                    file=sys.stderr,
                    flush=True,
                )
            save()


@contextlib.contextmanager
def open_bench(args: Namespace) -> Iterator[Bench]:
    """A data set in memory behind the bed, and the programs compiled."""
    with contextlib.ExitStack() as stack:

        def directory(prefix: str, where: str | None = None) -> Path:
            made = tempfile.TemporaryDirectory(prefix=prefix, dir=where)
            return Path(stack.enter_context(made))

        source = args.work or directory(
            "uffdprefetch-bench-", "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        )
        scratch = directory("uffdprefetch-")
        for name in PROGRAMS:
            build(name, scratch)
        manifest = make_dataset(source, args.size)
        bed = stack.enter_context(
            SlowBed(source, bandwidth=args.bandwidth, latency_us=args.latency_us)
        )
        yield Bench(bed, source, manifest, scratch, args.bandwidth, args.latency_us)


def service_switches(rundir: Path) -> int | None:
    """Context switches of the service's threads; None without a service."""
    service = find_service(str(rundir))
    if service is None:
        return None
    total = 0
    for task in Path(f"/proc/{service}/task").iterdir():
        with contextlib.suppress(OSError):
            for line in (task / "status").read_text().splitlines():
                if "ctxt_switches:" in line:
                    total += int(line.split()[1])
    return total


# ---- pure: statistics of runs ----------------------------------------------------------------


def median(runs: Sequence[Run], *path: str) -> float | None:
    """Median over runs of a figure by its path of keys; None where none has it."""
    values = []
    for run in runs:
        value: Any = run
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            values.append(float(value))
    return statistics.median(values) if values else None


def paired(
    runs: Sequence[Run], variant: str, baseline: str, figure: str = "seconds"
) -> tuple[float, tuple[float, float]] | None:
    """(median, 95 % interval) of the ratio of a figure to the baseline's in the same round."""
    by_round: dict[int, dict[str, float]] = {}
    for run in runs:
        if run.get(figure) is not None:
            by_round.setdefault(run["round"], {})[run["variant"]] = float(run[figure])
    ratios = [
        one[variant] / one[baseline]
        for one in by_round.values()
        if variant in one and one.get(baseline)
    ]
    return (statistics.median(ratios), bootstrap_interval(ratios)) if ratios else None


def by_variant(runs: Sequence[Run], case: str) -> dict[str, list[Run]]:
    """The runs of a case, by variant in the order measured."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run["case"] == case:
            found.setdefault(run["variant"], []).append(run)
    return found


def cases_of(runs: Sequence[Run]) -> list[str]:
    """The cases, in the order measured."""
    return list(dict.fromkeys(run["case"] for run in runs))


def disturbances(report: dict[str, Any]) -> list[str]:
    """Disturbances of the measurement, in sentences."""
    found, runs = [], report["runs"]
    if report["load_average"] > BUSY_LOAD_AVERAGE:
        found.append(f"the load average was {report['load_average']:.1f} when it began.")
    capacity = report["cpus"] or 1
    stolen = [
        run["steal_seconds"] / run["turn_seconds"] / capacity for run in runs if run["turn_seconds"]
    ]
    if stolen and max(stolen) > DISTURBED_STEAL_SHARE:
        found.append(f"the hypervisor took up to {max(stolen):.1%} of a run's CPU time.")
    detached = [run for run in runs if (run.get("pool") or {}).get("mappings_given_back")]
    if detached:
        found.append(f"in {len(detached)} runs a mapping was given back to the file.")
    if report["proactive_reclaim"]:
        found.append(f"{report['proactive_reclaim']}.")
    return found


def report_of(bench: Bench, args: Namespace, settings: dict[str, int]) -> dict[str, Any]:
    """The JSON: how it was measured, and every run."""
    options = vars(args)
    return {
        "schema": SCHEMA,
        "show": args.show,
        **bench.conditions,
        "command": command("pool.py", args.words),
        "cgroup_version": cgroup_version(),
        "bed": settings,
        "dataset": asdict(bench.manifest),
        "pairs": args.pairs,
        "options": {
            name: value
            for name, value in options.items()
            if isinstance(value, int | float | str | list | tuple) and name != "words"
        },
        "skipped": [{"variant": name, "reason": reason} for name, reason in bench.skipped.items()],
        "failures": bench.failures,
        "runs": bench.runs,
    }
