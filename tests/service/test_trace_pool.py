# SPDX-License-Identifier: Apache-2.0
"""A trace of a run with --engine pool: what its touches, misses and punches come to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import HANG_SECONDS, require, uffdprefetch
from harness import Records
from traces import PAGE_BYTES, START_NS, Machine, Reader, readers_of, report_of

from uffdprefetch.report import captions, png
from uffdprefetch.report import text as text_report
from uffdprefetch.state import publisher
from uffdprefetch.trace.analyse import marks
from uffdprefetch.trace.analyse.pictures import pictures
from uffdprefetch.trace.analyse.ranks import NOBODY
from uffdprefetch.trace.file import events
from uffdprefetch.trace.file import trace_file as file
from uffdprefetch.trace.file.events import DISK_OFF, POOL_BACKWARD, POOL_MISS, POOL_TOUCH, Kind
from uffdprefetch.trace.record.overview import Overview

pytest_plugins = ("harness_fixtures",)

MS = 1_000_000
CHUNK = 16  # pages
PAGES = 2048


def test_service_and_trace_mean_the_same_numbers() -> None:
    names = ("TOUCH", "SEEN", "WARM", "WINDOW", "MAJORS", "PUNCH", "NODES")
    assert [getattr(publisher, name) for name in names] == [Kind[name] for name in names]
    assert (publisher.POOL_TOUCH, publisher.POOL_MISS, publisher.POOL_BACKWARD) == (
        POOL_TOUCH, POOL_MISS, POOL_BACKWARD,
    )  # fmt: skip


# ---- what the analysis makes of it --------------------------------------------------------------


def warm(machine: Machine, by: Reader, length: int) -> None:
    """The service (tid 777) reads from the file's beginning on."""
    machine.rows.append((by.now_ns, 0, length, 5 * MS, by.pid, 777, Kind.WARM, 1, 0))


