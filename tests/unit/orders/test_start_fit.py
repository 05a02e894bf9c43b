# SPDX-License-Identifier: Apache-2.0
"""A start profile that does not fit any more is learned anew."""

from __future__ import annotations

import pytest

from uffdprefetch.native.profiles import EntryKind
from uffdprefetch.orders.start_fit import learned, used_files
from uffdprefetch.orders.start_profile import StartEntry, StartProfile


def files(*names: str, mtime_ns: int = 1) -> list[StartEntry]:
    return [StartEntry(EntryKind.FILE, f"/{name}", 0xEF53, 1000, mtime_ns) for name in names]


def paths(profile: StartProfile) -> set[str]:
    return {entry.path for entry in profile.entries}


def after(*runs: str) -> StartProfile:
    """Each run reads a file for each of its letters."""
    profile = StartProfile()
    for run in runs:
        profile = learned(profile, files(*run))
    return profile


def test_what_was_read_is_merged_with_what_was_known() -> None:
    assert paths(after("abcd", "abce")) == {"/a", "/b", "/c", "/d", "/e"}
    assert after("abcd", "abce").runs == 2


def test_one_run_that_reads_other_files_is_borne() -> None:
    assert paths(after("abcd", "abcd", "xyz")) == set(["/a", "/b", "/c", "/d", "/x", "/y", "/z"])


def test_two_in_a_row_are_not() -> None:
    assert paths(after("abcd", "abcd", "xy", "uvw")) == {"/u", "/v", "/w"}
    assert after("abcd", "abcd", "xy", "uvw").runs == 1


def test_of_a_run_of_several_nodes_the_first_has_judged() -> None:
    profile = after("abcd", "xy")
    first = learned(profile, files(*"uvw"))
    both = learned(first, files(*"st"), is_joined=True)
    assert (paths(both), both.runs) == ({"/s", "/t", "/u", "/v", "/w"}, 1)


@pytest.mark.parametrize(("changed", "runs"), [("ab", 2), ("abc", 1)])
def test_more_than_half_changed_is_another_program(changed: str, runs: int) -> None:
    same = set("abcd") - set(changed)
    run = files(*same) + files(*changed, mtime_ns=2)
    assert learned(after("abcd"), run).runs == runs


def test_the_first_run_is_kept_as_it_is() -> None:
    assert paths(learned(None, files("u"))) == {"/u"}


def test_of_what_was_known_it_is_counted_what_was_opened() -> None:
    known = StartProfile((*files(*"abc"), StartEntry(EntryKind.STAT, "/d")))
    assert used_files(known, files(*"bcd")) == 2
