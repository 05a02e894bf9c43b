# SPDX-License-Identifier: Apache-2.0
"""What the simulator says of bench/spill.py's runs, from their rates.

    python bench/spill.py --size 512MiB --only memory,pool,"disk 1.0","disk 0.65" --json RUNS.json
    uffdprefetch calibrate DIR --local /tmp -o SITE.toml
    python bench/lab/spill_predict.py RUNS.json SITE.toml [-o OUT.json]

Storage's rate is the bed's; what a reader computes in a second is its speed once memory holds all
(variant "memory", last epoch); the disk's rates are calibrate's. Where the order jumps about, each
chunk that was not in memory is a touch that the pool answers, in the time that `simulate --replay`
has for it. Nothing is taken from the runs that are predicted. An order that nobody knows is not in
the model. Prints a table: seconds of the
first epoch and the mean of later ones, and of the data what these read from storage, predicted and
measured (medians).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from cluster_predict import MEMORY_MB_PER_SECOND, THREADS  # noqa: E402
from spill import DISKS, MEMORY, RECORD_BYTES  # noqa: E402

from uffdprefetch.predict.window import pool_bytes  # noqa: E402
from uffdprefetch.sim.execute import execute  # noqa: E402
from uffdprefetch.sim.model import Curve, Readings, StorageClass, System, Training  # noqa: E402
from uffdprefetch.sim.policies.ours import KnownOrderPool  # noqa: E402
from uffdprefetch.sim.replay.policies import ANSWER_SECONDS  # noqa: E402
from uffdprefetch.sim.scenario import Scenario, load  # noqa: E402
from uffdprefetch.sim.workload import Workload  # noqa: E402

MB = 1e6
#: How the pool evicts, by order.
EVICT = {"in order": "cyclic", "known": "planned"}
#: What a touch maps where the order jumps about: the pool's chunk.
CHUNK_MB = (64 << 10) / MB
#: Of an epoch in which storage's readers are looked at anew.
BATCHES = 32


def disk_rate(site: Scenario) -> Curve:
    """Of the class that `calibrate --local` has measured."""
    return site.system.classes[-1].r


def predicted(
    size_bytes: int, order: str, variant: str, compute: float, rate: float, disk: Curve, epochs: int
) -> tuple[float, float]:
    """(seconds, of the data what was read from storage) of so many epochs."""
    memory = Curve.flat(MEMORY_MB_PER_SECOND)
    budget = int(MEMORY * size_bytes)
    ahead = pool_bytes(budget, size_bytes, 1)
    share = DISKS[variant] or 0.0
    classes = [
        StorageClass("windows", ahead / MB, THREADS, memory, memory),
        StorageClass("pool", (budget - ahead) / MB, THREADS, memory, memory),
        StorageClass("disk", share * size_bytes / MB, THREADS // 2, disk, disk),
    ]
    answered = ANSWER_SECONDS / CHUNK_MB * (1 - MEMORY) if order == "known" else 0.0
    compute = 1 / (1 / compute + answered)
    system = System(1, compute, 1e9, 1e9, rate, Curve.flat(rate), classes, rates="node")
    count = size_bytes // RECORD_BYTES
    kind = "sequential" if order == "in order" else "shuffled"
    training = Training(epochs, count // BATCHES, False, "whole", kind, 0)
    work = Workload(np.full(count, RECORD_BYTES / MB), training)
    plan = KnownOrderPool(EVICT[order]).plan(system, work)
    found = execute(system, Readings(), work.with_zero(), plan)
    return found.seconds, found.pfs_mb / work.S


def compare(report: dict[str, Any], rate: float, disk: Curve) -> list[dict[str, Any]]:
    """One row for each order and variant but "memory"."""
    runs: dict[tuple[str, str], list[list[dict[str, Any]]]] = {}
    for run in report["runs"]:
        if run["order"] in EVICT and run["variant"] != "plain":
            runs.setdefault((run["order"], run["variant"]), []).append(run["epochs"])
    size = report["size_bytes"]
    found = []
    for (order, variant), same in runs.items():
        if variant == "memory":
            continue
        epochs = len(same[0])
        warm = [each[-1]["seconds"] for each in runs[order, "memory"]]
        compute = size / MB / statistics.median(warm)
        some = [
            predicted(size, order, variant, compute, rate, disk, count) for count in (1, epochs)
        ]
        said = some[0][0], (some[1][0] - some[0][0]) / (epochs - 1)
        measured = [
            statistics.median(each[0]["seconds"] for each in same),
            statistics.median(statistics.mean(e["seconds"] for e in each[1:]) for each in same),
        ]
        read = statistics.median(
            statistics.mean(e["storage_bytes"] for e in each[1:]) / size for each in same
        )
        found.append({
            "order": order, "variant": variant, "runs": len(same),
            "compute_mb_per_second": round(compute, 1),
            "predicted_seconds": [round(s, 2) for s in said],
            "measured_seconds": [round(s, 2) for s in measured],
            "error": [round(a / b - 1, 3) for a, b in zip(said, measured, strict=True)],
            "predicted_read": round((some[1][1] - some[0][1]) / (epochs - 1), 3),
            "measured_read": round(read, 3),
        })  # fmt: skip
    return found


def main(argv: list[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path)
    parser.add_argument("site", help="of `uffdprefetch calibrate --local`")
    parser.add_argument("--bandwidth", type=float, default=300.0, help="of the bed, MB/s")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args(argv)
    report = json.loads(args.measured.read_text())
    rows = compare(report, args.bandwidth, disk_rate(load(args.site)))
    print(
        "| order | variant | epoch 1: predicted, measured s | error |"
        " later ones: predicted, measured s | error | from storage: predicted, measured |"
    )
    print("|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        (a, b), (c, d), (e, f) = row["predicted_seconds"], row["measured_seconds"], row["error"]
        print(f"| {row['order']} | {row['variant']} | {a}, {c} | {e:+.1%} | {b}, {d} | {f:+.1%} |"
              f" {row['predicted_read']}, {row['measured_read']} |")  # fmt: skip
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
