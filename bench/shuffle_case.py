# SPDX-License-Identifier: Apache-2.0
"""bench/shuffle_job.py on the slow bed, as bench/shuffle.py and bench/wrongplan.py run it: the
sampler's orders, their plan file, each rank's expected digest, one run."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pool_bench import Bench, NotHere, Run
from pool_gate import Readers, run_readers
from reports import ROOT

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.demo.bed import warm_fully
from uffdprefetch.demo.dataset import DATABASE_NAME, INDEX_NAME, digest_of
from uffdprefetch.demo.jobrun import read_tool_summary
from uffdprefetch.demo.run import COMPUTE_SHARE

PAGE_BYTES = 4096
#: Fields of the summary that a run keeps.
TOOL_FIELDS = ("engine", "totals", "service", "storage", "degradations", "plans")
Orders = list[list[np.ndarray]]


# ---- pure: orders ----------------------------------------------------------------------------


def sampler_orders(records: int, ranks: int, epochs: int, seed: int) -> Orders:
    """[epoch][rank] -> record numbers in DistributedSampler's order."""
    from torch.utils.data import DistributedSampler

    orders = []
    for epoch in range(epochs):
        row = []
        for rank in range(ranks):
            sampler: Any = DistributedSampler(
                range(records), num_replicas=ranks, rank=rank, shuffle=True, seed=seed
            )
            sampler.set_epoch(epoch)
            row.append(np.fromiter(sampler, dtype=np.int64))
        orders.append(row)
    return orders


