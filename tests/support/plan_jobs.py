# SPDX-License-Identifier: Apache-2.0
"""Jobs whose order is known, on the slow bed: the data, the plan file, the program that follows it.
A test module says ``pytest_plugins = ("harness_fixtures", "plan_jobs")``.

The program waits before each batch until its records are resident, which only the plan can bring
about: where a plan is not followed it ends with an error.
"""

from __future__ import annotations

import json
import random
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import HANG_SECONDS, require
from harness import Job, snapshot

from uffdprefetch.demo.bed import CONTROL_NAME, SlowBed, drop_cache, why_no_bed
from uffdprefetch.demo.dataset import DATABASE_NAME, INDEX_NAME, digest_of, make_dataset

MIB = 1 << 20
PAGE = 4096
BATCH = 8
#: The reader is some MiB behind what is warmed: it has to be followed.
AHEAD = ("--budget", "8MiB")

#: Its argument is a JSON file: the database, (offset, length) of each record, and steps of
#: {"records": [...], "wait": for their "pages", or for "bytes" over the link, or null, "say":
#: whether to wait for a word then, "fork": the records that a child reads from then on}.
JOB = """
import lmdb

work = json.load(open(sys.argv[1]))
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
env = lmdb.open(work["database"], readonly=True, lock=False, max_spare_txns=1)
sha, base, needed = hashlib.sha256(), None, set()
TAKEN_PATIENCE = 1.0

def bed_bytes():
    with open(work["counters"]) as file:
        return json.load(file)["bytes"]

def pages_of(record):
    offset, length = work["extents"][record]
    return range(offset // PAGE, -(-(offset + length) // PAGE))

def resident(record):
    pages = pages_of(record)
    vector = (ctypes.c_ubyte * len(pages))()
    checked(libc.mincore(base + pages[0] * PAGE, len(pages) * PAGE, vector), "mincore")
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
    # A page that has come may be taken away again by the kernel: then the job reads on, as any job
    # would. That it has come is told by the link: as many bytes as all batches until now hold.
    began = time.monotonic()
    def have_come():
        taken = time.monotonic() - began > TAKEN_PATIENCE
        return all(map(resident, records)) or taken and bed_bytes() >= PAGE * len(needed)
    until(have_come, f"the order to be followed: the batch of {records[0]}")

def batch(step):
    global base
    if step["wait"] == "bytes":
        until(lambda: bed_bytes() >= 1 << 20, "a MiB over the link")
    needed.update(page for record in step["records"] for page in pages_of(record))
    if step["wait"] == "pages":  # before get(): py-lmdb touches all pages of the value in it
        wait_for(step["records"])
    with env.begin(buffers=True) as txn:
        for record in step["records"]:
            value = txn.get(b"%08d" % record)
            sha.update(value)
            base = address_of(value) - work["extents"][record][0]

def child_reads(records):
    # as the fork left it: nothing is opened anew
    pid = os.fork()
    if pid:
        return pid
    sha = hashlib.sha256()
    for offset, length in map(work["extents"].__getitem__, records):
        sha.update(ctypes.string_at(base + offset, length))
    say(child=sha.hexdigest())
    os._exit(0)

children = []
for number, step in enumerate(work["steps"]):
    batch(step)
    if step["say"]:
        say(step=number, pid=os.getpid())
        hear()
    if "fork" in step:
        children.append(child_reads(step["fork"]))
for pid in children:
    _, status = until(lambda: (ended := os.waitpid(pid, os.WNOHANG))[0] and ended, "a child's end")
    if status:
        say(error=f"a child ended with {status}")
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
    """What the run's service says of it now."""
    return asdict(snapshot(work.env))
