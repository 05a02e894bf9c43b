# SPDX-License-Identifier: Apache-2.0
"""The trace file: what was written is read, whatever happened to its end."""

from __future__ import annotations

import errno
import os
import random
import re
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from paths import ROOT

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.trace.file import events as ev
from uffdprefetch.trace.file import trace_file
from uffdprefetch.trace.file.events import EVENT, Call, Kind, ReadaheadSite
from uffdprefetch.trace.record.overview import LAYERS, OFFSET_BINS, TIME_BINS, Overview

FILES = [{"id": 7, "path": "/data/a", "size_bytes": 1 << 30, "inode": 5}]
PROCESSES = [{"pid": 100, "parent": 1, "rank": 3, "local_rank": 1, "command": "train"}]


def some_events(n: int, seed: int = 1) -> np.ndarray[Any, Any]:
    """n events in every column of which something stands, times rising."""
    random_ = np.random.default_rng(seed)
    events = ev.empty(n)
    events["time_ns"] = 10**12 + np.cumsum(random_.integers(0, 10**7, n))
    for name, most in (("offset", 1 << 62), ("length", 1 << 40), ("value", (1 << 64) - 1)):
        events[name] = random_.integers(0, most, n, dtype="u8")
    for name, most in (("pid", 1 << 22), ("tid", 1 << 22), ("kind", 24), ("aux", (1 << 32) - 1)):
        events[name] = random_.integers(0, most, n)
    events["file"] = random_.choice([0, 7], n)
    return events


def write(path: Path, *, blocks: int = 3, n: int = 1000, end: bool = True) -> list[Any]:
    """A trace of ``blocks`` blocks of n events; the events of each."""
    writer = trace_file.create(str(path), False, {"host": "node"})
    writer.block("files", FILES)
    writer.block("processes", PROCESSES)
    parts = []
    for i in range(blocks):
        parts.append(some_events(n, i))
        parts[-1]["time_ns"] += 10**12 * i
        writer.events(parts[-1])
    if end:
        writer.block("end", {"ended_ns": 5})
    writer.close()
    return parts


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.uptrace"
    parts = write(path)
    trace = trace_file.read(str(path))
    assert (trace.events == np.concatenate(parts)).all()
    assert trace.files == {7: trace_file.TracedFile(7, "/data/a", 1 << 30, inode=5)}
    assert trace.processes[100] == trace_file.TracedProcess(100, 1, 3, 1, "train")
    assert (trace.meta["host"], trace.end, trace.truncated) == ("node", {"ended_ns": 5}, None)


@pytest.mark.parametrize("n", [0, 1, 2, trace_file.EVENTS_PER_BLOCK + 1])
def test_any_number_of_events(tmp_path: Path, n: int) -> None:
    path = tmp_path / "t.uptrace"
    parts = write(path, blocks=1, n=n)
    assert (trace_file.read(str(path)).events == parts[0]).all()


@pytest.mark.parametrize("column", EVENT.names)
def test_the_extremes_of_a_column(column: str) -> None:
    events = ev.empty(4)
    most = np.iinfo(EVENT[column]).max
    events[column] = [0, most, 0, most]
    packed = msgpack.unpackb(msgpack.packb(trace_file.pack_events(events)))
    assert (trace_file.unpack_events(packed) == events).all()


def test_a_file_cut_anywhere_gives_its_whole_blocks(tmp_path: Path) -> None:
    """A recorder that was killed: every cut from the first byte to the last."""
    path = tmp_path / "t.uptrace"
    parts = write(path, blocks=4, n=20)
    data = path.read_bytes()
    seen = set()
    for end in range(1, len(data)):
        path.write_bytes(data[:end])
        try:
            trace = trace_file.read(str(path))
        except trace_file.TraceError:
            assert end < len(msgpack.packb({"format": 1})) + 60, "more than the head is there"
            continue
        blocks, rest = divmod(len(trace.events), 20)
        assert rest == 0
        assert (trace.events == np.concatenate([ev.empty(), *parts[:blocks]])).all()
        assert trace.end is None
        seen.add(blocks)
    assert seen == {0, 1, 2, 3, 4}


