# SPDX-License-Identifier: Apache-2.0
"""Nodes that read one LMDB: from the file system each for itself, or through each other's pools.

    python bench/cluster.py [--nodes 1,2,4,8] [--patterns shard,all,shuffled,planned] [--modes ...]
        [--budget fits|half|disk] [--size MIB] [--epochs N] [--compute SHARE] [--times N]
        [--link BYTES_PER_SECOND] [-o FILE.json]

Nodes are network namespaces of this machine (tests/support/nodes_bed.py, root); they share a FUSE
file system of so many MB/s for all together, less the more they are, so that two cores can carry
them: its counters tell what was read. Who reads is a program of py-lmdb that knows nothing of this
project. Epochs begin together. Patterns: *shard*: each its part, in order; *all*: all of it, in
order; *shuffled*: each its part of a permutation that is another one in each epoch, as PyTorch's
DistributedSampler has it; *planned*: the same, with the order told by ``--plan``. Budgets: *fits*:
what all nodes keep together holds the data; *half*: it holds half of it; *disk*: each node's memory
is a 16th of the data, and the disks of all (``--spill``) hold it once.

A reader computes on each record, as long as the file system takes for ``--compute`` times its
bytes. Prints a table of runs, and what a bare mpi4py loop takes to bring each node all that the
others have read: an epoch takes no less than the longer of that, of what the file system takes for
all of it once, and of what the slowest reader computes. Every record's CRC is checked. In mode
*plain* nodes would have one page cache together: each has a mount of its own, with its share of
the file system's rate, and a memory cgroup whose page cache is as large as a pool would be.
*alone*: with `wrap --engine pool`, each node for itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import lmdb

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/support")]

from cluster_nodes import PATIENCE_SECONDS, environment, meet, sharing, until, wrapped  # noqa: E402
from conftest import clean_environment  # noqa: E402
from nodes_bed import Bed, nodes_bed  # noqa: E402
from pool_cgroup import MemoryGroup, memory_group  # noqa: E402

from uffdprefetch.cluster import mpi_start  # noqa: E402
from uffdprefetch.cluster.homes import RESERVE_SHARE  # noqa: E402
from uffdprefetch.demo.bed import SlowBed  # noqa: E402

MIB, RECORD = 1 << 20, 110_000
#: MB/s of the file system for all nodes together: transports on two cores carry some 20 MB/s each.
STORAGE = {1: 80, 2: 80, 4: 40, 8: 20}
#: What a plain reader's memory group may use besides the pages that it has mapped: Python and lmdb.
PROGRAM_BYTES = 48 << 20
PATTERNS, MODES = ("shard", "all", "shuffled", "planned"), ("plain", "alone", "cluster")
#: Read from storage though another node has it.
INSTEAD = ("hedged", "unknown", "away", "unanswered", "refused")
TICKS = os.sysconf("SC_CLK_TCK")
#: node, nodes, pattern, epochs, database, directory of marks, seconds that a record takes
READER = """
import os, random, sys, time, zlib, lmdb
node, nodes, pattern, epochs, path, marks, cost = sys.argv[1:8]
node, nodes, epochs, cost = int(node), int(nodes), int(epochs), float(cost)
def meet(what):
    open(f"{marks}/{what}-{node}", "w").close()
    while not os.path.exists(f"{marks}/{what}"):
        time.sleep(0.005)
