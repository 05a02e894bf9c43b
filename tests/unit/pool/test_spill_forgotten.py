# SPDX-License-Identifier: Apache-2.0
"""A file that is forgotten while the disk tier (spill_write.c) writes a copy of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from harness import programs
from paths import ROOT

CSRC = ROOT / "csrc"
NET = [str(CSRC / "service" / "net" / name) for name in ("rates.c", "checksum.c")]


@pytest.mark.parametrize("another", [[], ["comes"]], ids=["none", "a shorter one"])
def test_a_write_that_ends_after_its_file_was_forgotten_touches_no_books(
    tmp_path: Path, another: list[str]
) -> None:
    sources = [*map(str, (CSRC / "service" / "pool").glob("spill*.c")), *NET]
    program = programs(tmp_path, "spill_forgotten", f"-I{CSRC}", *sources)
    done = subprocess.run([program, *another], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done
    assert done.stdout == "errors 1, used 0, of the file 0\n"
