# SPDX-License-Identifier: Apache-2.0
"""readers/planned_files.py: a rank's epochs of files by a plan, one after the other, one ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
from asked_orders import Job
from conftest import warnings_fail
from test_announced_files import Follower, path_order

from uffdprefetch.orders.file_order import AROUND_FILES, FileOrder
from uffdprefetch.readers.planned_files import PlannedFiles, say_unread

pytestmark = warnings_fail


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    made = Job(tmp_path, monkeypatch)

    def file_order(told: str) -> object:
        if told == "gone":
            raise FileNotFoundError(told)
        return path_order()

    monkeypatch.setattr(made.helper, "file_order", file_order, raising=False)
    return made


def planned(job: Job, follower: Follower) -> PlannedFiles:
    return PlannedFiles(job.helper, follower, job.ledger, job.comes)  # type: ignore[arg-type]


def asked(job: Job) -> list[tuple[int, int]]:
    return [(each["rank"], each["epoch"]) for each in job.helper.asked]


def test_each_rank_is_asked_for_its_epochs_one_ahead(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = Follower()
    files = planned(job, follower)
    files.begin(10, 3)
    files.begin(10, 3)
    files.step()
    assert asked(job) == [(3, 0)], "it is not answered yet"
    job.helper.answer(file_order="some")
    (order,) = follower.orders
    assert (order.how, job.came) == ("--plan", 1)
    monkeypatch.setattr(FileOrder, "__len__", lambda self: AROUND_FILES + 4)
    order.said(2)
    files.step()
    assert asked(job) == [(3, 0)], "its end is far away"
    order.said(4)
    files.step()
    assert asked(job) == [(3, 0), (3, 1)]
    job.helper.answer(file_order="some")
    monkeypatch.setattr(FileOrder, "__len__", lambda self: 6)
    files.step()
    assert len(job.helper.asked) == 2, "that has not begun, short as it is"
    follower.orders[1].said(1)
    files.step()
    job.helper.answer(file_order=None)
    follower.orders[1].said(6)
    files.step()
    assert asked(job) == [(3, 0), (3, 1), (3, 2)], "there is no further epoch"
    files.end(10)
    assert follower.forgotten == [(10, follower.orders)], "the first was never read to its end"


def test_an_order_that_is_done_is_not_kept(job: Job) -> None:
    follower = Follower()
    files = planned(job, follower)
    files.begin(10, 0)
    for _ in range(2):
        job.helper.answer(file_order="some")
        follower.orders[-1].said(6)
        files.step()
    job.helper.answer(file_order="some")
    files.end(10)
    assert follower.forgotten == [(10, follower.orders[2:])]


def test_what_is_wrong_is_told_once_and_asked_no_more(job: Job) -> None:
    for peer, answer in enumerate(({"error": "no such path"}, {"file_order": "gone"})):
        follower = Follower()
        files = planned(job, follower)
        files.begin(peer, None)
        job.helper.answer(**answer)
        files.step()
        assert len(job.helper.asked) == peer + 1 and follower.orders == []
    assert [line.split(":")[0] for line in job.ledger.degradations] == ["--plan", "--plan"]


def test_an_answer_for_a_process_that_has_ended_is_of_nobody(job: Job) -> None:
    follower = Follower()
    files = planned(job, follower)
    files.begin(10, 0)
    files.end(10)
    job.helper.answer(file_order="some")
    assert follower.orders == [] and follower.forgotten == [(10, [])]


def test_that_nobody_reads_a_plans_files_is_said_where_it_has_any(job: Job) -> None:
    for answer in ({"file_order": None}, {"error": "no such path"}, {"file_order": "some"}):
        assert job.ledger.degradations == []
        say_unread(job.helper, job.ledger)  # type: ignore[arg-type]
        job.helper.answer(**answer)
    (line,) = job.ledger.degradations
    assert line.startswith("--plan: its files are not read ahead: ")


def test_a_plan_of_which_no_file_is_opened_is_told(job: Job) -> None:
    follower = Follower()
    files = planned(job, follower)
    files.say_unopened()
    assert job.ledger.degradations == [], "no order has come: the job was too short"
    files.begin(10, 0)
    job.helper.answer(file_order="some")
    files.begin(11, 1)
    job.helper.answer(file_order="some")
    files.say_unopened()
    (said,) = job.ledger.noted.limits
    assert said.is_asked and said.text.startswith("--plan: of its 6 files none was seen to be")


@pytest.mark.parametrize("ended", [False, True])
def test_one_file_is_enough(job: Job, ended: bool) -> None:
    follower = Follower()
    files = planned(job, follower)
    for peer in (10, 11):
        files.begin(peer, peer)
        job.helper.answer(file_order="some")
    (path,) = follower.orders[1].order.paths(3, 4)
    follower.orders[1].opened(path)
    if ended:
        files.end(11)
    files.say_unopened()
    assert job.ledger.degradations == []
