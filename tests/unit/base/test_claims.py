# SPDX-License-Identifier: Apache-2.0
"""A user's services on a node have each directory that they watch to themselves."""

from __future__ import annotations

import os
from pathlib import Path

from uffdprefetch.base import claims
from uffdprefetch.base.claims import Claims, place


def test_what_one_has_another_does_not_get(tmp_path: Path) -> None:
    one, other = Claims(str(tmp_path)), Claims(str(tmp_path))
    assert one.take(7) and one.take(8)
    assert not other.take(7) and other.take(9)
    one.give(7)
    assert other.take(7) and not other.take(8)
    one.close()
    assert other.take(8)
    other.close()


def test_the_last_one_leaves_no_file(tmp_path: Path) -> None:
    one, other = Claims(str(tmp_path)), Claims(str(tmp_path))
    one.close()
    assert len(list(tmp_path.iterdir())) == 1
    third = Claims(str(tmp_path))
    other.close()
    third.close()
    assert not list(tmp_path.iterdir())


def test_who_is_killed_holds_nothing(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        claimed = Claims(str(tmp_path))
        claimed.take(7)
        os._exit(0)
    os.waitpid(child, 0)
    mine = Claims(str(tmp_path))
    assert mine.take(7)
    mine.close()


def test_what_was_killed_left_goes_and_what_is_held_stays(tmp_path: Path) -> None:
    held = Claims(str(tmp_path), "node")
    elsewhere = Claims(str(tmp_path), "other")
    claims.tidy(str(tmp_path), "node")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["watched@node", "watched@other"]
    os.close(held._fd)  # as the kernel does with its process
    claims.tidy(str(tmp_path), "node")
    claims.tidy(str(tmp_path), "node")
    assert [path.name for path in tmp_path.iterdir()] == ["watched@other"]
    elsewhere.close()


def test_nodes_that_share_a_directory_share_no_claims(tmp_path: Path) -> None:
    here, there = Claims(str(tmp_path), "n1"), Claims(str(tmp_path), "n2/x")
    assert here.take(7) and there.take(7)
    here.close()
    there.close()


def test_places_are_those_of_bytes_that_can_be_locked(tmp_path: Path) -> None:
    claims = Claims(str(tmp_path))
    for device, inode in ((0, 0), (2**32 - 1, 2**64 - 1), (2**63, 2**63)):
        assert claims.take(place(device, inode))
    # the highest of all
    assert claims.take((1 << 63) - 3)
    claims.close()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    claims = Claims(str(tmp_path), "n")
    (path,) = tmp_path.iterdir()
    claims.close()
    path.symlink_to(tmp_path / "elsewhere")
    try:
        Claims(str(tmp_path), "n")
    except OSError:
        assert not (tmp_path / "elsewhere").exists()
    else:
        raise AssertionError("it was followed")
