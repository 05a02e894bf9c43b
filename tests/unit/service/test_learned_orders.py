# SPDX-License-Identifier: Apache-2.0
"""service/learned_orders.py: what of a run is kept, added to, removed, or no order worth it."""

from __future__ import annotations

import os
import random
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import HANG_SECONDS, warnings_fail

from tests.support.file_states import file_of
from uffdprefetch.base.config import LearnOptions
from uffdprefetch.base.units import MIB
from uffdprefetch.orders import learned_plan, learned_ranges
from uffdprefetch.predict.first_touches import FirstTouches, RankOf
from uffdprefetch.readers.learned_plans import PlanFate, RankRun
from uffdprefetch.service import learned_orders
from uffdprefetch.service.learned_orders import Learned, LearnedOrders, lesson
from uffdprefetch.state.file_times import Times
from uffdprefetch.state.touch_book import TouchedFile

pytestmark = warnings_fail

BLOCK = 64 << 10
SIZE = 64 * MIB
TIMES = Times(SIZE, 1, 2)
RANK = RankOf(1, 2)
NAME = learned_ranges.name_of("/data", TIMES, RANK)
SCATTERED = tuple(range(0, 512, 16))


def run(
    *blocks: int, fate: PlanFate = PlanFate.NONE, known: int = 0, plan: str | None = None
) -> RankRun:
    file = file_of(SIZE, "/data")
    touches = FirstTouches(SIZE)
    for block in blocks:
        touches.came(RANK, block * BLOCK, (block + 1) * BLOCK)
    touched = TouchedFile("/data", TIMES, file.guard, touches)
    return RankRun(NAME, plan, touched, touches.of(RANK), fate, known * BLOCK)


@pytest.mark.parametrize(
    ("told", "what"),
    [
        (run(*SCATTERED), Learned.WRITTEN),
        (run(*range(500)), Learned.IN_ORDER),
        (run(*range(499, -1, -1)), Learned.IN_ORDER),
        (run(*SCATTERED[:15]), Learned.LITTLE),
        (run(*SCATTERED, fate=PlanFate.DROPPED, known=32), Learned.REMOVED),
        (run(*SCATTERED, fate=PlanFate.FOLLOWED, known=32), Learned.KEPT),
        (run(*SCATTERED[:5], fate=PlanFate.FOLLOWED, known=32), Learned.KEPT),
        (run(*SCATTERED, fate=PlanFate.FOLLOWED, known=29), Learned.KEPT),
        (run(*SCATTERED, fate=PlanFate.FOLLOWED, known=28), Learned.ADDED),
    ],
    ids=["scattered", "onward", "back", "little", "wrong", "right", "cut short", "nearly", "more"],
)
def test_what_is_made_of_a_run(told: RankRun, what: Learned) -> None:
    assert lesson(told) is what


class Home:
    """Of a user, and what a run has shown."""

    def __init__(self, directory: Path) -> None:
        self.site = directory / "site"
        self.own = directory / "uffdprefetch" / "profiles" / "mine.ranges"
        self.found: dict[str, str] = {}
        self.told: list[RankRun] = []
        self._plans: Any = SimpleNamespace(
            found=self.found.update, end=lambda: self.told, counts=lambda: (0, 0)
        )
        self._opener: Any = SimpleNamespace(run=lambda work, then: then(work()))

    def learn(self, *told: RankRun) -> dict[str, Any]:
        self.told = list(told)
        options = LearnOptions("mine", directory=str(self.site))
        learned = LearnedOrders(options, self._plans, self._opener)
        learned.end()
        learned.end()
        learned.join(HANG_SECONDS)
        return {name: count for name, count in learned.describe().items() if count}

    def follow(self) -> str | None:
        """The plan that the next run follows."""
        directories = [str(self.own), str(self.site / "mine.ranges")]
        return learned_orders.kept_in(directories, str(self.own)).get(NAME)

    def spans(self) -> array[int]:
        path = learned_ranges.document_path(str(self.own), NAME)
        return learned_plan.load(path).spans(SIZE)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Home(tmp_path)


def test_an_order_is_written_once_and_found_the_next_time(home: Home) -> None:
    told = home.learn(run(*SCATTERED))
    assert told["written"] == 1 and home.found == {}
    assert home.spans()[::2].tolist() == [block * BLOCK for block in SCATTERED]
    taken = sum(os.stat(home.own / name).st_size for name in os.listdir(home.own))
    assert told["bytes"] == taken
    home.learn()
    assert home.found == {NAME: f"{home.own}/{NAME}.json"}


