# SPDX-License-Identifier: Apache-2.0
"""`wrap --plan` on the slow bed: what comes over the link, what the reader finds, and that whatever
goes wrong with a plan the job reads right bytes.

The job waits before each batch until its records are resident, which only the plan can bring about:
where a plan is not followed it ends with an error. The bed counts bytes, it has no link to wait
for.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import HANG_SECONDS, require, uffdprefetch, wait_until
from harness import Job, Start, python

from uffdprefetch.demo.bed import CONTROL_NAME, SlowBed, drop_cache, why_no_bed
from uffdprefetch.demo.dataset import DATABASE_NAME, INDEX_NAME, digest_of, make_dataset

pytest_plugins = ("harness_fixtures",)

MIB = 1 << 20
PAGE = 4096
BATCH = 8
#: The reader is some MiB behind what is warmed: it has to be followed.
AHEAD = ("--budget", "8MiB")

#: Its argument is a JSON file: the database, (offset, length) of each record, and steps of
#: {"records": [...], "wait": for their "pages", or for "bytes" over the link, or null, "say":
#: whether to wait for a word then}.
JOB = """
import lmdb

work = json.load(open(sys.argv[1]))
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
env = lmdb.open(work["database"], readonly=True, lock=False, max_spare_txns=1)
sha, base, late = hashlib.sha256(), None, 0
PATIENCE, LATE_MAX = 6.0, 1

def bed_bytes():
    with open(work["counters"]) as file:
        return json.load(file)["bytes"]

