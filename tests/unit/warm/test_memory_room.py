# SPDX-License-Identifier: Apache-2.0
"""What a pool may hold beside a job: trees of cgroup v1 and v2, a /proc/meminfo of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from uffdprefetch.native import memory
from uffdprefetch.native.memory import UNLIMITED, Memory
from uffdprefetch.native.memory_limits import Limit
from uffdprefetch.pool.size import LimitReport

MIB, GIB = 1 << 20, 1 << 30
#: What is left free of each limit for a burst of the job (csrc/service/memory.h).
BURST_PART = 8

V1 = "7:cpu:/elsewhere\n4:memory:/job/step\n"
V2 = "0::/job/step\n"


class Machine:
    """A machine whose numbers a test sets."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.asked = directory, list[Memory]()
        self.meminfo(64 * GIB, 60 * GIB)

    def meminfo(self, total: int, available: int, shmem: int = 0, swap: int = 0) -> None:
        names = {"MemTotal": total, "MemAvailable": available, "Shmem": shmem, "SwapFree": swap}
        text = "".join(f"{name}:  {value >> 10} kB\n" for name, value in names.items())
        (self.directory / "meminfo").write_text(text)

    def v2(
        self, group: str, limit: int | str, anon: int = 0, cache: int = 0, shmem: int = 0,
        **more: int | str,
    ) -> None:  # fmt: skip
        self._write(group, {
            "memory.max": limit, "memory.high": "max", "memory.swap.max": "max",
            "memory.current": anon + cache + shmem,
            "memory.stat": f"anon {anon}\nfile {cache + shmem}\nshmem {shmem}\n"
            f"inactive_file {cache // 2}\nactive_file {cache - cache // 2}\nslab_reclaimable 0",
            **{name.replace("_", "."): value for name, value in more.items()},
        })  # fmt: skip

    def v1(self, group: str, limit: int, anon: int = 0, cache: int = 0, shmem: int = 0) -> None:
        self._write(f"memory/{group}", {
            "memory.limit_in_bytes": limit, "memory.usage_in_bytes": anon + cache + shmem,
            "memory.stat": f"shmem 1\ninactive_file 1\ntotal_shmem {shmem}\n"
            f"total_inactive_file {cache // 2}\ntotal_active_file {cache - cache // 2}",
        })  # fmt: skip

    def _write(self, group: str, files: dict[str, int | str]) -> None:
        (self.directory / group).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (self.directory / group / name).write_text(f"{text}\n")

    def memory(self, groups: str) -> Memory:
        asked = Memory(groups, str(self.directory), str(self.directory / "meminfo"))
        self.asked.append(asked)
        return asked


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    for asked in machine.asked:
        asked.close()


def beside(limit: int, others: int) -> int:
    """What a pool may hold in a limit of which others have so much."""
    return limit - limit // BURST_PART - others


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_pool_may_hold_what_others_and_a_burst_of_them_leave(
    machine: Machine, version: str
) -> None:
    numbers = {"anon": 100 * MIB, "cache": 300 * MIB, "shmem": 50 * MIB}
    getattr(machine, version)("job/step", 512 * MIB, **numbers)
    room = machine.memory(V1 if version == "v1" else V2).look(held_bytes=50 * MIB)
    # page cache goes first, so it is nobody's; the pool's own memory is none of the others'
    assert room.may_hold_bytes == beside(512 * MIB, 100 * MIB)
    assert room.left_bytes == (512 - 100 - 50) * MIB
    assert room.is_cgroup
    assert room.group_limit_bytes == room.limit_bytes == 512 * MIB


def test_shared_memory_that_is_not_the_pools_is_the_jobs(machine: Machine) -> None:
    machine.v2("job/step", 512 * MIB, anon=100 * MIB, shmem=150 * MIB)
    room = machine.memory(V2).look(held_bytes=50 * MIB)
    assert room.may_hold_bytes == beside(512 * MIB, 200 * MIB)


def test_what_is_being_filled_and_is_not_there_yet_is_no_memory_of_others(machine: Machine) -> None:
    machine.v2("job/step", 512 * MIB, anon=100 * MIB, shmem=50 * MIB)
    room = machine.memory(V2).look(held_bytes=80 * MIB)
    assert room.may_hold_bytes == beside(512 * MIB, 100 * MIB)
    assert room.left_bytes == (512 - 100 - 80) * MIB


