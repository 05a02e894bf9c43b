# SPDX-License-Identifier: Apache-2.0
"""What `doctor PATH` says of the kernel's own readahead: its size, who sets it, what more gains."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import require

from uffdprefetch import doctor
from uffdprefetch.base import file_systems, mounts
from uffdprefetch.demo.bed import SlowBed, why_no_bed
from uffdprefetch.doctor import read_ahead, show
from uffdprefetch.doctor.read_ahead import LARGE_BYTES

KIB, EXTENTS = 1 << 10, 8


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[SlowBed]:
    """A file of EXTENTS extents, each request of which takes some ms and none waits for another."""
    require(why_no_bed() is None, f"no slow bed: {why_no_bed()}")
    source = tmp_path / "source"
    source.mkdir()
    with open(source / "data", "wb") as file:
        file.truncate(EXTENTS * LARGE_BYTES)
    with SlowBed(source, bandwidth=0, latency_us=5000) as bed:
        yield bed


def test_its_value_and_who_sets_it_are_told_and_what_more_gains_is_measured(bed: SlowBed) -> None:
    path = bed.path("data")
    found = read_ahead.read_ahead(str(path))
    number = f"{os.major(path.stat().st_dev)}:{os.minor(path.stat().st_dev)}"
    place = f"/sys/class/bdi/{number}/read_ahead_kb"
    assert found.found == f"128 ({place} sets it)"
    assert set(found.values) == {
        "read_ahead_bytes", "bytes_per_second", "large_bytes", "large_bytes_per_second",
    }  # fmt: skip
    assert "(measured)" in found.follows
    assert bed.counters()["bytes"] <= read_ahead.TRIES * (LARGE_BYTES + 128 * KIB)


def test_a_large_request_is_made_at_once_and_a_small_one_alone(bed: SlowBed) -> None:
    fd = os.open(bed.path("data"), os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    assert read_ahead._seconds(fd, 0, 128 * KIB, 128 * KIB)
    assert bed.counters()["bytes"] == 128 * KIB
    assert bed.counters()["most_in_flight"] == 1
    assert read_ahead._seconds(fd, LARGE_BYTES, LARGE_BYTES, 128 * KIB)
    assert bed.counters()["bytes"] == 128 * KIB + LARGE_BYTES
    assert bed.counters()["most_in_flight"] > 1
    os.close(fd)


def test_what_is_cached_is_not_taken_for_quick_storage(bed: SlowBed) -> None:
    bed.path("data").read_bytes()
    fd = os.open(bed.path("data"), os.O_RDONLY)
    assert read_ahead._seconds(fd, 0, 128 * KIB, 128 * KIB) is None
    os.close(fd)
    found = read_ahead.read_ahead(str(bed.path("data")))
    assert "not measured: too little of the file was cold" in found.follows


def test_a_user_to_whom_residency_is_not_told_has_it_measured_too(
    bed: SlowBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread's own waits tell cold from cached, which needs no right."""

    def untold(*_: object) -> int:
        raise AssertionError("not told")

    with open(bed.path("data"), "rb") as file:  # what was cached is left out
        file.seek((EXTENTS - 1) * LARGE_BYTES)
        file.read()
    monkeypatch.setattr(read_ahead.Residency, "pages", untold)
    monkeypatch.setattr(read_ahead.Residency, "__init__", lambda eye, fd: vars(eye).update(
        sensor="mincore", trusted=False))  # fmt: skip
    assert "(measured)" in read_ahead.read_ahead(str(bed.path("data"))).follows


@pytest.mark.parametrize(
    ("f_type", "ahead", "why"),
    [
        (file_systems.LUSTRE, 0, "lctl get_param llite.*.max_read_ahead*"),
        (0x47504653, 128 * KIB, "GPFS may read ahead by settings of its own"),
        (0xEF53, 8 << 20, "it is 8 MiB already"),
        (0xEF53, 0, "it is off, and each page a request"),
        (0x01021994, 128 * KIB, "tmpfs is memory itself"),
    ],
)
def test_where_it_is_not_measured_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, f_type: int, ahead: int, why: str
) -> None:
    (tmp_path / "data").write_bytes(bytes(8))
    monkeypatch.setattr(file_systems, "type_of", lambda _: f_type)
    monkeypatch.setattr(mounts, "read_ahead_bytes", lambda *_: ahead)
    found = read_ahead.read_ahead(str(tmp_path / "data"))
    assert found.remedy is None and why in found.follows
    assert found.follows.startswith(f"{ahead >> 10} (/sys/class/bdi/")
    assert ("NEVER write" in found.follows) == (f_type == file_systems.LUSTRE)


@pytest.mark.parametrize(("large", "advised"), [(3.2e8, True), (1.2e8, False)])
def test_more_is_advised_where_it_gains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, large: float, advised: bool
) -> None:
    (tmp_path / "data").write_bytes(bytes(8))
    monkeypatch.setattr(file_systems, "type_of", lambda _: 0xEF53)
    monkeypatch.setattr(mounts, "read_ahead_bytes", lambda *_: 128 * KIB)
    monkeypatch.setattr(read_ahead, "_measured", lambda *_: (1e8, large))
    found = read_ahead.read_ahead(str(tmp_path / "data"))
    place = found.found.split()[1].lstrip("(")
    assert found.remedy == (f"echo 4096 | sudo tee {place}" if advised else None)
    assert ("more is not needed here" in found.follows) != advised
    assert "gets 100 MB/s at most, with 4096 " in found.follows


def test_the_short_report_tells_it_before_what_was_not_asked_about(bed: SlowBed) -> None:
    found = read_ahead.read_ahead(str(bed.path("data")))
    general = [
        doctor.Check("pool huge pages", doctor.check.NOTE, "no", "pages of 4 KiB"),
        doctor.Check("eBPF (bcc)", doctor.check.NOTE, "no", "no witness"),
    ]
    told = show.short(doctor.assess([*general * show.LACKS_MAX, found])).splitlines()
    (line,) = [n for n, text in enumerate(told) if text.startswith("read_ahead_kb: 128 (/sys")]
    assert all(n > line for n, text in enumerate(told) if text.startswith("pool huge pages"))
