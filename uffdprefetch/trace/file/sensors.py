# SPDX-License-Identifier: Apache-2.0
"""The sensors of a recording, and which of them it lacks.

What is missing is a list of {"sensors": [name...], "what", "why", "lift"}: the names are for
programs, the rest is for people.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any


class Sensor(Enum):
    """What sees a kind of events; the value is how people are told that it is not there."""

    FAULTS = "demand faults"
    AROUND = "fault-around ranges (minor faults of cached pages)"
    ADDRESSES = "the addresses of faults"
    SLEEPS = "how long a fault slept"
    FILLS = "page-cache fills"
    EVICTIONS = "evictions"
    READS = "pages taken by read(2)"
    READAHEAD_SIZES = "readahead sizes"
    READAHEAD_DECISIONS = "readahead decisions"
    CALLS = "system calls"
    BIRTHS = "births of processes"
    BLOCK = "block I/O"


#: Sensors that are tracepoints of the kernel.
BY_BPF = frozenset(Sensor)


def entry(
    sensors: Iterable[Sensor], why: str, remedy: str | None = None, what: str | None = None
) -> dict[str, Any]:
    """Entry about missing sensors; ``remedy``: a command; ``what``: in other words than theirs."""
    named = list(sensors)
    return {
        "sensors": [sensor.name for sensor in named],
        "what": what or ", ".join(sensor.value for sensor in named),
        "why": why,
        "lift": remedy,
    }


def is_of(lack: Mapping[str, Any], sensors: Iterable[Sensor]) -> bool:
    """Whether an entry is about any of these sensors; one that names none is about all."""
    named = lack.get("sensors")
    return named is None or any(sensor.name in named for sensor in sensors)
