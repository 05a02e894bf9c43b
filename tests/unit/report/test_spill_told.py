# SPDX-License-Identifier: Apache-2.0
"""What `--spill` did is told: with -v, in `top`, and by `doctor`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from uffdprefetch.base import spill_place
from uffdprefetch.doctor import pool as doctor_pool
from uffdprefetch.doctor.check import NOTE, OK
from uffdprefetch.protocol.snapshot import SpillState
from uffdprefetch.report.how_it_ran import spill_line
from uffdprefetch.service.told import Told
from uffdprefetch.trace.file import events
from uffdprefetch.view.render import disk_line

GIB = 1 << 30
DISK = SpillState(
    directory="/tmp", size_bytes=32 * GIB, used_bytes=19 * GIB, written_bytes=20 * GIB,
    read_bytes=58 * GIB, dropped_bytes=GIB, refused_bytes=0, late_reads=0, errors={},
    read_bytes_per_second=1.9e9, write_bytes_per_second=1e9, ended=None,
)  # fmt: skip


def test_a_line_says_what_lies_on_the_disk_and_what_came_from_there() -> None:
    told = vars(DISK)
    assert spill_line({"pool": {"spill": told}}) == (
        "disk: 19 GiB on /tmp: read 58 GiB of it at 1.9 GB/s a thread; wrote 20 GiB; "
        "1 GiB left memory before they were written"
    )
    failed = {**told, "errors": {"EIO": 3}, "ended": "the disk failed 3 times in a minute"}
    line = spill_line({"pool": {"spill": failed}}) or ""
    assert line.endswith("; EIO 3 times; the disk failed 3 times in a minute")
    idle = {**told, "written_bytes": 0, "read_bytes": 0, "dropped_bytes": 0, "used_bytes": 0}
    assert (spill_line({"pool": {"spill": idle}}) or "").endswith(": nothing was written")
    assert spill_line({"pool": {"spill": None}}) is None and spill_line({"pool": None}) is None


@pytest.mark.parametrize("is_off", [False, True])
def test_recorders_are_told_of_each_file_of_which_something_went_there(is_off: bool) -> None:
    counts = {
        3: SimpleNamespace(disk_read_bytes=5, disk_written_bytes=4, disk_dropped_bytes=1),
        4: SimpleNamespace(disk_read_bytes=0, disk_written_bytes=0, disk_dropped_bytes=0),
    }
    told: Any = Told.__new__(Told)
    put: list[tuple[Any, ...]] = []
    pool = SimpleNamespace(
        disk=SimpleNamespace(is_full=False, is_off=is_off),
        pool=SimpleNamespace(file_counts=counts.get),
        files=SimpleNamespace(by_number={3: "a", 4: "b"}),
    )  # fmt: skip
    told._core = SimpleNamespace(pool=pool)
    told._publisher = SimpleNamespace(active=True, put=lambda *what: put.append(what))
    told._tell_of_the_disk(9)
    assert put == [(events.Kind.DISK, 9, 0, "a", 5, 4, 1, events.DISK_OFF if is_off else 0)]
    pool.disk = None
    told._tell_of_the_disk(9)
    assert len(put) == 1


def test_top_has_a_row_of_it() -> None:
    row = disk_line(DISK, 120).plain
    assert "19 GiB of 32 GiB on /tmp" in row and "read 58 GiB" in row


def test_doctor_says_where_it_may_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in doctor_pool.DISKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    monkeypatch.setattr(spill_place, "why_not", lambda _: None)
    found = doctor_pool.disk()
    assert found.status == OK and str(tmp_path) in found.found
    monkeypatch.setattr(spill_place, "why_not", lambda _: "tmpfs is memory, as the pool itself")
    found = doctor_pool.disk()
    assert found.status == NOTE and "tmpfs is memory" in found.found
