# SPDX-License-Identifier: Apache-2.0
"""launch/oom.py: where the kernel counts its kills, and who was killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from uffdprefetch.launch import oom

V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
OTHER = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
V2 = "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
#: A container without a namespace of groups, which sees its own as the root of the tree.
WITHIN = "41 31 0:38 /docker/a1 /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("cgroup", "mountinfo", "found"),
    [
        ("0::/a/b\n", V2, ("/sys/fs/cgroup/a/b", "memory.events")),
        ("4:memory:/j\n1:cpu:/\n0::/\n", OTHER + V1 + V2,
         ("/sys/fs/cgroup/memory/j", "memory.oom_control")),
        ("0::/docker/a1\n", WITHIN, ("/sys/fs/cgroup", "memory.events")),
        ("0::/docker/a1/x\n", WITHIN, ("/sys/fs/cgroup/x", "memory.events")),
    ],
)  # fmt: skip
def test_the_counts_lie_where_the_memory_controller_is_mounted(
    cgroup: str, mountinfo: str, found: tuple[str, str]
) -> None:
    assert oom.directory_of(cgroup, mountinfo) == found


@pytest.mark.parametrize(
    ("cgroup", "mountinfo"), [("1:cpu:/\n", OTHER), ("0::/a\n", OTHER), ("0::/b\n", WITHIN)]
)
def test_a_group_that_cannot_be_seen_is_a_reason(cgroup: str, mountinfo: str) -> None:
    with pytest.raises(LookupError, match="control group"):
        oom.directory_of(cgroup, mountinfo)


def test_the_nearest_group_with_counts_is_read(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for group in (tmp_path, tmp_path / "a", tmp_path / "a" / "b"):
        (group / "cgroup.procs").touch()
    events = tmp_path / "a" / "memory.events"
    events.write_text("low 0\noom 5\noom_kill 3\noom_group_kill 1\n")
    found = oom.Counts.read(str(tmp_path / "a" / "b"), "memory.events")
    assert found == oom.Counts(3, 1, str(events))
    events.write_text("oom_kill 3\n")
    assert oom.Counts.read(str(tmp_path / "a"), "memory.events").group_kills is None
    events.write_text("under_oom 0\n")
    with pytest.raises(LookupError, match="does not count"):
        oom.Counts.read(str(tmp_path / "a"), "memory.events")
    events.unlink()
    with pytest.raises(LookupError, match=r"have no memory\.events"):
        oom.Counts.read(str(tmp_path / "a" / "b"), "memory.events")


@pytest.mark.parametrize(
    ("kills", "status", "service_killed", "job", "service"),
    [
        (0, 0, False, False, False),
        (0, signal.SIGKILL, True, False, False),  # somebody has killed both
        (0, signal.SIGKILL, None, False, False),
        (1, signal.SIGKILL, False, True, False),
        (1, signal.SIGKILL | 0x80, False, True, False),
        (1, 0, True, False, True),  # the job went on
        (1, 7 << 8, True, False, True),
        (1, signal.SIGKILL, True, None, None),  # one of them
        (2, signal.SIGKILL, True, True, True),
        (1, 0, None, False, None),
        (1, signal.SIGTERM, False, False, False),  # a process of the job's
    ],
)
def test_who_was_killed_follows_from_the_count_and_how_each_ended(
    kills: int, status: int, service_killed: bool | None, job: bool | None, service: bool | None
) -> None:
    before, after = oom.Counts(4, 1, "/g/f"), oom.Counts(4 + kills, 1, "/g/f")
    found = oom.verdict(before, after, status, service_killed)
    assert (found["job"], found["service"]) == (job, service)
    assert (found["kills"], found["group_kills"], found["sensor"]) == (kills, 0, "/g/f")
    assert found["why_not"] is None


def test_what_cannot_be_counted_is_null_with_the_reason() -> None:
    for before, after in (("no file", "no file"), (oom.Counts(1, None, "/a"), "no file")):
        found = oom.verdict(before, after, signal.SIGKILL, None)
        assert found == {
            "kills": None, "group_kills": None, "job": None, "service": None, "sensor": None,
            "why_not": "no file",
        }  # fmt: skip
    moved = oom.verdict(oom.Counts(1, 0, "/a"), oom.Counts(9, 0, "/b"), 0, False)
    assert moved["kills"] is None and "/b" in moved["why_not"]
    assert (moved["job"], moved["service"]) == (False, False)
