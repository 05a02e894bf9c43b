# SPDX-License-Identifier: Apache-2.0
"""cluster/identity.py: nodes share a file only if it is the same one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from uffdprefetch.base.file_systems import LUSTRE
from uffdprefetch.cluster import identity as module
from uffdprefetch.cluster.identity import (
    PROBE_BYTES,
    NotSharedError,
    difference,
    fields,
    identity,
)

NFS, EXT4, FUSE, SIZE = 0x6969, 0xEF53, 0x65735546, 1 << 20


@pytest.fixture
def data(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(SIZE))
    fd = os.open(path, os.O_RDONLY)
    yield fd, path
    os.close(fd)


def test_the_same_file_has_the_same_identity_and_everything_that_differs_another(
    data: tuple[int, Path],
) -> None:
    fd, path = data
    found = fields(fd, str(path), NFS)
    assert set(found) == {"path", "size", "mtime", "ctime", "inode", "bytes"}
    assert identity(found) == identity(fields(fd, str(path), NFS))
    for name in found:
        other = {**found, name: "another"}
        assert identity(other) != identity(found)
        assert difference(found, other) == name
    assert difference(found, {"path": found["path"]}) == "bytes, ctime, inode, mtime, size"
    assert difference(found, dict(found)) == ""


@pytest.mark.parametrize("at", [0, SIZE // 2 - 1, SIZE - 1])
def test_other_bytes_with_the_same_times_are_another_file(data: tuple[int, Path], at: int) -> None:
    fd, path = data
    before, status = fields(fd, str(path), NFS), path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert difference(before, fields(fd, str(path), NFS)) == "bytes, ctime"


@pytest.mark.parametrize("f_type", [EXT4, 0x01021994, 0x01021997, 0x794C7630])
def test_a_local_file_is_never_shared(data: tuple[int, Path], f_type: int) -> None:
    fd, path = data
    with pytest.raises(NotSharedError, match="not a network file system"):
        fields(fd, str(path), f_type)


def test_of_fuse_the_user_says_it_and_more_bytes_stand_for_inode_and_ctime(
    data: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, path = data
    with pytest.raises(NotSharedError, match="--share"):
        fields(fd, str(path), FUSE)
    with pytest.raises(NotSharedError):
        fields(fd, str(path), FUSE, ["/elsewhere/*"])
    read = list[int]()
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda f, n, at: (read.append(at), pread(f, n, at))[1])
    found = fields(fd, str(path), FUSE, [f"{path.parent}/*.bin"])
    assert set(found) == {"path", "size", "mtime", "bytes"}
    assert len(set(read)) == module.PROBES_FUSE and {0, SIZE - PROBE_BYTES} <= set(read)


@pytest.mark.parametrize("size", [0, 1, PROBE_BYTES, PROBE_BYTES + 1, 3 * PROBE_BYTES])
def test_small_files_have_an_identity_too(tmp_path: Path, size: int) -> None:
    path = tmp_path / "small"
    path.write_bytes(b"x" * size)
    with path.open("rb") as file:
        assert len(identity(fields(file.fileno(), str(path), NFS))) == module.ID_BYTES


def test_lustres_data_version_counts_where_it_is_told(
    data: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, path = data
    assert "data version" not in fields(fd, str(path), LUSTRE), "another one's ioctl fails"
    for version, named in ((0, False), (17, True)):
        answer = module._DATA_VERSION_SIZE.pack(version, 1, 0)
        monkeypatch.setattr(module.fcntl, "ioctl", lambda *_, answer=answer: answer)
        assert ("data version" in fields(fd, str(path), LUSTRE)) == named
