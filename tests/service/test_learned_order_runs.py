# SPDX-License-Identifier: Apache-2.0
"""`wrap --learn` of a job that maps a file and reads it in an order of its own, on the slow bed:
the second run is served in that order, and where it reads in another one that is dropped."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from components import Run, Runner, on_memory, python
from conftest import require
from harness import write_records

from uffdprefetch.demo.bed import CONTROL_NAME, SlowBed, drop_cache, why_no_bed
from uffdprefetch.orders import learned_plan, learned_ranges

pytest_plugins = ("harness_fixtures",)

MIB = 1 << 20
SIZE, RECORD = 64 * MIB, 128 << 10
RECORDS = SIZE // RECORD
#: The service is up before the job maps; and what it touches first is seen soon after.
OPTIONS = ("--learn=mine", "--strict")
#: Reads records in the order that a seed gives; of several ranks each every so many, from its own
#: number on. A pause after each, in which a computation goes on. AWAITS: the bed's counters, by
#: which it waits until something of its file is read, as only for a known order before any touch.
JOB = f"""
import hashlib, json, mmap, os, random, sys, time
path, seed, parts = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
with open(path, "rb") as file:
    data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
first, step = (int(os.environ.get(name, end)) for name, end in (("RANK", 0), ("WORLD_SIZE", 1)))
order = list(range({RECORDS}))[first::step]
random.Random(seed).shuffle(order)
sha, awaits = hashlib.sha256(), os.environ.get("AWAITS")
while awaits and json.load(open(awaits))["bytes"] < {MIB}:
    time.sleep(0.002)
for record in order[: int(parts[0]) if parts else None]:
    sha.update(data[record * {RECORD} : (record + 1) * {RECORD}])
    time.sleep(0.001)
