# SPDX-License-Identifier: Apache-2.0
"""readers/order_sources.Announcements: what is asked of an announcement and how often, who follows
its order,
and when that ends."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asked_orders import Job, only
from conftest import warnings_fail
from planned_readers import SIZE, place, reads

from uffdprefetch.base.clock import MS
from uffdprefetch.job.channel import ENDED, SCHEMA
from uffdprefetch.orders.announcement import AnnounceError
from uffdprefetch.predict.bounds import DECIDE_NS, LATELY_NS
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers import order_sources
from uffdprefetch.readers.order_sources import Announcements
from uffdprefetch.sense.pagetables import LOOKS

pytestmark = warnings_fail


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


@pytest.fixture
def heard(job: Job) -> Iterator[Announcements]:
    made = Announcements(
        job.helper,
        job.known_orders,
        job.ledger,
        lambda: job.clients,
        job.comes,  # type: ignore[arg-type]
    )
    job.known_orders.sources.append(made)
    yield made
    for fd in made._progress.values():
        os.close(fd)


def written(
    job: Job,
    number: int,
    items: int = 100,
    slot: int = 1,
    reader: str = "loader",
    pid: int = 10,
    parts: tuple[dict[str, Any], ...] = ({"what": "records", "array": "a"},),
) -> Path:
    """An announcement's files."""
    value = {
        "schema": SCHEMA, "pid": pid, "number": number, "reader": reader, "slot": slot,
        "items": items, "parts": parts,
    }  # fmt: skip
    path = job.directory / f"{pid}-{number}.json"
    path.write_text(json.dumps(value))
    progress(job, slot, 0, pid)
    return path


def progress(job: Job, slot: int, items: int, pid: int = 10) -> None:
    with open(job.directory / f"{pid}.progress", "ab") as file:
        os.truncate(file.fileno(), max(file.tell(), 8 * slot + 8))
    with open(job.directory / f"{pid}.progress", "r+b") as file:
        file.seek(8 * slot)
        file.write(struct.pack("<Q", items))


def part(name: str = "some", number: int = 0, file: int = 0) -> dict[str, Any]:
    return {"part": number, "file": file, "order": name, "how": "records"}


def followed(job: Job, heard: Announcements) -> Any:
    """The reader of an announcement of process 10, which maps a file."""
    job.process(10, 4, "/train")
    written(job, 1)
    heard.announced(10, 10, 1)
    job.helper.answer(orders=[part()])
    (reader,) = job.known_orders.all
    return reader


def test_that_there_will_be_announcements_starts_the_helper(job: Job, heard: Announcements) -> None:
    heard.announced(10, 10, 0)
    assert job.helper.starts == 1 and not heard.any