def test_a_damaged_file_never_gives_other_events(tmp_path: Path) -> None:
    path = tmp_path / "t.uptrace"
    parts = write(path, blocks=4, n=50)
    whole = np.concatenate(parts)
    data = path.read_bytes()
    chance = random.Random(4)
    told = 0
    for _ in range(400):
        damaged = bytearray(data)
        at = chance.randrange(len(data))
        damaged[at] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            trace = trace_file.read(str(path))
        except trace_file.TraceError:
            told += 1
            continue
        n = len(trace.events)
        told += trace.truncated is not None
        assert (n % 50 == 0 and (trace.events == whole[:n]).all()) or not trace.files
    assert told > 300


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b"hello, this is a text\n", "no trace"),
        (msgpack.packb({"format": "other"}), "no trace of ours"),
        (msgpack.packb({"format": "uffdprefetch.trace", "version": 9}), "version 9"),
        (msgpack.packb([1, 2, 3]), "no trace of ours"),
        (os.urandom(3) * 1000, "no trace"),
    ],
)
def test_what_is_no_trace_is_named_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "t.uptrace"
    path.write_bytes(content)
    with pytest.raises(trace_file.TraceError) as caught:
        trace_file.read(str(path))
    assert said in caught.value.message and "\n" not in caught.value.message


def test_a_block_of_a_later_version_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "t.uptrace"
    writer = trace_file.create(str(path), False, {})
    writer.block("weather", {"rain": True})
    writer.block("end", {"ended_ns": 1})
    writer.close()
    assert trace_file.read(str(path)).end == {"ended_ns": 1}


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "t.uptrace"
    path.write_text("precious")
    with pytest.raises(UffdPrefetchError, match="exists"):
        trace_file.create(str(path), False, {})
    assert path.read_text() == "precious"


def test_events_of_files_that_were_not_wanted_in_the_end_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.uptrace"
    writer = trace_file.create(str(path), False, {})
    events = some_events(100)
    events["file"][::2] = 9
    writer.events(events)
    writer.block("files", FILES)
    writer.close()
    assert set(trace_file.read(str(path)).events["file"]) <= {0, 7}


def test_two_nodes_on_one_axis(tmp_path: Path) -> None:
    """The clocks of two nodes differ by any amount; their wall clocks do not."""
    paths = []
    for k, (boot_ns, name) in enumerate(((0, "/data/a"), (5 * 10**11, "/data/b"))):
        path = tmp_path / f"{k}.uptrace"
        meta = {"host": f"n{k}", "started_ns": 10**12 - boot_ns, "started_unix_ns": 1 << 60}
        writer = trace_file.create(str(path), False, meta)
        writer.block("files", [{"id": 7, "path": name, "size_bytes": 1}])
        writer.block("processes", [{"pid": 100, "rank": k}])
        events = ev.empty(3)
        events["time_ns"] = 10**12 - boot_ns + np.array([1, 2, 3]) * 1000 + k
        events["pid"], events["file"], events["kind"] = 100, 7, Kind.FAULT
        writer.events(events)
        writer.block("end", {"ended_ns": 10**12 - boot_ns + 9000})
        writer.close()
        paths.append(str(path))
    both = trace_file.read_all(paths)
    assert both.events["time_ns"].tolist() == [
        10**12 + i * 1000 + k for i in (1, 2, 3) for k in (0, 1)
    ]
    names = {both.files[e["file"]].path for e in both.events}
    assert names == {"/data/a", "/data/b"}
    assert sorted(p.rank for p in both.processes.values()) == [0, 1]
    assert {both.processes[e["pid"]].rank for e in both.events} == {0, 1}
    assert both.meta["host"] == "n0, n1"


