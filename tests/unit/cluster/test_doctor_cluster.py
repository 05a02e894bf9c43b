# SPDX-License-Identifier: Apache-2.0
"""`doctor --cluster`: what it makes of what the ranks have found, and how they find it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loop_fabric import Loop

from uffdprefetch.base.config import Config
from uffdprefetch.cluster import probe
from uffdprefetch.cluster.mpi_start import LaunchMethod
from uffdprefetch.doctor import cluster
from uffdprefetch.doctor.check import Check


def ranks(count: int, hosts: int | None = None, **first: Any) -> list[dict[str, Any]]:
    """What each of so many has found, on so many hosts."""
    found: list[dict[str, Any]] = [
        {
            "host": f"n{i % (hosts or count)}", "size": count, "idle_share": 0.5, "cpus": 8,
            "library": "Open MPI v4.1.4", "mpi4py": "4.1.2", "thread_level": "FUNNELED",
        }
        for i in range(count)
    ]  # fmt: skip
    found[0]["with"] = [
        {"rank": i, "latency_seconds": 2e-6 * i, "bytes_per_second": 5e9, "sent_bytes": 1 << 20,
         "link_bytes": 1 << 20}
        for i in range(1, count)
    ]  # fmt: skip
    found[0] |= first
    return found


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name.removeprefix("cluster: "): check for check in checks}


def test_nodes_that_can_share_are_told_by_what_and_how_fast() -> None:
    found = by_name(cluster.checks("srun --mpi=pmix", ranks(4), "; no world by srun"))
    assert {name: one.status for name, one in found.items()} == {
        "launcher": "ok", "MPI": "ok", "messages": "ok", "network": "ok", "CPUs": "ok",
        "privacy": "note",
    }  # fmt: skip
    assert found["launcher"].found == (
        "srun --mpi=pmix makes one world of 4 nodes; no world by srun"
    )
    assert "6 us" in found["messages"].found


def test_in_a_job_of_slurm_s_the_launcher_may_be_another_one_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, says in (("srun", ""), ("mpirun", "mpirun (Open MPI) 4.1.4")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
    (way,), nodes = cluster.ways(Config.of(launcher="mpirun --mca a b"), job)
    assert (way.name, nodes) == ("Open MPI", 3)
    assert way.command([], "", ["p"])[:1] == ["mpirun"]
    (way,), nodes = cluster.ways(Config.of(launcher=f"{tmp_path}/srun --mpi=x"), job)
    assert (way.name, nodes) == ("srun", 3)


@pytest.mark.parametrize(
    ("found", "name", "status", "word"),
    [
        (ranks(4, hosts=1), "launcher", "limit", "4 ranks on n0 alone"),
        (ranks(1), "launcher", "limit", "nobody to share with"),
        (ranks(2, library="MPICH 5"), "MPI", "limit", "may not understand"),
        (ranks(2, cpus=1), "CPUs", "limit", "one core"),
        (ranks(2, idle_share=0.01), "CPUs", "note", "takes time"),
    ],
)
def test_what_keeps_them_from_it_is_said(
    found: list[dict[str, Any]], name: str, status: str, word: str
) -> None:
    check = by_name(cluster.checks("mpirun", found, ""))[name]
    assert check.status == status and word in f"{check.found}: {check.follows}"


def test_slow_links_and_messages_that_no_link_has_seen_are_notes() -> None:
    two = ranks(2)
    two[0]["with"][0] |= {"bytes_per_second": 5e6, "link_bytes": 0}
    found = by_name(cluster.checks("mpirun", two, ""))
    assert (found["messages"].status, found["network"].status) == ("note", "note")
    assert "storage" in found["messages"].follows


def test_the_first_way_that_makes_one_world_is_taken(tmp_path: Path) -> None:
    ways = [
        LaunchMethod(name, lambda *_: [], {})
        for name in ("srun", "srun --mpi=pmi2", "srun --mpi=pmix")
    ]

    def run(way: LaunchMethod, nodes: int, directory: Path) -> str:
        if way.name == "srun --mpi=pmi2":
            return "MPI_Init failed"
        world = ranks(nodes) if way.name == "srun --mpi=pmix" else [*ranks(1), *ranks(1)]
        for i, rank in enumerate(world):
            (directory / f"rank-{i}.json").write_text(json.dumps(rank))
        return ""

    found = by_name(cluster._tried(ways, 2, tmp_path, run))
    assert found["launcher"].found == (
        "srun --mpi=pmix makes one world of 2 nodes; no world by srun, srun --mpi=pmi2"
    )
    (check,) = cluster._tried(ways[:2], 2, tmp_path, run)
    assert check.status == "cannot" and check.found == (
        "srun: 2 worlds of one process; srun --mpi=pmi2: MPI_Init failed"
    )


@pytest.mark.parametrize(
    ("seen_by", "found"),
    [
        (1, "mpirun makes one world of 2 nodes, but only 1 of them see"),
        (0, "mpirun works, but no node sees"),
    ],
)
def test_a_directory_that_some_nodes_do_not_see_is_not_taken_for_a_missing_mpi(
    tmp_path: Path, seen_by: int, found: str
) -> None:
    def run(way: LaunchMethod, nodes: int, directory: Path) -> str:
        for i, rank in enumerate(ranks(2)[:seen_by]):
            (directory / f"rank-{i}.json").write_text(json.dumps(rank))
        return ""

    (check,) = cluster._tried([LaunchMethod("mpirun", lambda *_: [], {})], 2, tmp_path, run)
    assert (check.name, check.status) == ("cluster: meeting", "cannot")
    assert check.found.startswith(found) and "--meet" in check.remedy


def test_rank_0_measures_each_other_rank() -> None:
    fabrics = Loop(3).ranks()
    others = [
        threading.Thread(target=probe.Messages(fabric).answer, daemon=True)
        for fabric in fabrics[1:]
    ]
    lock = threading.RLock()
    for fabric in fabrics:  # of one process: one at a time
        for name in ("send", "receive", "poll"):
            setattr(fabric, name, _alone(lock, getattr(fabric, name)))
    for thread in others:
        thread.start()
    found = probe.with_each(probe.Messages(fabrics[0]))
    for thread in others:
        while thread.is_alive():
            fabrics[0].poll()
            thread.join(0.001)
    assert [one["rank"] for one in found] == [1, 2]
    assert all(one["latency_seconds"] > 0 and one["bytes_per_second"] > 0 for one in found)


def _alone(lock: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    def locked(*args: Any) -> Any:
        with lock:
            return call(*args)

    return locked


def test_a_rank_that_does_not_answer_is_no_endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PATIENCE_SECONDS", 0.05)
    with pytest.raises(TimeoutError, match="rank 1 does not answer"):
        probe.with_each(probe.Messages(Loop(2).ranks()[0]))
