# SPDX-License-Identifier: Apache-2.0
"""The runs of a comparison: plain and each engine in turns, each cold.

First one run that is not measured, under `wrap --policy none`, which tells what files the job
reads: nobody knows what of them was cached before it. Then rounds, each of which begins with
another variant than the one before, so that what changes meanwhile affects all alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from uffdprefetch.base.errors import EXIT_CANNOT, EXIT_OURS, UffdPrefetchError
from uffdprefetch.compare import job, watch
from uffdprefetch.compare.cold import Files, Left, counts_reads
from uffdprefetch.compare.figures import PLAIN, MeasuredRun, Remark, remark, words_of_status
from uffdprefetch.report import summary as report

#: Last bytes shown of a failed command's output.
TAIL_BYTES = 2000
#: --min-size of the learning run, by which it tells of small files, too; and that run's name.
TOLD, WRAPPED = "64KiB", "wrap"
#: Least looks at a run's threads from which a share of waiting can be told.
LOOKS_LEAST = 10
Summary = dict[str, Any]


class Shows(Protocol):
    """The progress display of a comparison."""

    def begins(self, what: str) -> None: ...

    def counted(self, files: int) -> None: ...

    def ended(self, what: str, seconds: float, runs: Sequence[MeasuredRun]) -> None: ...

    def said(self, text: str) -> None: ...


@dataclass
class ComparisonPlan:
    """What is asked for. ``options``: words for `wrap`; ``named``: files and folders to be dropped,
    whether or not they are seen; ``environment``: of the job; ``shows_output``: the job's output is
    ours."""

    command: list[str]
    engines: list[str]
    rounds: int
    options: list[str]
    named: list[str]
    learns: bool
    shows_output: bool
    environment: Mapping[str, str]


@dataclass
class Comparison:
    """A comparison's results, until now. ``names``: the variants, ``plain`` first."""

    plan: ComparisonPlan
    files: Files
    names: list[str] = field(default_factory=list)
    runs: list[MeasuredRun] = field(default_factory=list)
    first_run: dict[str, Any] | None = None
    left: dict[str, Left] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    summaries: dict[str, Summary] = field(default_factory=dict)

    def remarks(self) -> list[dict[str, Any]]:
        """Remarks that do not follow from the runs' figures."""
        found = [
            remark(Remark.LEFT_OUT, variant=name, why=why) for name, why in self.left_out.items()
        ]
        if not self.files.paths and not self.left:
            found.append(remark(Remark.NO_FILES))
        for name, summary in self.summaries.items():
            lines = report.not_served(summary)
            found += [remark(Remark.NOT_SERVED, variant=name, lines=lines)] if lines else []
        return found

    def files_document(self) -> dict[str, Any]:
        """The document's part about files dropped before each run, and those that stayed."""
        paths = self.files.paths
        return {
            "count": len(paths),
            "bytes": self.files.size_bytes,
            "paths": paths[:PATHS_MAX],
            "not_dropped": [one.as_dict() for one in self.left.values()],
        }


#: Most paths of dropped files in the document.
PATHS_MAX = 256


def own_command() -> list[str]:
    """The words by which this program was started, as a user would start `wrap`."""
    program = sys.argv[0]
    if os.path.basename(program) == "uffdprefetch" and os.access(program, os.X_OK):
        return [os.path.abspath(program)]
    return [sys.executable, "-m", "uffdprefetch"]


