# SPDX-License-Identifier: Apache-2.0
"""Where the kernel's readahead of a device is found."""

from __future__ import annotations

import os
from pathlib import Path

from uffdprefetch.base.mounts import read_ahead_files

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
    assert read_ahead_files(scratch, MOUNTS, tmp_path) == [
        where / "lustre-ff12" / "read_ahead_kb", where / "scratch-ff11" / "read_ahead_kb",
    ]  # fmt: skip
    other = os.makedev(1273, 181607)
    assert read_ahead_files(other, MOUNTS, tmp_path) == [where / "lustre-ff12" / "read_ahead_kb"]


def test_a_partition_s_readahead_is_its_disk_s(tmp_path: Path) -> None:
    where = bdi(tmp_path, "8:0", "254:1")
    partition = tmp_path / "devices" / "sda" / "sda1"
    partition.mkdir(parents=True)
    (partition / "partition").write_text("1\n")
    (partition.parent / "dev").write_text("8:0\n")
    (tmp_path / "dev" / "block").mkdir(parents=True)
    (tmp_path / "dev" / "block" / "8:1").symlink_to(partition)
    first, mapped, network = (os.makedev(*n) for n in ((8, 1), (254, 1), (0, 52)))
    assert read_ahead_files(first, MOUNTS, tmp_path) == [where / "8:0" / "read_ahead_kb"]
    assert read_ahead_files(mapped, MOUNTS, tmp_path) == [where / "254:1" / "read_ahead_kb"]
    assert read_ahead_files(network, MOUNTS, tmp_path) == [where / "0:52" / "read_ahead_kb"]
