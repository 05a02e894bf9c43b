# SPDX-License-Identifier: Apache-2.0
"""A tape: one JSON array a line, gzip.

The first line is the head: {"config": Config.to_json(), "page_bytes": ...}. Every other one is an
input of the core,

    [kind, time_ns, [argument...], [[question, answer]...]]

where the questions are those that the core asked the kernel, or another thread, while it took the
input; the same question may be asked again. Processes and files are their numbers in the order of
arrival. Times are CLOCK_MONOTONIC ns: within one input the clock stands still.

Decisions are [input's number, kind, ...] (replay.py).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TAPES = Path(__file__).with_name("tapes")


def dump(path: Path, lines: Iterable[Any]) -> None:
    """Write a tape, or decisions; the same lines make the same file."""
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        for line in lines:
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


def load(path: Path) -> Iterator[Any]:
    """The lines."""
    with gzip.open(path, "rb") as file:
        for line in file:
            yield json.loads(line)


def scenarios() -> list[str]:
    """The names of the tapes there are."""
    return sorted(path.name.removesuffix(".tape.gz") for path in TAPES.glob("*.tape.gz"))