@pytest.mark.parametrize("tight", ["job/step", "job", ""])
def test_the_tightest_of_all_ancestors_binds(machine: Machine, tight: str) -> None:
    for group in ("job/step", "job", ""):
        machine.v2(group, 512 * MIB if group == tight else "max", anon=100 * MIB)
    assert machine.memory(V2).look().may_hold_bytes == beside(512 * MIB, 100 * MIB)
    others = [group for group in ("job/step", "job", "") if group != tight]
    machine.v2(others[0], 256 * MIB, anon=20 * MIB)
    assert machine.memory(V2).look().may_hold_bytes == beside(256 * MIB, 20 * MIB)


def test_memory_high_binds_as_memory_max(machine: Machine) -> None:
    machine.v2("job/step", 512 * MIB, anon=100 * MIB, memory_high=256 * MIB)
    assert machine.memory(V2).look().may_hold_bytes == beside(256 * MIB, 100 * MIB)


def test_what_the_job_has_had_at_its_peak_stays_free_for_it(machine: Machine) -> None:
    machine.v2("job/step", 512 * MIB, anon=300 * MIB)
    asked = machine.memory(V2)
    assert asked.look().may_hold_bytes == beside(512 * MIB, 300 * MIB)
    machine.v2("job/step", 512 * MIB, anon=40 * MIB)
    rooms = [asked.look() for _ in range(8)]
    assert {room.may_hold_bytes for room in rooms} == {beside(512 * MIB, 300 * MIB)}
    assert rooms[-1].left_bytes == (512 - 40) * MIB


def test_where_the_kernel_can_swap_a_peak_binds_no_longer(machine: Machine) -> None:
    machine.meminfo(64 * GIB, 60 * GIB, swap=8 * GIB)
    machine.v2("job/step", 512 * MIB, anon=300 * MIB)
    asked = machine.memory(V2)
    asked.look()
    machine.v2("job/step", 512 * MIB, anon=40 * MIB)
    room = [asked.look() for _ in range(8)][-1]
    assert room.may_hold_bytes == beside(512 * MIB, 40 * MIB)
    assert room.group_limit_bytes == UNLIMITED
    machine.v2("job/step", 512 * MIB, anon=40 * MIB, memory_swap_max=0)
    assert [asked.look() for _ in range(8)][-1].may_hold_bytes == beside(512 * MIB, 300 * MIB)


def test_without_a_group_the_machine_binds(machine: Machine) -> None:
    machine.meminfo(64 * GIB, 40 * GIB, shmem=10 * GIB)
    room = machine.memory(V2).look(held_bytes=10 * GIB)
    assert room.may_hold_bytes == beside(64 * GIB, 14 * GIB)
    assert not room.is_cgroup
    assert (room.left_bytes, room.group_limit_bytes) == (40 * GIB, UNLIMITED)


def test_an_eighth_of_the_machine_stays_free_of_a_pool_and_that_is_told(machine: Machine) -> None:
    machine.meminfo(30 * GIB, 36 * GIB // 10)
    room = machine.memory(V2).look()
    assert room.may_hold_bytes == 0 and room.left_bytes > 3 * GIB and not room.is_cgroup
    told: list[str] = []
    report = LimitReport(SimpleNamespace(degrade=told.append))  # type: ignore[arg-type]
    for _ in range(2):
        report.note(MIB, Limit.MEMORY)
        report.note(MIB, Limit.CGROUP)
    assert told == [
        "the pool holds 1 MiB, not --budget: MemAvailable, and an eighth of the machine's memory"
        " stays free for the job",
        "the pool holds 1 MiB, not --budget: cgroup memory limit, and an eighth of it stays free"
        " for the job",
    ]


def test_a_full_group_leaves_nothing(machine: Machine) -> None:
    machine.v2("job/step", 512 * MIB, anon=500 * MIB)
    room = machine.memory(V2).look(held_bytes=MIB)
    assert room.may_hold_bytes == 0
    machine.v2("job/step", 512 * MIB, anon=600 * MIB)
    assert machine.memory(V2).look().left_bytes == 0


def test_a_limit_that_is_raised_while_the_job_runs_is_seen(machine: Machine) -> None:
    machine.v2("job/step", 512 * MIB, anon=100 * MIB)
    asked = machine.memory(V2)
    asked.look()
    machine.v2("job/step", 1024 * MIB, anon=100 * MIB)
    assert asked.look().may_hold_bytes == beside(1024 * MIB, 100 * MIB)


def test_this_machine_has_some() -> None:
    assert 0 < memory.look().may_hold_bytes < UNLIMITED
