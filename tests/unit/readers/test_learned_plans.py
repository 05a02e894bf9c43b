# SPDX-License-Identifier: Apache-2.0
"""readers/learned_plans.py: which orders are asked for, who is asked first, and what there is to be
learned."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asked_orders import Job, only
from conftest import warnings_fail
from planned_readers import reads

from uffdprefetch.orders.learned_ranges import name_of
from uffdprefetch.predict.first_touches import RankOf
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers.learned_plans import LearnedPlans, PlanFate
from uffdprefetch.readers.order_sources import PlanFile
from uffdprefetch.sense.observation import Batch, Observation
from uffdprefetch.state.reader import Reader

pytestmark = warnings_fail

BLOCK = 64 << 10


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


@pytest.fixture
def learned(job: Job) -> LearnedPlans:
    made = LearnedPlans(job.helper, job.known_orders, job.ledger, job.comes)  # type: ignore[arg-type]
    job.known_orders.sources.append(made)
    return made


def kept(reader: Reader, rank: int, world: int = 8) -> dict[str, str]:
    file = reader.file
    return {name_of(file.path, file.guard.times, RankOf(rank, world)): "/there.json"}


def sees(
    learned: LearnedPlans, reader: Reader, *blocks: int, told: bool = False,
    mode: ServingMode = ServingMode.PAGE_TABLES,
) -> None:  # fmt: skip
    """By one look, or by a fault for each."""
    region: Any = SimpleNamespace(reader=reader, file=reader.file, mode=mode)
    batch = Batch(region, 0)
    spans = [(block * BLOCK, (block + 1) * BLOCK) for block in blocks]
    if told:
        batch.touches = [Observation(a, b, 0) for a, b in spans]
    else:
        batch.found = spans
        batch.touches = [Observation(spans[0][0], spans[-1][1], 0, told=False)]
    learned.saw(batch)


# ---- what is asked ------------------------------------------------------------------------------


def test_without_orders_that_were_kept_nothing_is_started(job: Job, learned: LearnedPlans) -> None:
    learned.found({})
    reader = only(job.process(10, 3, "/train"))
    assert learned.readers(reader) == [] and not learned.pending(reader)
    assert (job.helper.starts, job.helper.asked, job.came) == (0, [], 0)


def test_an_order_of_that_rank_and_file_is_asked_for_and_followed(
    job: Job, learned: LearnedPlans
) -> None:
    client = job.process(10, 3, "/train")
    reader = only(client)
    learned.found(kept(reader, 3))
    assert (job.helper.starts, job.came) == (1, 1)
    (order,) = learned.readers(reader)
    assert not order.live and learned.pending(reader)
    (question,) = job.helper.asked
    assert (question["do"], question["plan"], question["rank"]) == ("learned", "/there.json", 3)
    job.helper.answer(order="some")
    assert job.known_orders.order_of(reader) is order
    assert (order.how, order.cursor.items) == ("--learn", 100)
    assert job.helper.orders["some"].in_blocks  # type: ignore[union-attr]
    assert learned.counts() == (1, 0)


@pytest.mark.parametrize(("rank", "world"), [(4, 8), (3, 4)])
def test_an_order_of_another_rank_or_number_of_ranks_is_none(
    job: Job, learned: LearnedPlans, rank: int, world: int
) -> None:
    reader = only(job.process(10, 3, "/train"))
    learned.found(kept(reader, rank, world))
    assert learned.readers(reader) == [] and job.helper.asked == []


def test_who_knows_better_is_asked_first(job: Job, learned: LearnedPlans) -> None:
    plan = PlanFile(job.helper, job.known_orders, job.ledger, job.comes)  # type: ignore[arg-type]
    job.known_orders.sources.insert(0, plan)
    reader = only(job.process(10, 3, "/train"))
    learned.found(kept(reader, 3))
    assert job.known_orders.order_of(reader) is None  # both are asked for
    job.helper.answer(1, order="some")
    assert job.known_orders.order_of(reader) is learned.readers(reader)[0]
    job.helper.answer(0, order="more")
    assert job.known_orders.order_of(reader) is plan.readers(reader)[0]


def test_a_damaged_order_is_told_once_and_the_reader_is_served_as_without(
    job: Job, learned: LearnedPlans
) -> None:
    reader = only(job.process(10, 3, "/train"))
    learned.found(kept(reader, 3))
    learned.readers(reader)
    assert job.known_orders.order_of(reader) is None
    job.helper.answer(error="/there.json: no JSON")
    assert job.ledger.degradations == ["--learn: /there.json: no JSON"]
    for _ in range(3):
        assert job.known_orders.order_of(reader) is None and not learned.pending(reader)
    assert len(job.helper.asked) == 1 and learned.counts() == (0, 0)


# ---- what is learned ----------------------------------------------------------------------------


def runs(learned: LearnedPlans) -> dict[tuple[str, int], list[int]]:
    """By file and rank, the blocks at which runs begin."""
    return {
        (run.file.path, int(run.name.split("-")[2].split("of")[0])): [
            at // BLOCK for at in run.touches.spans[::2]
        ]
        for run in learned.end()
    }


def test_what_a_rank_touches_is_kept_by_file_and_rank(job: Job, learned: LearnedPlans) -> None:
    one, two = job.process(10, 0, "/train", "/valid"), job.process(11, 1, "/train")
    worker = job.process(12, 0, "/train")
    sees(learned, one.regions[0].reader, 7, 9)
    sees(learned, only(two), 3)
    sees(learned, one.regions[1].reader, 1)
    sees(learned, only(worker), 5, 7)
    assert runs(learned) == {("/train", 0): [7, 9, 5], ("/train", 1): [3], ("/valid", 0): [1]}


def test_in_the_pool_faults_tell_and_what_it_has_mapped_does_not(
    job: Job, learned: LearnedPlans
) -> None:
    reader = only(job.process(10, 0, "/train"))
    sees(learned, reader, 7, 3, told=True, mode=ServingMode.POOL)
    sees(learned, reader, 20, 21, mode=ServingMode.POOL)
    sees(learned, reader, 30, mode=ServingMode.READS)
    assert runs(learned) == {("/train", 0): [7, 3]}


def test_where_the_order_is_known_from_elsewhere_nothing_is_learned(
    job: Job, learned: LearnedPlans
) -> None:
    plan = PlanFile(job.helper, job.known_orders, job.ledger, job.comes)  # type: ignore[arg-type]
    job.known_orders.sources.insert(0, plan)
    known, other = (only(job.process(10 + rank, rank, "/train")) for rank in (0, 1))
    sees(learned, known, 7)
    plan.readers(known)
    assert job.known_orders.order_of(known) is None
    job.helper.answer(order="some")
    known.order.followed = True
    for reader in (known, other):
        sees(learned, reader, 3)
    assert runs(learned) == {("/train", 1): [3]}


def test_an_order_that_was_learned_is_no_reason_to_learn_nothing(
    job: Job, learned: LearnedPlans
) -> None:
    reader = only(job.process(10, 3, "/train"))
    learned.found(kept(reader, 3))
    learned.readers(reader)
    assert job.known_orders.order_of(reader) is None
    job.helper.answer(order="some")
    reader.order.followed = True
    sees(learned, reader, 9)
    (run,) = learned.end()
    assert (run.fate, run.plan, run.touches.blocks) == (PlanFate.FOLLOWED, "/there.json", 1)
    cursor = learned.readers(reader)[0].cursor
    assert cursor is not None and run.known_bytes == cursor.total_bytes


def test_a_wrong_order_is_told_as_that(job: Job, learned: LearnedPlans) -> None:
    reader = only(job.process(10, 3, "/train"))
    learned.found(kept(reader, 3))
    (order,) = learned.readers(reader)
    assert job.known_orders.order_of(reader) is None
    job.helper.answer(order="some")
    reads(order, range(100, 110))
    order.dropped = "it was wrong"
    sees(learned, reader, 9)
    (run,) = learned.end()
    assert run.fate is PlanFate.DROPPED and learned.counts() == (1, 1)


def test_after_the_end_nothing_is_noted(job: Job, learned: LearnedPlans) -> None:
    reader = only(job.process(10, 3, "/train"))
    sees(learned, reader, 9)
    (run,) = learned.end()
    sees(learned, reader, 11)
    assert run.touches.blocks == 1
