# SPDX-License-Identifier: Apache-2.0
"""readers/announced_files.py: how an order of whole files comes of an announcement: the directories
to watch, the opens that the helper hears of, the order, and its end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked_orders import Job
from conftest import warnings_fail
from test_announced_orders import progress, written

from uffdprefetch.base.clock import MS
from uffdprefetch.job.channel import ENDED, packed
from uffdprefetch.orders.file_order import FileOrder, PathColumn, PathOrder, of_items
from uffdprefetch.orders.key_lists import KeyList
from uffdprefetch.orders.opens import OPENS_MAX
from uffdprefetch.readers.order_sources import Announcements

pytestmark = warnings_fail

SAMPLES = ({"what": "samples", "array": "s", "samples": 6, "token": "t", "ahead": 2},)


class Follower:
    """Takes notes of what is watched and followed."""

    def __init__(self) -> None:
        self.ready, self.seen = False, list[str]()
        self.watched: list[str] = []
        self.orders: list[FileOrder] = []
        self.forgotten: list[tuple[int, list[FileOrder]]] = []

    def watch(self, peer: int, directories: Sequence[str]) -> bool:
        assert peer == 10
        self.watched = list(directories)
        return self.ready

    def opened(self, peer: int) -> Sequence[str]:
        return self.seen

    def follow(self, peer: int, order: FileOrder, after: FileOrder | None = None) -> None:
        assert after is None or after is self.orders[-1]
        self.orders.append(order)

    def forget(self, peer: int, orders: Sequence[FileOrder]) -> None:
        self.forgotten.append((peer, list(orders)))


def path_order() -> PathOrder:
    names = [f"/d/{i}".encode() for i in range(6)]
    column = PathColumn(KeyList.parse("n", "bytes", packed(names)))
    return of_items([column], [np.arange(6)[::-1]], np.arange(6), 6)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    made = Job(tmp_path, monkeypatch)

    def file_order(told: Any) -> PathOrder:
        if told == "gone":
            raise FileNotFoundError("gone")
        return path_order()

    monkeypatch.setattr(made.helper, "file_order", file_order, raising=False)
    return made


@pytest.fixture
def follower() -> Follower:
    return Follower()


@pytest.fixture
def heard(job: Job, follower: Follower) -> Iterator[Announcements]:
    made = Announcements(
        job.helper, job.known_orders, job.ledger, lambda: job.clients, job.comes, follower,  # type: ignore[arg-type]
    )  # fmt: skip
    yield made
    for fd in made._progress.values():
        os.close(fd)


def look(job: Job, heard: Announcements, items: int) -> dict[str, Any]:
    """The opens in the question after so many items."""
    progress(job, 1, items)
    job.now += 10_000 * MS
    heard.look(job.now)
    opens: dict[str, Any] = job.helper.asked[-1]["opens"]
    return opens


def test_directories_are_watched_before_opens_are_compared(
    job: Job, heard: Announcements, follower: Follower
) -> None:
    job.process(10, 4)  # it maps nothing
    written(job, 1, items=6, parts=SAMPLES)
    heard.announced(10, 10, 1)
    assert job.helper.asked[-1]["files"] == []
    assert job.helper.asked[-1]["opens"] == {"paths": [], "directories": [], "since_items": None}
    job.helper.answer(watch=["/d", "/e"], again=True)
    assert follower.watched == ["/d", "/e"]
    opens = look(job, heard, 1)
    assert (opens["directories"], opens["since_items"]) == (["/d", "/e"], None)
    follower.ready = True
    job.helper.answer(watch=["/f"], again=True)
    follower.seen = [f"/d/{i}" for i in range(OPENS_MAX + 9)]
    opens = look(job, heard, 3)
    assert (opens["directories"], opens["since_items"]) == (["/d", "/e"], 1)
    assert opens["paths"] == follower.seen[-OPENS_MAX:]
    assert follower.orders == []
    job.helper.answer(again=True)
    follower.ready = False  # opens were lost
    assert look(job, heard, 4)["since_items"] is None
    follower.ready = True
    job.helper.answer(again=True)
    assert look(job, heard, 5)["since_items"] == 4, "what is compared begins anew"


def test_an_order_of_files_is_followed_to_its_end(
    job: Job, heard: Announcements, follower: Follower
) -> None:
    job.process(10, 4)
    written(job, 1, items=6, parts=SAMPLES)
    heard.announced(10, 10, 1)
    job.helper.answer(again=True)
    look(job, heard, 2)
    job.helper.answer(file_orders=[{"part": 0, "order": "some", "how": "files .n"}])
    (order,) = follower.orders
    assert (order.position, order.how) == (2, "loader: files .n")
    assert order.ahead(order.position, 2) == ["/d/3", "/d/2"]
    asked = len(job.helper.asked)
    look(job, heard, 4)
    assert (order.position, len(job.helper.asked)) == (4, asked), "nothing is left to be asked"
    progress(job, 1, 6 | ENDED)
    heard.look(job.now)
    assert follower.forgotten == [(10, [order])] and not heard.any


def test_what_a_program_announces_is_asked_for_though_it_maps_nothing(
    job: Job, heard: Announcements, follower: Follower
) -> None:
    job.process(10, 4)
    written(job, 1, items=6, parts=({"what": "paths", "array": "p", "cwd": "/"},))
    heard.announced(10, 10, 1)
    told = [{"part": 0, "order": order, "how": "x"} for order in ("some", "gone")]
    job.helper.answer(again=True, file_orders=told)
    assert len(follower.orders) == 1 and "cannot be mapped" in job.ledger.degradations[0]
    assert look(job, heard, 1) and job.helper.asked[-1]["done"] == [(0, "")]
    heard.forget_process(10)
    assert follower.forgotten == [(10, follower.orders)]


def test_records_are_no_order_of_files(job: Job, heard: Announcements, follower: Follower) -> None:
    job.process(10, 4)
    written(job, 1)
    heard.announced(10, 10, 1)
    assert job.helper.asked == [], "it maps nothing"