def test_nothing_is_written_of_what_needs_no_plan(home: Home) -> None:
    assert home.learn(run(*range(500)), run(3)) == {"in_order": 1, "little": 1}
    assert not home.own.exists()


def test_what_the_next_run_comes_to_beyond_is_added(home: Home) -> None:
    home.learn(run(*SCATTERED[:16]))
    path = f"{home.own}/{NAME}.json"
    more = run(*reversed(SCATTERED), fate=PlanFate.FOLLOWED, known=16, plan=path)
    assert home.learn(more)["added"] == 1
    wanted = [*SCATTERED[:16], *reversed(SCATTERED[16:])]
    assert home.spans()[::2].tolist() == [block * BLOCK for block in wanted]


def test_a_wrong_order_goes_and_the_run_after_it_is_learned_anew(home: Home) -> None:
    home.learn(run(*SCATTERED))
    path = f"{home.own}/{NAME}.json"
    wrong = run(*SCATTERED[::-1], fate=PlanFate.DROPPED, known=32, plan=path)
    assert home.learn(wrong) == {"removed": 1}
    assert learned_ranges.names(str(home.own)) == []
    assert home.learn(run(*SCATTERED[::-1]))["written"] == 1


def test_who_never_repeats_itself_pays_more_and_more_rarely(home: Home) -> None:
    """Each run goes another way: whatever was kept is wrong."""
    came = []
    for seed in range(20):
        blocks = random.Random(seed).sample(SCATTERED, len(SCATTERED))
        known = home.follow()
        if known is None:
            told = home.learn(run(*blocks))
        else:
            told = home.learn(run(*blocks, fate=PlanFate.DROPPED, known=32, plan=known))
        told.pop("bytes", 0)
        came += told
    wrong = [at for at, what in enumerate(came) if what == "removed"]
    assert wrong == [1, 3, 6, 11] and came.count("put_off") == 1 + 3 + 7


def test_who_begins_to_repeat_itself_is_followed_and_then_believed_again(home: Home) -> None:
    for _ in range(3):
        while (known := home.follow()) is None:
            home.learn(run(*SCATTERED))
        home.learn(run(*SCATTERED[::-1], fate=PlanFate.DROPPED, known=32, plan=known))
    while (known := home.follow()) is None:
        home.learn(run(*SCATTERED))
    assert home.learn(run(*SCATTERED, fate=PlanFate.FOLLOWED, known=32, plan=known))["kept"] == 1
    assert learned_ranges.doubted(str(home.own)) == set()


def test_an_order_that_is_not_to_be_learned_is_not_had_from_a_site(home: Home) -> None:
    learned_ranges.store(str(home.site / "mine.ranges"), NAME, "/data", array("q", [0, BLOCK]))
    for _ in range(2):
        wrong = run(*SCATTERED, fate=PlanFate.DROPPED, known=1, plan=home.follow())
        home.learn(wrong)
    assert home.follow() is None
    learned_ranges.remove_all(str(home.own))
    assert home.follow() == learned_ranges.document_path(str(home.site / "mine.ranges"), NAME)


@pytest.mark.parametrize("text", [b"", b"1", b"many 3", b"1 2 3", b"9" * 80])
def test_a_damaged_doubt_is_none(home: Home, text: bytes) -> None:
    home.own.mkdir(parents=True)
    (home.own / f"{NAME}.drops").write_bytes(text)
    assert home.learn(run(*SCATTERED))["written"] == 1


def test_a_sites_order_is_never_changed_and_an_own_one_takes_the_place_of_a_wrong_one(
    home: Home,
) -> None:
    site = home.site / "mine.ranges"
    learned_ranges.store(str(site), NAME, "/data", array("q", [0, BLOCK]))
    before = {name: (site / name).read_bytes() for name in os.listdir(site)}
    home.learn()
    assert home.found == {NAME: f"{site}/{NAME}.json"}
    wrong = run(*SCATTERED, fate=PlanFate.DROPPED, known=1, plan=home.found[NAME])
    assert home.learn(wrong)["written"] == 1
    home.found.clear()
    home.learn()
    assert home.found == {NAME: f"{home.own}/{NAME}.json"}
    assert {name: (site / name).read_bytes() for name in os.listdir(site)} == before


@pytest.mark.parametrize("where", ["a file lies there", "no home"])
def test_where_nothing_can_be_kept_that_is_told_and_nothing_else_happens(
    home: Home, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "")
    else:
        home.own.parent.parent.write_text("no directory")
        told: list[str] = []
        monkeypatch.setattr(learned_orders.log, "warning", lambda *words: told.append(words[0]))
        home.learn()
        assert len(told) == 1
    assert home.learn(run(*SCATTERED), run(3)) == {"failed": 1, "little": 1}
