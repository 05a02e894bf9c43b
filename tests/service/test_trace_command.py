# SPDX-License-Identifier: Apache-2.0
"""`uffdprefetch trace FILE`: what a recording is shown as, and where to."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import HANG_SECONDS, uffdprefetch

from uffdprefetch.trace.file import trace_file

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
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"cannot write {out}: File too large" in done.stderr
    assert [path.name for path in recording.parent.iterdir()] == [recording.name]


@pytest.mark.parametrize("wanted", FORMATS)
def test_what_can_be_written_is(recording: Path, wanted: str) -> None:
    out = recording.parent / "x"
    done = show(recording, "--format", wanted, "-o", str(out))
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    assert out.stat().st_size > 16