print(sha.hexdigest())
"""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "records.bin"
    write_records(path, SIZE)
    return path


@pytest.fixture(scope="module")
def bed(records: Path) -> Iterator[SlowBed]:
    require(why_no_bed() is None, why_no_bed() or "")
    require(not on_memory(records), "files in memory are not prefetched")
    with SlowBed(records.parent) as mounted:
        yield mounted


class Job:
    """One whose runs are learned of."""

    def __init__(self, runner: Runner, bed: SlowBed, records: Path, cache: Path) -> None:
        self._runner, self._bed, self._records = runner, bed, records
        self.kept = cache / "uffdprefetch" / "profiles" / "mine.ranges"
        self.path = bed.path(records.name)

    def again(self, seed: int, *parts: int, options: tuple[str, ...] = (), **env: str) -> Run:
        """The same, which begins when an order is followed."""
        env["AWAITS"] = str(self._bed.path(CONTROL_NAME))
        return self.run(seed, *parts, options=options, **env)

    def run(self, seed: int, *parts: int, options: tuple[str, ...] = (), **env: str) -> Run:
        """From a cold cache, with the right bytes."""
        drop_cache(self.path)
        self._bed.reset()
        words = python(JOB, self.path, str(seed), *map(str, parts))
        done = self._runner.wrapped(*words, options=(*OPTIONS, *options), **env)
        assert (done.status, done.stderr) == (0, "")
        assert done.stdout.decode().strip() == self.digest(seed, *parts, **env)
        return done

    def digest(self, seed: int, *parts: int, **env: str) -> str:
        order = list(range(RECORDS))[int(env.get("RANK", 0)) :: int(env.get("WORLD_SIZE", 1))]
        random.Random(seed).shuffle(order)
        sha = hashlib.sha256()
        with self._records.open("rb") as file:
            for record in order[: parts[0] if parts else None]:
                sha.update(os.pread(file.fileno(), RECORD, record * RECORD))
        return sha.hexdigest()

    def orders(self) -> list[learned_plan.LearnedPlan]:
        kept = str(self.kept)
        return [
            learned_plan.load(learned_ranges.document_path(kept, name))
            for name in learned_ranges.names(kept)
        ]


@pytest.fixture
def job(env: dict[str, str], tmp_path: Path, bed: SlowBed, records: Path) -> Job:
    env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    return Job(Runner(env, tmp_path), bed, records, tmp_path / "cache")


def orders_of(run: Run) -> dict[str, Any]:
    """What is not zero of ``learn.orders``, but for the bytes that were written."""
    told = run.summary["learn"]["orders"]
    return {name: count for name, count in told.items() if count and name != "bytes"}


@pytest.mark.parametrize("engine", ["cache", "pool"])
def test_the_second_run_of_a_shuffled_job_is_served_in_its_order(job: Job, engine: str) -> None:
    options = ("--engine", engine)
    first = job.run(1, options=options)
    assert orders_of(first) == {"written": 1} and first.summary["plans"] == []
    (order,) = job.orders()
    assert (order.file, order.rank) == (str(job.path), (0, 0))
    spans = order.spans(SIZE)
    ordered = sum(spans[1::2]) - sum(spans[::2])
    assert 0.95 * SIZE <= ordered <= SIZE, "but for what it came to just before its end"
    again = job.again(1, options=options)
    assert orders_of(again) == {"followed": 1, "kept": 1}
    (plan,) = again.summary["plans"]
    assert (plan["how"], plan["dropped"]) == ("--learn", None)
    assert plan["read_items"] > 0.8 * plan["items"]
    assert again.file(job.path)["prefetched_bytes"] > SIZE // 2


def test_in_another_order_it_is_dropped_and_the_run_after_that_is_learned_anew(job: Job) -> None:
    assert orders_of(job.run(1)) == {"written": 1}
    other = job.again(2)
    assert orders_of(other) == {"followed": 1, "dropped": 1, "removed": 1}
    (line,) = [text for text in other.summary["degradations"] if "--learn" in text]
    assert "not followed any more" in line and job.orders() == []
    assert orders_of(job.run(2)) == {"written": 1}
    assert orders_of(job.again(2)) == {"followed": 1, "kept": 1}


def test_ranks_have_orders_of_their_own_and_other_numbers_of_ranks_have_others(job: Job) -> None:
    ranks = [{"RANK": str(rank), "WORLD_SIZE": "4"} for rank in (0, 2)]
    for rank in ranks:
        assert orders_of(job.run(1, **rank)) == {"written": 1}
    assert {order.rank for order in job.orders()} == {(0, 4), (2, 4)}
    again = job.again(1, **ranks[1])
    assert orders_of(again) == {"followed": 1, "kept": 1}
    assert again.summary["plans"][0]["rank"] == 2
    half = job.run(1, RANK="0", WORLD_SIZE="2")
    assert orders_of(half) == {"written": 1} and half.summary["plans"] == []


def test_a_file_that_was_changed_since_is_learned_anew_and_its_old_order_goes(
    job: Job, records: Path, tmp_path: Path
) -> None:
    job.path = Path(shutil.copy(records, tmp_path))  # the bed's client sees no change
    assert orders_of(job.run(1)) == {"written": 1}
    (before,) = os.listdir(job.kept)[:1]
    os.utime(job.path)
    changed = job.run(1)
    assert orders_of(changed) == {"written": 1} and changed.summary["plans"] == []
    assert len(job.orders()) == 1 and before not in os.listdir(job.kept)


def test_what_a_longer_run_reads_beyond_is_added(job: Job) -> None:
    assert orders_of(job.run(1, RECORDS // 2)) == {"written": 1}
    longer = job.again(1)
    assert orders_of(longer) == {"followed": 1, "added": 1}
    spans = job.orders()[0].spans(SIZE)
    assert 0.95 * SIZE <= sum(spans[1::2]) - sum(spans[::2]) <= SIZE
    assert orders_of(job.again(1, RECORDS // 2)) == {"followed": 1, "kept": 1}


def test_where_a_plan_says_the_order_nothing_is_learned(job: Job, tmp_path: Path) -> None:
    order = list(range(RECORDS))
    random.Random(1).shuffle(order)
    entry = {
        "file": str(job.path), "unit": "records", "record_size": RECORD, "format": "raw",
        "epochs": [{"ranks": {"*": order}}],
    }  # fmt: skip
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"schema": "uffdprefetch.plan/1", "files": [entry]}))
    done = job.run(1, options=("--plan", str(plan)))
    assert done.summary["plans"][0]["how"] == "--plan"
    assert orders_of(done) == {} and not job.kept.exists()


def test_a_file_that_is_read_in_order_needs_none(job: Job) -> None:
    code = JOB.replace("random.Random(seed).shuffle(order)", "pass")
    words = python(code, job.path, "1")
    done = job._runner.wrapped(*words, options=OPTIONS, cold=[job.path])
    assert done.status == 0 and orders_of(done) == {"in_order": 1}
    assert not job.kept.exists()


@pytest.mark.parametrize("damage", ["cut off", "no numbers", "another file's", "beyond the file"])
def test_a_damaged_order_costs_nobody_a_byte(job: Job, damage: str) -> None:
    job.run(1)
    (document,), (numbers,) = job.kept.glob("*.json"), job.kept.glob("*.npy")
    if damage == "cut off":
        os.truncate(numbers, 200)
    elif damage == "no numbers":
        numbers.unlink()
    elif damage == "another file's":
        document.write_text(document.read_text().replace("records.bin", "other.bin"))
    else:
        data = bytearray(numbers.read_bytes())
        data[-1] = 1
        numbers.write_bytes(data)
    again = job.run(1)
    assert orders_of(again) == {"written": 1} and again.summary["plans"] == []
    told = [text for text in again.summary["degradations"] if "--learn" in text]
    assert len(told) == (damage != "another file's")
    assert orders_of(job.again(1)) == {"followed": 1, "kept": 1}
