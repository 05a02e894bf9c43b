# SPDX-License-Identifier: Apache-2.0
"""Memory and rate limits: texts of /proc, trees of cgroup v1 and v2, a bucket under our clock."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from uffdprefetch.warm import limits
from uffdprefetch.warm.limits import Limit, Limits, TokenBucket, cgroup_room_bytes

MIB, GIB = 1 << 20, 1 << 30
SECOND = 1_000_000_000

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


# ---- the token bucket, under a clock of ours -----------------------------------------------------


def send_all(bucket: TokenBucket, extents: list[int], now_ns: int = 0) -> list[tuple[int, int]]:
    """Send extents as early as the bucket lets us: (time, bytes) of each."""
    sent = []
    for length in extents:
        wait = bucket.wait_ns(now_ns)
        assert wait >= 0
        if wait:
            now_ns += wait
            assert bucket.wait_ns(now_ns) == 0, "the wait it told was too short"
        bucket.take(length)
        sent.append((now_ns, length))
    return sent


def test_without_a_rate_nothing_waits() -> None:
    bucket = TokenBucket(None, 4 * MIB)
    assert [at for at, _ in send_all(bucket, [64 * MIB] * 100)] == [0] * 100


@pytest.mark.parametrize("rate", [MIB, 100 * MIB, 10 * GIB])
@pytest.mark.parametrize("extent", [64 << 10, 2 * MIB, 4 * MIB])
def test_the_rate_holds_over_any_stretch(rate: int, extent: int) -> None:
    burst = 4 * MIB
    sent = send_all(TokenBucket(rate, burst), [extent] * 300)
    for first in range(0, 300, 37):
        bytes_ = 0
        for at, length in sent[first:]:
            bytes_ += length
            seconds = (at - sent[first][0]) / SECOND
            # a full bucket at first, and one extent of debt at last
            assert bytes_ <= rate * seconds + burst + extent + rate / SECOND


def test_the_rate_is_reached() -> None:
    sent = send_all(TokenBucket(100 * MIB, 4 * MIB), [2 * MIB] * 500)
    seconds = sent[-1][0] / SECOND
    assert sum(length for _, length in sent) == pytest.approx(100 * MIB * seconds, rel=0.02)


def test_a_pause_saves_up_no_more_than_a_burst() -> None:
    bucket = TokenBucket(MIB, 4 * MIB)
    send_all(bucket, [4 * MIB])
    hour = 3600 * SECOND
    at_once = [length for at, length in send_all(bucket, [MIB] * 20, hour) if at == hour]
    assert sum(at_once) <= 5 * MIB


def test_what_turned_out_to_be_resident_is_given_back() -> None:
    bucket = TokenBucket(MIB, 4 * MIB)
    assert bucket.wait_ns(0) == 0
    bucket.take(8 * MIB)
    assert bucket.wait_ns(0) > 0
    bucket.take(-8 * MIB)
    assert bucket.wait_ns(0) == 0


@pytest.mark.parametrize("seed", range(5))
def test_odd_sizes_and_idle_times(seed: int) -> None:
    chance = random.Random(seed)
    rate, burst = 50 * MIB, 4 * MIB
    bucket = TokenBucket(rate, burst)
    now_ns = total = 0
    for _ in range(500):
        now_ns += chance.choice((0, 0, 1, chance.randrange(100_000_000)))
        if bucket.wait_ns(now_ns) == 0:
            length = chance.randrange(1, 4 * MIB)
            bucket.take(length)
            total += length
        assert total <= rate * now_ns / SECOND + burst + 4 * MIB


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
