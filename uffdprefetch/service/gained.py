# SPDX-License-Identifier: Apache-2.0
"""What the run gained, for its summary: predict/gain.py with what this run has measured."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from uffdprefetch.predict.bulk import MISS_BYTES
from uffdprefetch.predict.gain import FileReads, Watched, saved
from uffdprefetch.predict.window import Storage

#: Less than one part in this many read from storage: the data was in memory.
LITTLE_SHARE = 16
#: By so much less than their reading becomes quicker programs end sooner: what `wrap` adds to one
#: of some seconds, on two cores (docs/summary-schema.md, table). It is taken off what was saved.
OWN_SECONDS = 0.2
#: A gain that cannot be told from none by the estimate is not known, unless both are less than this
#: ("little", report/summary.py).
LITTLE_SECONDS = 0.1
#: So many misses, and the waits of which they are part, bound what a request takes.
MISSES_LEAST = 20
METHOD = (
    "estimate (docs/summary-schema.md): requests of read_ahead_kb that the kernel need not make "
    "any more x what one takes, less the waits that remained"
)
WAITED_SENSOR = (
    "states of the threads of each process with a mapping (/proc/PID/task/TID/stat), 20 times a "
    "second; waits for the pool are counted"
)


class Gain(Enum):
    """What can be said of it; the values are those of the summary."""

    SAVED = "saved"
    IN_MEMORY = "in-memory"
    JUST_READ = "just-read"
    NOTHING_READ = "nothing-read"
    NOT_USED = "not-used"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Gained:
    """Some of the summary's totals (protocol/summary.py)."""

    gain: str
    gained_seconds: float | None
    gained_error_seconds: float | None
    gained_method: str
    spared_requests: int
    waited_seconds: float | None
    waited_sensor: str


def gained(
    reads: list[FileReads], used_bytes: int | None, in_memory_bytes: int, misses: int,
    job_storage_bytes: int, watched: Watched, storage: Storage,
) -> Gained:  # fmt: skip
    """``used_bytes``: prefetched and then used, None where that is not known;
    ``in_memory_bytes``: used, or asked for, and there already; ``job_storage_bytes``: what the
    job's own page faults have had read, from the first byte on, also before they were followed."""
    gain, seconds, error = Gain.SAVED, None, None
    from_storage = (used_bytes or 0) + misses * MISS_BYTES
    measured = storage.bandwidth_bytes_per_second > 0 and storage.latency_seconds > 0
    if used_bytes is None:
        gain = Gain.UNKNOWN
    elif not from_storage and not in_memory_bytes:
        gain, seconds = Gain.NOTHING_READ, 0.0
    elif from_storage * LITTLE_SHARE <= in_memory_bytes:
        gain, seconds = Gain.IN_MEMORY, 0.0
        if 2 * job_storage_bytes > in_memory_bytes:
            gain, seconds = Gain.JUST_READ, None
    elif not used_bytes:
        gain, seconds = Gain.NOT_USED, 0.0
    elif not measured or not watched.wall_seconds:
        gain = Gain.UNKNOWN
    else:
        latency = storage.latency_seconds
        if misses >= MISSES_LEAST:  # each of them has waited for a request at least
            latency = min(latency, watched.waited_seconds / misses)
        found = saved(reads, misses, watched, latency, storage.bandwidth_bytes_per_second)
        seconds, error = max(0.0, found.seconds - OWN_SECONDS), found.error_seconds
        if seconds < error and error >= LITTLE_SECONDS:
            gain, seconds, error = Gain.UNKNOWN, None, None
    return Gained(
        gain.value,
        None if seconds is None else round(seconds, 3),
        None if error is None else round(error, 3),
        METHOD,
        round(sum(one.requests for one in reads)),
        round(watched.waited_seconds, 3) if watched.wall_seconds else None,
        WAITED_SENSOR,
    )
