# SPDX-License-Identifier: Apache-2.0
"""`uffdprefetch trace FILE`: what a recording is shown as, and where to."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import HANG_SECONDS, uffdprefetch

from uffdprefetch.trace.file import trace_file
from uffdprefetch.trace.file.events import Kind, empty

FORMATS = ("text", "json", "html", "png", "perfetto")


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "t.uptrace"
    trace_file.create(str(path), False, {"command": ["true"], "started_ns": 1}).close()
    return path


def show(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        uffdprefetch("trace", str(path), *words), capture_output=True, text=True,
        timeout=HANG_SECONDS,
    )  # fmt: skip


@pytest.mark.parametrize("wanted", FORMATS)
def test_a_place_that_cannot_be_written_is_one_line(recording: Path, wanted: str) -> None:
    done = show(recording, "--format", wanted, "-o", str(recording.parent / "no" / "x"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert f"cannot write {recording.parent}/no/x: No such file or directory" in done.stderr


@pytest.mark.parametrize("wanted", FORMATS)
def test_what_cannot_be_written_whole_is_not_there(recording: Path, wanted: str) -> None:
    """As where the disk is full: a file that ends in the middle."""
    out = recording.parent / "x"
    shell = ["prlimit", "--fsize=16", "--", *uffdprefetch("trace", str(recording))]
    done = subprocess.run(
        [*shell, "--format", wanted, "-o", str(out)], capture_output=True, text=True,
        timeout=HANG_SECONDS,
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if line.startswith("uffdprefetch: ")]
    assert done.returncode == 2 and len(ours) == 1, done.stderr
    assert f"cannot write {out}: File too large" in ours[0]
    assert [path.name for path in recording.parent.iterdir()] == [recording.name]


@pytest.mark.parametrize("wanted", FORMATS)
def test_what_can_be_written_is(recording: Path, wanted: str) -> None:
    out = recording.parent / "x"
    done = show(recording, "--format", wanted, "-o", str(out))
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    assert out.stat().st_size > 16


def test_two_recordings_are_put_beside_each_other(tmp_path: Path) -> None:
    """A file of which a rank waited in the first run and not in the second."""
    paths = []
    for name, stalls in (("plain", 5), ("wrapped", 0)):
        paths.append(str(tmp_path / f"{name}.uptrace"))
        writer = trace_file.create(paths[-1], False, {"started_ns": 10**9, "source": "bpf"})
        writer.block("files", [{"id": 1, "path": "/data/a", "size_bytes": 1 << 20}])
        writer.block("processes", [{"pid": 9, "rank": 3}])
        rows = empty(2 * 8)
        rows["time_ns"] = 10**9 + np.arange(16) * 10**8
        rows["kind"] = [Kind.FAULT, Kind.MAJOR] * 8
        rows["offset"] = np.repeat(np.arange(8), 2) * 4096
        rows["length"], rows["pid"], rows["tid"], rows["file"] = 4096, 9, 9, 1
        rows["value"][1::2] = 10**8
        writer.events(rows[: 2 * (3 + stalls)] if stalls else rows[::2])
        writer.block("end", {"ended_ns": (4 if stalls else 2) * 10**9})
        writer.close()
    done = subprocess.run(
        uffdprefetch("trace", "--compare", *paths), capture_output=True, text=True,
        timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"^time .*better$", done.stdout, re.MULTILINE)
    assert re.search(r"^/data/a, rank 3$", done.stdout, re.MULTILINE)
    assert re.search(r"^major faults +8 +0 +-100 %  better$", done.stdout, re.MULTILINE)
    document = subprocess.run(
        uffdprefetch("trace", "--compare", *paths, "--format", "json"), capture_output=True,
        text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    (part,) = json.loads(document.stdout)["parts"]
    assert part["of"] == "/data/a, rank 3"
    assert [one["verdict"] for one in part["figures"]] == ["better", "better"]


def test_a_comparison_wants_two(recording: Path) -> None:
    for words in (["--compare"], ["--compare", "--format", "png"]):
        done = show(recording, *words)
        assert done.returncode == 2 and "two recordings" in done.stderr
