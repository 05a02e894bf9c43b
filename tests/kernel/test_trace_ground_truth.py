# SPDX-License-Identifier: Apache-2.0
"""Readers whose accesses are known, recorded by the kernel's own events: counts must agree exactly,
and what is understood of them must be what they did."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from components import on_memory
from conftest import HANG_SECONDS, clean_environment, require, wait_until
from witness import Recorded, count, faults, length, ranks_of, reader, record, why_no_witness

from uffdprefetch.demo.bed import SlowBed, drop_cache, why_no_bed
from uffdprefetch.trace.analyse.report import analyse
from uffdprefetch.trace.file.events import HUGE_BYTES, Kind

pytestmark = pytest.mark.bpf

MIB = 1 << 20
RECORD_BYTES = 256 << 10
RECORDS = 96
SIZE = RECORDS * RECORD_BYTES


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    require(why_no_witness() is None, f"no eBPF: {why_no_witness()}")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory on a disk with a file of RECORDS records."""
    directory = tmp_path_factory.mktemp("truth")
    require(not on_memory(directory), "TMPDIR is memory: nothing is read from a disk")
    content = np.random.PCG64(1).random_raw(SIZE // 8).tobytes()
    for name in ("records.bin", *(case.name for case in CASES)):
        (directory / name).write_bytes(content)
    os.sync()
    return directory


@pytest.fixture(scope="module")
def bed(source: Path) -> Iterator[SlowBed]:
    """The same behind a link without delay: what counts here is what it counts."""
    require(why_no_bed() is None, why_no_bed() or "")
    with SlowBed(source, bandwidth=0, latency_us=0) as mounted:
        yield mounted


NAMES = {
    "consecutive": ("consecutive", None),
    "stride:2": ("strided", 2),
    "stride:3": ("strided", 3),
    "stride:16": ("strided", 16),
    "random": ("random", None),
    "backward": ("backward", None),
    "epochs:2": ("consecutive", None),
    "change": ("mixed", None),
}


@dataclass(frozen=True)
class Case:
    """A pattern read by so many ranks, each case from a file of its own."""

    pattern: str
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.pattern.replace(':', '-')}.{self.ranks}"


CASES = [Case(pattern, ranks) for pattern in NAMES for ranks in (1, 4)]


@dataclass(frozen=True)
class Patterns:
    """All cases, one after the other, in one recording."""

    run: Recorded
    bed: SlowBed
    report: dict[str, Any]

    def path(self, case: Case) -> Path:
        return self.bed.path(case.name)

    def said(self, case: Case) -> list[dict[str, Any]]:
        return [said for said in self.run.said if said["path"] == str(self.path(case))]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


def recorded(bed: SlowBed, directory: Path, cases: list[Case]) -> Patterns:
    """These cases one after the other, cold, and understood."""
    environment = {**clean_environment(), "UFFDPREFETCH_RUNDIR": str(directory / "hub")}
    lines = []
    for case in cases:
        path = bed.path(case.name)
        drop_cache(path)
        lines.append(shlex.join(ranks_of(case.ranks, reader(path, case.pattern, RECORD_BYTES))))
    run = record(environment, directory, ["sh", "-ec", "\n".join(lines)])
    return Patterns(run, bed, analyse(run.trace))


@pytest.fixture(scope="module")
def patterns(bed: SlowBed, tmp_path_factory: pytest.TempPathFactory) -> Patterns:
    """Every case recorded."""
    return recorded(bed, tmp_path_factory.mktemp("patterns"), CASES)


# ---- counts -------------------------------------------------------------------------------------


def warm_in_single_pages(path: Path) -> None:
    """Read it into the page cache without readahead.

    Readahead's folios may have 2 MiB, and one fault maps two of the places then (12 faults for 23,
    seen on Linux 6.18's ext4, with MADV_NOHUGEPAGE too).
    """
    drop_cache(path)
    with path.open("rb") as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        while f.read(MIB):
            pass


@pytest.mark.alone  # memory that others want takes cached pages away
@pytest.mark.parametrize("place", ["disk", "bed"])
@pytest.mark.parametrize("temperature", ["cold", "warm"])
def test_23_faults_are_23_faults(
    env: dict[str, str], tmp_path: Path, source: Path, bed: SlowBed, place: str, temperature: str
) -> None:
    path = source / "records.bin" if place == "disk" else bed.path("records.bin")
    if temperature == "warm":
        warm_in_single_pages(path)
    run = record(
        env, tmp_path, reader(path, "faults:23"), cold=path if temperature == "cold" else None
    )
    (said,) = run.said
    events = run.events(path, said["pid"])
    assert said["faults"] == 23
    assert faults(events) == 23
    assert count(events, Kind.MAJOR) == said["majors"]
    touched = set(events["offset"][events["kind"] == Kind.FAULT].tolist())
    assert touched <= {i * MIB for i in range(23)}
    assert run.trace.end is not None and run.trace.end["lost_events"] == 0


