# SPDX-License-Identifier: Apache-2.0
"""Memory limits: texts of /proc, trees of cgroup v1 and v2."""

from __future__ import annotations

from pathlib import Path

import pytest

from uffdprefetch.native import memory_limits as limits
from uffdprefetch.native.memory_limits import Limit, Limits, cgroup_room_bytes

MIB, GIB = 1 << 20, 1 << 30

# ---- memory -------------------------------------------------------------------------------------

_MEMINFO = """MemTotal:       24689664 kB
MemFree:         1000000 kB
MemAvailable:   22000000 kB
Buffers:          200000 kB
"""


def test_mem_available_is_told_in_bytes() -> None:
    assert limits.mem_available_bytes(_MEMINFO) == 22_000_000 * 1024


def test_a_kernel_without_mem_available() -> None:
    text = "".join(line for line in _MEMINFO.splitlines(True) if "Available" not in line)
    assert limits.mem_available_bytes(text) is None
    assert limits.mem_available_bytes("") is None


def test_which_limit_would_bind_next_is_that_of_the_larger_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "mem_available_bytes", lambda _: 8 * GIB)
    monkeypatch.setattr(limits, "cgroup_room_bytes", lambda _: None)
    of_a_run = Limits(GIB)
    assert of_a_run.ahead_bytes() == (GIB, Limit.BUDGET)
    assert of_a_run.at(4 * GIB) is Limit.BUDGET
    assert of_a_run.at(5 * GIB) is Limit.MEMORY
    monkeypatch.setattr(limits, "cgroup_room_bytes", lambda _: 16 * GIB)
    assert of_a_run.at(3 * GIB) is Limit.CGROUP


def test_each_limit_is_told_in_words_and_with_what_would_lift_it() -> None:
    assert [limit.raised_to(3 * GIB) for limit in Limit] == [
        "with --budget 3GiB",
        "on a node with more free memory",
        "with a higher memory limit of the job (Slurm: --mem)",
    ]
    assert all(limit.words for limit in Limit)


# ---- cgroups ------------------------------------------------------------------------------------

_V1 = """12:cpu,cpuacct:/slurm/uid_1000
7:memory:/slurm/uid_1000/job_5
3:memory_recursive:/wrong
1:name=systemd:/slurm
"""
_V2 = "0::/system.slice/slurmstepd.scope/job_5\n"


def set_use(root: Path, group: str, names: dict[str, str]) -> None:
    """Write files of a group, as the kernel shows them."""
    (root / group).mkdir(parents=True, exist_ok=True)
    for name, text in names.items():
        (root / group / name).write_text(f"{text}\n")


def set_limit(root: Path, group: str, name: str, text: str) -> None:
    """A group that has a limit and uses nothing."""
    used = "memory.usage_in_bytes" if name == "memory.limit_in_bytes" else "memory.current"
    set_use(root, group, {name: text, used: "0", "memory.stat": "anon 0"})


def test_v2_the_own_group_and_every_parent_bind(tmp_path: Path) -> None:
    set_limit(tmp_path, "system.slice/slurmstepd.scope/job_5", "memory.max", "max")
    assert cgroup_room_bytes(_V2, tmp_path) is None
    set_limit(tmp_path, "system.slice", "memory.max", str(8 * GIB))
    assert cgroup_room_bytes(_V2, tmp_path) == 8 * GIB
    set_limit(tmp_path, "system.slice/slurmstepd.scope", "memory.max", str(GIB))
    assert cgroup_room_bytes(_V2, tmp_path) == GIB
    set_limit(tmp_path, "system.slice/slurmstepd.scope/job_5", "memory.max", str(2 * GIB))
    assert cgroup_room_bytes(_V2, tmp_path) == GIB  # the tightest
    set_limit(tmp_path, "system.slice/slurmstepd.scope/job_5", "memory.high", str(GIB // 2))
    assert cgroup_room_bytes(_V2, tmp_path) == GIB // 2


def test_v1_the_memory_controller_is_found_among_the_others(tmp_path: Path) -> None:
    set_limit(tmp_path, "memory/slurm/uid_1000/job_5", "memory.limit_in_bytes", str(3 * GIB))
    set_limit(tmp_path, "memory/wrong", "memory.limit_in_bytes", "1")
    assert cgroup_room_bytes(_V1, tmp_path) == 3 * GIB


def test_v1s_number_for_no_limit_is_no_limit(tmp_path: Path) -> None:
    no_limit = "9223372036854771712"
    set_limit(tmp_path, "memory/slurm/uid_1000/job_5", "memory.limit_in_bytes", no_limit)
    assert cgroup_room_bytes(_V1, tmp_path) is None


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    """/proc/self/cgroup names a path that is not below the mounted tree."""
    set_limit(tmp_path, "", "memory.max", str(256 * MIB))
    assert cgroup_room_bytes(_V2, tmp_path) == 256 * MIB
    assert cgroup_room_bytes("0::/\n", tmp_path) == 256 * MIB


def test_both_kinds_at_once(tmp_path: Path) -> None:
    set_limit(tmp_path, "memory/slurm/uid_1000/job_5", "memory.limit_in_bytes", str(3 * GIB))
    set_limit(tmp_path, "system.slice", "memory.max", str(2 * GIB))
    assert cgroup_room_bytes(_V1 + _V2, tmp_path) == 2 * GIB


def test_a_group_outside_of_ours_is_told_with_dots(tmp_path: Path) -> None:
    """cgroup_namespaces(7): a process outside of its namespace's root; what we see still binds."""
    set_limit(tmp_path, "", "memory.max", str(GIB))
    assert cgroup_room_bytes("0::/../other\n", tmp_path) == GIB


def test_without_any_group_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_room_bytes("", tmp_path) is None
    assert cgroup_room_bytes(_V1 + _V2, tmp_path) is None


def test_the_budget_binds_where_it_is_the_smallest() -> None:
    allowed, why = limits.allowed_bytes(MIB)
    assert (allowed, why) == (MIB, limits.Limit.BUDGET)
    allowed, why = limits.allowed_bytes(1 << 60)
    assert allowed < 1 << 60
    assert why is not limits.Limit.BUDGET


def test_room_in_a_group_is_what_is_not_used_and_the_page_cache(tmp_path: Path) -> None:
    stat = f"anon {5 * MIB}\nactive_file {7 * MIB}\ninactive_file {11 * MIB}\n"
    group = {"memory.max": str(64 * MIB), "memory.current": str(40 * MIB), "memory.stat": stat}
    assert cgroup_room_bytes(_V2, tmp_path) is None
    set_use(tmp_path, "", group)
    assert cgroup_room_bytes(_V2, tmp_path) == (64 - 40 + 7 + 11) * MIB
    (tmp_path / "memory.current").write_text(str(90 * MIB))
    assert cgroup_room_bytes(_V2, tmp_path) == 0


def test_v1_room_counts_the_groups_below(tmp_path: Path) -> None:
    stat = f"inactive_file 1\ntotal_active_file {2 * MIB}\ntotal_inactive_file {3 * MIB}\n"
    names = {"memory.limit_in_bytes": str(64 * MIB), "memory.usage_in_bytes": str(60 * MIB)}
    set_use(tmp_path, "memory/slurm/uid_1000/job_5", {**names, "memory.stat": stat})
    assert cgroup_room_bytes(_V1, tmp_path) == (64 - 60 + 2 + 3) * MIB
