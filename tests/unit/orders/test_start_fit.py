# SPDX-License-Identifier: Apache-2.0
"""A start profile that does not fit any more is learned anew."""

from __future__ import annotations

import pytest

from uffdprefetch.native.profiles import EntryKind
from uffdprefetch.orders.start_fit import Replayed, learned
from uffdprefetch.orders.start_profile import StartEntry, StartProfile

ALL_FOUND = Replayed(10, 0)


def files(*names: str) -> list[StartEntry]:
    return [StartEntry(EntryKind.FILE, f"/{name}", 0xEF53, 1000, 1) for name in names]


def paths(profile: StartProfile) -> set[str]:
    return {entry.path for entry in profile.entries}


def after(*runs: str) -> StartProfile:
    """Each run reads a file for each of its letters."""
    profile = StartProfile()
    for run in runs:
        profile = learned(profile, files(*run), ALL_FOUND if profile.runs else None)
    return profile


def test_what_was_read_is_merged_with_what_was_known() -> None:
    assert paths(after("abcd", "abce")) == {"/a", "/b", "/c", "/d", "/e"}
    assert after("abcd", "abce").runs == 2


def test_one_run_that_reads_other_files_is_borne() -> None:
    assert paths(after("abcd", "abcd", "xyz")) == set(["/a", "/b", "/c", "/d", "/x", "/y", "/z"])


def test_two_in_a_row_are_not() -> None:
    assert paths(after("abcd", "abcd", "xy", "uvw")) == {"/u", "/v", "/w"}
    assert after("abcd", "abcd", "xy", "uvw").runs == 1


@pytest.mark.parametrize(("changed", "runs"), [(5, 2), (6, 1)])
def test_more_than_half_changed_is_another_program(changed: int, runs: int) -> None:
    known = after("abcd")
    assert learned(known, files(*"abcd"), Replayed(10, changed)).runs == runs


def test_where_nothing_was_replayed_nothing_is_judged() -> None:
    known = after("abcd", "abcd", "xy")
    assert learned(known, files("u"), None).runs == 4
    assert learned(None, files("u"), None).runs == 1
