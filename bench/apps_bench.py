# SPDX-License-Identifier: Apache-2.0
"""What bench/apps.py measures with: the bed, files that are made once, one run from cold."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from apps_programs import VMTOUCH, Program
from apps_table import CAT, PEER, POOL, WRAP

from uffdprefetch.base.config import Config
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.procfs import machine_cpu_seconds
from uffdprefetch.demo.bed import SlowBed, drop_cache, resident_bytes
from uffdprefetch.demo.jobrun import JobRun, read_tool_summary, run_job, wrap_command

MAKER = Path(__file__).with_name("apps_files.py")
#: Files that are made from one size may be this much smaller: a checkpoint has four shards.
LEAST_SHARE = 8
#: Of the summary, what a run keeps: of the run, and of each file.
KEPT_TOTALS = (
    *("prefetched_bytes", "already_resident_bytes", "used_bytes", "wasted_bytes"),
    *("gain", "saved_at_least_seconds", "cost_seconds", "waited_seconds"),
    *("demand_misses", "accuracy", "coverage", "timeliness", "unserved_read_bytes"),
)
KEPT_OF_FILES = ("path", "served_by", "prefetched_bytes", "whole")
ENVIRONMENT = ("env", "HF_HUB_OFFLINE=1", "HF_DATASETS_OFFLINE=1", "TRANSFORMERS_VERBOSITY=error")
#: A run begins when this much of one CPU or less was in use for a while, or at last anyway.
QUIET_SHARE, LOOK_SECONDS, QUIET_WITHIN_SECONDS = 0.1, 0.2, 10.0
Run = dict[str, Any]


def wait_until_quiet() -> None:
    """Until nothing else runs here, for a while at most: a difference of 50 ms is looked for."""
    for _ in range(round(QUIET_WITHIN_SECONDS / LOOK_SECONDS)):
        before, _ = machine_cpu_seconds()
        time.sleep(LOOK_SECONDS)
        if machine_cpu_seconds()[0] - before < QUIET_SHARE * LOOK_SECONDS:
            return


def kept(summary: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a run keeps of the summary."""
    if summary is None:
        return None
    return {
        "engine": summary["engine"],
        "degradations": summary["degradations"],
        "refused": summary["refused"],
        "totals": {name: summary["totals"].get(name) for name in KEPT_TOTALS},
        "files": [{name: file.get(name) for name in KEPT_OF_FILES} for file in summary["files"]],
    }


