# SPDX-License-Identifier: Apache-2.0
"""Nodes that load the same model weights at once.

    python bench/lab/cluster_weights.py [--nodes N] [--size MIB] [--modes ...] [-o FILE.json]

Each node (tests/support/nodes_bed.py, root) opens one file of safetensors as that library does, and
takes its tensors one after the other, as an inference server starts. All begin together. Modes:
*plain*; *alone*: with `wrap --engine pool`, each node for itself; *tree*: with `--cluster`, where
each node that has a block serves two of those that asked later; *chain*: the same, but each serves
only one, as in a ring. All tensors must have the SHA-256 that they were written with. Prints
seconds, what was read from the file system and what moved between nodes over the size of the file.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / one) for one in ("", "bench", "tests", "tests/support")]

from cluster import STORAGE, busy_seconds, cpu_seconds  # noqa: E402
from cluster_nodes import MIB, environment, meet, sharing, until, wrapped  # noqa: E402
from nodes_bed import nodes_bed  # noqa: E402

from uffdprefetch.demo.bed import SlowBed  # noqa: E402

MODES = ("plain", "alone", "tree", "chain")
#: A layer's matrix.
TENSOR = 16 * MIB
#: node, file, directory of marks
LOADER = """
import hashlib, os, sys, time
from safetensors import safe_open
node, path, marks = sys.argv[1:4]
open(f"{marks}/open-{node}", "w").close()
while not os.path.exists(f"{marks}/open"):
    time.sleep(0.005)
began, digest, loaded = time.monotonic(), hashlib.sha256(), {}
with safe_open(path, framework="numpy") as file:
    for name in file.offset_keys():
        loaded[name] = file.get_tensor(name)
took = time.monotonic() - began
for name in sorted(loaded):
    digest.update(loaded[name])
print(took, digest.hexdigest(), flush=True)
"""
#: Each node that has a block serves one of those that asked later.
CHAIN = """
from uffdprefetch.cluster import homes
homes.CHILDREN = 1
"""


def make_weights(path: Path, size: int) -> str:
    """Their SHA-256."""
    chance = np.random.default_rng(11)
    tensors = {
        f"layer.{number:03d}.weight": chance.integers(0, 256, TENSOR, dtype=np.uint8)
        for number in range(size // TENSOR)
    }
    save_file(tensors, path)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name])
    return digest.hexdigest()


def run(mode: str, nodes: int, source: Path, digest: str) -> dict[str, Any]:
    """One row."""
    size = (source / "model.safetensors").stat().st_size
    with tempfile.TemporaryDirectory(dir="/var/tmp") as text, contextlib.ExitStack() as stack:
        directory = Path(text)
        marks, chain = directory / "marks", directory / "chain"
        for one in (marks, chain):
            one.mkdir()
        (chain / "sitecustomize.py").write_text(CHAIN)
        apart = nodes if mode == "plain" else 1
        mounts = [
            stack.enter_context(SlowBed(source, bandwidth=STORAGE[nodes] * 1_000_000 // apart))
            for _ in range(apart)
        ]
        bed = stack.enter_context(nodes_bed(nodes, directory))
        jobs, shares = [], mode in ("tree", "chain")
        for node in range(nodes):
            far = mounts[node % apart].path("model.safetensors")
            words = [sys.executable, "-c", LOADER, str(node), str(far), str(marks)]
            if mode != "plain":
                more = sharing(directory, nodes, far) if shares else []
                words = [*wrapped(directory, node, 2 * size, *more), *words]
            path = f"{chain}:{ROOT}" if mode == "chain" else str(ROOT)
            jobs.append(bed.start(node, words, environment(directory, node, path), ROOT))
        if shares:
            until(lambda: all(bed.find(n, "uffdprefetch.cluster.carry") for n in range(nodes)))
            time.sleep(1.5)
        meet(marks, "open", nodes)
        before, busy_before = sum(one.counters()["bytes"] for one in mounts), busy_seconds()
        (marks / "open").touch()
        said = []
        for job in jobs:
            assert job.stdout is not None
            said.append(job.stdout.readline().split())
        busy = [now - then for now, then in zip(busy_seconds(), busy_before, strict=True)]
        read = sum(one.counters()["bytes"] for one in mounts) - before
        cpu = cpu_seconds(bed, nodes) if mode != "plain" else {}
        for job in jobs:
            job.communicate()
        summary = directory / "out0.summary.json"
        found = json.loads(summary.read_text()) if summary.exists() else {}
    took = [float(seconds) for seconds, _ in said]
    cluster = found.get("cluster") or {}
    return {
        "mode": mode, "nodes": nodes, "size_bytes": size, "seconds": round(max(took), 2),
        "first_seconds": round(min(took), 2), "read_per_size": round(read / size, 3),
        "between_per_size": round((cluster.get("from_bytes") or 0) / size, 3),
        "storage_mb_per_second": STORAGE[nodes], "busy_share": round(busy[0] / busy[1], 2),
        "cpu_seconds": {name: round(value, 2) for name, value in cpu.items()},
        "wrong": sum(found != digest for _, found in said),
        "degradations": found.get("degradations", []),
    }  # fmt: skip


def main(argv: list[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, choices=sorted(STORAGE), default=8)
    parser.add_argument("--size", type=int, default=512, help="MiB of weights")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as text:
        source = Path(text)
        digest = make_weights(source / "model.safetensors", args.size * MIB)
        for mode in args.modes.split(","):
            rows.append(run(mode, args.nodes, source, digest))
            print(json.dumps(rows[-1]), flush=True)
            if args.output:
                args.output.write_text(json.dumps(rows, indent=1))
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main(sys.argv[1:]))