def page_bytes(extents: np.ndarray, records: np.ndarray) -> int:
    """Bytes of the pages that hold any of these records; extents as in the dataset's index file."""
    pages: np.ndarray = np.zeros(int(extents.sum(axis=1).max()) // PAGE_BYTES + 2, dtype=np.int64)
    offsets, lengths = extents[np.unique(records)].T
    np.add.at(pages, offsets // PAGE_BYTES, 1)
    np.add.at(pages, (offsets + lengths - 1) // PAGE_BYTES + 1, -1)
    return int(np.count_nonzero(np.cumsum(pages))) * PAGE_BYTES


# ---- one run --------------------------------------------------------------------------------


@dataclass
class Shuffle:
    """The script on ``ranks`` ranks. ``first``: it trains on the first records only."""

    bench: Bench
    ranks: int
    epochs: int
    batch: int = 32
    seed: int = 0
    compute_share: float = COMPUTE_SHARE
    first: int | None = None
    orders: Orders = field(init=False)
    digests: list[list[str]] = field(init=False)
    needed_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        if importlib.util.find_spec("torch") is None:
            raise UffdPrefetchError("the Python package torch is not installed: pip install torch")
        records = self.first or self.bench.manifest.records
        self.orders = sampler_orders(records, self.ranks, self.epochs, self.seed)
        source = self.bench.source
        self.digests = [
            [digest_of(source / DATABASE_NAME, order.tolist()) for order in row]
            for row in self.orders
        ]
        extents = np.load(source / INDEX_NAME)
        self.needed_bytes = page_bytes(extents, np.concatenate(self.orders[0]))

    def write_plan(self, orders: Orders, name: str = "plan") -> Path:
        """A plan file of these orders (docs/plans.md)."""
        directory = self.bench.scratch / name
        directory.mkdir(exist_ok=True)
        epochs = []
        for epoch, row in enumerate(orders):
            named = {str(rank): f"epoch{epoch}-rank{rank}.npy" for rank in range(len(row))}
            for rank, order in enumerate(row):
                np.save(directory / named[str(rank)], order)
            epochs.append({"ranks": named})
        database = str(self.bench.bed.path(DATABASE_NAME))
        entry = {"file": database, "unit": "records", "epochs": epochs}
        path = directory / "plan.json"
        path.write_text(json.dumps({"schema": "uffdprefetch.plan/1", "files": [entry]}))
        return path

    def job(self, gate: Path, *options: str) -> list[str]:
        """The script's command."""
        bench = self.bench
        share = self.compute_share / bench.bandwidth if bench.bandwidth else 0.0
        words = [
            # as torchrun sets it where it starts several on a node
            "env", "OMP_NUM_THREADS=1", sys.executable, str(ROOT / "bench" / "shuffle_job.py"),
            "--db", str(bench.bed.path(DATABASE_NAME)), f"--epochs={self.epochs}",
            f"--batch={self.batch}", f"--seed={self.seed}", f"--gate={gate}",
            # All ranks together need the link's bandwidth: each computes longer for a byte.
            f"--compute-seconds-per-byte={share * self.ranks!r}",
            f"--peer-index={bench.source / INDEX_NAME}", *options,
        ]  # fmt: skip
        if self.first is not None:
            words.append(f"--first={self.first}")
        return [*words, f"--ranks={self.ranks}"] if self.ranks > 1 else words

    def prepare(self, warm: bool) -> None:
        """Make the file cold, or warm without the link; verified."""
        bench = self.bench
        if warm:
            bench.bed.set(bandwidth=0, latency_us=0)
            warm_fully(bench.data)
            bench.bed.set(bandwidth=bench.bandwidth, latency_us=bench.latency_us)
            bench.bed.reset()
        else:
            bench.prepare()

    def run(self, wrap: Sequence[str], job: Sequence[str] = (), warm: bool = False) -> Run:
        """One run of the script with the command prefix ``wrap``, checked for its bytes."""
        bench, marks = self.bench, list[dict[str, int]]()
        self.prepare(warm)
        (bench.scratch / "tool.summary.json").unlink(missing_ok=True)

        def between(_epochs: int, _rundir: Path) -> None:
            marks.append(bench.bed.counters())

        readers = run_readers(
            lambda gate: [*wrap, *self.job(gate, *job)],
            ranks=self.ranks, epochs=self.epochs, between=between, scratch=bench.scratch,
            timeout_seconds=120 + 60 * self.epochs * bench.file_bytes / (bench.bandwidth or 1e9),
        )  # fmt: skip
        self.check(readers)
        total_bytes = bench.bed.counters()["bytes"]
        summary = read_tool_summary(bench.scratch / "tool")
        stalls = [[line["stall_seconds"] for line in lines] for lines in readers.epochs]
        run = {
            "seconds": readers.seconds(0),
            "epoch_seconds": [readers.seconds(epoch) for epoch in range(self.epochs)],
            "stall_seconds": max(stalls[0]),
            "epoch_stall_seconds": [max(row) for row in stalls],
            "rank_stall_seconds": stalls,
            "digest_beyond_compute_seconds": max(
                line["digest_beyond_compute_seconds"] for line in readers.epochs[0]
            ),
            "wall_seconds": readers.wall_seconds,
            "bytes_read": total_bytes,
            "epoch_bytes_read": [mark["bytes"] for mark in marks],
            "requests": marks[1]["requests"],
            "needed_bytes": self.needed_bytes,
            "major_faults": readers.total("majflt"),
            "tool": summary and {name: summary.get(name) for name in TOOL_FIELDS},
        }
        if self.epochs > 1:
            run["second_seconds"] = readers.seconds(1)
        # Cold, each page comes over the link; warm, none except what reclaim has dropped since.
        if warm:
            run["as_prepared"] = total_bytes < bench.file_bytes // 100
        else:
            run["as_prepared"] = total_bytes >= self.needed_bytes
        return run

    def check(self, readers: Readers) -> None:
        """Raise UffdPrefetchError for wrong bytes or a wrong order."""
        for epoch, lines in enumerate(readers.epochs):
            for rank, line in enumerate(lines):
                expected = self.digests[epoch][rank]
                if line["sha256"] != expected:
                    raise UffdPrefetchError(
                        f"WRONG BYTES: rank {rank} of {self.ranks}, epoch {epoch}: "
                        f"{line['records']} records have the SHA-256 {line['sha256'][:16]}, the "
                        f"file's {len(self.orders[epoch][rank])} in this order {expected[:16]}"
                    )


def need_plans() -> None:
    """NotHere unless `wrap --plan` can be had."""
    if not hasattr(importlib.import_module("uffdprefetch.orders.indexer"), "main"):
        raise NotHere("this checkout's uffdprefetch/orders/indexer.py has no main()")
