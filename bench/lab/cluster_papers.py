# SPDX-License-Identifier: Apache-2.0
"""`--cluster` beside what [FanStore] and [HDMLP] do, on their axes.

    python bench/lab/cluster_papers.py FILE.json

FILE.json is bench/cluster.py's. Its shuffled epochs, of which each node reads its part: what all
epochs read from the file system over the size, and the stall, which is what they take beyond
computing. Ours and a plain reader's are measured; theirs are the simulator's at the same rates and
budgets, as is ours once more. [FanStore]: each node keeps its part of the data from before the
first epoch on, and has the rest from the others (the simulator's `lbann` with preloading); [HDMLP]:
a node keeps what it will read most often and has from others what they keep already (`hdmlp` with
`remote`).

Then, from the simulator alone, to 512 nodes: what computing takes of the time of five epochs, the
first one and preloading included (efficiency; [FanStore] figure 7 has it of later ones). 1.28
million files of 110 kB; a node computes on 100 MB/s, 1.25 GB/s come to it, 12 GB of its memory keep
files, and the file system gives 20 GB/s to all.
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

from cluster_predict import MB, predicted, rates  # noqa: E402

from uffdprefetch.sim.execute import execute  # noqa: E402
from uffdprefetch.sim.model import Curve, Readings, StorageClass, System, Training  # noqa: E402
from uffdprefetch.sim.plan import CannotRun  # noqa: E402
from uffdprefetch.sim.policies import LoadingPolicy  # noqa: E402
from uffdprefetch.sim.policies.cluster import ClusterPool  # noqa: E402
from uffdprefetch.sim.policies.hdmlp import Frequency  # noqa: E402
from uffdprefetch.sim.policies.preloading import Lbann  # noqa: E402
from uffdprefetch.sim.workload import Workload  # noqa: E402

POLICIES: dict[str, LoadingPolicy] = {
    "--cluster": ClusterPool(), "FanStore": Lbann(preloading=True), "HDMLP": Frequency(),
}  # fmt: skip
SCALES, EPOCHS = (16, 64, 128, 256, 512), 5


def measured(rows: list[dict[str, Any]], nodes: int, mode: str, pattern: str) -> str:
    """Of all epochs: read over size, seconds of stall; medians of the runs."""
    runs = [r for r in rows if (r["nodes"], r["mode"], r.get("pattern")) == (nodes, mode, pattern)]
    if not runs:
        return ""
    compute, _ = rates(rows, nodes)
    first = runs[0]
    epochs = len(first["epoch_seconds"])
    ideal = epochs * first["size_bytes"] / MB / nodes / compute
    read = statistics.median(sum(run["read_per_size"]) for run in runs)
    return f"{read:.2f}, {statistics.median(sum(r['epoch_seconds']) for r in runs) - ideal:.1f}"


def simulated(rows: list[dict[str, Any]], nodes: int, policy: LoadingPolicy) -> str:
    """The same."""
    row = next(r for r in rows if r["nodes"] == nodes and r.get("pattern") == "planned")
    compute, network = rates(rows, nodes)
    try:
        one = predicted(row, compute, network, len(row["epoch_seconds"]), policy)
    except CannotRun as error:
        return str(error)
    return f"{one.pfs_mb / (row['size_bytes'] / MB):.2f}, {one.stall:.1f}"


def efficiency(nodes: int, policy: LoadingPolicy) -> float:
    """What computing takes of the time of all epochs, at scale."""
    memory, storage = Curve.flat(20_000.0), 20_000.0
    system = System(
        N=nodes, c=100.0, beta=1e9, b_c=1250.0, b_fs=storage, t=Curve.flat(storage),
        classes=[StorageClass("windows", 1000.0, 16, memory, memory),
                 StorageClass("pool", 12_000.0, 16, memory, memory)],
        rates="node",
    )  # fmt: skip
    work = Workload(np.full(1_280_000, 0.11), Training(EPOCHS, 64 * nodes, False, seed=0))
    one = execute(system, Readings(), work.with_zero(), policy.plan(system, work))
    return one.compute_seconds / one.seconds


def main(argv: list[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path)
    rows = json.loads(parser.parse_args(argv).measured.read_text())
    names = " | ".join(POLICIES)
    print(f"read / size, stall s of all epochs | plain | alone | --cluster | simulated: {names} |")
    print("|---|---|---|---|" + "---|" * len(POLICIES))
    for nodes in sorted({r["nodes"] for r in rows if r["nodes"] > 1}):
        one = [
            measured(rows, nodes, "plain", "shuffled"), measured(rows, nodes, "alone", "planned"),
            measured(rows, nodes, "cluster", "planned"),
            *(simulated(rows, nodes, policy) for policy in POLICIES.values()),
        ]  # fmt: skip
        print(f"| {nodes} |", " | ".join(one), "|", flush=True)
    print(f"\n| nodes | efficiency, simulated: {names} |\n|---|" + "---|" * len(POLICIES))
    for nodes in SCALES:
        shares = []
        for policy in POLICIES.values():
            try:
                shares.append(f"{efficiency(nodes, policy):.1%}")
            except CannotRun:
                shares.append("does not fit")
        print(f"| {nodes} |", " | ".join(shares), "|", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