def pooled_machine(epochs: int = 2, evict: bool = True) -> tuple[Machine, Reader]:
    """A reader in order over a file in the pool: touches of each chunk, one of eight of them late;
    half of it leaves between two epochs and is asked for again."""
    machine = Machine(PAGES)
    by = machine.reader(0)
    size = PAGES * PAGE_BYTES
    warm(machine, by, size)
    for epoch in range(epochs):
        if epoch and evict:
            machine.event(by, Kind.PUNCH, 0, size // 2)
            by.now_ns += MS
            warm(machine, by, size // 2)
        for chunk in range(PAGES // CHUNK):
            by.now_ns += MS
            first = (chunk - 1) * CHUNK + 1 if chunk else 0
            missed = POOL_MISS if chunk % 8 == 0 else 0
            pages = chunk * CHUNK + 1 - first
            machine.event(
                by, Kind.TOUCH, first * PAGE_BYTES, pages * PAGE_BYTES, aux=POOL_TOUCH | missed
            )
    return machine, by


def test_touches_of_the_pool_are_faults_and_the_late_ones_major() -> None:
    machine, _ = pooled_machine(1, evict=False)
    (reader,) = readers_of(report_of(machine))
    chunks = PAGES // CHUNK
    assert reader["faults"] == {
        "total": chunks, "minor": chunks - chunks // 8, "major": chunks // 8,
    }  # fmt: skip
    assert reader["hit"]["share"] == pytest.approx(7 / 8)
    assert "pool" in reader["faults_sensor"] and "pool" in reader["hit"]["sensor"]
    # how long they waited is not told: no zero
    assert reader["stall_seconds"] is None and "the pool" in reader["stall_sensor"]


def test_what_lies_between_two_touches_of_a_stream_counts_as_touched() -> None:
    machine, _ = pooled_machine(1, evict=False)
    report = report_of(machine)
    (reader,) = readers_of(report)
    assert reader["pattern"]["name"] == "sequential" and reader["pattern"]["direction"] == 1
    assert reader["touched_pages"] == PAGES - CHUNK + 1
    assert reader["touched_pages_least"] == PAGES // CHUNK
    assert report["service"]["warm_used_share"] == pytest.approx((PAGES - CHUNK + 1) / PAGES)
    assert (report["service"]["touches"], report["service"]["pool_touches"]) == (0, PAGES // CHUNK)


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_epochs_are_found_where_different_pages_are_touched(epochs: int) -> None:
    """Runs are of different lengths in each epoch, so other pages tell."""
    machine = Machine(PAGES)
    by = machine.reader(0)
    for epoch in range(epochs):
        at, step = 0, CHUNK
        while at < PAGES:
            by.now_ns += MS
            first = max(0, at - step + 1)
            machine.event(
                by, Kind.TOUCH, first * PAGE_BYTES, (at + 1 - first) * PAGE_BYTES, aux=POOL_TOUCH
            )
            step = CHUNK * (1 + (at // CHUNK + epoch) % 3)
            at += step
    (reader,) = readers_of(report_of(machine))
    assert len(reader["epochs"]) == epochs


def test_a_backward_reader_is_backward() -> None:
    machine = Machine(PAGES)
    by = machine.reader(0)
    for chunk in reversed(range(PAGES // CHUNK)):
        by.now_ns += MS
        machine.event(
            by, Kind.TOUCH, chunk * CHUNK * PAGE_BYTES, CHUNK * PAGE_BYTES,
            aux=POOL_TOUCH | POOL_BACKWARD,
        )  # fmt: skip
    (reader,) = readers_of(report_of(machine))
    assert (reader["pattern"]["name"], reader["pattern"]["direction"]) == ("backward", -1)


def test_one_that_skips_more_than_is_mapped_at_once_is_strided() -> None:
    machine = Machine(16 * PAGES)
    by = machine.reader(0)
    for page in range(0, 16 * PAGES, 256):
        by.now_ns += MS
        machine.event(by, Kind.TOUCH, page * PAGE_BYTES, PAGE_BYTES, aux=POOL_TOUCH)
    (reader,) = readers_of(report_of(machine))
    assert reader["pattern"]["name"] == "strided"
    assert reader["pattern"]["stride_bytes"] == 256 * PAGE_BYTES
    assert reader["touched_pages"] == 16 * PAGES // 256


def test_what_left_the_pool_and_came_again_is_counted_and_found() -> None:
    machine, _ = pooled_machine()
    report = report_of(machine)
    size = PAGES * PAGE_BYTES
    assert report["files"][0]["pool"] == {
        "touches": 2 * PAGES // CHUNK, "missed": 2 * PAGES // CHUNK // 8,
        "warm_bytes": size * 3 // 2, "warm_again_bytes": size // 2, "punched_bytes": size // 2,
        "from_nodes_bytes": None, "to_nodes_bytes": None, "storage_bytes": None,
        "disk_read_bytes": None, "disk_written_bytes": None, "disk_dropped_bytes": None,
        "disk_is_off": None,
    }  # fmt: skip
    (found,) = [f for f in report["findings"] if "the pool let" in f["title"]]
    assert "4 MiB or more of train.bin" in found["title"]
    assert "--budget, up to 8 MiB" in found["remedy"]
    quiet, _ = pooled_machine(evict=False)
    assert not any("the pool let" in f["title"] for f in report_of(quiet)["findings"])


def test_what_came_from_other_nodes_is_told_of_the_file() -> None:
    machine, by = pooled_machine(1, evict=False)
    assert report_of(machine)["files"][0]["pool"]["from_nodes_bytes"] is None, "no cluster"
    for turn in (1, 2):
        machine.event(by, Kind.NODES, (5 << 20) * turn, (3 << 20) * turn, (7 << 20) * turn)
    report = report_of(machine)
    pool = report["files"][0]["pool"]
    assert (pool["from_nodes_bytes"], pool["to_nodes_bytes"], pool["storage_bytes"]) == (
        10 << 20, 6 << 20, 14 << 20,
    )  # fmt: skip
    assert "10 MiB from other nodes" in " ".join(text_report.text(report).split())


def test_what_went_to_the_disk_and_came_back_is_told_of_the_file() -> None:
    machine, by = pooled_machine(1, evict=False)
    for turn in (1, 2):
        machine.event(
            by,
            Kind.DISK,
            (5 << 20) * turn,
            (3 << 20) * turn,
            (1 << 20) * turn,
            aux=DISK_OFF * (turn - 1),
        )
    report = report_of(machine)
    pool = report["files"][0]["pool"]
    assert (pool["disk_read_bytes"], pool["disk_written_bytes"], pool["disk_dropped_bytes"]) == (
        10 << 20, 6 << 20, 2 << 20,
    )  # fmt: skip
    assert pool["disk_is_off"]
    told = " ".join(text_report.text(report).split())
    assert "6 MiB went to the disk tier, which is off now, 10 MiB came back, 2 MiB left" in told


def test_what_came_back_from_the_disk_was_not_read_again() -> None:
    machine, by = pooled_machine()
    machine.event(by, Kind.DISK, PAGES * PAGE_BYTES // 2, 0, 0, aux=0)
    report = report_of(machine)
    assert report["files"][0]["pool"]["warm_again_bytes"] == PAGES * PAGE_BYTES // 2
    assert not any("the pool let" in f["title"] for f in report["findings"])


def test_what_the_pool_let_go_and_nobody_wanted_again_is_no_finding() -> None:
    machine, by = pooled_machine(1, evict=False)
    machine.event(by, Kind.PUNCH, 0, PAGES * PAGE_BYTES)
    report = report_of(machine)
    assert report["files"][0]["pool"]["warm_again_bytes"] == 0
    assert not any("the pool let" in f["title"] for f in report["findings"])


def test_a_file_outside_the_pool_says_nothing_of_it() -> None:
    machine = Machine(64)
    machine.run([(machine.reader(0), range(64))])
    assert report_of(machine)["files"][0]["pool"] is None
    text = text_report.text(report_of(machine))
    assert "pool" not in text


def test_the_text_tells_of_the_pool_instead_of_the_page_cache() -> None:
    machine, _ = pooled_machine()
    text = " ".join(text_report.text(report_of(machine)).split())
    assert "in our pool: 256 touches reached it, 32 had to wait" in text
    assert "4 MiB left it, at least 4 MiB of that brought back" in text
    assert "brought in" not in text and "never used" not in text


# ---- pictures -----------------------------------------------------------------------------------


def test_marks_of_the_pool_lie_where_the_pages_were_touched() -> None:
    machine, _ = pooled_machine(2)
    found = {s.kind: s for s in marks.collect(machine.trace())}
    assert {"pool", "missed", "punch", "warm"} <= set(found) and "touch" not in found
    chunks = 2 * PAGES // CHUNK
    assert len(found["pool"]) == chunks and len(found["missed"]) == chunks // 8
    assert (found["pool"].offset % (CHUNK * PAGE_BYTES) == 0).all()
    assert np.isin(found["missed"].offset, found["pool"].offset).all()
    assert (found["punch"].rank, found["punch"].layer) == (NOBODY, "evict")
    assert found["missed"].layer == "miss" and found["pool"].layer == "demand"


def test_hits_over_time_count_the_pools_touches_and_stall_says_why_it_is_not_there() -> None:
    machine, _ = pooled_machine()
    report = report_of(machine)
    drawn = pictures(machine.trace(), report)
    series = drawn["series"]
    assert series["accesses"].sum() == 2 * PAGES // CHUNK
    assert series["misses"].sum() == 2 * PAGES // CHUNK // 8
    assert series["stall_share"] is None
    told = captions.captions(report, drawn)
    assert "does not tell how long" in told["stall"]["empty"]
    assert "Seen by: n/a" not in told["stall"]["text"]
    assert "or in the pool" in told["hits"]["text"]
    assert "touches that reached our service's pool" in told["map"]["text"]


def test_a_picture_can_be_made_of_it(tmp_path: Path) -> None:
    machine, _ = pooled_machine()
    path = tmp_path / "x.png"
    png.write(machine.trace(), report_of(machine), str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_overview_keeps_what_left_the_pool() -> None:
    made = Overview(START_NS)
    some = events.empty(3)
    some["kind"], some["time_ns"], some["length"], some["file"] = Kind.PUNCH, START_NS, 65536, 1
    made.add(some)
    (entry,) = made.body()["series"]
    assert entry["punch_bytes"] == [[0, 3 * 65536]]


# ---- a real run ---------------------------------------------------------------------------------

READER = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
m = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
for epoch in range(3):
    for at in range(0, len(m), 4096):
        m[at]
"""


def test_a_recording_agrees_with_the_pools_own_books(
    env: dict[str, str], tmp_path: Path, records: Records
) -> None:
    from uffdprefetch.doctor import pool

    require(pool.mechanism().status == "ok", "no userfaultfd with kernel faults for this user")
    out, trace_path = tmp_path / "x", tmp_path / "run.uptrace"
    words = uffdprefetch(
        *("wrap", "-f", "-o", str(out), "--engine", "pool", "--budget", "8MiB"),
        *("--trace", str(trace_path), "--", sys.executable, "-c", READER, str(records.path)),
    )
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    summary = json.loads(Path(f"{out}.summary.json").read_text())
    books, trace = summary["pool"], file.read(str(trace_path))
    assert books["lost_events"] == 0 and trace.end is not None
    touches = events.of_kind(trace.events, Kind.TOUCH)
    # a touch is told when it is known whose it was: one that a mapping ended with may not be
    assert 0 <= books["faults"] - len(touches) <= 8
    assert (touches["aux"] & POOL_TOUCH > 0).all()
    missed = int((touches["aux"] & POOL_MISS > 0).sum())
    assert 0 <= books["missing_faults"] - missed <= 8
    punched = int(events.of_kind(trace.events, Kind.PUNCH)["length"].sum())
    assert 0 < punched <= books["evicted_bytes"]
    from uffdprefetch.trace.analyse.report import analyse

    report = analyse(trace)
    entry = next(f for f in report["files"] if f["path"] == str(records.path))
    assert entry["pool"]["touches"] == len(touches)
    # fills of the pool's memory are no fills of the file
    if entry["fill_bytes"] is not None:
        assert entry["fill_bytes"] <= books["read_bytes"]
    assert not any("memfd" in f["path"] for f in report["files"])
