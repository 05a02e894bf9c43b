# SPDX-License-Identifier: Apache-2.0
"""The summary of a run in which all went well, and what other ones have."""

from __future__ import annotations

import copy
from typing import Any

from fake_service import SUMMARY_JSON


def unserved(remedy: str | None, mapped_bytes: int) -> dict[str, Any]:
    return {"path": "/data/w", "mapped_bytes": mapped_bytes, "why": "shared", "remedy": remedy}


TERMINAL = 80


def changed(**values: Any) -> dict[str, Any]:
    """The good summary with top-level values, or with totals_NAME= in its totals, replaced."""
    summary = copy.deepcopy(SUMMARY_JSON)
    for name, value in values.items():
        if name.startswith("totals_"):
            summary["totals"][name.removeprefix("totals_")] = value
        else:
            summary[name] = value
    return summary


def note(text: str, path: str = "") -> dict[str, str]:
    return {"path": path, "text": text}


KEPT = "kept ahead of the job: 1014 MiB of 1 GiB (10.2 MiB missed, 200 ms waited)"


def job(*command: str, status: int = 0, written_bytes: int | None = None) -> dict[str, Any]:
    return {
        "command": list(command), "status": status, "min_size_bytes": 16 << 20,
        "written_bytes": written_bytes,
    }  # fmt: skip


LOOKED = {"read_bytes": 0, "processes": 3, "small_files": None, "left_alone": []}
SMALL = {
    "read_bytes": 182 << 20,
    "small_files": {
        "read": 1900, "read_bytes": 184 << 20, "used": 1849, "used_bytes": 182 << 20, "there": 3,
    },
}  # fmt: skip
NO_MAPPING = "served nothing: no mapping of 16 MiB or more was seen"