def resident(record):
    offset, length = work["extents"][record]
    start = base + offset // PAGE * PAGE
    pages = -(-(offset + length) // PAGE) - offset // PAGE
    vector = (ctypes.c_ubyte * pages)()
    checked(libc.mincore(start, pages * PAGE, vector), "mincore")
    return all(byte & 1 for byte in vector)

def address_of(view):
    class Buffer(ctypes.Structure):  # Include/cpython/object.h, the beginning of it
        _fields_ = [("buf", ctypes.c_void_p), ("rest", ctypes.c_byte * 128)]
    buffer = Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address = buffer.buf
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address

def wait_for(records):
    # A page that is there may be taken away again: then the job reads on, as any job would. But
    # where an order is not followed, this is so for batch after batch.
    global late
    end = time.monotonic() + PATIENCE
    while not all(map(resident, records)):
        if time.monotonic() > end:
            late += 1
            until(lambda: late <= LATE_MAX, f"records {records}")
            return
        time.sleep(0.002)

def batch(step):
    global base
    if step["wait"] == "bytes":
        until(lambda: bed_bytes() >= 1 << 20, "a MiB over the link")
    if step["wait"] == "pages":  # before get(): py-lmdb touches all pages of the value in it
        wait_for(step["records"])
    with env.begin(buffers=True) as txn:
        for record in step["records"]:
            value = txn.get(b"%08d" % record)
            sha.update(value)
            base = address_of(value) - work["extents"][record][0]

for number, step in enumerate(work["steps"]):
    batch(step)
    if step["say"]:
        say(step=number)
        hear()
usage = __import__("resource").getrusage(0)
say(sha256=sha.hexdigest(), majflt=usage.ru_majflt, rank=os.environ.get("RANK"))
"""


@dataclass
class Data:
    """An LMDB of records on a bed."""

    bed: SlowBed
    source: Path
    records: int
    file_bytes: int
    extents: np.ndarray = field(repr=False)

    @property
    def database(self) -> Path:
        return self.bed.path(DATABASE_NAME)

    def page_bytes(self, records: Sequence[int]) -> int:
        """Of the pages that hold any of these records."""
        pages = set()
        for record in records:
            offset, length = self.extents[record].tolist()
            pages |= set(range(offset // PAGE, -(-(offset + length) // PAGE)))
        return PAGE * len(pages)

    def digest(self, records: Sequence[int]) -> str:
        return digest_of(self.source / DATABASE_NAME, records)

    def read_bytes(self) -> int:
        return int(self.bed.counters()["bytes"])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Data]:
    """48 MiB behind a bed without a link."""
    require(why_no_bed() is None, why_no_bed() or "")
    source = tmp_path_factory.mktemp("data")
    manifest = make_dataset(source, 48 * MIB)
    extents = np.load(source / INDEX_NAME)
    with SlowBed(source, bandwidth=0, latency_us=0) as bed:
        yield Data(bed, source, manifest.records, manifest.file_bytes, extents)


@pytest.fixture
def cold(data: Data) -> Data:
    """The same, with nothing of it in the page cache and the counters at zero."""
    drop_cache(data.database / "data.mdb", patience_seconds=HANG_SECONDS)
    data.bed.reset()
    return data


def shuffled(records: Sequence[int], seed: int = 0) -> list[int]:
    order = list(records)
    random.Random(seed).shuffle(order)
    return order


def batches(order: Sequence[int], first: str | None = "bytes", **more: Any) -> list[dict[str, Any]]:
    """Steps of BATCH records that wait for their pages. The first one is of one record and waits
    for any bytes: where the mapping lies is told by what is read."""
    cut = [list(order[at : at + BATCH]) for at in range(1, len(order), BATCH)]
    steps = [{"records": list(order[:1]), "wait": first, "say": False}]
    return [*steps, *({"records": one, "wait": "pages", "say": False, **more} for one in cut)]


def reader(tmp_path: Path, data: Data, steps: list[dict[str, Any]], name: str = "w") -> list[str]:
    """The command line of a job that goes through these steps."""
    file = tmp_path / f"{name}.json"
    work = {"database": str(data.database), "extents": data.extents.tolist(), "steps": steps}
    work["counters"] = str(data.bed.path(CONTROL_NAME))
    file.write_text(json.dumps(work))
    text = "from inside import *\n" + textwrap.dedent(JOB)
    return [sys.executable, "-c", text, str(file)]


def plan_file(tmp_path: Path, data: Data, epochs: Any, unit: str = "records", **more: Any) -> str:
    """A plan; ``epochs``: for each {rank: order}."""
    file = tmp_path / "plan.json"
    entry = {"file": str(data.database), "unit": unit, **more}
    entry["epochs"] = [{"ranks": ranks} for ranks in epochs]
    file.write_text(json.dumps({"schema": "uffdprefetch.plan/1", "files": [entry]}))
    return str(file)


def options_of(plan: str, engine: str = "cache") -> tuple[str, ...]:
    """`wrap`'s; in the pool --budget is the pool's size, and holds all."""
    return ("--plan", plan, *(AHEAD if engine == "cache" else ()))


def followed(summary: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The summary's plans; asserts that none was dropped and nobody was told of a trouble."""
    assert summary is not None
    assert summary["plans"], summary
    assert all(plan["dropped"] is None for plan in summary["plans"]), summary["plans"]
    assert not [text for text in summary["degradations"] if "plan" in text or "order" in text]
    return list(summary["plans"])


def live(work: Job) -> dict[str, Any]:
    """What `uffdprefetch top` says of the run now."""
    words = uffdprefetch("top", "--once", "--json")
    out = subprocess.run(words, env=work.env, capture_output=True, timeout=HANG_SECONDS).stdout
    return dict(json.loads(out))


@pytest.fixture(params=["cache", "pool"])
def engine(request: pytest.FixtureRequest, env: dict[str, str]) -> str:
    """The engine of the test's jobs, each in its turn."""
    env["UFFDPREFETCH_ENGINE"] = request.param
    return str(request.param)


# ---- a right plan ----------------------------------------------------------------------------


def test_what_the_order_names_is_there_before_it_is_read_and_comes_once(
    job: Start, cold: Data, tmp_path: Path, engine: str
) -> None:
    order = shuffled(range(cold.records // 2))  # a split: the other half stays away
    plan = plan_file(tmp_path, cold, [{"0": order}])
    done = job(reader(tmp_path, cold, batches(order)), options_of(plan, engine)).finish().good()
    (line,) = done.lines
    assert line["sha256"] == cold.digest(order)
    (walked,) = followed(done.summary)
    assert (walked["rank"], walked["items"], walked["epoch"]) == (0, len(order), 0)
    needed = cold.page_bytes(order)
    assert needed <= cold.read_bytes() <= 1.03 * needed + MIB  # and tree pages, read by the kernel
    assert done.summary is not None
    assert done.summary["totals"]["demand_misses"] < len(order) // 10


def test_the_second_epoch_goes_by_its_own_order(
    job: Start, cold: Data, tmp_path: Path, engine: str
) -> None:
    half = cold.records // 2
    first, second = shuffled(range(half), 1), shuffled(range(half, 2 * half), 2)
    plan = plan_file(tmp_path, cold, [{"0": first}, {"0": second}])
    steps = batches(first) + batches(second, "pages")
    done = job(reader(tmp_path, cold, steps), options_of(plan, engine)).finish().good()
    assert done.lines[0]["sha256"] == cold.digest(first + second)
    (walked,) = followed(done.summary)
    assert (walked["epoch"], walked["items"]) == (1, len(second))
    assert walked["read_items"] > len(first)


def test_a_pool_smaller_than_the_data_reads_again_only_what_it_cannot_hold(
    job: Start, cold: Data, tmp_path: Path, env: dict[str, str]
) -> None:
    env["UFFDPREFETCH_ENGINE"] = "pool"
    first, second = shuffled(range(cold.records), 1), shuffled(range(cold.records), 2)
    plan = plan_file(tmp_path, cold, [{"0": first}, {"0": second}])
    # In epoch 2 it does not wait: what is mapped still is read without a touch.
    steps = batches(first) + [{**step, "wait": None} for step in batches(second)]
    budget = 32 * MIB
    words = ("--plan", plan, "--budget", str(budget))
    done = job(reader(tmp_path, cold, steps), words).finish().good()
    assert done.lines[0]["sha256"] == cold.digest(first + second)
    (walked,) = followed(done.summary)
    assert walked["epoch"] == 1
    # Belady's optimum is the difference, 17 MB; without an order it is all of the file, 50.
    assert cold.read_bytes() - cold.file_bytes <= 1.6 * (cold.file_bytes - budget)
    assert done.summary is not None
    assert done.summary["pool"]["resident_peak_bytes"] <= budget


def test_a_repeated_epoch_is_read_as_often_as_the_job_likes(
    job: Start, cold: Data, tmp_path: Path
) -> None:
    order = shuffled(range(200))
    plan = plan_file(tmp_path, cold, [{"*": order}], repeat=True)
    steps = batches(order) + 2 * batches(order, "pages")
    done = job(reader(tmp_path, cold, steps), options_of(plan)).finish().good()
    assert done.lines[0]["sha256"] == cold.digest(3 * order)
    followed(done.summary)
    assert cold.read_bytes() <= 1.03 * cold.page_bytes(order) + MIB


def test_each_rank_goes_by_its_own_order(
    job: Start, cold: Data, tmp_path: Path, engine: str
) -> None:
    order = shuffled(range(cold.records))
    parts = [order[rank::2] for rank in range(2)]
    plan = plan_file(tmp_path, cold, [{str(rank): part for rank, part in enumerate(parts)}])
    options = ("--plan", plan, *(("--budget", "16MiB") if engine == "cache" else ()))
    words = [reader(tmp_path, cold, batches(part), f"w{r}") for r, part in enumerate(parts)]
    launcher = """
    import subprocess
    started = [
        subprocess.Popen(words, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"})
        for rank, words in enumerate(json.loads(sys.argv[1]))
    ]
    sys.exit(max(child.wait() for child in started))
    """
    done = job(python(launcher, json.dumps(words)), options).finish().good()
    digests = {line["rank"]: line["sha256"] for line in done.lines}
    assert digests == {str(rank): cold.digest(part) for rank, part in enumerate(parts)}
    plans = {plan["rank"]: plan for plan in followed(done.summary)}
    assert [plans[rank]["items"] for rank in range(2)] == [len(part) for part in parts]
    assert cold.read_bytes() <= 1.03 * cold.file_bytes


@pytest.mark.parametrize("unit", ["range", "keys", "bytes"])
def test_an_order_of_another_unit_is_followed_as_well(
    job: Start, cold: Data, tmp_path: Path, unit: str
) -> None:
    order = shuffled(range(cold.records // 2))
    told: Any = [f"{record:08}" for record in order]
    if unit == "range":  # of record numbers: every other one
        order = list(range(0, cold.records, 2))
        told, unit = {"range": [0, cold.records, 2]}, "records"
    elif unit == "bytes":
        told = [[start, start + length] for start, length in cold.extents[order].tolist()]
    plan = plan_file(tmp_path, cold, [{"0": told}], unit)
    done = job(reader(tmp_path, cold, batches(order)), options_of(plan)).finish().good()
    assert done.lines[0]["sha256"] == cold.digest(order)
    (walked,) = followed(done.summary)
    assert walked["items"] == len(order)


def test_a_job_that_stops_early_costs_what_lay_ahead_of_it(
    job: Start, cold: Data, tmp_path: Path
) -> None:
    order = shuffled(range(cold.records))
    plan = plan_file(tmp_path, cold, [{"0": order}])
    read = order[: 1 + 16 * BATCH]
    done = job(reader(tmp_path, cold, batches(read)), options_of(plan)).finish().good()
    assert done.lines[0]["sha256"] == cold.digest(read)
    followed(done.summary)
    assert cold.read_bytes() <= 1.03 * cold.page_bytes(read) + 8 * MIB + 4 * MIB  # and a slice


def test_after_an_epoch_that_was_cut_short_the_next_ones_order_is_followed(
    job: Start, cold: Data, tmp_path: Path, engine: str
) -> None:
    half = cold.records // 2
    first, second = shuffled(range(half), 1), shuffled(range(half, 2 * half), 2)
    plan = plan_file(tmp_path, cold, [{"0": first}, {"0": second}])
    begun = 4 * BATCH  # by these it is seen that another epoch has begun
    steps = [*batches(first)[:9], {"records": second[:begun], "wait": None, "say": False}]
    steps += batches(second[begun:], "pages")
    done = job(reader(tmp_path, cold, steps), options_of(plan, engine)).finish().good()
    assert done.lines[0]["sha256"] == cold.digest(first[: 1 + 8 * BATCH] + second)
    (walked,) = followed(done.summary)
    assert walked["epoch"] == 1


# ---- a wrong plan ----------------------------------------------------------------------------


def test_a_plan_of_other_records_is_dropped_with_a_line_and_costs_little(
    job: Start, cold: Data, tmp_path: Path, engine: str
) -> None:
    half = cold.records // 2
    order, wrong = shuffled(range(half)), shuffled(range(half, cold.records))
    plan = plan_file(tmp_path, cold, [{"0": wrong}])
    steps = [{**step, "wait": step["wait"] and "bytes"} for step in batches(order)]
    steps[-1]["say"] = True
    work = job(reader(tmp_path, cold, steps), options_of(plan, engine))
    work.line()
    dropped = "not followed any more"
    wait_until(
        lambda: any(dropped in text for text in live(work)["degradations"]),
        lambda: f"{dropped!r} among {live(work)}",
    )
    work.tell()
    done = work.finish().good()
    assert done.lines[0]["sha256"] == cold.digest(order)
    assert done.summary is not None
    (walked,) = done.summary["plans"]
    assert walked["dropped"] is not None, walked
    (line,) = [text for text in done.summary["degradations"] if "not followed any more" in text]
    assert walked["dropped"] in line


def test_a_plan_that_does_not_fit_the_file_is_told_and_the_job_reads_on(
    job: Start, cold: Data, tmp_path: Path
) -> None:
    order = shuffled(range(100))
    plan = plan_file(tmp_path, cold, [{"0": [*order, cold.records]}])
    steps = [{**step, "wait": None} for step in batches(order)]
    steps[0]["say"] = True
    work = job(reader(tmp_path, cold, steps), options_of(plan))
    work.line()
    wanted = f'files[0].epochs[0].ranks["0"][100]: record {cold.records}:'
    wait_until(lambda: any(wanted in text for text in live(work)["degradations"]), wanted)
    work.tell()
    done = work.finish().good()
    assert done.lines[0]["sha256"] == cold.digest(order)
    assert done.summary is not None
    assert any(wanted in text for text in done.summary["degradations"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"schema": "uffdprefetch.plan/1", "files": [{"fiel": "a"}]}', "fiel"),
        ('{"schema": "uffdprefetch.plan/1", "files": [', "JSON"),
        (None, "cannot read"),
    ],
    ids=["unknown key", "cut off", "missing"],
)
def test_a_bad_plan_is_one_line_and_status_2_before_the_job_runs(
    env: dict[str, str], tmp_path: Path, text: str | None, reason: str
) -> None:
    plan, marker = tmp_path / "plan.json", tmp_path / "ran"
    if text is not None:
        plan.write_text(text)
    words = uffdprefetch("wrap", "--plan", str(plan), "--", "touch", str(marker))
    ended = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert not marker.exists()
    (line,) = ended.stderr.splitlines()
    assert line.startswith("uffdprefetch: ") and str(plan) in line
    assert reason in line


# ---- death -----------------------------------------------------------------------------------


def test_the_job_reads_right_bytes_when_the_service_is_killed_on_the_way(
    job: Start, cold: Data, tmp_path: Path, engine: str
) -> None:
    order = shuffled(range(cold.records))
    plan = plan_file(tmp_path, cold, [{"0": order}])
    steps = batches(order)
    steps[3]["say"] = True  # until here the plan was followed
    for step in steps[4:]:
        step["wait"] = None
    work = job(reader(tmp_path, cold, steps), options_of(plan, engine))
    assert work.line() == {"step": 3}
    work.kill_service()
    work.tell()
    done = work.finish()
    assert done.status == 0, done.stderr
    assert done.lines[0]["sha256"] == cold.digest(order)