@pytest.mark.parametrize(
    ("host", "rank", "later_seconds", "why"),
    [
        ("n0", 0, 1, "both have a rank 0 on n0"),
        ("n0", 1, 1, None),  # a recorder for each rank
        ("n1", 1, 1, None),
        ("n1", 0, 1, None),  # no launcher has told any rank
        ("n1", 1, 100, "90 s lie between them"),
    ],
)
def test_what_is_not_of_one_run_is_not_shown_as_one(
    tmp_path: Path, host: str, rank: int, later_seconds: int, why: str | None
) -> None:
    """Of a plain run and a wrapped one the ranks were mixed, and a finding disappeared."""
    paths = []
    for name, node, number, at in (("a", "n0", 0, 0), ("b", host, rank, later_seconds)):
        paths.append(str(tmp_path / name))
        meta = {"host": node, "started_ns": 10**9, "started_unix_ns": (1 << 60) + at * 10**9}
        writer = trace_file.create(paths[-1], False, meta)
        writer.block("processes", [{"pid": 100, "rank": number}])
        writer.block("end", {"ended_ns": 11 * 10**9})
        writer.close()
    if why is None:
        assert len(trace_file.read_all(paths).processes) == 2
        return
    with pytest.raises(UffdPrefetchError, match=rf"a and .*b are not of one run \({why}\)") as one:
        trace_file.read_all(paths)
    assert one.value.exit_code == 2


def test_the_programs_and_the_recorder_speak_of_the_same_numbers() -> None:
    header = (ROOT / "bpf" / "event.h").read_text()
    defined = {k: int(v, 0) for k, v in re.findall(r"#define (\w+) (0x[0-9A-F]+|\d+)u?\b", header)}
    for kind in Kind:
        if kind < Kind.TOUCH:
            assert defined[f"EV_{kind.name}"] == kind
    for how in ReadaheadSite:
        assert defined[f"AHEAD_{how.name}"] == how
    for call in (Call.MMAP, Call.READ, Call.PREAD, Call.WRITE):
        assert defined[f"CALL_{call.name}"] == call
    flags = (defined["AFTER_AROUND"], defined["IN_KERNEL"])
    assert flags == (ev.FAULT_AFTER_AROUND, ev.FAULT_KERNEL)


# ---- the overview -------------------------------------------------------------------------------


def overview_of(events: np.ndarray[Any, Any], at_once: int) -> dict[str, Any]:
    overview = Overview(0)
    for i in range(0, len(events), at_once):
        overview.add(events[i : i + at_once])
    return overview.body()


@pytest.mark.parametrize("seconds", [0.001, 4, 100, 5000])
def test_the_overview_keeps_every_sum_however_long_the_run_is(seconds: float) -> None:
    n = 5000
    events = ev.empty(n)
    events["time_ns"] = np.linspace(0, seconds * 1e9, n).astype("u8")
    events["kind"] = np.resize([Kind.FAULT, Kind.MAJOR, Kind.WAIT, Kind.FILL], n)
    events["offset"] = np.linspace(0, 1 << 40, n).astype("u8")
    events["length"] = 4096
    events["value"] = 1000
    events["pid"], events["file"] = np.resize([1, 2], n), 7
    body = overview_of(events, 333)
    for name, expected in (("faults", n / 4), ("majors", n / 4), ("wait_ns", n / 4 * 1000),
                           ("fill_bytes", n / 4 * 4096)):  # fmt: skip
        assert sum(v for s in body["series"] for _, v in s.get(name, ())) == expected
    assert body["time_bins"] == TIME_BINS
    assert seconds * 1e9 < body["width_ns"] * TIME_BINS <= max(4 * seconds * 1e9, 512 * 10**7)
    for layer, kinds in LAYERS.items():
        drawn = sum(
            int(np.frombuffer(m["cells"], "<u4").reshape(-1, 3)[:, 2].sum())
            for m in body["maps"] if m["layer"] == layer
        )  # fmt: skip
        assert drawn == np.isin(events["kind"], kinds).sum()
    assert all(m["width_bytes"] * OFFSET_BINS >= 1 << 40 for m in body["maps"])


