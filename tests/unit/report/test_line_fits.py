# SPDX-License-Identifier: Apache-2.0
"""report/line.py: what of a line a terminal has room for."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import termios

import pytest
from good_summary import TERMINAL, changed, note, unserved

from uffdprefetch.base.messages import PREFIX
from uffdprefetch.report.summary import short_lines


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/d/a.npy", " of /d/a.npy"),
        ("/data/run-2/a.npy", " of .../a.npy"),
        ("/data/run-2/some.npy", " of some.npy"),
        ("/data/tensors.npy", ""),
    ],
)
def test_a_file_is_told_by_the_folders_that_fit(path: str, end: str) -> None:
    read = [{"path": path, "bytes": 1 << 28}, {"path": "/data/b", "bytes": 1 << 28}]
    summary = changed(totals_unserved_read_bytes=1 << 29, totals_unserved_read_files=read)
    told = f", 256 MiB{end}" if end else ""
    assert short_lines(summary, TERMINAL)[1] == (
        f"of 1.5 GiB: 1 GiB served, 512 MiB by read(2){told}"
    )
    assert short_lines(summary)[1].endswith(f", 256 MiB of {path}")


@pytest.mark.parametrize("columns", [40, TERMINAL, 160, None])
@pytest.mark.parametrize("length", [5, 40, 200])
@pytest.mark.parametrize("why", ["short", "w" * 40, "w" * 200])
def test_a_line_loses_folders_on_a_terminal_and_never_why(
    columns: int | None, length: int, why: str
) -> None:
    path = f"/{'p' * length}/name"
    one = {**unserved("r" * length, 1 << 40), "path": path, "why": why}
    _, line, remedy = short_lines(changed(files=[], unserved=[one]), columns)
    assert line.endswith(f"name: {why}") and remedy == f"try: {'r' * length}"
    fits = columns is None or len(f"{PREFIX}not served: 1 TiB of {path}: {why}") <= columns
    assert (path in line) == fits
    if columns is not None and not fits and len(why) < 40 < columns:
        assert len(PREFIX + line) <= columns
    (said,) = short_lines(changed(notes=[note(why, path)]), columns)[1:]
    assert said.endswith(f"name: {why}")
    assert columns is not None or said == f"note: {path}: {why}"


@pytest.mark.parametrize(("columns", "told"), [(None, None), (0, None), (57, 57), (200, 200)])
def test_only_a_terminal_has_columns(columns: int | None, told: int | None) -> None:
    """Of its own, and not those of a variable."""
    ours, theirs = os.pipe() if columns is None else os.openpty()
    if columns is not None:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    code = "import sys; from uffdprefetch.base.messages import columns; print(columns())"
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, text=True, check=True,
        env={**os.environ, "COLUMNS": "33"},
    )  # fmt: skip
    os.close(ours)
    os.close(theirs)
    assert done.stdout.strip() == str(told)
