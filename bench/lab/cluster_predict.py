# SPDX-License-Identifier: Apache-2.0
"""What the simulator says of bench/cluster.py's runs, from their rates.

    python bench/lab/cluster_predict.py FILE.json [-o OUT.json]

FILE.json is bench/cluster.py's, with patterns shard, all and planned. Storage's rate is the bed's;
what a reader computes in a second is its speed in the second epoch of *shard*, when all is in its
node's memory; the network's rate is that of the bare exchange. Nothing is taken from the runs that
are predicted. Prints a table: seconds of the first epoch and of a later one, predicted and measured
(medians), and the bytes that come from storage and from other nodes.
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
sys.path[:0] = [str(ROOT)]

from uffdprefetch.sim.execute import execute  # noqa: E402
from uffdprefetch.sim.model import Curve, Readings, StorageClass, System, Training  # noqa: E402
from uffdprefetch.sim.outcome import Outcome  # noqa: E402
from uffdprefetch.sim.policies import LoadingPolicy  # noqa: E402
from uffdprefetch.sim.policies.cluster import ClusterPool  # noqa: E402
from uffdprefetch.sim.workload import Workload  # noqa: E402

MB, RECORD_MB = 1e6, (110_000 + 2592) / 1e6
#: A node's memory, and its fill threads.
MEMORY_MB_PER_SECOND, THREADS = 5000.0, 16
#: Of an epoch in which nodes go side by side: after each the model looks who reads storage now. A
#: shard is one: nodes do not wait for each other.
BATCHES = 30
SCHEMES = {"shard": ("uniform", "sequential"), "all": ("whole", "sequential"),
           "planned": ("uniform", "shuffled")}  # fmt: skip


def predicted(
    row: dict[str, Any],
    compute: float,
    network: float,
    epochs: int,
    policy: LoadingPolicy | None = None,
) -> Outcome:
    """Of so many epochs; ``policy``: None is our own."""
    scheme, order = SCHEMES[row["pattern"]]
    nodes, rate = row["nodes"], float(row["storage_mb_per_second"])
    memory = Curve.flat(MEMORY_MB_PER_SECOND)
    count = int(row["size_bytes"] / MB / RECORD_MB)
    budget = row["budget_bytes"] / MB
    # In the first epoch they have what is not kept yet: all of it at first, a quarter in the end.
    window = StorageClass("windows", budget / 2, THREADS, memory, memory)
    pool = StorageClass("pool", budget, THREADS, memory, memory)
    system = System(
        N=nodes, c=compute, beta=1e9, b_c=network, b_fs=rate, t=Curve.flat(rate),
        classes=[window, pool], rates="node",
    )  # fmt: skip
    batch = count if row["pattern"] == "shard" else count // BATCHES
    training = Training(epochs, batch, False, scheme, order, 0)
    work = Workload(np.full(count, RECORD_MB), training)
    plan = (policy or ClusterPool()).plan(system, work)
    return execute(system, Readings(), work.with_zero(), plan)


def rates(rows: list[dict[str, Any]], nodes: int) -> tuple[float, float]:
    """MB/s that a reader of so many nodes computes, and that come to a node from the others."""
    mode = "alone" if nodes == 1 else "cluster"
    warm = [r for r in rows if (r["nodes"], r["mode"], r.get("pattern")) == (nodes, mode, "shard")]
    size = warm[0]["size_bytes"] / MB
    bare = [r["exchange_seconds"] for r in rows if (r["nodes"], r["mode"]) == (nodes, "bare")]
    network = size * (nodes - 1) / nodes / bare[0] if bare else 1e9
    return size / nodes / statistics.median(r["epoch_seconds"][1] for r in warm), network


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each number of nodes and pattern."""
    runs: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        mode = "alone" if row["nodes"] == 1 else "cluster"
        if row["mode"] == mode and row["pattern"] in SCHEMES:
            runs.setdefault((row["nodes"], row["pattern"]), []).append(row)
    found = []
    for (nodes, pattern), same in sorted(runs.items()):
        size = same[0]["size_bytes"] / MB
        compute, network = rates(rows, nodes)
        first, two = (predicted(same[0], compute, network, epochs) for epochs in (1, 2))
        measured = [statistics.median(r["epoch_seconds"][i] for r in same) for i in (0, 1)]
        said = [first.seconds, two.seconds - first.seconds]
        found.append(
            {
                "nodes": nodes, "pattern": pattern, "runs": len(same),
                "compute_mb_per_second": round(compute, 1),
                "network_mb_per_second": round(network, 1),
                "predicted_seconds": [round(s, 2) for s in said], "measured_seconds": measured,
                "error": [round(a / b - 1, 3) for a, b in zip(said, measured, strict=True)],
                "predicted_read_per_size": round(two.pfs_mb / size, 3),
                "measured_read_per_size": round(
                    statistics.median(sum(r["read_per_size"][:2]) for r in same), 3
                ),
                "predicted_between_per_size": round(float(two.read_mb[2:].sum()) / size, 3),
                "measured_between_per_size": round(
                    statistics.median(r["between_nodes_per_size"] for r in same), 3
                ),
            }
        )  # fmt: skip
    return found


def main(argv: list[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args(argv)
    rows = compare(json.loads(args.measured.read_text()))
    print("| nodes | pattern | epoch 1: predicted, measured s | error |"
          " epoch 2: predicted, measured s | error |"
          " read / size: predicted, measured |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        (a, b), (c, d), (e, f) = row["predicted_seconds"], row["measured_seconds"], row["error"]
        print(f"| {row['nodes']} | {row['pattern']} | {a}, {c} | {e:+.1%} | {b}, {d} | {f:+.1%} |"
              f" {row['predicted_read_per_size']}, {row['measured_read_per_size']} |")  # fmt: skip
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
