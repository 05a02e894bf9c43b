# SPDX-License-Identifier: Apache-2.0
"""What a mount keeps, by what a probe has seen (tests/kernel/test_path_reader.py probes mounts)."""

from __future__ import annotations

import pytest

from uffdprefetch.base.file_systems import FileSystem
from uffdprefetch.native.paths import Keeping, Look, PathProbe

#: Waits of the first page, by one open and by another, and of fstat(2); whether it is mappable.
SEEN = [
    ((0, 0, 0, 0, 0), True, Keeping.PAGES),
    ((1, 0, 0, 0, 0), True, Keeping.PAGES),
    # the time of access is asked for again after data has come
    ((1, 0, 0, 0, 1), True, Keeping.PAGES),
    ((1, 0, 1, 0, 0), True, Keeping.WHILE_OPEN),
    ((0, 0, 2, 0, 0), True, Keeping.WHILE_OPEN),
    ((1, 1, 1, 1, 0), False, Keeping.NOTHING),
    ((0, 0, 0, 0, 0), False, Keeping.NOTHING),
    # a daemon that lets what it does not cache be mapped (FUSE_DIRECT_IO_ALLOW_MMAP)
    ((1, 1, 1, 1, 0), True, Keeping.NOTHING),
    ((1, 1, 1, 1, 1), True, Keeping.UNKNOWN),
    # attributes at each read
    ((2, 1, 1, 1, 1), True, Keeping.PAGES),
    ((2, 1, 2, 1, 1), True, Keeping.WHILE_OPEN),
]


@pytest.mark.parametrize(("waits", "is_mappable", "keeping"), SEEN)
def test_what_a_mount_keeps(
    waits: tuple[int, int, int, int, int], is_mappable: bool, keeping: Keeping
) -> None:
    looks = (Look(one, 1000) for one in waits)
    probe = PathProbe(*looks, is_mappable=is_mappable, file_system=FileSystem("any"))
    assert probe.keeping is keeping
    assert probe.cached_waits == waits[3]
