"""The demonstration's runner: paper 1's four configurations of one job on slow storage.

Figure 7 of "Design of a data supply mechanism for distributed deep learning" (section 4):

baseline      the job as it is, cold page cache
prefetch-off  the job under `wrap --policy none`: what watching alone costs, cold
prefetch-on   the job under `wrap`, cold
warm cache    the job as it is, all data in the page cache: the best that can be

Cold and warm are counted before each run. Every run hashes the bytes that the job itself read,
in its compute time, so the same runs give the times and the proof.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from uffdprefetch.demo.bed import (
    DEFAULT_BANDWIDTH,
    DEFAULT_LATENCY_US,
    BedError,
    SlowBed,
    drop_cache,
    proactive_reclaim,
    resident_bytes,
    warm_fully,
    why_no_bed,
)
from uffdprefetch.errors import UffdPrefetchError
from uffdprefetch.units import format_rate, format_size

SCHEMA = "uffdprefetch.demo/1"
CONFIGURATIONS = ("baseline", "prefetch-off", "prefetch-on", "warm cache")
COMPUTE_SHARE = 0.95
"""Compute time of a batch over its transfer time: nearly all that the link gives is needed, so
prefetching has to be nearly perfect (the goals' default point)."""

JOB = Path(__file__).with_name("job.py")
_PACKAGE_PARENT = Path(__file__).resolve().parents[2]


# ---- one run of a job -----------------------------------------------------------------------


@dataclass(frozen=True)
class JobRun:
    """One run of job.py: its JSON, and what the machine did meanwhile (seconds).

    steal_seconds is what the hypervisor took from all CPUs together, machine_busy_seconds all
    their busy time, children_cpu_seconds the part of the job and its wrapper.
    """

    command: list[str]
    job: dict[str, Any]
    stderr: str
    wall_seconds: float
    steal_seconds: float
    machine_busy_seconds: float
    children_cpu_seconds: float


def machine_cpu_seconds() -> tuple[float, float]:
    """(busy, stolen) seconds of all CPUs since boot, from /proc/stat (proc(5))."""
    with open("/proc/stat", encoding="ascii") as stat:
        ticks = [int(word) for word in stat.readline().split()[1:]]
    hertz = os.sysconf("SC_CLK_TCK")
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks[:8]
    return (user + nice + system + irq + softirq) / hertz, steal / hertz


def _children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def job_environment() -> dict[str, str]:
    """Our environment, less the user's options: each configuration is what its name says."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("UFFDPREFETCH_") or name == "UFFDPREFETCH_RUNDIR"
    }
    paths = [str(_PACKAGE_PARENT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def wrap_command(*options: str) -> list[str]:
    """The words that put a command under `uffdprefetch wrap` with this interpreter."""
    return [sys.executable, "-m", "uffdprefetch", "wrap", "-q", *options, "--"]


def job_command(database: str | os.PathLike[str], *options: str) -> list[str]:
    """The words that run job.py on a database with this interpreter."""
    return [sys.executable, str(JOB), "--db", str(database), *options]


def run_job(command: Sequence[str], *, timeout_seconds: float, cwd: Path | None = None) -> JobRun:
    """Run a command that ends in job.py's words; returns when it has ended.

    Raises:
        UffdPrefetchError: it failed, hung for `timeout_seconds`, or printed no JSON.
    """
    busy_before, steal_before = machine_cpu_seconds()
    children_before = _children_cpu_seconds()
    begin = time.perf_counter()
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=job_environment(),
        cwd=cwd,
        start_new_session=True,  # so that a hang can be ended with all its children
        text=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise UffdPrefetchError(
            f"the job did not end within {timeout_seconds:.0f} s and was killed"
        ) from None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    wall_seconds = time.perf_counter() - begin
    busy_after, steal_after = machine_cpu_seconds()
    if process.returncode != 0:
        lines = [line for line in err.splitlines() if line.strip()]
        last = lines[-1] if lines else "it said nothing"
        raise UffdPrefetchError(f"the job ended with status {process.returncode}: {last}")
    try:
        job = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        raise UffdPrefetchError(f"the job printed no JSON: {out[-200:]!r}") from None
    return JobRun(
        command=list(command),
        job=job,
        stderr=err,
        wall_seconds=wall_seconds,
        steal_seconds=steal_after - steal_before,
        machine_busy_seconds=busy_after - busy_before,
        children_cpu_seconds=_children_cpu_seconds() - children_before,
    )


# ---- where the data lies --------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What the demonstration is asked to do; bytes, bytes/s and microseconds."""

    size_bytes: int = 1 << 30
    bandwidth: int = DEFAULT_BANDWIDTH
    latency_us: int = DEFAULT_LATENCY_US
    local: bool = False
    work: Path | None = None
    configurations: tuple[str, ...] = CONFIGURATIONS
    epochs: int = 2


@dataclass(frozen=True)
class Storage:
    """Where the job's LMDB is, and what is known of what lies below it.

    bed is None on a local disk; bandwidth is then a measured one.
    """

    database: Path
    bed: SlowBed | None
    bandwidth: int
    description: str

    @property
    def data(self) -> Path:
        """The file that is mapped."""
        return self.database / "data.mdb"

    @contextlib.contextmanager
    def fast(self) -> Iterator[None]:
        """The bed without its link, for filling the cache: preparation is not what is shown."""
        if self.bed is None:
            yield
            return
        before = self.bed.counters()
        self.bed.set(bandwidth=0, latency_us=0)
        try:
            yield
        finally:
            self.bed.set(
                bandwidth=before["bandwidth_bytes_per_second"], latency_us=before["latency_us"]
            )

    def make_cold(self) -> None:
        """Nothing of the file in the page cache, counted."""
        drop_cache(self.data)

    def make_warm(self) -> None:
        """All of the file in the page cache, counted."""
        with self.fast():
            warm_fully(self.data)


@contextlib.contextmanager
def directory_in(parent: Path) -> Iterator[Path]:
    """A new directory in `parent` that vanishes afterwards."""
    try:
        path = Path(tempfile.mkdtemp(prefix="uffdprefetch-demo-", dir=parent))
    except OSError as error:
        raise UffdPrefetchError(
            f"cannot make a directory in {parent}: {error.strerror}; give another with --work"
        ) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def memory_available_bytes() -> int:
    """MemAvailable of /proc/meminfo; 0 where it is not told."""
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


def fits_in_tmpfs(size_bytes: int, shm: Path = Path("/dev/shm")) -> bool:
    """Whether /dev/shm can hold the data set, and memory the data set and its page cache."""
    if not os.access(shm, os.W_OK):
        return False
    needed_bytes = size_bytes + size_bytes // 50 + (64 << 20)
    free_bytes = shutil.disk_usage(shm).free
    return needed_bytes <= free_bytes and 2 * needed_bytes <= memory_available_bytes()


def measure_bandwidth(path: Path) -> int:
    """Bytes per second of a cold read of `path` with 8 readers, as warm_fully() reads."""
    drop_cache(path)
    begin = time.perf_counter()
    warm_fully(path)
    return round(path.stat().st_size / (time.perf_counter() - begin))


def _make_records(
    options: Options, on_bed: bool, stack: contextlib.ExitStack, say: Callable[[str], None]
) -> Path:
    """Make the data set where it is to lie, for as long as `stack` lives; its directory."""
    from uffdprefetch.demo import dataset  # after the check that numpy and lmdb are there

    if options.work is not None:
        source = options.work
    else:
        # Below a bed lies memory, so that no real disk's noise comes through.
        in_memory = on_bed and fits_in_tmpfs(options.size_bytes)
        parent = Path("/dev/shm") if in_memory else Path("/var/tmp")
        source = stack.enter_context(directory_in(parent))
    say(f"making {format_size(options.size_bytes)} of records")
    dataset.make_dataset(source, options.size_bytes)
    return source


@contextlib.contextmanager
def _slow_storage(options: Options, say: Callable[[str], None]) -> Iterator[Storage]:
    """The data set behind a slow link; BedError where that cannot be."""
    reason = why_no_bed()
    if reason is not None:
        raise BedError(reason)
    with contextlib.ExitStack() as stack:
        source = _make_records(options, True, stack, say)
        bed = stack.enter_context(
            SlowBed(source, bandwidth=options.bandwidth, latency_us=options.latency_us)
        )
        description = (
            f"{format_rate(options.bandwidth)}, {options.latency_us / 1000:g} ms latency, "
            f"readahead {bed.read_ahead_kb} KiB (FUSE bed)"
        )
        yield Storage(bed.path(_database_name()), bed, options.bandwidth, description)


@contextlib.contextmanager
def _local_storage(options: Options, say: Callable[[str], None]) -> Iterator[Storage]:
    """The data set on the local disk."""
    with contextlib.ExitStack() as stack:
        source = _make_records(options, False, stack, say)
        database = source / _database_name()
        bandwidth = measure_bandwidth(database / "data.mdb")
        yield Storage(database, None, bandwidth, f"local disk, {format_rate(bandwidth)} measured")


def _database_name() -> str:
    from uffdprefetch.demo.dataset import DATABASE_NAME

    return DATABASE_NAME


@contextlib.contextmanager
def open_storage(options: Options, say: Callable[[str], None]) -> Iterator[Storage]:
    """The data set on slow storage, or on the local disk where that cannot be or is asked for."""
    with contextlib.ExitStack() as stack:
        storage: Storage | None = None
        if not options.local:
            try:
                storage = stack.enter_context(_slow_storage(options, say))
            except BedError as error:
                say(f"no slow storage: the local disk is used, cache dropped ({error.message})")
        if storage is None:
            storage = stack.enter_context(_local_storage(options, say))
        say(f"storage: {storage.description}")
        yield storage


# ---- the four configurations ----------------------------------------------------------------


@dataclass(frozen=True)
class Configuration:
    """One row: paper 1's configuration and what its run gave; times in seconds."""

    name: str
    epoch_seconds: list[float]
    stall_seconds: float
    major_faults: int
    sha256: str
    digest_right: bool
    digest_beyond_compute_seconds: float
    resident_before_bytes: int
    storage_counters: dict[str, Any] | None
    tool_summary: dict[str, Any] | None
    run: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """The demonstration's outcome; `expected_sha256` is the manifest's."""

    schema: str
    storage: str
    size_bytes: int
    record_bytes: int
    bandwidth_bytes_per_second: int
    compute_seconds_per_byte: float
    expected_sha256: str
    configurations: list[Configuration] = field(default_factory=list)

    def row(self, name: str) -> Configuration | None:
        """The configuration of that name, None if it was not run."""
        return next((row for row in self.configurations if row.name == name), None)

    @property
    def digests_right(self) -> bool:
        """Whether every run read exactly the manifest's bytes, in every epoch."""
        return all(row.digest_right for row in self.configurations)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for a file."""
        return asdict(self) | {"digests_right": self.digests_right}


def _check_needs(configurations: Sequence[str]) -> None:
    import importlib.util

    for module in ("lmdb", "numpy"):
        if importlib.util.find_spec(module) is None:
            raise UffdPrefetchError(
                f"the demonstration needs the Python package {module}: "
                f"pip install 'uffdprefetch[demo]'"
            )
    wrapped = [name for name in configurations if name.startswith("prefetch")]
    if wrapped and importlib.util.find_spec("uffdprefetch.cli.wrap") is None:
        raise UffdPrefetchError(
            f"{' and '.join(wrapped)} need the command `uffdprefetch wrap`, which this "
            "installation lacks; show the others with --configurations 'baseline,warm cache'"
        )


def run_demo(options: Options, say: Callable[[str], None]) -> Result:
    """Run the configurations one after the other; `say` gets a line of progress at a time."""
    _check_needs(options.configurations)
    from uffdprefetch.demo.dataset import read_manifest

    with open_storage(options, say) as storage:
        source = storage.bed.source if storage.bed is not None else storage.database.parent
        manifest = read_manifest(source)
        assert manifest is not None
        per_byte_seconds = COMPUTE_SHARE / storage.bandwidth
        result = Result(
            schema=SCHEMA,
            storage=storage.description,
            size_bytes=manifest.file_bytes,
            record_bytes=manifest.record_bytes,
            bandwidth_bytes_per_second=storage.bandwidth,
            compute_seconds_per_byte=per_byte_seconds,
            expected_sha256=manifest.sha256,
        )
        job = job_command(
            storage.database,
            f"--epochs={options.epochs}",
            f"--compute-seconds-per-byte={per_byte_seconds!r}",
            "--digest",
            "--rank=0",  # whatever launcher's variables may be in our environment
            "--ranks=1",
        )
        # A tenth of the link would still be called slow, not hung.
        timeout_seconds = 60 + 10 * options.epochs * manifest.file_bytes / storage.bandwidth
        # Once for nothing: memory that a virtual machine's host has yet to give is slow when it
        # is first touched, and the first configuration would pay for it.
        storage.make_warm()
        with tempfile.TemporaryDirectory(prefix="uffdprefetch-demo-") as summaries:
            for name in options.configurations:
                say(f"{name} ...")
                output = Path(summaries) / name
                try:
                    run = _run_configuration(name, storage, job, timeout_seconds, output)
                except UffdPrefetchError as error:
                    raise UffdPrefetchError(f"{name}: {error.message}") from error
                right = all(epoch["sha256"] == manifest.sha256 for epoch in run.job["epochs"])
                result.configurations.append(_row(name, run, right, storage, output))
        return result


def _run_configuration(
    name: str, storage: Storage, job: list[str], timeout_seconds: float, output: Path
) -> JobRun:
    if name == "warm cache":
        storage.make_warm()
    else:
        storage.make_cold()
    if storage.bed is not None:
        storage.bed.reset()
    write = ["-f", "-o", str(output)]
    if name == "prefetch-off":
        job = [*wrap_command(*write, "--policy", "none"), *job]
    elif name == "prefetch-on":
        # strict: a demonstration that silently prefetches nothing would show nothing
        job = [*wrap_command(*write, "--policy", "auto", "--strict"), *job]
    return run_job(job, timeout_seconds=timeout_seconds, cwd=output.parent)


def read_tool_summary(output: Path) -> dict[str, Any] | None:
    """What `wrap -o OUTPUT` wrote, None if it wrote nothing (as without wrap)."""
    try:
        summary = json.loads(Path(f"{output}.summary.json").read_text())
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def _row(name: str, run: JobRun, right: bool, storage: Storage, output: Path) -> Configuration:
    epochs = run.job["epochs"]
    return Configuration(
        name=name,
        epoch_seconds=[epoch["seconds"] for epoch in epochs],
        stall_seconds=sum(epoch["stall_seconds"] for epoch in epochs),
        major_faults=sum(epoch["majflt"] for epoch in epochs),
        sha256=epochs[0]["sha256"],
        digest_right=right,
        digest_beyond_compute_seconds=sum(
            epoch["digest_beyond_compute_seconds"] for epoch in epochs
        ),
        resident_before_bytes=resident_bytes(storage.data) if name == "warm cache" else 0,
        storage_counters=None if storage.bed is None else storage.bed.counters(),
        tool_summary=read_tool_summary(output),
        run=asdict(run),
    )


# ---- what is shown --------------------------------------------------------------------------


def render_table(result: Result) -> Table:
    """The table of a result; a pure function."""
    epochs = max((len(row.epoch_seconds) for row in result.configurations), default=0)
    table = Table(
        title=f"One job, {format_size(result.size_bytes)} of LMDB, {epochs} epochs",
        caption=(
            f"Storage: {result.storage}. Compute {COMPUTE_SHARE:g} x transfer time. "
            "Ratio to warm, and times as fast as baseline: epoch 1. Stall and major faults: all "
            "epochs; a wait for kernel readahead that is under way is stall but no major fault. "
            "sha256: of all that was read, checked. Cold or warm was counted before each run."
        ),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("configuration", no_wrap=True)
    for epoch in range(epochs):
        table.add_column(f"epoch {epoch + 1} s", justify="right")
    for title in ("stall s", "ratio to warm", "times as fast", "major faults"):
        table.add_column(title, justify="right")
    table.add_column("sha256", no_wrap=True)
    warm, baseline = result.row("warm cache"), result.row("baseline")
    for row in result.configurations:
        first = row.epoch_seconds[0]
        table.add_row(
            row.name,
            *(f"{seconds:.2f}" for seconds in row.epoch_seconds),
            f"{row.stall_seconds:.2f}",
            "n/a" if warm is None else f"{first / warm.epoch_seconds[0]:.2f}",
            "n/a" if baseline is None else f"{baseline.epoch_seconds[0] / first:.2f}",
            str(row.major_faults),
            f"{row.sha256[:12]} {'✓' if row.digest_right else '✗'}",
        )
    return table


def verdict(result: Result) -> str:
    """The result in one sentence; a pure function."""
    if not result.digests_right:
        wrong = [row.name for row in result.configurations if not row.digest_right]
        return f"WRONG BYTES in {', '.join(wrong)}: the digest is not the data set's."
    on, baseline, warm = (result.row(name) for name in ("prefetch-on", "baseline", "warm cache"))
    if on is None or baseline is None or warm is None:
        return "All digests are the data set's; run all configurations to compare them."
    before, after = baseline.epoch_seconds[0], on.epoch_seconds[0]
    if after >= before:
        return (
            f"Prefetching gained nothing on this storage: the first epoch took {after:.2f} s "
            f"instead of {before:.2f} s ({warm.epoch_seconds[0]:.2f} s with a warm cache); every "
            "run read exactly the data set's bytes."
        )
    return (
        f"Prefetching took the first epoch from {before:.1f} s to {after:.1f} s "
        f"({before / after:.2f} times as fast, {after / warm.epoch_seconds[0]:.2f} x the time "
        "with a warm cache), and every run read exactly the data set's bytes."
    )


def remarks(result: Result) -> list[str]:
    """What a reader has to know before believing the times; usually nothing."""
    found = []
    for row in result.configurations:
        late, total = row.digest_beyond_compute_seconds, sum(row.epoch_seconds)
        if late > 0.01 * total:
            found.append(
                f"{row.name}: hashing took {late:.2f} s more than the compute time hides; "
                "they are in its epochs"
            )
        counters = row.storage_counters
        if row.name == "warm cache" and counters is not None and counters["bytes"] > 0:
            why = proactive_reclaim() or "no cause is known"
            found.append(
                f"{row.name}: {format_size(counters['bytes'])} had left the cache again before "
                f"they were read ({why})"
            )
        steal = row.run["steal_seconds"]
        if steal > 0.02 * row.run["wall_seconds"]:
            found.append(f"{row.name}: the hypervisor took {steal:.2f} s of CPU time meanwhile")
    return found