#: A fault that is given up before it is done (VM_FAULT_RETRY and a signal) is taken a second time:
#: two exceptions, which getrusage(2) counts once. Seldom: seen once.
TAKEN_AGAIN = 1


def agree(found: int, said: int) -> bool:
    """Whether a recording has the faults that getrusage(2) has."""
    return said <= found <= said + TAKEN_AGAIN


def test_the_kernels_own_counts_of_each_process_agree(patterns: Patterns, case: Case) -> None:
    run, path = patterns.run, patterns.path(case)
    assert len(patterns.said(case)) == case.ranks
    for said in patterns.said(case):
        events = run.events(path, said["pid"])
        assert agree(faults(events), said["faults"])
        assert count(events, Kind.MAJOR) == said["majors"]
        assert run.trace.processes[said["pid"]].rank == said["rank"]


def test_bytes_agree_with_the_bed_and_with_the_page_cache(
    env: dict[str, str], tmp_path: Path, bed: SlowBed
) -> None:
    path = bed.path("records.bin")
    before = bed.counters()["bytes"]
    run = record(env, tmp_path, reader(path, "stride:3", RECORD_BYTES, "--resident"), cold=path)
    (said,) = run.said
    events = run.events(path)
    filled = length(events, Kind.FILL)
    # what nobody waited for (readahead) may still be on its way when the reader has ended
    wait_until(lambda: bed.counters()["bytes"] - before >= filled, "the bed to have told of all")
    assert bed.counters()["bytes"] - before == filled
    # the kernel may take pages back at any time (it told of that, too): as it was when it was asked
    by_then = events[events["time_ns"] <= said["resident_ns"]]
    assert length(by_then, Kind.FILL) - length(by_then, Kind.EVICT) == said["resident"]


def test_bytes_agree_with_what_the_process_was_charged_on_a_disk(
    env: dict[str, str], tmp_path: Path, source: Path
) -> None:
    """/proc/PID/io read_bytes, taken by the reader's parent when it has ended: all of it."""
    path = source / "records.bin"
    code = (
        "import resource, subprocess, sys, json\n"
        "subprocess.run(sys.argv[1:], check=True)\n"
        "io = dict(line.split(': ') for line in open('/proc/self/io'))\n"
        "print(json.dumps({'charged': int(io['read_bytes'])}))\n"
    )
    command = ["/usr/bin/python3", "-c", code, *reader(path, "consecutive")]
    record(env, tmp_path, command)  # the interpreter's own files are cached from here on
    run = record(env, tmp_path, command, cold=path)
    charged = run.said[1]["charged"]
    filled = length(run.events(path), Kind.FILL)
    assert filled == SIZE
    assert filled <= charged <= filled + 4 * MIB  # and what else it may have read


# ---- what they did ------------------------------------------------------------------------------


def readers(patterns: Patterns, case: Case) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Of each rank what it says of itself, and what was understood."""
    (file,) = [f for f in patterns.report["files"] if f["path"] == str(patterns.path(case))]
    found = {r["rank"]: r for r in patterns.report["readers"] if r["file"] == file["id"]}
    return [(said, found[said["rank"]]) for said in patterns.said(case)]


def misnamed(patterns: Patterns, case: Case) -> list[str]:
    """The patterns that have not the name, or the stride, of what was read."""
    name, stride = NAMES[case.pattern]
    wrong = []
    for _, found in readers(patterns, case):
        pattern = found["pattern"]
        # one rank alone: where its record ends may be hidden in a window of 64 KiB
        known = pattern["stride_records"] == stride or (
            case.ranks == 1 and pattern["stride_records"] is None
        )
        size = None if stride is None else stride * RECORD_BYTES
        if pattern["name"] != name or (stride and not (known and pattern["stride_bytes"] == size)):
            wrong.append(json.dumps(pattern))
    return wrong


def test_each_pattern_is_named_for_each_rank(
    patterns: Patterns, case: Case, bed: SlowBed, tmp_path: Path
) -> None:
    """Where one page is mapped that no event tells of, a pattern of few records has another name:
    seen twice in some hundred recordings, on a busy machine. It is not twice running."""
    wrong = misnamed(patterns, case)
    if wrong:
        wrong = misnamed(recorded(bed, tmp_path, [case]), case)
    assert not wrong
    for said, found in readers(patterns, case):
        assert agree(found["faults"]["total"], said["faults"])
        assert found["faults"]["major"] == said["majors"]
        if case.pattern == "epochs:2":
            assert found["pids"] == [said["pid"]]


def test_what_a_skipping_reader_never_touched_is_useless(
    env: dict[str, str], tmp_path: Path, bed: SlowBed
) -> None:
    """One rank of stride 16 with readahead: most of what is read is thrown away ([Stanovnik])."""
    path = bed.path("records.bin")
    run = record(env, tmp_path, reader(path, "stride:16"), cold=path)
    report = analyse(run.trace)
    (file,) = [f for f in report["files"] if f["path"] == str(path)]
    filled = length(run.events(path), Kind.FILL)
    assert file["fill_bytes"] == filled
    # from 16 KiB behind each record's end to what readahead brought: nobody came there
    assert 0 < file["useless_bytes"] <= filled - RECORDS // 16 * RECORD_BYTES
    assert file["useless_denominator_bytes"] == filled


def test_the_records_of_an_array_are_told_by_its_index(
    env: dict[str, str], tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header moves all records by less than a page: each begins on its neighbour's last one."""
    monkeypatch.setenv("UFFDPREFETCH_RUNDIR", env["UFFDPREFETCH_RUNDIR"])
    path = source / "array.npy"
    np.save(path, np.fromfile(source / "records.bin", np.uint8).reshape(RECORDS, RECORD_BYTES))
    run = record(env, tmp_path, reader(path, "stride:3", RECORD_BYTES), cold=path)
    report = analyse(run.trace)
    (file,) = [f for f in report["files"] if f["path"] == str(path)]
    (found,) = [r for r in report["readers"] if r["file"] == file["id"]]
    assert (found["pattern"]["name"], found["pattern"]["stride_records"]) == ("strided", 3)
    assert "records from the .npy index" in found["pattern"]["sensor"]
    assert file["records"]["records"] == RECORDS
    assert file["records"]["records_touched"] == RECORDS // 3
    assert file["records"]["records_mapped"] >= RECORDS // 3


