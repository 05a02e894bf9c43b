# SPDX-License-Identifier: Apache-2.0
"""What the hook says of an epoch as it goes, and that the job notices nothing of it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from paths import SUPPORT
from torch_service import (
    ENDED,
    HAVE_TORCH,
    Listener,
    ReceivedAnnouncement,
    job_environment,
    output_of,
)

pytestmark = [
    pytest.mark.skipif(not HAVE_TORCH, reason="torch is not installed"),
    pytest.mark.torch,
]

SCENES = SUPPORT / "torch_scenes.py"
NAMES = (
    "progress 0", "progress 2", "before_workers", "early_end", "early_end_persistent",
    "two_iterators", "iterator_without_loader", "many_loaders", "nothing_stays",
    "nothing_pickled", "failing 0", "failing 2", "drawn_between", "unsized", "handler_raises",
    "changed_methods", "late lists", "late lists fork", "late lists spawn", "late lists forkserver",
)  # fmt: skip
#: Scenes that must go the same way without the hook.
COMPARED = ("failing 0", "failing 2", "unsized", "handler_raises", "nothing_pickled")


@dataclass
class Played:
    """All scenes, played once by one process under the hook."""

    seen: dict[str, Any]
    by_scene: dict[str, list[ReceivedAnnouncement]]
    all: list[ReceivedAnnouncement]
    heard: list[list[bytes]]

    def result(self, name: str) -> Any:
        return self.seen[name]["result"]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    service = Listener(tmp_path_factory.mktemp("service"))
    try:
        seen = output_of("-W", "ignore", SCENES, *NAMES, environment=service.environment())
        everything = service.announced()
    finally:
        service.close()
    pid = seen["late lists"]["result"]
    own = {a.number: a for a in everything if a.pid == pid}
    by_scene = {name: [own[n] for n in said["announced"]] for name, said in seen.items()}
    yield Played(seen, by_scene, everything, service.heard)


@pytest.fixture(scope="module")
def plain() -> Any:
    """The scenes that are compared, without the hook."""
    return output_of("-W", "ignore", SCENES, *COMPARED, "drawn_between",
                     environment=job_environment())  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
def test_progress_counts_the_items_of_delivered_batches_and_ends(
    played: Played, workers: int
) -> None:
    assert played.result(f"progress {workers}") == [4, 8, 10, ENDED | 10]
    (said,) = played.by_scene[f"progress {workers}"]
    assert (said.reader, said.items) == ("loader-1", 10)


def test_an_order_is_announced_before_workers_are_started_and_once(played: Played) -> None:
    assert played.result("before_workers") == [1, 1, 1, 3]
    orders = [said.order() for said in played.by_scene["before_workers"]]
    assert len({tuple(order) for order in orders}) == 3


def test_an_epoch_that_is_left_has_ended_and_the_next_one_begins_anew(played: Played) -> None:
    assert played.result("early_end") == [2, ENDED | 2, 2, ENDED | 2]
    first, second = played.by_scene["early_end"]
    assert first.reader == second.reader
    assert first.order() != second.order()


def test_a_persistent_iterators_next_epoch_takes_the_place_of_the_one_that_was_left(
    played: Played,
) -> None:
    assert played.result("early_end_persistent") == [2, 2, 4, 6]
    assert len(played.by_scene["early_end_persistent"]) == 2


def test_of_two_iterators_of_a_loader_the_later_one_counts(played: Played) -> None:
    assert played.result("two_iterators") == [2, 2, 4]


def test_a_name_is_not_given_away_while_an_iterator_still_reads_under_it(played: Played) -> None:
    first, second = played.result("iterator_without_loader")
    assert first != second


def test_a_loader_for_every_epoch_is_one_reader(played: Played) -> None:
    said = played.by_scene["many_loaders"]
    assert len(said) == 600
    assert {(a.reader, a.slot) for a in said} == {("loader-1", 1)}


def test_loader_data_set_and_iterator_are_not_kept_alive(played: Played) -> None:
    assert played.result("nothing_stays") == [True, True, True]


def test_the_jobs_objects_are_pickled_as_before(played: Played) -> None:
    assert played.result("nothing_pickled") is True


@pytest.mark.parametrize("name", COMPARED)
def test_scenes_go_as_without_the_hook(played: Played, plain: Any, name: str) -> None:
    assert played.result(name) == plain[name]["result"]


def test_an_exception_of_the_data_set_reaches_the_job_and_progress_goes_on(
    played: Played,
) -> None:
    seen = played.result("failing 0")
    assert seen[2] == [
        "FileNotFoundError", "[Errno 2] no such record: 'record-5'",
        "(2, 'no such record')", None, None,
    ]  # fmt: skip
    assert seen[3:] == [[6, 7], [8, 9]]


def test_what_a_signal_handler_of_the_job_raises_is_not_swallowed(played: Played) -> None:
    assert played.result("handler_raises") == "raised"


def test_a_data_set_without_length_is_left_alone(played: Played) -> None:
    assert played.result("unsized") == [[3, 1], [2]]
    assert played.by_scene["unsized"] == []


def test_an_order_that_proves_wrong_is_taken_back_and_never_tried_a_third_time(
    played: Played, plain: Any
) -> None:
    seen = played.result("drawn_between")
    assert seen["read"] == plain["drawn_between"]["result"]["read"]
    assert len(played.by_scene["drawn_between"]) == 2
    # RandomSampler draws 32 at once: the fourth batch has some from after the job's own draws.
    assert seen["said"] == 2 * [10, 20, 30, *7 * [ENDED | 30]] + 20 * [ENDED | 30]


def test_wrapped_methods_look_like_torchs(played: Played) -> None:
    names, qualified = played.result("changed_methods")
    assert names == ["__init__", "__next__", "_next_index", "_reset"]
    assert qualified == [f"_BaseDataLoaderIter.{name}" for name in names]


@pytest.mark.parametrize("context", ["", " fork", " spawn", " forkserver"])
def test_keys_that_a_data_set_reads_with_its_first_sample_are_published_once(
    played: Played, context: str
) -> None:
    job = played.result("late lists")
    path = f"data-{context.strip()}"
    (token,) = {a.parts[0]["token"] for a in played.by_scene[f"late lists{context}"]
                if a.reader.startswith("loader-")}  # fmt: skip
    late = [a for a in played.all if a.reader == f"lists-{token}"]
    assert len(late) == 1
    (part,) = late[0].parts
    assert late[0].items == 0
    assert (part["what"], part["token"], part["parent"]) == ("lists", token, job)
    assert late[0].lists() == {"keys": [b"%s/%d" % (path.encode(), i) for i in range(12)]}
    assert (late[0].pid == job) == (context == "")


def test_every_announcement_is_told_to_the_service(played: Played) -> None:
    # and a process that has imported torch says that there will be some: number 0
    numbers = [struct.unpack_from("<I", messages[1], 16)[0] for messages in played.heard]
    assert sum(number > 0 for number in numbers) == len(played.all)
    assert 0 in numbers
    assert all(len(messages) == 2 for messages in played.heard)
