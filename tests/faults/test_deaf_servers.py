# SPDX-License-Identifier: Apache-2.0
"""A file system whose server stops answering: its readers wait, as they do without us, and all
others are served as if it were not there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_VARIABLE, process_state, wait_until
from harness import MIB, Job, Start, python, settle
from plan_jobs import Data, batches, followed, live, options_of, reader, shuffled

from uffdprefetch.demo.bed import SlowBed

pytest_plugins = ("harness_fixtures", "plan_jobs")
pytestmark = pytest.mark.slow

HOUR_US = 3600 * 10**6


@pytest.fixture
def deaf(cold: Data) -> Iterator[Data]:
    """The same data on another bed."""
    with SlowBed(cold.source, bandwidth=0, latency_us=0, told_of_closes=True) as bed:
        yield Data(bed, cold.source, cold.records, cold.file_bytes, cold.extents)
        os.kill(bed.pid, signal.SIGCONT)


def stop(bed: SlowBed) -> None:
    """It answers nothing from now on."""
    os.kill(bed.pid, signal.SIGSTOP)
    wait_until(lambda: process_state(bed.pid) == "T", "the stop")


def plan_of(
    tmp_path: Path, datas: tuple[Data, ...], order: list[int], engine: str = "cache"
) -> tuple[str, ...]:
    """`wrap`'s options: each of the data sets is read in this order."""
    file = tmp_path / "plan.json"
    entries = [
        {"file": str(data.database), "unit": "records", "epochs": [{"ranks": {"0": order}}]}
        for data in datas
    ]
    file.write_text(json.dumps({"schema": "uffdprefetch.plan/1", "files": entries}))
    return options_of(str(file), engine)


def unhurried(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same without waiting for pages."""
    return [{**step, "wait": None} for step in steps]


def opened(pid: int, data: Data) -> int:
    """How many descriptors of its files a process has."""
    count = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            count += os.readlink(fd).startswith(str(data.bed.mountpoint))
    return count


def under_way(work: Job) -> int:
    """Bytes that the service waits for."""
    return int(live(work)["node"]["under_way_bytes"])


def test_short_requests_that_a_server_does_not_answer_hold_up_no_other_files(
    job: Start, cold: Data, deaf: Data, tmp_path: Path
) -> None:
    """As many as are ever under way. Each batch of the other program is there before it is read."""
    order = shuffled(range(cold.records))
    options = plan_of(tmp_path, (cold, deaf), order)
    steps = batches(order)
    steps[3]["say"] = True
    waits = job(reader(tmp_path, deaf, [*steps[:4], *unhurried(steps[4:])], "waits"), options)
    waits.line()
    stop(deaf.bed)
    waits.tell()
    wait_until(lambda: under_way(waits) > MIB, "requests that are not answered")
    settle(lambda: under_way(waits), "what is under way")
    done = job(reader(tmp_path, cold, batches(order)), options).finish().good()
    assert done.lines[0]["sha256"] == cold.digest(order)
    assert under_way(waits) > MIB, "else it was answered"
    os.kill(deaf.bed.pid, signal.SIGCONT)
    done = waits.finish().good()
    assert done.lines[-1]["sha256"] == cold.digest(order)
    assert len(followed(done.summary)) == 2


def test_mappings_whose_first_pages_do_not_come_hold_up_no_other_files(
    job: Start, cold: Data, deaf: Data, tmp_path: Path
) -> None:
    """There are more of them than threads that read."""
    order = shuffled(range(cold.records))
    options = plan_of(tmp_path, (cold,), order)
    deaf.bed.set(latency_us=HOUR_US)
    code = """
    maps = [Mapping(sys.argv[1]) for _ in range(3)]
    say(mapped=True)
    maps[0].digest()
    """
    waits = job(python(code, deaf.database / "data.mdb"), options)
    waits.line()
    wait_until(lambda: deaf.bed.counters()["in_flight"] >= 16, "pages that are asked for")
    work = job(reader(tmp_path, cold, batches(order)), options)
    assert work.finish().good().lines[0]["sha256"] == cold.digest(order)
    assert deaf.bed.counters()["in_flight"] >= 16, "else it was answered"


#: What the service is given, and what it has opened, is to be closed while nobody answers.
HANDED_OVER = """
fd = os.open(sys.argv[1], os.O_RDONLY)
first = Mapping(fd).managed()
say(mapped=True)
hear()
more = [Mapping(fd, first.length) for _ in range(2)]  # fstat(2) would ask
say(mapped=True)
"""
LET_GO = """
m = Mapping(sys.argv[1]).managed()
m.digest()
m.unmap()
say(mapped=False)
hear()
say(mapped=False)
"""


@pytest.mark.parametrize(
    ("code", "engine"),
    [(HANDED_OVER, "cache"), (LET_GO, "cache"), (LET_GO, "pool")],
    ids=["handed over", "let go", "let go of by the pool"],
)
def test_a_server_that_does_not_answer_a_close_holds_up_no_other_files(
    job: Start, cold: Data, deaf: Data, tmp_path: Path, code: str, engine: str
) -> None:
    order = shuffled(range(cold.records))
    options = ("--engine", engine, *plan_of(tmp_path, (cold,), order, engine))
    more = {PATIENCE_VARIABLE: "1000"} if code is LET_GO else {}
    waits = job(python(code, deaf.database / "data.mdb"), options, **more)
    waits.line()
    service = waits.service()
    assert opened(service, deaf), "else there is nothing to close"
    stop(deaf.bed)
    waits.tell()
    waits.line()
    if code is LET_GO:
        wait_until(lambda: not opened(service, deaf), "the file to be closed")
    work = job(reader(tmp_path, cold, batches(order)), options)
    assert work.finish().good().lines[0]["sha256"] == cold.digest(order)
    os.kill(deaf.bed.pid, signal.SIGCONT)
    waits.finish().good()
