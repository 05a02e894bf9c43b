# SPDX-License-Identifier: Apache-2.0
"""The demonstration's runner: four configurations of one job on slow storage.

Those of [Haderbache] figure 7 (section 4):

baseline      the job as it is, cold page cache
prefetch-off  the job under `wrap --policy none`: the cost of observing alone, cold
prefetch-on   the job under `wrap`, cold
warm cache    the job as it is, all data in the page cache: the lower bound

Cold and warm are verified before each run. Every run hashes the bytes that the job itself read, in
its compute time, so that the same runs give the times and the proof.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from uffdprefetch.base.errors import UffdPrefetchError, pip_install
from uffdprefetch.demo.bed import resident_bytes
from uffdprefetch.demo.jobrun import (
    JobRun,
    job_command,
    read_tool_summary,
    run_job,
    wrap_command,
)
from uffdprefetch.demo.storage import DemoStorage, Say, Wanted, open_storage

SCHEMA = "uffdprefetch.demo/1"
CONFIGURATIONS = ("baseline", "prefetch-off", "prefetch-on", "warm cache")
COMPUTE_SHARE = 0.95
"""Compute time of a batch over its transfer time: nearly all that the link gives is needed, so
prefetching has to be nearly perfect (the goals' default point)."""


@dataclass(frozen=True)
class DemoOptions(Wanted):
    """The demonstration's options."""

    configurations: tuple[str, ...] = CONFIGURATIONS
    epochs: int = 1


@dataclass(frozen=True)
class Configuration:
    """One row: a configuration and its run's result; times in seconds."""

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
class DemoResult:
    """The demonstration's result; `expected_sha256` is the manifest's."""

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
                f"the demonstration needs {module}: {pip_install('lmdb', 'numpy')}"
            )
    wrapped = [name for name in configurations if name.startswith("prefetch")]
    if wrapped and importlib.util.find_spec("uffdprefetch.cli.wrap") is None:
        raise UffdPrefetchError(
            f"{' and '.join(wrapped)} need the command `uffdprefetch wrap`, which this "
            "installation lacks; show the others with --configurations 'baseline,warm cache'"
        )


def run_demo(options: DemoOptions, say: Say) -> DemoResult:
    """Run the configurations one after the other; `say` gets a line of progress at a time."""
    _check_needs(options.configurations)
    from uffdprefetch.demo.dataset import read_manifest

    with open_storage(options, say) as storage:
        source = storage.bed.source if storage.bed is not None else storage.database.parent
        manifest = read_manifest(source)
        assert manifest is not None
        per_byte_seconds = COMPUTE_SHARE / storage.bandwidth
        result = DemoResult(
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
        # A run at a tenth of the link's bandwidth is slow, not hung.
        timeout_seconds = 60 + 10 * options.epochs * manifest.file_bytes / storage.bandwidth
        # Warm-up: on a virtual machine memory not yet backed by the host is slow on first touch,
        # at the first configuration's expense.
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
    name: str, storage: DemoStorage, job: list[str], timeout_seconds: float, output: Path
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
        # strict: else it might silently not prefetch
        job = [*wrap_command(*write, "--policy", "auto", "--strict"), *job]
    return run_job(job, timeout_seconds=timeout_seconds, cwd=output.parent)


def _row(name: str, run: JobRun, right: bool, storage: DemoStorage, output: Path) -> Configuration:
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
