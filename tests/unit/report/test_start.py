# SPDX-License-Identifier: Apache-2.0
"""What `uffdprefetch profile` shows of a profile, which may be a stranger's."""

from __future__ import annotations

from uffdprefetch.native.profiles import EntryKind
from uffdprefetch.orders.learned_plan import LearnedPlan
from uffdprefetch.orders.learned_ranges import KeptOrders
from uffdprefetch.orders.plan_file import ParsedPlan
from uffdprefetch.orders.profile_store import StoredProfile
from uffdprefetch.orders.start_profile import StartEntry, StartProfile
from uffdprefetch.orders.stated import KeyOrder
from uffdprefetch.predict.first_touches import RankOf
from uffdprefetch.report import start

HOSTILE = "/a\x1b[2J\x1b]0;mine\x07\nb\u202e\udcff"
SHOWN = r"/a\x1b[2J\x1b]0;mine\x07\nb\u202e\udcff"


def test_what_a_profile_says_does_nothing_to_a_terminal() -> None:
    profile = StartProfile((StartEntry(EntryKind.STAT, HOSTILE),), 1)
    plan = LearnedPlan(ParsedPlan("it", ()), HOSTILE, RankOf(0, 2), KeyOrder("it", []))
    orders = [start.ShownOrder("a", 1, plan), start.ShownOrder("b", 1, None, HOSTILE)]
    text = start.show_text(start.show_document("it", HOSTILE, StartProfile(), orders)).plain()
    assert text.count(SHOWN) == 3 and len(text.splitlines()) == 4
    text = start.show_text(start.show_document("it", HOSTILE, profile, [])).plain()
    assert text.count(SHOWN) == 2 and len(text.splitlines()) == 3
    found = [
        StoredProfile(HOSTILE, HOSTILE, 1, 1, 1, HOSTILE, one, "flaw") for one in (profile, None)
    ]
    text = start.list_text(
        start.list_document("/there", found, {HOSTILE: KeptOrders(1, 1, 1)}, 1)
    ).plain()
    assert text.count(SHOWN) == 3 and len(text.splitlines()) == 3


def test_ages_are_in_whole_ones() -> None:
    hour = 3600 * 10**9
    profile = StartProfile((StartEntry(EntryKind.STAT, "/a"),), 1)
    found = [StoredProfile("k", "/k", 900, 0, 71 * hour, "", profile)]
    (row,) = (
        start.list_text(start.list_document("/", found, {}, 73 * hour)).plain().splitlines()[1:]
    )
    assert row.split() == ["k", "?", "1", "1", "0", "B", "900", "B", "0", "3", "d", "2", "h"]
