# SPDX-License-Identifier: Apache-2.0
"""Numbers of the disk tier (csrc/service/pool/spill.c), each of which a half and a double would
show here: without a pool, by a clock that only it moves."""

from __future__ import annotations

import subprocess

import pytest
from harness import programs
from paths import ROOT

CSRC = ROOT / "csrc"
NET = [str(CSRC / "service" / "net" / name) for name in ("rates.c", "checksum.c")]
TOLD = [
    # a tier that is to end after more errors than are remembered never ends
    "errors that end it: 3, 8, 0",
    "three errors in 40 s: 3",
    "three errors in 80 s: 0",
    # where storage is quicker by more than a quarter, and by less
    "of 6400 reads: 100, 6400",
    # beside another thread that writes
    "written after: 100 ms",
    # of 130 MiB
    "taken: 3 times 64 MiB",
    # slots, one of which is written to
    "tried: 64 of 1000, 25 of 101",
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    sources = [*map(str, (CSRC / "service" / "pool").glob("spill*.c")), *NET]
    program = programs(tmp_path_factory.mktemp("built"), "spill_alone", f"-I{CSRC}", *sources)
    return subprocess.run(
        [program], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()


@pytest.mark.parametrize("at", range(len(TOLD)))
def test_a_number_of_the_disk_tiers_is_what_it_is_for(told: list[str], at: int) -> None:
    assert told[at] == TOLD[at]
