# SPDX-License-Identifier: Apache-2.0
"""What `--spill` did is told: with -v, in `top`, and by `doctor`."""

from __future__ import annotations

from pathlib import Path

import pytest

from uffdprefetch.base import spill_place
from uffdprefetch.doctor import pool as doctor_pool
from uffdprefetch.doctor.check import NOTE, OK
from uffdprefetch.protocol.snapshot import SpillState
from uffdprefetch.report.how_it_ran import spill_line
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
