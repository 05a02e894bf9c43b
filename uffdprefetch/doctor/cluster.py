# SPDX-License-Identifier: Apache-2.0
"""`doctor --cluster`: what the nodes of this allocation have for `--cluster`, found by trying."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from uffdprefetch.base.config import Config
from uffdprefetch.base.units import format_duration, format_size
from uffdprefetch.cluster import mpi_start, slurm
from uffdprefetch.doctor.check import (
    CANNOT,
    CPUS,
    LAUNCHER,
    LIMIT,
    MEETING,
    MESSAGES,
    MPI,
    NETWORK,
    NOTE,
    OK,
    PRIVACY,
    Check,
)

#: Time limits of all nodes' MPI_Init, and of rank 0's messages with each.
START_SECONDS, EACH_SECONDS = 30.0, 3.0
#: Rate between two nodes below which sharing is not worth it: a node's own rate from a file system
#: is rarely lower.
SLOW_BYTES_PER_SECOND = 100e6
#: Idle cores below which sharing is not advised: a transport and a service take one while bytes
#: move (docs/cluster.md).
IDLE_LEAST_CPUS = 1.0
PROBE = "uffdprefetch.cluster.probe"


def ways(
    config: Config, environ: Mapping[str, str]
) -> tuple[list[mpi_start.LaunchMethod], int | None]:
    """(what may start one MPI process on each node of this allocation, how many nodes there are,
    None: the launcher knows). Raises mpi_start.NoMpiError."""
    own = mpi_start.words_of(config.cluster.launcher) if config.cluster.launcher else []
    nodes_said = config.cluster.nodes or None
    if slurm.is_here(environ):
        nodes_said = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
        if not own or mpi_start.is_srun(own):
            found = mpi_start.ways(environ, config.cluster.launcher)
            return [way for way in found if way.name.startswith("srun")], nodes_said
    mpi = mpi_start.named(own) if own else mpi_start.find()

    def command(hosts: Sequence[mpi_start.Host], agent: str, words: Sequence[str]) -> list[str]:
        return mpi_start.in_an_allocation(mpi, nodes_said, words)

    return [mpi_start.LaunchMethod(mpi.kind, command, slurm.outside_of_a_rank(environ))], nodes_said


def examine(config: Config, environ: Mapping[str, str]) -> list[Check]:
    """All that is found. Starts a process on each node, several times."""
    meet = config.cluster.meet or os.getcwd()
    try:
        found, nodes = ways(config, environ)
        with tempfile.TemporaryDirectory(prefix=".uffdprefetch-doctor-", dir=meet) as directory:
            return _tried(found, nodes, Path(directory), _run)
    except mpi_start.NoMpiError as error:
        return [Check(LAUNCHER, CANNOT, str(error), "nodes cannot share by MPI")]
    except OSError as error:
        why = f"nodes cannot meet in {meet}: {error.strerror}"
        return [Check(MEETING, CANNOT, why, "name another directory with --meet")]


Run = Callable[[mpi_start.LaunchMethod, int, Path], str]


def _run(way: mpi_start.LaunchMethod, nodes: int, directory: Path) -> str:
    """Start the probe on all nodes; what it said. The directory holds what it found."""
    import sys

    hosts = [mpi_start.Host("")] * nodes
    argv = way.command(hosts, "", [sys.executable, "-m", PROBE, str(directory)])
    if "-w" in argv:  # all nodes of the job
        at = argv.index("-w")
        del argv[at : at + 2]
    try:
        done = subprocess.run(
            argv, env=dict(way.environ), capture_output=True, text=True, stdin=subprocess.DEVNULL,
            timeout=START_SECONDS + EACH_SECONDS * nodes,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "it does not end"
    except OSError as error:
        return str(error)
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1].strip() if lines and done.returncode else ""


def _tried(
    found: Sequence[mpi_start.LaunchMethod], nodes: int | None, directory: Path, run: Run
) -> list[Check]:
    why = []
    for number, way in enumerate(found):
        its = directory / str(number)
        its.mkdir()
        said = run(way, nodes or 1, its)
        ranks = [json.loads(path.read_text()) for path in sorted(its.glob("rank-*.json"))]
        shutil.rmtree(its, ignore_errors=True)
        sizes = {rank["size"] for rank in ranks}
        if ranks and sizes == {len(ranks)} and len(ranks) >= (nodes or 1):
            failed = ", ".join(f"{one.name}" for one in found[:number])
            return checks(way.name, ranks, f"; no world by {failed}" if failed else "")
        if not said and len(ranks) < max(sizes, default=nodes or 1):
            return [_not_seen(way.name, len(ranks), max(sizes, default=0), directory.parent)]
        worlds = f"{len(ranks)} worlds of one process" if sizes == {1} else said or "no world"
        why.append(f"{way.name}: {worlds}")
    return [
        Check(
            LAUNCHER, CANNOT, "; ".join(why), "each node reads for itself",
            "name the site's: --launcher 'srun --mpi=...'",
        )
    ]  # fmt: skip


def _not_seen(way: str, by: int, size: int, directory: Path) -> Check:
    """All ranks ended well, and some have left nothing."""
    found = f"{way} makes one world of {size} nodes, but only {by} of them see {directory}"
    if not by:
        found = f"{way} works, but no node sees {directory}"
    return Check(
        MEETING, CANNOT, found, "they cannot meet there",
        "uffdprefetch doctor --cluster --meet DIRECTORY  # on a file system that all nodes share",
    )  # fmt: skip


def checks(way: str, ranks: Sequence[Mapping[str, Any]], others: str) -> list[Check]:
    """What the ranks of one world have found, for people. Pure."""
    first = next(rank for rank in ranks if "with" in rank)
    found = [_launcher(way, ranks, others), _mpi(ranks)]
    if first["with"]:
        found += [_messages(first["with"]), _links(first["with"])]
    return [*found, _cpus(ranks), _privacy()]


def _launcher(way: str, ranks: Sequence[Mapping[str, Any]], others: str) -> Check:
    hosts = sorted({rank["host"] for rank in ranks})
    if len(hosts) < 2:
        return Check(
            LAUNCHER, LIMIT, f"{way}: {len(ranks)} ranks on {hosts[0]} alone",
            "there is nobody to share with: run it where the job runs, in its allocation",
        )  # fmt: skip
    return Check(
        LAUNCHER, OK, f"{way} makes one world of {len(ranks)} nodes{others}",
        values={"way": way, "hosts": hosts},
    )  # fmt: skip


def _mpi(ranks: Sequence[Mapping[str, Any]]) -> Check:
    kinds = sorted({(rank["library"], rank["mpi4py"], rank["thread_level"]) for rank in ranks})
    text = "; ".join(f"{lib}, mpi4py {mpi4py}, {level}" for lib, mpi4py, level in kinds)
    if len(kinds) > 1:
        return Check(MPI, LIMIT, text, "nodes differ: they may not understand each other")
    return Check(MPI, OK, text)


def _messages(with_: Sequence[Mapping[str, Any]]) -> Check:
    slowest = min(with_, key=lambda one: one["bytes_per_second"])
    latency = max(one["latency_seconds"] for one in with_)
    rate = slowest["bytes_per_second"]
    slow = rate < SLOW_BYTES_PER_SECOND
    return Check(
        MESSAGES, NOTE if slow else OK,
        f"{format_duration(latency)} one way at the most, {format_size(int(rate))}/s there and back"
        " at the least",
        "slower than many file systems: what storage brings quicker is read from there" if slow
        else "",
        values={"latency_seconds": latency, "bytes_per_second": rate},
    )  # fmt: skip


def _links(with_: Sequence[Mapping[str, Any]]) -> Check:
    sent = sum(one["sent_bytes"] for one in with_)
    seen = sum(one["link_bytes"] for one in with_)
    found = f"{format_size(seen)} on this node's links for {format_size(sent)} of messages"
    if seen < sent // 2:
        return Check(
            NETWORK, NOTE, found,
            "they went by a device without counters here, or the ranks are on one node",
        )  # fmt: skip
    return Check(NETWORK, OK, found, values={"sent_bytes": sent, "link_bytes": seen})


def _cpus(ranks: Sequence[Mapping[str, Any]]) -> Check:
    least = min(ranks, key=lambda rank: rank["cpus"])
    idle = min(rank["idle_share"] * rank["cpus"] for rank in ranks)
    found = f"{least['cpus']} CPUs on {least['host']}, {idle:.1f} of them idle at the least"
    if least["cpus"] < 2:
        return Check(
            CPUS, LIMIT, found,
            "service and transport share one core with the job: let it have all of the node's",
        )  # fmt: skip
    if idle < IDLE_LEAST_CPUS:
        return Check(CPUS, NOTE, found, "moving bytes takes time from what runs here")
    return Check(CPUS, OK, found)


def _privacy() -> Check:
    return Check(
        PRIVACY, NOTE, "MPI authenticates nobody and encrypts nothing",
        "whoever reaches its ports on the nodes' network can send and listen",
    )  # fmt: skip
