# SPDX-License-Identifier: Apache-2.0
"""What is known of a device is asked once (csrc/service/pathtype.c, pathdevice.c)."""

from __future__ import annotations

import subprocess
from pathlib import Path

from harness import programs
from paths import ROOT


def test_each_of_many_devices_is_asked_once_whoever_meets_it_first(tmp_path: Path) -> None:
    program = programs(tmp_path, "path_devices", f"-I{ROOT / 'csrc'}")
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    assert done.stdout == "1000 1000\n"
