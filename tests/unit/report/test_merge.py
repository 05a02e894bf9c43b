# SPDX-License-Identifier: Apache-2.0
"""report/merge.py: the summaries of a run's nodes as one."""

from __future__ import annotations

from typing import Any

from uffdprefetch.base.config import Config
from uffdprefetch.launch import nothing_reported
from uffdprefetch.report.merge import merged
from uffdprefetch.report.summary import lines

DISK = {
    "directory": "/tmp", "size_bytes": 9, "used_bytes": 6, "written_bytes": 4, "read_bytes": 12,
    "dropped_bytes": 2, "refused_bytes": 1, "late_reads": 0, "errors": {"EIO": 1},
    "read_bytes_per_second": 6.0, "write_bytes_per_second": None, "ended": None,
}  # fmt: skip
KEYS = ("read_bytes", "reread_bytes", "evicted_bytes", "faults", "missing_faults", "budget_bytes")


def node(number: int, **totals: Any) -> dict[str, Any]:
    found = nothing_reported.summary(Config(engine="pool"), "r", 10.0 + number, 0.5, None)
    wait = {"count": 2 + number, "p50": 5, "p99": 10 * number, "max": 10 * number, "sum": 9}
    found["totals"] = {
        **found["totals"], "gain": "saved", "saved_at_least_seconds": 1.0 + number,
        "cost_seconds": 0.0,
        "prefetched_bytes": 100, **totals,
    }  # fmt: skip
    return {
        **found, "host": f"node{number}", "rung_reason": "best",
        "ranks": [{"rank": 4 - number, "local_rank": 0, "processes": [], "demand_misses": 1}],
        "files": [{"path": "/far/a", "size_bytes": 50, "pool_read_bytes": 25, "late_bytes": None}],
        "pool": {
            **dict.fromkeys(KEYS, 7), "resident_peak_bytes": 3, "demand_wait_ns": wait,
            "evict": "cyclic", "limited_by": None,
        },
        "cluster": {
            "node": number, "nodes": 3, "present": [0, number],
            "mpi": None if number else "Open MPI", "generations": 1 + number,
            "from_bytes": 10, "to_bytes": 20, "network_bytes_per_second": None,
            "links": [{"node": 5, "late": number}],
            "keepers": {"/far/a": [number, None], "/far/b": [None, number]},
            "why_not": "no MPI" if number == 1 else None,
            "not_shared": [{"path": "/a", "why": "ext4"}, {"path": f"/b{number}", "why": "xfs"}],
        },
        "degradations": ["all say it", f"node {number} says it"],
        "notes": [
            {"path": "/a", "text": "all say it"},
            {"path": "", "text": f"{number} does", "asked": True},
        ],
    }  # fmt: skip


def test_one_node_s_is_the_run_s() -> None:
    assert merged([node(1)]) == node(1)


def test_bytes_are_added_and_what_all_say_is_said_once() -> None:
    run = merged([node(2), node(0), node(1)])
    assert run["host"] == "node0" and [one["host"] for one in run["nodes"]] == [
        "node0", "node1", "node2"
    ]  # fmt: skip
    assert run["wall_seconds"] == 12.0
    assert [rank["rank"] for rank in run["ranks"]] == [2, 3, 4]
    assert run["totals"]["prefetched_bytes"] == 300
    assert run["totals"]["gain"] == "saved" and run["totals"]["saved_at_least_seconds"] == 3.0
    (file,) = run["files"]
    assert (file["size_bytes"], file["pool_read_bytes"], file["late_bytes"]) == (50, 75, None)
    assert run["pool"]["read_bytes"] == 21
    assert run["pool"]["demand_wait_ns"] == {"count": 9, "p50": 5, "p99": 20, "max": 20, "sum": 9}
    assert run["cluster"] == {
        "node": None, "nodes": 3, "present": [0, 1, 2], "mpi": "Open MPI", "generations": 3,
        "from_bytes": 30, "to_bytes": 60, "network_bytes_per_second": None,
        "links": [{"at": n, "node": 5, "late": n} for n in range(3)],
        "keepers": {"/far/a": [0, None], "/far/b": [None, 0]},
        "why_not": "no MPI",
        "not_shared": [
            {"path": "/a", "why": "ext4"}, *({"path": f"/b{n}", "why": "xfs"} for n in range(3)),
        ],
    }  # fmt: skip
    assert run["degradations"] == [
        "all say it", "node0: node 0 says it", "node1: node 1 says it", "node2: node 2 says it"
    ]  # fmt: skip
    assert run["notes"] == [
        {"path": "/a", "text": "all say it", "asked": False},
        *({"path": "", "text": f"on node{n}: {n} does", "asked": True} for n in range(3)),
    ]
    assert lines(run, "/out.json", verbose=True)[0].endswith("; saved at least 3 s")


