# SPDX-License-Identifier: Apache-2.0
"""What programs, libraries and small files cost, and what read(2) took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from uffdprefetch.report import text
from uffdprefetch.trace.analyse.ranks import Ranks
from uffdprefetch.trace.analyse.report import analyse
from uffdprefetch.trace.analyse.series import bytes_per_second
from uffdprefetch.trace.file import events as ev
from uffdprefetch.trace.file import trace_file
from uffdprefetch.trace.file.events import Call, Kind, ReadaheadSite
from uffdprefetch.trace.file.trace_file import Trace
from uffdprefetch.trace.record.process_identity import group_of

SECOND = 10**9
START = 1000 * SECOND
MIB = 1 << 20
TORCH = "/opt/env/lib/python3.11/site-packages/torch"
FILES = [
    {"id": 1, "path": "/data/train.npy", "size_bytes": 64 * MIB},
    {"id": 2, "path": f"{TORCH}/lib/libtorch.so", "size_bytes": 200 * MIB, "group": "torch"},
    {"id": 3, "path": f"{TORCH}/nn/__init__.pyc", "size_bytes": 9000, "group": "torch"},
    {"id": 4, "path": "/usr/bin/env", "size_bytes": 9000, "group": "/usr/bin"},
]


def event(at: float, kind: Kind, file: int, **more: int) -> Any:
    one = ev.empty(1)
    one["time_ns"], one["kind"], one["file"] = START + int(at * SECOND), kind, file
    one["pid"] = one["tid"] = 100
    for name, value in more.items():
        one[name] = value
    return one


def a_trace(path: Path, host: str = "node", pid: int = 100, started_unix: int = SECOND) -> Path:
    writer = trace_file.create(
        str(path), False,
        {"host": host, "started_ns": START, "started_unix_ns": started_unix, "source": "bpf",
         "job_ended_ns": START + 10 * SECOND},
    )  # fmt: skip
    writer.block("files", FILES)
    writer.block("processes", [{"pid": pid, "rank": 0 if host == "node" else 1}])
    order = ReadaheadSite.ORDER << 8
    parts = [
        event(0.1, Kind.READAHEAD, 2, offset=0, length=MIB, aux=order),
        event(0.2, Kind.FILL, 2, offset=0, length=MIB, value=10, aux=4),
        event(0.3, Kind.READAHEAD, 2, offset=MIB, length=MIB, aux=order),
        event(0.4, Kind.MAJOR, 2, offset=0, length=4096, value=3 * SECOND),
        event(0.5, Kind.FAULT, 2, offset=0, length=4096),  # of a program nobody asks this
        event(0.6, Kind.FILL, 3, offset=0, length=12288, value=10, aux=1),
        event(0.65, Kind.CALL, 3, value=SECOND // 4, aux=Call.OPEN | 3 << 8),
        event(0.7, Kind.CALL, 3, length=9000, value=SECOND // 2, aux=Call.READ | 3 << 8),
        event(0.8, Kind.CALL, 1, length=5 * MIB, value=SECOND // 4, aux=Call.PREAD | 4 << 8),
        event(0.9, Kind.READ, 1, offset=0, length=5 * MIB),
    ]
    events = np.concatenate(parts)
    events["pid"] = events["tid"] = pid
    writer.events(events)
    writer.block("end", {"ended_ns": START + 10 * SECOND})
    writer.close()
    return path


def report_of(trace: Trace) -> dict[str, Any]:
    return analyse(trace, lambda *_: None)


def test_what_they_cost_is_told_by_package(tmp_path: Path) -> None:
    trace = trace_file.read(str(a_trace(tmp_path / "t.uptrace")))
    report = report_of(trace)
    assert [file["path"] for file in report["files"]] == ["/data/train.npy"]
    (torch,) = report["others"]  # nothing was read for the other one
    assert (torch["name"], torch["files"], torch["requests"]) == ("torch", 2, 2)
    assert torch["fill_bytes"] == MIB + 12288
    assert torch["major_faults"] == 1
    assert torch["read_calls"] == {"count": 1, "bytes": 9000, "seconds": 0.5}
    assert torch["opens"] == {"count": 1, "seconds": 0.25}
    assert torch["wait_seconds"] == 3.75
    # of calls, theirs are the job's as any other; of what is read of record files, not a part
    assert report["calls"]["read"] == 1
    assert report["calls"]["pread"] == 1
    assert report["files"][0]["read_calls"] == {"count": 1, "bytes": 5 * MIB, "seconds": 0.25}
    assert not (trace.events["kind"] == Kind.MAJOR).any()
    shown = "\n".join(text.lines(report, width=100))
    assert "torch: 2 files, 1 open (250 ms), 1 read call of 8.79 KiB (500 ms), 2 requests" in shown
    assert "read(2): 1 call, 5 MiB, 250 ms" in shown


def test_what_came_of_them_is_in_the_bandwidth(tmp_path: Path) -> None:
    trace = trace_file.read(str(a_trace(tmp_path / "t.uptrace")))
    found = bytes_per_second(trace, Ranks(trace), START, 10 * SECOND, 100)
    assert found["ranks"].sum() * 0.1 == pytest.approx(MIB + 12288)  # of record files nothing came


def test_a_start_that_waits_for_libraries_is_a_finding(tmp_path: Path) -> None:
    trace = trace_file.read(str(a_trace(tmp_path / "t.uptrace")))
    (found,) = report_of(trace)["findings"]
    assert found["severity"] == "high"  # 3.5 s of 10
    assert found["title"] == "2 programs and libraries, nearly all for torch"
    assert found["cost_text"] == "3.75 s of waiting", "which is told once, beside it"
    # in memory it is none
    trace.other_events = trace.other_events[trace.other_events["kind"] != Kind.MAJOR]
    trace.other_events["value"] //= 10
    assert not report_of(trace)["findings"]


def test_those_of_several_nodes_add_up(tmp_path: Path) -> None:
    paths = [
        str(a_trace(tmp_path / "a.uptrace")),
        str(a_trace(tmp_path / "b.uptrace", host="two", pid=200)),
    ]
    report = report_of(trace_file.read_all(paths))
    assert [file["path"] for file in report["files"]] == ["/data/train.npy"]
    (torch,) = report["others"]
    assert (torch["files"], torch["requests"], torch["wait_seconds"]) == (2, 4, 7.5)


@pytest.mark.parametrize(
    ("path", "group"),
    [
        (f"{TORCH}/lib/libtorch_cpu.so", "torch"),
        ("/opt/env/lib/python3.11/site-packages/numpy.libs/libgfortran.so.5", "numpy"),
        ("/opt/env/lib/python3.11/site-packages/numpy-2.1.dist-info/METADATA", "numpy"),
        ("/opt/env/lib/python3.11/site-packages/six.py", "six"),
        ("/usr/lib/python3/dist-packages/bcc/__init__.py", "bcc"),
        ("/usr/lib/python3.11/json/decoder.py", "python3.11"),
        ("/opt/R/lib/R/library/base/R/base.rdb", "R"),
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", "/usr/lib/x86_64-linux-gnu"),
        ("/data/images/cat/1.jpg", "/data/images/cat"),
    ],
)
def test_groups(path: str, group: str) -> None:
    assert group_of(path) == group


def test_a_call_that_is_told_of_with_each_batch_counts_once(tmp_path: Path) -> None:
    writer = trace_file.create(str(tmp_path / "t.uptrace"), False, {"started_ns": START})
    writer.block("files", FILES)
    writer.block("processes", [{"pid": 100}])
    end, step = 48 * MIB, MIB
    told = [event(i, Kind.READ, 1, offset=i * step, length=end - i * step) for i in range(48)]
    told.append(event(20.5, Kind.READ, 1, offset=20 * step, length=end - 20 * step))  # once more
    other = event(60, Kind.READ, 1, offset=0, length=4 * MIB)  # another call
    writer.events(np.concatenate([*told, other]))
    writer.close()
    (reader,) = report_of(trace_file.read(str(tmp_path / "t.uptrace")))["readers"]
    assert reader["read_call_bytes"] == end + 4 * MIB
    assert reader["touched_pages"] == end // 4096


@pytest.mark.parametrize("call", [Call.READ, Call.PREAD])
def test_who_reads_in_order_is_consecutive_though_of_batches_nothing_is_told(
    tmp_path: Path, call: Call
) -> None:
    """The kernel tells nothing of a batch whose last page it had to wait for: it was "strided",
    with a third left out."""
    writer = trace_file.create(str(tmp_path / "t.uptrace"), False, {"started_ns": START})
    writer.block("files", FILES)
    writer.block("processes", [{"pid": 100}])
    size, count = 8 * MIB, 100_000
    rows = []
    for i, at in enumerate(range(0, size, count)):
        taken = min(count, size - at)
        end = -(-(at + taken) // 4096) * 4096
        told = min(-(-at // (32 * 4096)) * 32 * 4096, end - 4096) if i % 3 else at // 4096 * 4096
        offset = at if call is Call.PREAD else 0
        rows += [
            event(i, Kind.READ, 1, offset=told, length=end - told),
            event(i + 0.5, Kind.CALL, 1, offset=offset, length=taken, aux=call | 3 << 8),
        ]
    writer.events(np.concatenate(rows))
    writer.close()
    (reader,) = report_of(trace_file.read(str(tmp_path / "t.uptrace")))["readers"]
    pattern = reader["pattern"]
    assert (pattern["name"], pattern["stride_bytes"]) == ("consecutive", None)
    assert pattern["skipped_share"] == pytest.approx(0, abs=0.001)
    assert reader["touched_pages"] == size // 4096


def test_what_a_reader_leaves_out_is_not_put_in(tmp_path: Path) -> None:
    """Each call takes 64 KiB of 256; of some there was a batch before the first that is told."""
    writer = trace_file.create(str(tmp_path / "t.uptrace"), False, {"started_ns": START})
    writer.block("files", FILES)
    writer.block("processes", [{"pid": 100}])
    rows = []
    for i, at in enumerate(range(0, 32 * MIB, MIB // 4)):
        end = at + MIB // 16
        told = end - 4096 if i % 2 else at
        rows += [
            event(i, Kind.READ, 1, offset=told, length=end - told),
            event(i + 0.5, Kind.CALL, 1, offset=at, length=MIB // 16, aux=Call.PREAD | 3 << 8),
        ]
    writer.events(np.concatenate(rows))
    writer.close()
    (reader,) = report_of(trace_file.read(str(tmp_path / "t.uptrace")))["readers"]
    assert (reader["pattern"]["name"], reader["pattern"]["stride_bytes"]) == ("strided", MIB // 4)
    assert reader["touched_pages"] == 32 * MIB // 4 // 4096


def test_small_files_of_a_wrapped_run_are_looked_for_in_its_summary(tmp_path: Path) -> None:
    for wrapped, said in ((False, "`uffdprefetch wrap`, which"), (True, "the run's summary")):
        path = str(tmp_path / f"{wrapped}.uptrace")
        writer = trace_file.create(path, False, {"started_ns": START, "wrapped": wrapped})
        writer.block("files", [{"id": 1, "path": "/data/a", "size_bytes": 9, "group": "/data"}])
        writer.block("processes", [{"pid": 100}])
        writer.events(event(1, Kind.CALL, 1, length=9, value=9 * SECOND, aux=Call.READ | 3 << 8))
        writer.close()
        found, *_ = report_of(trace_file.read(path))["findings"]
        assert "small files" in found["title"] and said in found["remedy"]
