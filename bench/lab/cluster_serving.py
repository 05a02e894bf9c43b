# SPDX-License-Identifier: Apache-2.0
"""What serving other nodes costs the job of a node, and how long its answers take.

    python bench/lab/cluster_serving.py [--seconds S] [-o FILE.json]

Two nodes (tests/support/nodes_bed.py, root). One keeps all of a file; its own program maps it anew
again and again and touches it page by page, each touch a fault that the service answers. The other
reads the same file, of which its pool holds a small part: not at all, in random places with a pause
after each, in order as fast as can be. Prints the quantiles of both programs' touches in
microseconds, what came to the second node, and what services and transports used of the CPUs; then
the same random touches with a transport that spins for an answer, as one does where more than two
CPUs are there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / one) for one in ("", "bench", "tests", "tests/support")]

from cluster import cpu_seconds  # noqa: E402
from cluster_nodes import environment, sharing, until, wrapped  # noqa: E402
from nodes_bed import nodes_bed  # noqa: E402

from uffdprefetch.demo.bed import SlowBed  # noqa: E402

MIB = 1 << 20
SIZE = 192 * MIB
#: path, directory of marks; waits for "go", ends at "stop". Touches a page in each 64 KiB.
OWN = """
import json, mmap, os, sys, time
path, marks = sys.argv[1:3]
clock, took = time.perf_counter_ns, []
with open(path, "rb") as file:
    found = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    sum(found[at] for at in range(0, len(found), 4096))
    open(f"{marks}/kept", "w").close()
    while not os.path.exists(f"{marks}/go"):
        time.sleep(0.01)
    while not os.path.exists(f"{marks}/stop"):
        found.close()
        found = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        for at in range(len(found) - 4096, 0, -5 << 20):
            began = clock()
            found[at]
            took.append(clock() - began)
            time.sleep(0.0005)
print(json.dumps(took))
"""
#: path, directory of marks, idle|random|order
OTHER = """
import json, mmap, os, random, sys, time
path, marks, how = sys.argv[1:4]
clock, took, chance = time.perf_counter_ns, [], random.Random(3)
with open(path, "rb") as file:
    found = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    open(f"{marks}/there", "w").close()
    while not os.path.exists(f"{marks}/go"):
        time.sleep(0.01)
    at = 0
    while not os.path.exists(f"{marks}/stop"):
        if how == "idle":
            time.sleep(0.01)
            continue
        at = chance.randrange(len(found)) if how == "random" else (at + 4096) % len(found)
        began = clock()
        found[at]
        took.append(clock() - began)
        if how == "random":
            time.sleep(0.002)
if how == "order":
    took = [one for one in took if one > 20000]
print(json.dumps(took))
"""
SPINS = """
import sys
if sys.argv[1:2] == ["serve"] or "serve" in sys.orig_argv:
    from uffdprefetch.cluster import link
    link._has_a_core_free = lambda: True
"""


def quantiles(took: list[int]) -> dict[str, float] | None:
    """Microseconds."""
    if not took:
        return None
    took.sort()
    return {
        name: round(took[min(len(took) - 1, int(share * len(took)))] / 1000, 1)
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    } | {"count": len(took)}


def run(how: str, seconds: float, source: Path, spins: bool = False) -> dict[str, Any]:
    """One row."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as text:
        directory = Path(text)
        marks = directory / "marks"
        marks.mkdir()
        (directory / "spin").mkdir()
        (directory / "spin" / "sitecustomize.py").write_text(SPINS)
        path = f"{directory / 'spin'}:{ROOT}" if spins else str(ROOT)
        with SlowBed(source, bandwidth=60_000_000) as storage, nodes_bed(2, directory) as bed:
            far = storage.path("data.bin")
            jobs = []
            for node, (program, budget, more) in enumerate(((OWN, 512, []), (OTHER, 32, [how]))):
                words = [
                    *wrapped(directory, node, budget * MIB, *sharing(directory, 2, far)),
                    *(sys.executable, "-c", program, str(far), str(marks), *more),
                ]
                jobs.append(bed.start(node, words, environment(directory, node, path), ROOT))
                until(lambda node=node: bed.find(node, "uffdprefetch.cluster.convene"))
            until(lambda: all(bed.find(n, "uffdprefetch.cluster.carry") for n in range(2)))
            until(lambda: (marks / "kept").exists() and (marks / "there").exists())
            time.sleep(1)
            before = cpu_seconds(bed, 2)
            (marks / "go").touch()
            time.sleep(seconds)
            after = cpu_seconds(bed, 2)
            (marks / "stop").touch()
            own, other = (json.loads(job.communicate(timeout=60)[0]) for job in jobs)
        summaries = [json.loads(path.read_text()) for path in directory.glob("out*.summary.json")]
    came = max(one["cluster"]["from_bytes"] for one in summaries)
    return {
        "other": how, "spins": spins, "own_us": quantiles(own), "other_us": quantiles(other),
        "came_mb_per_second": round(came / 1e6 / seconds, 1),
        "cpu_share": {k: round((after[k] - before[k]) / seconds, 3) for k in after},
    }  # fmt: skip


def main(argv: list[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as text:
        source = Path(text)
        (source / "data.bin").write_bytes(random.Random(9).randbytes(SIZE))
        for how, spins in (
            ("idle", False), ("random", False), ("order", False), ("random", True),
        ):  # fmt: skip
            rows.append(run(how, args.seconds, source, spins))
            print(json.dumps(rows[-1]), flush=True)
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main(sys.argv[1:]))