def test_the_overview_is_bounded_whoever_comes() -> None:
    n = 3000
    events = ev.empty(n)
    events["pid"] = np.arange(n)
    events["kind"], events["file"] = Kind.FAULT, 7
    body = overview_of(events, 100)
    assert len(body["series"]) <= 256 and len(body["maps"]) <= 64 * len(LAYERS)
    assert sum(v for s in body["series"] for _, v in s["faults"]) == n


def test_a_file_s_name_may_be_no_text(tmp_path: Path) -> None:
    """It is bytes to the kernel; a recording with one was lost. People see its bytes."""
    path, name = tmp_path / "t.uptrace", os.fsdecode(b"/data/caf\xe9.bin")
    writer = trace_file.create(str(path), False, {"command": ["cat", name]})
    writer.block("files", [{"id": 7, "path": name, "size_bytes": 1}])
    writer.block("processes", [{"pid": 1, "command": name}])
    writer.close()
    trace = trace_file.read(str(path))
    assert trace.truncated is None
    assert trace.files[7].path == trace.processes[1].command == "/data/caf\\xe9.bin"
    assert trace.meta["command"] == ["cat", "/data/caf\\xe9.bin"]


def test_where_there_is_no_room_the_recording_is_said_to_be_impossible_and_no_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(trace_file.Writer, "_put", full)
    with pytest.raises(UffdPrefetchError, match="No space left on device") as caught:
        trace_file.create(str(tmp_path / "t.uptrace"), False, {})
    assert caught.value.exit_code == 125 and not list(tmp_path.iterdir())


# ---- faults that no tracepoint tells of ---------------------------------------------------------


def silent(page: int, pid: int = 100) -> tuple[int, ...]:
    """Such a fault, as it is written: an AROUND of its 2 MiB."""
    low = page // 512 * 512
    return (low * 4096, ev.HUGE_BYTES, 0, pid, pid, Kind.AROUND, 7, page - low)


def around(page: int, pid: int = 100) -> tuple[int, ...]:
    return (page // 16 * 65536, 65536, 0, pid, pid, Kind.AROUND, 7, page % 16)


def touch(page: int, pid: int = 100, aux: int = 0) -> tuple[int, ...]:
    return (page * 4096, 4096, 9000, pid, pid, Kind.TOUCH, 7, aux)


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        # of a checkpoint, before or after which our service tells of the touch
        ([silent(600), touch(600)], []),
        ([touch(600), silent(600)], []),
        # of a huge page, of the same process, and of another one at that page
        ([silent(700), touch(600), silent(1024)], [700, 1024]),
        ([touch(600), silent(600, pid=101)], [600]),
        # single pages around it were mapped before: of a checkpoint that nobody told of
        ([touch(9000), around(1056), silent(1040), silent(1536)], [1536]),
        ([touch(9000), silent(1040), around(1056)], [1040]),
        # nothing else lies in our pool
        ([touch(600, aux=ev.POOL_TOUCH), silent(700), silent(700, pid=101)], [700]),
        # without our service there are no checkpoints
        ([around(1056), silent(1040)], [1040]),
    ],
)
def test_a_checkpoint_is_told_from_a_huge_page(
    tmp_path: Path, rows: list[tuple[int, ...]], kept: list[int]
) -> None:
    path = tmp_path / "t.uptrace"
    writer = trace_file.create(str(path), False, {"host": "node"})
    writer.block("files", FILES)
    events = np.array([(10**12 + i * 1000, *row) for i, row in enumerate(rows)], EVENT)
    writer.events(events)
    writer.close()
    found = trace_file.read(str(path)).events
    huge = found[found["length"] == ev.HUGE_BYTES]
    assert (huge["offset"] // 4096 + huge["aux"]).tolist() == kept
    assert len(found) == len(rows) - sum(row[1] == ev.HUGE_BYTES for row in rows) + len(kept)