def test_the_longest_standstill_of_a_service_is_the_run_s() -> None:
    still = [
        {**node(n), "service": {"died": False, "stood_still_seconds": seconds}}
        for n, seconds in enumerate((0.0, 12.5, 3.0))
    ]
    assert merged(still)["service"] == {"died": False, "stood_still_seconds": 12.5}
    assert lines(merged(still))[0].startswith("the service stood still for 12.5 s")


def test_a_ratio_is_that_of_all_bytes_and_one_unknown_is_no_sum() -> None:
    sizes = ("accuracy_denominator_bytes", "coverage_denominator_bytes")
    one = node(0, accuracy=1.0, coverage=None, **dict.fromkeys(sizes, 300))
    two = node(1, accuracy=0.5, coverage=0.5, **dict.fromkeys(sizes, 100), used_bytes=None)
    totals = merged([one, two])["totals"]
    assert totals["accuracy"] == 0.875 and totals["accuracy_denominator_bytes"] == 400
    assert totals["coverage"] is None and totals["used_bytes"] is None
    unknown = {"saved_at_least_seconds": None, "cost_seconds": None}
    just_read = merged([node(0, gain="in-memory", **unknown), node(1, gain="just-read", **unknown)])
    assert just_read["totals"]["gain"] == "just-read"
    nothing = merged([node(0, gain="in-memory"), node(1, gain="nothing-read")])["totals"]
    assert nothing["gain"] == "in-memory" and nothing["saved_at_least_seconds"] == 0.0
    nobody = merged([node(0, gain="unknown", **unknown), node(1, gain="unknown", **unknown)])
    assert nobody["totals"]["gain"] == "unknown"
    assert nobody["totals"]["saved_at_least_seconds"] is None


def test_a_run_of_which_a_node_lost_has_lost() -> None:
    lost = {"gain": "cost", "saved_at_least_seconds": 0.0, "cost_seconds": 0.7}
    totals = merged([node(0), node(1, **lost), node(2)])["totals"]
    assert (totals["gain"], totals["cost_seconds"]) == ("cost", 0.7)
    assert totals["saved_at_least_seconds"] == 0.0


def test_kills_of_all_nodes_are_the_run_s() -> None:
    none = {"kills": 0, "group_kills": None, "job": False, "service": False, "why_not": None}
    nodes = [node(0), node(1)]
    assert merged(nodes)["oom"] is None  # of a version that did not look
    nodes[0]["oom"], nodes[1]["oom"] = none, {**none, "kills": 2, "service": True}
    run = merged(nodes)["oom"]
    assert (run["kills"], run["job"], run["service"]) == (2, False, True)
    nodes[0]["oom"] = {**none, "kills": None, "job": None, "why_not": "no file"}
    run = merged(nodes)["oom"]
    assert (run["kills"], run["job"], run["why_not"]) == (None, None, "no file")


def test_what_was_read_by_calls_is_added_up() -> None:
    """It was the first node's alone."""
    small = {"directories": 2, "read": 9, "used": 8, "used_bytes": 80, "uncounted": ["FUSE"]}
    left = {"path": "/a", "why": "O_DIRECT"}
    reads = {"read_bytes": 100, "processes": 3, "small_files": small, "left_alone": [left]}
    nodes = [{**node(0), "reads": {**reads, "small_files": None}}, {**node(1), "reads": reads}]
    assert merged([*nodes, {**node(2), "reads": reads}])["reads"] == {
        "read_bytes": 300, "processes": 9, "left_alone": [left],
        "small_files": {
            "directories": 4, "read": 18, "used": 16, "used_bytes": 160, "uncounted": ["FUSE"]
        },
    }  # fmt: skip
    assert merged([node(0), node(1)])["reads"] is None


def test_the_disk_tiers_of_nodes_add_up_and_each_that_has_ended_is_named() -> None:
    nodes = [node(0), node(1), node(2)]
    assert merged(nodes)["pool"]["spill"] is None
    nodes[0]["pool"]["spill"] = DISK
    nodes[1]["pool"]["spill"] = None
    nodes[2]["pool"]["spill"] = {
        **DISK, "directory": "/scratch", "read_bytes": 36, "read_bytes_per_second": 9.0,
        "errors": {"EIO": 2, "ENOSPC": 1}, "ended": "it is full",
    }  # fmt: skip
    assert merged(nodes)["pool"]["spill"] == {
        "directory": "/scratch, /tmp", "size_bytes": 18, "used_bytes": 12, "written_bytes": 8,
        "read_bytes": 48, "dropped_bytes": 4, "refused_bytes": 2, "late_reads": 0,
        "errors": {"EIO": 3, "ENOSPC": 1}, "read_bytes_per_second": 8.0,
        "write_bytes_per_second": None, "ended": "node2: it is full",
    }  # fmt: skip