# ---- a witness, not our own events --------------------------------------------------------------


def test_a_reader_that_is_not_wrapped_is_seen_beside_one_that_is(
    env: dict[str, str], tmp_path: Path, source: Path
) -> None:
    """The whole pipeline under wrap; a second program without it (UFFDPREFETCH_DISABLE)."""
    path = source / "records.bin"
    command = reader(path, "faults:23")
    stray = ["env", "-u", "LD_PRELOAD", *command]
    run = record(
        env, tmp_path, ["sh", "-c", " ".join(f"'{w}'" for w in stray)], cold=path,
        wrap=["--policy", "auto"],
    )  # fmt: skip
    (said,) = run.said
    events = run.events(path, said["pid"])
    assert faults(events) == said["faults"] == 23
    assert count(events, Kind.TOUCH) == count(events, Kind.SEEN) == 0
    assert run.trace.meta["source"] == "bpf+service"


def test_wrap_and_kernel_are_on_one_axis(env: dict[str, str], tmp_path: Path, bed: SlowBed) -> None:
    """What the service says that it warmed, the kernel saw it fill, at that time."""
    path = bed.path("records.bin")
    run = record(
        env, tmp_path, reader(path, "epochs:2", RECORD_BYTES, "--ahead"), cold=path,
        wrap=["--min-size", "1MiB", "--policy", "fixed", "--size", "1MiB", "--distance", "1MiB"],
    )  # fmt: skip
    events = run.events(path)
    warm = events[events["kind"] == Kind.WARM]
    warm = warm[warm["length"] > warm["aux"].astype("<u8") * 1024]
    assert len(warm), "nothing was warmed"
    assert count(events, Kind.TOUCH) > 0, "no checkpoint was touched"
    around = events[events["kind"] == Kind.AROUND]
    assert not (around["length"] == HUGE_BYTES).any(), "a checkpoint was taken for a huge page"
    (service,) = [p.pid for p in run.trace.processes.values() if p.role == "service"]
    fills = events[(events["kind"] == Kind.FILL) & (events["pid"] == service)]
    assert len(fills), "the kernel saw no fill by the service"
    for extent in warm:
        end, done = extent["offset"] + extent["length"], extent["time_ns"] + extent["value"]
        ends = fills["offset"] + fills["length"]
        meant = fills[(fills["offset"] < end) & (extent["offset"] < ends)]
        began, ended = meant["time_ns"], meant["time_ns"] + meant["value"]
        within = (began <= done) & (ended >= extent["time_ns"])
        assert within.any(), "an extent was warmed that the kernel did not see at that time"


def test_what_comes_after_the_end_is_not_recorded(tmp_path: Path) -> None:
    """The probes are still there then: to take them away takes longer than a short job."""
    path = tmp_path / "data"
    path.write_bytes(bytes(SIZE))
    os.sync()
    code = """
import os, sys
from uffdprefetch.trace.record.kernel_tracer import KernelTracer

def read(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    for at in range(0, os.fstat(descriptor).st_size, 1 << 20):
        os.pread(descriptor, 1 << 20, at)
    os.close(descriptor)
    events, new = witness.drain()
    return len(events) + len(new)

witness = KernelTracer()
witness.follow(os.getpid())
assert read(sys.argv[1])
last = witness.stop()
assert len(last), "the run of pages that had not ended"
witness.drain()
assert not read(sys.argv[1])
assert len(witness.stop()) == len(last)
witness.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True,
        timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