class Runner:
    """Runs what a plan asks for, in a folder of its own that is gone when the block is left."""

    def __init__(self, plan: ComparisonPlan, shows: Shows) -> None:
        self.result = Comparison(plan, Files(counted=shows.counted), [PLAIN, *plan.engines])
        self._plan, self._shows = plan, shows
        self._folder = tempfile.mkdtemp(prefix="uffdprefetch-compare-")
        self._count = 0
        self._status: int | None = None  # of the first run that was measured
        self._first_said = ""

    def __enter__(self) -> Runner:
        job.adopt()
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def go(self) -> None:
        """To the end. Raises UffdPrefetchError where a run ends otherwise than the others, or
        nothing can be compared; what has come of it until then is in ``result``."""
        if self._plan.named:
            self._shows.begins("the files of --drop are looked for")
            self.result.files.add_named(self._plan.named)
        if self._plan.learns:
            self._learn()
        for number in range(1, self._plan.rounds + 1):
            for name in self._turn(number):
                if name in self.result.names:  # it may have been left out meanwhile
                    self._measure(name, number)

    def _turn(self, number: int) -> list[str]:
        """The order of a round; the first one begins with plain."""
        names = self.result.names
        at = (number - 1) % len(names)
        return [*names[at:], *names[:at]]

    # ---- one run --------------------------------------------------------------------------------

    def _words(self, *options: str) -> list[str]:
        """The command line of a run under `wrap`."""
        return [
            *own_command(), "wrap", "-q", "-f", "-o", self._summary_path(), "--headless",
            *self._plan.options, *options, "--", *self._plan.command,
        ]  # fmt: skip

    def _summary_path(self) -> str:
        return os.path.join(self._folder, "wrap.summary.json")

    def _environment(self, name: str) -> dict[str, str]:
        """A run of its own: no service of another one's."""
        self._count += 1
        environment = dict(self._plan.environment)
        if name != PLAIN:
            environment["UFFDPREFETCH_RUN"] = f"compare-{os.getpid()}-{self._count}"
        return environment

    @contextlib.contextmanager
    def _output(self) -> Iterator[tuple[int, int]]:
        """Descriptors for the job's output and errors: files of ours, or our own."""
        if self._plan.shows_output:
            yield 1, 2
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        paths = [os.path.join(self._folder, name) for name in ("stdout", "stderr")]
        out, err = (os.open(path, flags, 0o600) for path in paths)
        try:
            yield out, err
        finally:
            os.close(out)
            os.close(err)

    def _said(self) -> str:
        """The end of what the last run has said: of its errors, else of its output."""
        for name in ("stderr", "stdout"):
            with contextlib.suppress(OSError), open(os.path.join(self._folder, name), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                text = file.read().decode(errors="replace").strip()
                if text:
                    return text
        return ""

    def _run(
        self, name: str, words: list[str], is_learning: bool = False
    ) -> tuple[job.Ended, watch.RunObservations, Summary | None]:
        """Run a variant, with the summary that `wrap` has left."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._summary_path())
        with self._output() as output:
            environment = self._environment(name)
            ended, seen = job.run(words, environment, output, name != PLAIN, is_learning)
        try:
            with open(self._summary_path(), encoding="utf-8", errors="surrogateescape") as file:
                return ended, seen, json.load(file)
        except (OSError, ValueError):
            return ended, seen, None

    def _learn(self) -> None:
        """The service is up before the job, however short that is (--strict), where there can be
        one."""
        self._shows.begins("first run, to see which files the job reads")
        for more in (["--strict"], []):
            words = self._words("--engine=cache", "--policy=none", f"--min-size={TOLD}", *more)
            ended, seen, summary = self._run(WRAPPED, words, is_learning=True)
            self._saw(seen, summary)
            if summary is not None or ended.status != EXIT_OURS:
                break
        self.result.first_run = {"seconds": ended.seconds, "status": ended.status}
        self._first_said = self._said()
        self._shows.ended("first run", ended.seconds, [])

    def _saw(self, seen: watch.RunObservations, summary: Summary | None, begin: float = 0.0) -> int:
        """Bytes of files that were there when the run began (seconds since the epoch), and not
        known."""
        told = [file["path"] for file in (summary or {}).get("files") or []]
        told += [one["path"] for one in (summary or {}).get("unserved") or []]
        totals = (summary or {}).get("totals") or {}
        told += [one["path"] for one in totals.get("unserved_read_files") or []]
        return self.result.files.saw([*seen.files, *told], seen.elsewhere, begin)

    def _measure(self, name: str, number: int) -> None:
        what = f"round {number} of {self._plan.rounds}, {name}"
        files = self.result.files
        self._shows.begins(f"{what}: its files are dropped")
        for one in files.drop():
            self.result.left[one.path] = one
        self._shows.begins(f"{what}: whether they are is looked at")
        before, begin = files.cached(estimates=False).total_bytes, time.time()
        self._shows.begins(what)
        words = self._plan.command if name == PLAIN else self._words(f"--engine={name}")
        ended, seen, summary = self._run(name, words)
        self._shows.begins(f"{what}: its files in memory are counted")
        cached = files.cached()
        late = self._saw(seen, summary, begin)
        self._check_status(what, ended.status)
        if name != PLAIN and not self._is_right_engine(name, summary):
            return
        self.result.runs.append(
            MeasuredRun(
                variant=name, round=number, seconds=ended.seconds, status=ended.status,
                waited_seconds=seen.waited_seconds if seen.looks >= LOOKS_LEAST else None,
                read_bytes=_read(ended.read_bytes, cached.total_bytes - before, summary),
                read_is_estimated=cached.is_estimated,
                major_faults=ended.major_faults, cpu_seconds=ended.cpu_seconds,
                unused_bytes=_unused(summary), others_cpu_seconds=ended.others_cpu_seconds,
                stolen_seconds=ended.stolen_seconds, late_bytes=late,
            )
        )  # fmt: skip
        self._shows.ended(what, ended.seconds, self.result.runs)

    def _check_status(self, what: str, status: int) -> None:
        """Check that all runs end alike."""
        expected, said = self._status, self._said()
        if expected is None:
            self._status = expected = status
            first = self.result.first_run
            if first is not None and first["status"] != status:
                what, status = "first run (wrap --policy none)", first["status"]
                said = self._first_said
        if status != expected:
            self._shows.said(said)
            raise UffdPrefetchError(
                f"{what}: {words_of_status(status)}, plainly {words_of_status(expected)}:"
                " not compared",
                EXIT_CANNOT,
            )

    def _is_right_engine(self, name: str, summary: Summary | None) -> bool:
        """Whether `wrap` has served with this engine; if not, it is left out from now on."""
        if summary is not None and summary["engine"] == name:
            self.result.summaries[name] = summary
            return True
        degraded = (summary or {}).get("degradations") or []
        said = self._said().splitlines()
        why = degraded[0] if degraded else said[-1] if said else "wrap has left no summary"
        self.result.left_out[name] = why
        self.result.names.remove(name)
        if self.result.names == [PLAIN]:
            raise UffdPrefetchError(f"nothing to compare: {why}", EXIT_CANNOT)
        return False


def _read(counted: int | None, cached: int, summary: Summary | None) -> int | None:
    """Bytes that came from storage. Each of two counts may lack some: what the kernel counts for
    processes (nothing on FUSE or NFS), and what is cached afterwards or was read into the pool of
    files that are not counted so (nothing of what has left the cache again)."""
    files = (summary or {}).get("files") or []
    pool = sum(
        file.get("pool_read_bytes") or 0 for file in files if not counts_reads(file["path"])
    )  # fmt: skip
    if pool:
        from_cache = ((summary or {}).get("pool") or {}).get("from_page_cache_bytes") or 0
        pool = max(0, pool - from_cache)
    uncounted = max(0, cached) + pool
    return uncounted or None if counted is None else max(counted, uncounted)


def _unused(summary: Summary | None) -> int | None:
    return None if summary is None else summary["totals"].get("wasted_bytes")
