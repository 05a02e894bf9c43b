# SPDX-License-Identifier: Apache-2.0
"""What is known of each type of file system."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

from uffdprefetch.base import file_systems as fs
from uffdprefetch.base.file_systems import FILE_SYSTEMS, PREAD, PROBE, READAHEAD, Medium

MIB = 1 << 20


def test_the_calls_are_numbered_as_the_workers_number_them() -> None:
    from uffdprefetch.native import uffd

    assert (PROBE, READAHEAD, PREAD) == (uffd.WARM_PROBE, uffd.WARM_READAHEAD, uffd.WARM_PREAD)


def test_the_type_of_a_file_is_the_same_by_path_and_by_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    assert fs.type_of(fd) == fs.type_of(str(path)) != 0
    os.close(fd)
    with pytest.raises(FileNotFoundError):
        fs.type_of(str(tmp_path / "nowhere"))


def test_rows_that_are_mounted_by_one_word_have_their_reads_counted_alike() -> None:
    """The only column of which anybody asks by the word (service/summary.py)."""
    counted = defaultdict[str, list[bool | None]](list)
    for one in FILE_SYSTEMS.values():
        for word in one.mounts or (one.name.lower(),):
            counted[word].append(one.counts_reads)
    shared = {word: told for word, told in counted.items() if len(told) > 1}
    assert shared == {"afs": [None, None]}


def test_the_kernels_own_afs_is_read_ahead_by_the_kernels_call() -> None:
    kafs = fs.known(0x6B414653)  # AFS_FS_MAGIC of linux/magic.h
    assert (kafs.name, kafs.medium, kafs.call) == ("kAFS", Medium.NETWORK, READAHEAD)
    assert fs.known(0x5346414F).call == PROBE
    assert fs.mounted("afs").name == "AFS"
    assert not (kafs.one_machine or kafs.is_coherent), "no lease binds another machine's writers"


def test_a_type_is_found_by_how_it_is_mounted() -> None:
    found = [fs.mounted(kind).name for kind in ("fuse.sshfs", "ext4", "lustre", "nfs4", "overlay")]
    assert found == ["FUSE", "ext2/3/4", "Lustre", "NFS", "overlayfs"]
    assert fs.mounted("fantasy") == fs.FileSystem("fantasy")


def test_of_an_unknown_type_nothing_is_taken_for_granted() -> None:
    unknown = fs.known(0x12345678)
    assert unknown.name == "unknown (0x12345678)"
    assert not (unknown.in_memory or unknown.one_machine or unknown.is_coherent)
    assert not unknown.opens_held
    assert (unknown.medium, unknown.call, unknown.counts_reads) == (Medium.UNKNOWN, PROBE, None)


def test_a_network_is_coherent_only_where_its_server_is_asked() -> None:
    network = {one.name for one in FILE_SYSTEMS.values() if one.medium is Medium.NETWORK}
    assert {one.name for one in FILE_SYSTEMS.values() if one.is_coherent} & network == {
        "Lustre", "GPFS",
    }  # fmt: skip


def test_files_are_held_open_only_where_that_was_seen_to_help() -> None:
    """And never where the removal of an open file leaves a name behind (NFS, FUSE)."""
    assert {one.name for one in FILE_SYSTEMS.values() if one.opens_held} == {"Lustre"}