def test_what_orders_need_is_loaded_when_there_will_be_some() -> None:
    """Not with the service: a run without orders spares numpy."""
    script = """
import sys
from types import SimpleNamespace
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.readers import order_sources
known_orders, helper = SimpleNamespace(clock=None), SimpleNamespace(start=lambda: None)
heard = order_sources.Announcements(helper, known_orders, None, list, None)
needed = {"numpy", "uffdprefetch.orders.announcement", "uffdprefetch.predict.order.pieces"}
assert not needed & sys.modules.keys()
heard.announced(10, 10, 0)
assert needed <= sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_bytes_of_an_order_are_asked_for_in_what_its_processes_map(
    job: Job, heard: Announcements
) -> None:
    own = job.process(10, 4, "/train")
    worker = job.process(12, 4, "/train", "/valid", parents=(10,))
    stranger = job.process(13, 5, "/train", "/other")
    job.process(14, 4, "/modified", parents=(10,))
    job.file("/modified").guard.give_up("modified")
    written(job, 1)
    heard.announced(10, 10, 1)
    assert job.helper.starts == 1 and heard.any
    assert job.helper.asked == [{
        "do": "announced", "pid": 10, "number": 1, "process": 10, "said": 0, "done": [],
        "first": True,
        "files": [
            {"path": "/train", "regions": [[10, 10 << 32, 4096, SIZE], [12, 12 << 32, 4096, SIZE]]},
            {"path": "/valid", "regions": [[12, 12 << 32, 4096, SIZE]]},
        ],
    }]  # fmt: skip
    assert heard.pending(only(own)) and heard.pending(only(worker))
    assert not heard.pending(only(stranger))
    job.helper.answer(orders=[part("some", 0, 0), part("more", 1, 1)])
    train, valid = job.known_orders.all
    assert heard.readers(worker.regions[0].reader) == heard.readers(only(own)) == [train]
    assert heard.readers(worker.regions[1].reader) == [valid]
    assert heard.readers(only(stranger)) == []
    assert (train.live, train.rank, train.how) == (True, 4, "loader: records")
    assert train.cursor.items == 100 and not heard.pending(only(own)) and job.came == 1


def test_what_a_process_reads_by_calls_is_not_asked_of(job: Job, heard: Announcements) -> None:
    """Addresses tell which file an announced array lies in: there it has none."""
    process = job.process(10, 4, "/train", "/read")
    process.regions[1].mode = ServingMode.READS
    written(job, 1)
    heard.announced(10, 10, 1)
    assert [file["path"] for file in job.helper.asked[0]["files"]] == ["/train"]


def test_how_far_its_readers_may_be_ahead_of_what_they_tell_is_known(
    job: Job, heard: Announcements
) -> None:
    job.process(10, 4, "/train")
    written(job, 1, parts=({"what": "samples", "array": "some", "ahead": 96},))
    heard.announced(10, 10, 1)
    job.helper.answer(orders=[part()])
    assert [reader.ahead_items for reader in job.known_orders.all] == [96]


def test_the_rank_is_that_of_the_process_that_reads(job: Job, heard: Announcements) -> None:
    job.process(9, 2, "/train")
    assert followed(job, heard).rank == 4


def test_an_order_is_of_one_epoch(job: Job, heard: Announcements) -> None:
    reader = followed(job, heard)
    assert reader.live
    reads(reader, range(100, 200))
    assert not reader.live and not reader.over and reader.look() is reader.look()


def test_what_is_said_moves_the_reader(job: Job, heard: Announcements) -> None:
    reader = followed(job, heard)
    opened = dict(heard._progress)
    for said, at, came in ((0, 0, 1), (30, 30, 2), (30, 30, 2), (20, 30, 2), (31, 31, 3)):
        progress(job, 1, said)
        heard.look(job.now)
        assert (place(reader) if reader.look() else None, job.came) == ((0, at), came)
    assert heard.next_ns == job.now + DECIDE_NS and heard._progress == opened


def test_each_counter_is_its_own(job: Job, heard: Announcements) -> None:
    job.process(10, 4, "/train")
    for number in (1, 2):
        written(job, number, slot=number, reader=f"loader-{number}")
        heard.announced(10, 10, number)
        job.helper.answer(orders=[part()])
    first, second = job.known_orders.all
    progress(job, 2, 9)
    heard.look(job.now)
    assert second.look() and first.look() and (place(first), place(second)) == ((0, 0), (0, 9))


def test_what_was_said_before_the_order_came_counts(job: Job, heard: Announcements) -> None:
    job.process(10, 4, "/train")
    written(job, 1)
    progress(job, 1, 12)
    heard.announced(10, 10, 1)
    assert job.helper.asked[-1]["said"] == 12
    job.helper.answer(orders=[part()])
    assert place(job.known_orders.all[0]) == (0, 12)


def test_an_end_is_the_end_and_what_was_read_till_then_counts(
    job: Job, heard: Announcements
) -> None:
    reader = followed(job, heard)
    assert reader.live
    progress(job, 1, 70 | ENDED)
    heard.look(job.now)
    assert not heard.any and job.known_orders.all == [] and reader.ended
    assert job.known_orders.describe()[0]["read_items"] == 70
    assert not list(job.directory.glob("10-1.*")) and heard._progress == {}
    assert len(job.helper.asked) == 1


def test_an_end_before_the_order_came_is_an_end(job: Job, heard: Announcements) -> None:
    job.process(10, 4, "/train")
    written(job, 1)
    progress(job, 1, ENDED)
    heard.announced(10, 10, 1)
    assert not heard.any and job.helper.asked == []


@pytest.mark.parametrize("left", [None, 12])
def test_without_its_counter_an_announcement_has_ended(
    job: Job, heard: Announcements, left: int | None
) -> None:
    reader = followed(job, heard)
    progress(job, 1, 5)
    heard.look(job.now)
    path = job.directory / "10.progress"
    if left is None:
        os.close(heard._progress.pop(10))
        path.unlink()
    else:
        os.truncate(path, left)
    heard.look(job.now)
    assert not heard.any and reader.ended and job.known_orders.describe()[0]["read_items"] == 5


def test_a_dropped_order_is_not_taken_up_by_its_end(job: Job, heard: Announcements) -> None:
    reader = followed(job, heard)
    reads(reader, range(100, 103))
    reader.dropped = "wrong"
    progress(job, 1, 70 | ENDED)
    heard._heard[10, "loader"].items = 70
    heard.forget_process(10)
    assert job.known_orders.describe()[0]["read_items"] == 3 and heard._progress == {}


def test_a_new_order_of_the_same_reader_takes_the_place_of_the_last(
    job: Job, heard: Announcements
) -> None:
    first = followed(job, heard)
    assert first.live
    progress(job, 1, 40)
    written(job, 2, slot=2)
    heard.announced(10, 10, 2)
    assert first.ended and job.known_orders.describe()[0]["read_items"] == 40
    assert not (job.directory / "10-1.json").exists() and (job.directory / "10-2.json").exists()
    job.helper.answer(orders=[part("more")])
    (second,) = job.known_orders.all
    assert second.live and second.cursor.items == 20
    written(job, 3, slot=3, reader="another")
    heard.announced(10, 10, 3)
    assert job.known_orders.all == [second], "of another reader: both hold"


def test_an_answer_that_comes_too_late_is_of_nobody(job: Job, heard: Announcements) -> None:
    job.process(10, 4, "/train")
    for number in (1, 2):
        written(job, number, slot=number)
        heard.announced(10, 10, number)
    job.helper.answer(0, orders=[part()], error="of the first one")
    assert job.known_orders.all == [] and job.ledger.degradations == []
    job.helper.answer(1, orders=[part()])
    assert len(job.known_orders.all) == 1


def test_what_could_not_be_told_is_asked_again_less_and_less_often(
    job: Job, heard: Announcements
) -> None:
    client = job.process(10, 4, "/train")
    written(job, 1)
    heard.announced(10, 10, 1)
    waits: list[int] = []
    while sum(waits) < 20_000:
        heard.look(job.now + 10**12)
        count = len(job.helper.asked)
        job.helper.answer(again=True)
        assert count == len(waits) + 1, "one question at a time"
        began = job.now
        while len(job.helper.asked) == count:
            job.now += 10 * MS
            heard.look(job.now)
        waits.append((job.now - began) // MS)
        assert heard.pending(only(client))
    assert waits[:3] == [DECIDE_NS // MS] * 3 and waits[-2:] == [LATELY_NS // MS] * 2
    for number, wait in enumerate(waits):
        assert wait <= max(DECIDE_NS // MS, sum(waits[:number]) // LOOKS) + 10, "never much later"
    assert [question["first"] for question in job.helper.asked[:3]] == [True, False, False]
    progress(job, 1, 5)
    job.helper.answer(again=True)
    heard.look(job.now)
    assert job.helper.asked[-1]["said"] == 5, "asked at once: there is more to tell by"
    job.helper.answer(again=True)
    count = len(job.helper.asked)
    heard.look(job.now + DECIDE_NS)
    assert len(job.helper.asked) == count + 1, "and often again"


def test_parts_that_are_known_are_not_asked_for_again(job: Job, heard: Announcements) -> None:
    job.process(10, 4, "/train")
    written(job, 1)
    heard.announced(10, 10, 1)
    job.helper.answer(orders=[part("some", 3), part("more", 1)], again=True)
    heard.look(job.now + DECIDE_NS - 1)
    assert len(job.helper.asked) == 1
    heard.look(job.now + DECIDE_NS)
    assert job.helper.asked[-1]["done"] == [(1, "/train"), (3, "/train")]
    job.helper.answer(orders=[])
    heard.look(job.now + 10**12)
    assert len(job.helper.asked) == 2, "all of it is known"


def test_files_of_a_data_set_that_are_mapped_later_are_asked_for_then(
    job: Job, heard: Announcements
) -> None:
    client = job.process(10, 4, "/train")
    written(job, 1)
    heard.announced(10, 10, 1)
    job.helper.answer(orders=[part()], more=True)
    heard.look(job.now + 10**12)
    assert len(job.helper.asked) == 1 and not heard.pending(only(client))
    heard.mapped(job.process(13, 5, "/other"))
    heard.look(job.now + 10**12)
    assert len(job.helper.asked) == 1, "not of this data set's job"
    worker = job.process(12, 4, "/train", "/more", parents=(10,))
    heard.mapped(worker)
    heard.look(job.now)
    assert len(job.helper.asked) == 2
    assert job.helper.asked[-1]["done"] == [(0, "/train")]
    job.helper.answer(orders=[part("more", 0, 1)], more=False)
    assert [one.file.path for one in job.known_orders.all] == ["/train", "/more"]
    heard.mapped(worker)
    heard.look(job.now)
    assert len(job.helper.asked) == 2, "that were all"


def test_findings_and_errors_are_told(job: Job, heard: Announcements) -> None:
    job.process(10, 4, "/train")
    written(job, 1)
    heard.announced(10, 10, 1)
    job.helper.orders["some"] = ValueError("short")
    job.helper.orders["more"] = OSError("gone")
    job.helper.answer(error="an error", findings=["a finding"], orders=[part(), part("more", 1)])
    assert job.known_orders.all == []
    assert job.ledger.degradations == [
        "an error", "a finding", "loader: its order cannot be mapped: short",
        "loader: its order cannot be mapped: gone",
    ]  # fmt: skip


def test_where_nothing_is_mapped_yet_it_is_asked_when_something_is(
    job: Job, heard: Announcements
) -> None:
    client = job.process(10, 4)
    written(job, 1)
    heard.announced(10, 10, 1)
    client.regions[0] = SimpleNamespace(
        file=job.file("/train"),
        address=0,
        offset_bytes=0,
        length_bytes=SIZE,
        mode=ServingMode.PAGE_TABLES,
    )
    heard.look(job.now + DECIDE_NS - 1)
    assert job.helper.asked == []
    heard.next_ns = job.now + DECIDE_NS
    heard.mapped(job.process(13, 5, "/train"))
    assert heard.next_ns > job.now, "not what it waits for"
    heard.look(job.now)
    assert job.helper.asked == []
    heard.mapped(client)
    assert heard.next_ns == 0
    heard.look(job.now)
    assert [question["do"] for question in job.helper.asked] == ["announced"]
    job.helper.answer(orders=[])
    heard.next_ns = job.now + DECIDE_NS
    heard.mapped(client)
    assert heard.next_ns > job.now, "nothing is missing any more"


def test_where_nothing_was_mapped_it_is_asked_again_soon(job: Job, heard: Announcements) -> None:
    client = job.process(10, 4)
    written(job, 1)
    heard.announced(10, 10, 1)
    client.regions[0] = SimpleNamespace(
        file=job.file("/train"),
        address=0,
        offset_bytes=0,
        length_bytes=SIZE,
        mode=ServingMode.PAGE_TABLES,
    )
    heard.look(job.now + DECIDE_NS)
    assert len(job.helper.asked) == 1


def test_while_all_is_in_the_page_cache_nobody_is_asked(job: Job, heard: Announcements) -> None:
    client = job.process(10, 4, "/train", "/valid")
    job.helper.fd = 0
    cached = {"/train", "/valid"}
    for path in sorted(cached):
        job.file(path).cache.all = SimpleNamespace(ask=lambda _clock, path=path: path in cached)
    heard.mapped(client)
    written(job, 1)
    heard.announced(10, 10, 1)
    assert job.helper.asked == []
    assert heard.next_ns <= job.now + DECIDE_NS, "it may end"
    cached.remove("/valid")
    heard.mapped(client)
    heard.look(job.now)
    assert job.helper.asked[0] == {"do": "prepare", "path": "/valid"}
    assert [file["path"] for file in job.helper.asked[1]["files"]] == ["/train", "/valid"]
    assert len(job.helper.asked) == 2


def test_what_the_pool_is_to_hold_needs_its_order_though_the_page_cache_has_it(
    job: Job, heard: Announcements
) -> None:
    job.process(10, 4, "/train")
    job.file("/train").cache.all = SimpleNamespace(ask=lambda _clock: True)
    job.file("/train").pooled = SimpleNamespace()
    written(job, 1)
    heard.announced(10, 10, 1)
    assert len(job.helper.asked) == 1


def test_while_a_helper_runs_each_file_is_indexed_once(job: Job, heard: Announcements) -> None:
    client = job.process(10, 4, "/train", "/valid")
    heard.mapped(client)
    assert job.helper.asked == [], "nobody has said that there will be orders"
    job.helper.fd = 0
    for _ in range(2):
        heard.mapped(client)
    assert job.helper.asked == [
        {"do": "prepare", "path": "/train"}, {"do": "prepare", "path": "/valid"},
    ]  # fmt: skip


def test_of_a_process_that_has_ended_nothing_is_followed(job: Job, heard: Announcements) -> None:
    reader = followed(job, heard)
    job.process(20, 5, "/train")
    written(job, 1, pid=20)
    heard.announced(20, 20, 1)
    job.helper.answer(orders=[part("more")])
    heard.forget_process(10)
    assert reader.ended and len(job.known_orders.all) == 1 and heard.any
    assert not (job.directory / "10-1.json").exists()
    heard.look(job.now)
    assert set(heard._progress) == {20}, "its counters are closed"


def test_announcements_at_a_time_are_bounded(
    job: Job, heard: Announcements, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_sources, "ENTRIES_MAX", 2)
    job.process(10, 4, "/train")
    for number in (1, 2):
        written(job, number, slot=number, reader=f"loader-{number}")
        heard.announced(10, 10, number)
    written(job, 3, slot=3, reader="loader-3")
    with pytest.raises(AnnounceError, match="more than 2 orders"):
        heard.announced(10, 10, 3)
    written(job, 4, slot=2, reader="loader-2")
    heard.announced(10, 10, 4)
    assert set(heard._heard) == {(10, "loader-1"), (10, "loader-2")}


def test_readers_of_two_processes_may_have_the_same_name(job: Job, heard: Announcements) -> None:
    """In namespaces of their own, of the same number for us."""
    reader = followed(job, heard)
    written(job, 1, pid=11)
    heard.announced(10, 11, 1)
    assert not reader.ended and len(heard._heard) == 2


def test_an_order_that_is_not_known_is_told_of(job: Job, heard: Announcements) -> None:
    job.process(10, 4, "/train")
    path = written(job, 1, items=0, parts=({"what": "nothing", "why": "it is random"},))
    heard.announced(10, 10, 1)
    assert job.ledger.degradations == ["loader: in which order it reads is not known: it is random"]
    assert not path.exists() and not heard.any and job.helper.asked == []


def test_lists_go_to_the_helper_and_what_waits_is_asked_again(
    job: Job, heard: Announcements
) -> None:
    job.process(10, 4, "/train")
    written(job, 1)
    heard.announced(10, 10, 1)
    job.helper.answer(again=True)
    path = written(job, 2, items=0, parts=({"what": "lists", "token": "t"},))
    heard.announced(10, 10, 2)
    assert job.helper.asked[-1] == {
        "do": "announced", "pid": 10, "number": 2, "files": [], "process": 0, "said": 0, "done": [],
        "first": True,
    }  # fmt: skip
    heard.look(job.now)
    assert path.exists() and len(job.helper.asked) == 2
    job.helper.answer()
    assert not path.exists()
    heard.look(job.now)
    assert [question["number"] for question in job.helper.asked] == [1, 2, 1]
