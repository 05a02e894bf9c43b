# SPDX-License-Identifier: Apache-2.0
"""readers/order_sources.PlanFile: which orders are asked for and when; the answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from asked_orders import Job, only
from conftest import warnings_fail
from planned_readers import RECORD, SIZE, place, reads

from uffdprefetch.readers.order_sources import PlanFile
from uffdprefetch.state.reader import reader_of

pytestmark = warnings_fail


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


@pytest.fixture
def plan(job: Job) -> PlanFile:
    made = PlanFile(job.helper, job.known_orders, job.ledger, job.comes)  # type: ignore[arg-type]
    job.known_orders.sources.append(made)
    return made


def test_each_rank_has_one_reader_in_each_file(job: Job, plan: PlanFile) -> None:
    ranks = [job.process(10 + rank, rank, "/train") for rank in (0, 1)]
    other = job.process(20, 1, "/train", "/valid")
    (first,), (second,) = (plan.readers(only(client)) for client in ranks)
    assert plan.readers(other.regions[0].reader) == [second] and second is not first
    (third,) = plan.readers(other.regions[1].reader)
    assert job.known_orders.all == [first, second, third]
    assert [(r.rank, r.file.path) for r in job.known_orders.all] == [
        (0, "/train"), (1, "/train"), (1, "/valid"),
    ]  # fmt: skip


def test_a_file_that_was_closed_and_is_opened_again_has_its_order(job: Job, plan: PlanFile) -> None:
    client = job.process(10, 0, "/train")
    (order,) = plan.readers(only(client))
    old = job.files.pop("/train")
    again = job.file("/train")
    again.key = old.key
    client.regions[0].reader = reader_of(client, again)
    assert plan.readers(only(client)) == [order] and order.file is again


def test_an_order_is_asked_for_once_and_the_next_when_it_is_needed(
    job: Job, plan: PlanFile
) -> None:
    client = job.process(10, 3, "/train")
    assert not plan.pending(only(client))
    (reader,) = plan.readers(only(client))
    for _ in range(3):
        assert not reader.live and plan.pending(only(client))
    assert job.helper.asked == [
        {"do": "plan", "path": "/train", "key": (0, 1, SIZE, 0), "rank": 3, "epoch": 0}
    ]
    seen: list[bool] = []
    plan._came = lambda: seen.append(reader.live)
    job.helper.answer(order="some")
    assert seen == [True], "it is there when this is told"
    assert not plan.pending(only(client)) and place(reader) == (0, 0)
    assert reader.look() is reader.look(), "it is given once"
    reads(reader, range(100, 150))
    assert len(job.helper.asked) == 1 and reader.how == "--plan"
    for _ in range(3):
        list(reader.epochs.due(100 * RECORD))
    assert [question["epoch"] for question in job.helper.asked] == [0, 1]
    job.helper.answer(order="more")
    reads(reader, range(500, 504))
    assert place(reader) == (1, 4)


def test_after_the_last_epoch_nothing_is_asked_or_followed(job: Job, plan: PlanFile) -> None:
    client = job.process(10, 0, "/train")
    (reader,) = plan.readers(only(client))
    assert not reader.live
    job.helper.answer(order="some")
    reads(reader, range(100, 200))
    list(reader.epochs.due(RECORD))
    assert reader.live
    job.helper.answer(order=None)
    assert not reader.live and not plan.pending(only(client))
    for _ in range(3):
        list(reader.epochs.due(RECORD))
    assert len(job.helper.asked) == 2 and job.ledger.degradations == []


def test_a_rank_that_the_plan_does_not_name_is_waited_for_no_longer(
    job: Job, plan: PlanFile
) -> None:
    client = job.process(10, 7, "/train")
    (reader,) = plan.readers(only(client))
    assert not reader.live
    job.helper.answer(order=None)
    assert reader.over and not plan.pending(only(client)) and not reader.live
    assert len(job.helper.asked) == 1 and job.came == 1


def test_an_estimated_order_is_followed_until_the_right_one_comes(job: Job, plan: PlanFile) -> None:
    client = job.process(10, 0, "/train")
    (reader,) = plan.readers(only(client))
    assert not reader.live
    job.helper.answer(order="some", early=True)
    assert reader.live and reader.how == "--plan, estimated" and reader.cursor.items == 100
    reads(reader, range(100, 103))
    job.helper.answer(order="more")
    assert reader.live and reader.how == "--plan" and reader.cursor.items == 20
    assert place(reader) == (0, 3)


def test_of_two_answers_the_later_one_is_followed(job: Job, plan: PlanFile) -> None:
    client = job.process(10, 0, "/train")
    (reader,) = plan.readers(only(client))
    assert not reader.live
    job.helper.answer(order="some", early=True)
    job.helper.answer(order="more")
    assert reader.live and reader.cursor.items == 20


@pytest.mark.parametrize("error", [OSError("gone"), ValueError("short")])
def test_an_order_that_cannot_be_had_is_told_of(job: Job, plan: PlanFile, error: Exception) -> None:
    client = job.process(10, 0, "/train")
    (reader,) = plan.readers(only(client))
    assert not reader.live
    job.helper.orders["some"] = error
    job.helper.answer(order="some")
    assert reader.over
    other = job.process(11, 1, "/train")
    (reader,) = plan.readers(only(other))
    assert not reader.live
    job.helper.answer(error="the helper has ended")
    assert reader.over
    assert job.ledger.degradations == [
        f"--plan: an order cannot be mapped: {error}", "--plan: the helper has ended",
    ]  # fmt: skip
