# SPDX-License-Identifier: Apache-2.0
"""Which call fills the page cache: what is known of file systems, and when a choice is given up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from uffdprefetch.state import file_systems as fs
from uffdprefetch.state.file_systems import MIB, PREAD, PROBE, READAHEAD

EXT4, GPFS = 0xEF53, 0x47504653


def test_the_calls_are_numbered_as_the_workers_number_them() -> None:
    from uffdprefetch.native import uffd

    assert (PROBE, READAHEAD, PREAD) == (uffd.WARM_PROBE, uffd.WARM_READAHEAD, uffd.WARM_PREAD)


@pytest.mark.parametrize("ahead", [None, 0, 4 * MIB])
@pytest.mark.parametrize("told", [True, False])
def test_on_lustre_whole_requests_are_read_whatever_else_is_known(
    ahead: int | None, told: bool
) -> None:
    choice = fs.choose(fs.LUSTRE, ahead, told)
    assert (choice.call, choice.chunk_bytes) == (PREAD, 4 * MIB)
    assert choice.reason.startswith("pread, FADV_RANDOM of 4096 KiB, known of Lustre")
    assert ("not told to us" in choice.reason) != told


def test_where_the_kernels_readahead_works_its_size_says_how_much_a_call_brings() -> None:
    assert fs.choose(EXT4, 128 << 10, True)[:2] == (READAHEAD, 256 << 10)
    assert fs.choose(EXT4, 8 * MIB, True)[:2] == (READAHEAD, 4 * MIB)
    assert fs.choose(EXT4, 0, True)[:2] == (PREAD, 4 * MIB)
    assert fs.choose(EXT4, None, True).call == PROBE  # it has no number: one call tells


def test_an_unknown_file_system_is_tried_if_somebody_tells_what_came() -> None:
    for f_type in (GPFS, 0x12345678):
        assert fs.choose(f_type, 128 << 10, True).call == PROBE
        assert fs.choose(f_type, 128 << 10, False)[:2] == (READAHEAD, 256 << 10)
        assert fs.choose(f_type, 0, False).call == PREAD
        assert "not told to us" in fs.choose(f_type, 0, False).reason


def test_the_type_of_a_file_is_the_same_by_path_and_by_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    assert fs.type_of(fd) == fs.type_of(str(path)) != 0
    os.close(fd)
    with pytest.raises(FileNotFoundError):
        fs.type_of(str(tmp_path / "nowhere"))


# ---- checked while running ----------------------------------------------------------------------


def test_a_call_that_brings_nothing_is_doubted_after_some_extents_and_not_before() -> None:
    doubt = fs.Doubt()
    verdicts = [doubt.note(4 * MIB, 0) for _ in range(8)]
    assert verdicts[:7] == [None] * 7
    assert verdicts[7] == (32 * MIB, 0)
    assert doubt.note(4 * MIB, 0) is None, "it begins anew"


def test_a_call_of_which_half_is_dropped_now_and_then_is_kept() -> None:
    doubt = fs.Doubt()
    assert not any(doubt.note(4 * MIB, 4 * MIB * (i % 2)) for i in range(200))


def test_what_came_long_ago_does_not_excuse_what_does_not_come_now() -> None:
    doubt = fs.Doubt()
    assert not any(doubt.note(4 * MIB, 4 * MIB) for _ in range(1000))
    assert any(doubt.note(4 * MIB, 0) for _ in range(9))


def test_readahead_is_given_up_for_pread_and_pread_for_nothing() -> None:
    choice = fs.corrected(READAHEAD, 32 * MIB, 1 * MIB)
    assert choice is not None and choice.call == PREAD
    assert "readahead(2) brought 1 of 32 MiB" in choice.reason
    assert fs.corrected(PREAD, 32 * MIB, 0) is None


# ---- requests -----------------------------------------------------------------------------------


def test_ranges_are_rounded_to_whole_requests_within_the_file() -> None:
    assert fs.cells(5 * MIB, 6 * MIB, 4 * MIB, 100 * MIB) == (4 * MIB, 8 * MIB)
    assert fs.cells(4 * MIB, 8 * MIB, 4 * MIB, 100 * MIB) == (4 * MIB, 8 * MIB)
    assert fs.cells(97 * MIB, 98 * MIB, 4 * MIB, 98 * MIB + 1) == (96 * MIB, 98 * MIB + 1)
    assert fs.cells(5, 6, 0, 100) == (5, 6)


# ---- read_ahead_kb ------------------------------------------------------------------------------

MOUNTS = """\
25 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
45 28 1273:181606 / /mnt/lus rw - lustre 192.168.77.1@tcp:/scratch/sub rw,flock
46 28 1273:181607 / /mnt/old rw - lustre mgs@tcp:/lustre rw
"""


def bdi(sys: Path, *names: str) -> Path:
    """The folder of these, as below /sys."""
    at = sys / "class" / "bdi"
    for name in names:
        (at / name).mkdir(parents=True)
        (at / name / "read_ahead_kb").write_text("0\n")
    return at


def test_a_lustre_clients_readahead_is_found_under_its_own_name(tmp_path: Path) -> None:
    where = bdi(tmp_path, "8:1", "scratch-ff11", "lustre-ff12", "home-ff13")
    scratch = os.makedev(1273, 181606)
    assert fs.read_ahead_files(scratch, MOUNTS, tmp_path) == [
        where / "lustre-ff12" / "read_ahead_kb", where / "scratch-ff11" / "read_ahead_kb",
    ]  # fmt: skip
    other = os.makedev(1273, 181607)
    assert fs.read_ahead_files(other, MOUNTS, tmp_path) == [where / "lustre-ff12" / "read_ahead_kb"]


def test_a_partition_s_readahead_is_its_disk_s(tmp_path: Path) -> None:
    where = bdi(tmp_path, "8:0", "254:1")
    partition = tmp_path / "devices" / "sda" / "sda1"
    partition.mkdir(parents=True)
    (partition / "partition").write_text("1\n")
    (partition.parent / "dev").write_text("8:0\n")
    (tmp_path / "dev" / "block").mkdir(parents=True)
    (tmp_path / "dev" / "block" / "8:1").symlink_to(partition)
    first, mapped, network = (os.makedev(*n) for n in ((8, 1), (254, 1), (0, 52)))
    assert fs.read_ahead_files(first, MOUNTS, tmp_path) == [where / "8:0" / "read_ahead_kb"]
    assert fs.read_ahead_files(mapped, MOUNTS, tmp_path) == [where / "254:1" / "read_ahead_kb"]
    assert fs.read_ahead_files(network, MOUNTS, tmp_path) == [where / "0:52" / "read_ahead_kb"]
