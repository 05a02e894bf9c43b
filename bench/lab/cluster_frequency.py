# SPDX-License-Identifier: Apache-2.0
"""Whether a node should keep what it reads most often ([HDMLP]), or what it asks for first.

    python bench/lab/cluster_frequency.py

Eight nodes, 4790 records of 113 kB, shuffled by a seed that all know; together they can keep all.
In the simulator, at the rates of bench/cluster.py: 20 MB/s from the file system, 496 MB/s between
nodes (or a tenth of that), computing 0.95 of the file system's rate (or not at all). Prints,
against who asks first, what `frequency` saves of the time and of the bytes between nodes, by blocks
of 4 MiB and by records.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from uffdprefetch.sim.execute import execute  # noqa: E402
from uffdprefetch.sim.model import Curve, Readings, StorageClass, System, Training  # noqa: E402
from uffdprefetch.sim.outcome import Outcome  # noqa: E402
from uffdprefetch.sim.policies.cluster import ClusterPool  # noqa: E402
from uffdprefetch.sim.workload import Workload  # noqa: E402

NODES, COUNT, RECORD_MB, STORAGE = 8, 4790, 0.112592, 20.0
POLICIES = (ClusterPool(), ClusterPool("frequency"), ClusterPool("frequency", "sample"))


def outcome(policy: ClusterPool, compute: float, network: float, epochs: int) -> Outcome:
    """Of so many epochs."""
    memory = Curve.flat(5000.0)
    budget = (COUNT * RECORD_MB / NODES + 8.4) / 0.75
    system = System(
        N=NODES, c=compute, beta=1e9, b_c=network, b_fs=STORAGE, t=Curve.flat(STORAGE),
        classes=[StorageClass("windows", 32.0, 16, memory, memory),
                 StorageClass("pool", budget, 16, memory, memory)],
        rates="node",
    )  # fmt: skip
    work = Workload(np.full(COUNT, RECORD_MB), Training(epochs, 160, False, seed=0))
    return execute(system, Readings(), work.with_zero(), policy.plan(system, work))


def main() -> int:
    """See the module."""
    print("| computing | between nodes MB/s | epochs | seconds | by blocks: time, bytes |"
          " by records: time, bytes |")  # fmt: skip
    print("|---|---|---|---|---|---|")
    for compute, name in ((0.95 * STORAGE, "0.95"), (1e5, "nothing")):
        for network in (496.0, 49.6):
            for epochs in (3, 10, 30, 90):
                first, *others = (outcome(p, compute, network, epochs) for p in POLICIES)
                saved = " | ".join(
                    f"{1 - one.seconds / first.seconds:.1%},"
                    f" {1 - one.read_mb[2:].sum() / first.read_mb[2:].sum():.0%}"
                    for one in others
                )
                print(f"| {name} | {network} | {epochs} | {first.seconds:.1f} | {saved} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