@dataclass
class Bench:
    """The bed, and the measurements on it."""

    bed: SlowBed
    source: Path
    scratch: Path
    size_bytes: int
    bandwidth: int
    latency_us: int
    columns: tuple[str, ...]
    lookup_us: int = 0
    least_share: int = LEAST_SHARE
    #: What goes before each program, `wrap` too: to be another user.
    prefix: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    #: `wrap` prints its lines and does not wait for its service, as by default.
    as_by_default: bool = False
    runs: list[Run] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    programs: list[dict[str, Any]] = field(default_factory=list)

    # ---- files -------------------------------------------------------------------------------

    def place(self, kind: str) -> Path:
        """Where the files of a kind lie beside the bed; on it they have the same name."""
        return self.source / f"{kind}-{self.size_bytes}"

    def make(self, kind: str) -> None:
        """The files of a kind, unless they are there."""
        directory = self.place(kind)
        if directory.exists():
            return
        making = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        made = subprocess.run(
            [*ENVIRONMENT, sys.executable, str(MAKER), kind, str(making), str(self.size_bytes)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        if made.returncode:
            raise UffdPrefetchError(f"the files for {kind} cannot be made: {made.stderr[-300:]}")
        for path in (making, *making.rglob("*")):  # some libraries write for their user alone
            path.chmod(0o755 if path.is_dir() else 0o644)
        making.rename(directory)

    def sources(self, kind: str) -> list[Path]:
        """The files of a kind, beside the bed."""
        return sorted(path for path in self.place(kind).rglob("*") if path.is_file())

    def files(self, kind: str) -> list[Path]:
        """Those of a kind, on the bed."""
        return [self.bed.path(path.relative_to(self.source)) for path in self.sources(kind)]

    # ---- one run -----------------------------------------------------------------------------

    def wrap(self, *options: str) -> list[str]:
        """The command prefix, with ``self.options`` too; of files that are smaller than is usual
        --min-size tells."""
        options = (*self.options, *options)
        smallest = self.size_bytes // self.least_share
        if smallest < Config().files.min_size_bytes:
            options = (f"--min-size={smallest}", *options)
        (self.scratch / "tool.summary.json").unlink(missing_ok=True)
        if not self.as_by_default:
            options = ("-q", "--strict", *options)
        return wrap_command("-f", "-o", str(self.scratch / "tool"), *options, quiet=False)

    def start(self, words: Sequence[str], file_bytes: int) -> JobRun:
        """Run a program to its end."""
        return run_job(
            [*self.prefix, *ENVIRONMENT, *words],
            timeout_seconds=120 + 60 * file_bytes / (self.bandwidth or 1e9),
            cwd=self.scratch,
        )

    def measure(self, program: Program, column: str) -> Run:
        """One run, from cold."""
        files = self.files(program.kind)
        file_bytes = sum(path.stat().st_size for path in files)
        for path in files:
            drop_cache(path)
        self.bed.set(bandwidth=self.bandwidth, latency_us=self.latency_us)
        self.bed.reset()
        begin = time.perf_counter()
        if column == CAT:
            subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)
        elif column == PEER and program.peer == VMTOUCH:
            subprocess.run(["vmtouch", "-qt", *files], stdout=subprocess.DEVNULL, check=True)
        before_seconds = time.perf_counter() - begin
        before_bytes = self.bed.counters()["bytes"]
        resident = sum(map(resident_bytes, files))
        words = program.command(self.bed.path(self.place(program.kind).name), peer=column == PEER)
        if column == WRAP:
            words = [*self.wrap(), *words]
        elif column == POOL:
            words = [*self.wrap("--engine=pool"), *words]
        faults_before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_majflt
        done = self.start(words, file_bytes)
        counters = self.bed.counters()
        summary = read_tool_summary(self.scratch / "tool") if column in (WRAP, POOL) else None
        return {
            "program": program.name,
            "column": column,
            "seconds": done.job["seconds"],
            "total_seconds": done.wall_seconds,
            "before_seconds": before_seconds,
            "digest": done.job["digest"],
            "value_bytes": done.job["bytes"],
            "major_faults": done.job["major_faults"],
            "tree_major_faults": resource.getrusage(resource.RUSAGE_CHILDREN).ru_majflt
            - faults_before,
            "file_bytes": file_bytes,
            "resident_bytes_at_start": resident,
            "bytes_read": counters["bytes"],
            "bytes_read_before": before_bytes,
            "requests": counters["requests"],
            "cpu_seconds": done.children_cpu_seconds,
            "steal_seconds": done.steal_seconds,
            "tool": kept(summary),
        }

    # ---- all of them -------------------------------------------------------------------------

    def columns_of(self, program: Program) -> list[str]:
        """Those that can be had."""
        able = list(self.columns)
        if PEER in able and program.peer == VMTOUCH and shutil.which("vmtouch") is None:
            able.remove(PEER)
            self.skip(f"{program.name}, {PEER}", "vmtouch is missing: apt-get install vmtouch")
        return able

    def skip(self, what: str, reason: str) -> None:
        """Something is left out."""
        self.skipped.append({"what": what, "reason": reason})
        print(f"bench: skip {what}: {reason}", file=sys.stderr)

    def run(self, program: Program, pairs: int) -> None:
        """A program in all columns, `pairs` times."""
        self.make(program.kind)
        file_bytes = sum(path.stat().st_size for path in self.files(program.kind))
        # Beside the bed: what it must read; and its libraries are in memory for whoever is first.
        expected = self.start(program.command(self.place(program.kind)), file_bytes).job
        self.programs.append(
            {
                "name": program.name,
                "kind": program.kind,
                "peer": program.peer,
                "files": len(self.files(program.kind)),
                "file_bytes": file_bytes,
                "digest": expected["digest"],
                "value_bytes": expected["bytes"],
            }
        )
        columns = self.columns_of(program)
        for number in range(pairs):
            for column in columns:
                try:
                    run = self.measure(program, column) | {"round": number}
                    if run["digest"] != expected["digest"]:
                        raise UffdPrefetchError(
                            f"WRONG VALUES: digest {run['digest']}, not {expected['digest']}"
                        )
                except UffdPrefetchError as error:
                    self.failures.append(
                        {"program": program.name, "column": column, "error": error.message}
                    )
                    print(
                        f"bench: FAILED {program.name}, {column}: {error.message}", file=sys.stderr
                    )
                    continue
                self.runs.append(run)
                print(
                    f"bench: {program.name} | round {number + 1}/{pairs} | {column}: "
                    f"{run['seconds']:.2f} s of {run['total_seconds']:.2f}, "
                    f"{run['bytes_read'] / file_bytes:.2f} of the bytes, "
                    f"{run['major_faults']} major faults",
                    file=sys.stderr,
                    flush=True,
                )