meet("open")  # when nothing starts any more
env = lmdb.open(path, subdir=False, readonly=True, lock=False)
count = env.stat()["entries"]
for epoch in range(epochs):
    meet(f"begin-{epoch}")
    began, bad = time.monotonic(), 0
    computed = began
    if pattern == "all":
        order = range(count)
    elif pattern == "shard":
        order = range(count * node // nodes, count * (node + 1) // nodes)
    else:
        order = list(range(count))
        random.Random(epoch).shuffle(order)
        order = order[node::nodes]
    with env.begin(buffers=True) as txn:
        for number in order:
            value = txn.get(b"%08d" % number)
            bad += zlib.crc32(value[4:]) != int.from_bytes(value[:4], "little")
            now = time.monotonic()
            computed = max(computed, now) + cost
            if computed - now > 0.001:
                time.sleep(computed - now)
    print(epoch, round(time.monotonic() - began, 3), bad, flush=True)
    meet(f"end-{epoch}")
"""


#: Each rank gets so many MiB from all others, in messages of 1 MiB, four of each peer at a time.
EXCHANGE = """
import sys, time
from mpi4py import MPI
comm, each = MPI.COMM_WORLD, int(sys.argv[1])
peers = [rank for rank in range(comm.size) if rank != comm.rank]
out, into = bytes(1 << 20), [[bytearray(1 << 20) for _ in range(4)] for _ in peers]
comm.Barrier()
began, requests = time.monotonic(), []
for first in range(0, each, 4):
    for peer, buffers in zip(peers, into):
        for buffer in buffers[: each - first]:
            requests.append(comm.Irecv([buffer, MPI.BYTE], peer))
            requests.append(comm.Isend([out, MPI.BYTE], peer))
    while not MPI.Request.Testall(requests):
        time.sleep(0.0001)
    requests.clear()
comm.Barrier()
if comm.rank == 0:
    print(time.monotonic() - began, flush=True)
"""


def exchange_seconds(nodes: int, size: int, directory: Path, link: int | None) -> float:
    """What a bare mpi4py loop takes to bring each node what the others have read of ``size``
    bytes."""
    agent = directory / "agent"
    mpi = mpi_start.find()
    with nodes_bed(nodes, directory, link) as bed:
        spaces = "".join(f"{bed.names[i]}) space={bed._spaces[i]};;" for i in range(nodes))
        agent.write_text(
            "#!/bin/sh\nwhile [ ${1#-} != $1 ]; do shift; done\n"
            f"case $1 in {spaces} esac\nhost=$1; shift\nexec ip netns exec $space unshare --uts"
            ' --mount sh -c "hostname $host; $*"\n'
        )
        agent.chmod(0o755)
        words = [sys.executable, "-c", EXCHANGE, str(max(1, (size >> 20) // nodes))]
        job = bed.start(0, mpi_start.command(mpi, bed.names, str(agent), words),
                        clean_environment(), ROOT)  # fmt: skip
        said, _ = job.communicate(timeout=PATIENCE_SECONDS)
    return float(said)


def busy_seconds() -> tuple[float, float]:
    """Of this machine's CPUs: in use, and all."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS, sum(fields) / TICKS


def order(count: int, node: int, nodes: int, epoch: int) -> list[int]:
    """The records of a node's in a shuffled epoch, as READER has them."""
    found = list(range(count))
    random.Random(epoch).shuffle(found)
    return found[node::nodes]


def write_plan(path: Path, data: Path, count: int, node: int, nodes: int, epochs: int) -> None:
    """Of one node."""
    ranks = [{"ranks": {"*": order(count, node, nodes, epoch)}} for epoch in range(epochs)]
    file = {"file": str(data), "unit": "records", "epochs": ranks}
    path.write_text(json.dumps({"schema": "uffdprefetch.plan/1", "files": [file]}))


def records(size_bytes: int) -> int:
    """How many fit: each takes whole pages."""
    return size_bytes // (RECORD + 2592)


def make_data(path: Path, size_bytes: int) -> None:
    """Records of RECORD bytes, each with its CRC."""
    chance = random.Random(6)
    env = lmdb.open(str(path), subdir=False, map_size=2 * size_bytes, lock=False)
    count = records(size_bytes)
    for first in range(0, count, 100):
        with env.begin(write=True) as txn:
            for number in range(first, min(first + 100, count)):
                body = chance.randbytes(RECORD - 4)
                txn.put(b"%08d" % number, zlib.crc32(body).to_bytes(4, "little") + body)
    env.close()


def cpu_seconds(bed: Bed, nodes: int) -> dict[str, float]:
    """Of all services and all transports, since they began."""
    found = {"service": 0.0, "transport": 0.0}
    words = {"service": "serve\0--socket", "transport": "uffdprefetch.cluster.carry"}
    for node in range(nodes):
        for part, word in words.items():
            for pid in bed.find(node, word):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found[part] += (int(fields[11]) + int(fields[12])) / TICKS
    return found


def run(
    args: argparse.Namespace, nodes: int, pattern: str, mode: str, source: Path
) -> dict[str, Any]:
    """One row."""
    size = (source / "data.mdb").stat().st_size
    kept = size / nodes / (1 if args.budget == "fits" else 2)
    budget = int((kept + (8 << 20)) / (1 - RESERVE_SHARE))
    if args.budget == "disk":
        budget = size // 16
    cost = RECORD * args.compute / (STORAGE[nodes] * 1e6)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as text, contextlib.ExitStack() as stack:
        directory = Path(text)
        marks = directory / "marks"
        marks.mkdir()
        apart = nodes if mode == "plain" else 1
        mounts = [
            stack.enter_context(SlowBed(source, bandwidth=STORAGE[nodes] * 1_000_000 // apart))
            for _ in range(apart)
        ]
        bed = stack.enter_context(nodes_bed(nodes, directory, args.link))
        jobs, groups = [], dict[int, MemoryGroup]()
        for node in range(nodes):
            far = mounts[node % apart].path("data.mdb")
            more = []
            if pattern == "planned":
                plan = directory / f"plan{node}.json"
                count = records(args.size * MIB)
                write_plan(plan, far, count, node, nodes, args.epochs)
                more += ["--plan", str(plan)]
            if mode == "cluster":
                more += sharing(directory, nodes, far)
            if args.budget == "disk":
                more += ["--spill", f"{args.disk}:{-(-size // nodes // MIB)}MiB"]
            words = [sys.executable, "-c", READER, str(node), str(nodes), pattern,
                     str(args.epochs), str(far), str(marks), str(cost)]  # fmt: skip
            if mode == "plain":
                groups[node] = stack.enter_context(memory_group(budget + PROGRAM_BYTES))
            else:
                words = [*wrapped(directory, node, budget, *more), *words]
            jobs.append(bed.start(node, words, environment(directory, node), ROOT))
        if mode == "cluster":
            until(lambda: all(bed.find(n, "uffdprefetch.cluster.carry") for n in range(nodes)))
            time.sleep(1.5)

        def bytes_read() -> int:
            return sum(one.counters()["bytes"] for one in mounts)

        meet(marks, "open", nodes)
        for node, group in groups.items():
            group.take(bed.processes(node))
        (marks / "open").touch()
        read, cpu, busy_before = [], {}, busy_seconds()
        for epoch in range(args.epochs):
            meet(marks, f"begin-{epoch}", nodes)
            before = bytes_read()
            (marks / f"begin-{epoch}").touch()
            meet(marks, f"end-{epoch}", nodes)
            read.append(round((bytes_read() - before) / size, 3))
            if epoch == args.epochs - 1 and mode != "plain":
                cpu = cpu_seconds(bed, nodes)
            busy_after = busy_seconds()
            (marks / f"end-{epoch}").touch()
        lines = [job.communicate(timeout=60)[0].split() for job in jobs]
        summary = directory / "out0.summary.json"
        found = json.loads(summary.read_text()) if summary.exists() else {}
    each = [[float(line[3 * e + 1]) for line in lines] for e in range(args.epochs)]
    used, whole = (now - before for now, before in zip(busy_after, busy_before, strict=True))
    bad = sum(int(line[3 * e + 2]) for line in lines for e in range(args.epochs))
    cluster = found.get("cluster") or {}
    each_node = found.get("nodes") or ([found] if found else [])
    sampled = 4096 * sum(one["totals"]["freshness"]["storage_requests"] for one in each_node)
    tiers = [spill for one in each_node if (spill := (one.get("pool") or {}).get("spill"))]
    instead = sum(cluster.get(f"{name}_bytes") or 0 for name in INSTEAD)
    return {
        "nodes": nodes, "pattern": pattern, "mode": mode, "size_bytes": size,
        "budget_bytes": budget, "storage_mb_per_second": STORAGE[nodes], "link": args.link,
        "epoch_seconds": [round(max(one), 2) for one in each], "read_per_size": read,
        "sampled_per_size": round(sampled / size, 3), "instead_per_size": round(instead / size, 3),
        "between_nodes_per_size": round((cluster.get("from_bytes") or 0) / size, 3),
        "busy_share": round(used / whole, 2),
        "disk_written_per_size": round(sum(one["written_bytes"] for one in tiers) / size, 3),
        "disk_read_per_size": round(sum(one["read_bytes"] for one in tiers) / size, 3),
        "tiers": tiers,
        "cpu_seconds": {k: round(v, 2) for k, v in cpu.items()}, "bad_records": bad,
        "cluster": cluster, "degradations": found.get("degradations", []),
    }  # fmt: skip


def main(argv: list[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default="1,2,4,8")
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--budget", choices=("fits", "half", "disk"), default="fits")
    parser.add_argument("--disk", type=Path, default="/var/tmp", help="where the tiers are")
    parser.add_argument("--size", type=int, default=96, help="MiB of data")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--compute", type=float, default=1 / 0.95, help="0: nothing")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--link", type=int, default=None, help="bytes per second of each node's")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as text:
        source = Path(text)
        make_data(source / "data.mdb", args.size * MIB)
        size = (source / "data.mdb").stat().st_size
        print("| nodes | pattern | mode | seconds of each epoch | read / size |"
              " samples, instead / size | between / size | disks written, read / size |"
              " CPU-s service, transport | CPUs busy | wrong |")  # fmt: skip
        print("|---|---|---|---|---|---|---|---|---|---|---|")
        for nodes in map(int, args.nodes.split(",")):
            if nodes > 1:
                exchange = exchange_seconds(nodes, size, source, args.link)
                print(f"| {nodes} | all | bare | {exchange:.2f} |", flush=True)
                rows.append({"nodes": nodes, "mode": "bare", "exchange_seconds": exchange})
            for pattern in args.patterns.split(","):
                for mode in args.modes.split(",") * args.times:
                    if (nodes == 1 and mode == "cluster") or (
                        mode == "plain" and pattern == "planned"
                    ):
                        continue
                    row = run(args, nodes, pattern, mode, source)
                    rows.append(row)
                    cpu = row["cpu_seconds"]
                    print(f"| {nodes} | {pattern} | {mode} | {row['epoch_seconds']} |"
                          f" {row['read_per_size']} | {row['sampled_per_size']},"
                          f" {row['instead_per_size']} | {row['between_nodes_per_size']} |"
                          f" {row['disk_written_per_size']}, {row['disk_read_per_size']} |"
                          f" {cpu.get('service', '')}, {cpu.get('transport', '')} |"
                          f" {row['busy_share']:.0%} | {row['bad_records']} |",
                          flush=True)  # fmt: skip
                    if args.output:
                        args.output.write_text(json.dumps(rows, indent=1))
    return 1 if any(row.get("bad_records") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
