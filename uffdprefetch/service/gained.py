# SPDX-License-Identifier: Apache-2.0
"""What the run gained, for its summary: predict/gain.py with what this run has measured."""

from __future__ import annotations

from enum import Enum

from uffdprefetch.base.record import dataclass
from uffdprefetch.predict.gain import FileReads, ReadersTime, gain
from uffdprefetch.predict.storage import MISS_BYTES, RequestCost

#: Less than one part in this many read from storage: the data was in memory.
LITTLE_SHARE = 16
METHOD = (
    "lower bound (docs/summary-schema.md): misses that did not happen, since what was read ahead "
    "was used, x what one takes, less the waits that remained"
)
WAITED_SENSOR = (
    "states of the threads of each process with a mapping (/proc/PID/task/TID/stat), 20 to 100 "
    "times a second; waits for the pool are counted"
)


class GainVerdict(Enum):
    """What can be said of it; the values are those of the summary."""

    SAVED = "saved"
    COST = "cost"
    EVEN = "even"
    IN_MEMORY = "in-memory"
    JUST_READ = "just-read"
    NOTHING_READ = "nothing-read"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Gained:
    """Some of the summary's totals (protocol/summary.py)."""

    gain: str
    saved_at_least_seconds: float | None
    cost_seconds: float | None
    gained_method: str
    waited_seconds: float | None
    waited_sensor: str


def gained(
    reads: list[FileReads], used_bytes: int, unused_bytes: int, in_memory_bytes: int, misses: int,
    job_storage_bytes: int, watched: ReadersTime, storage: RequestCost,
) -> Gained:  # fmt: skip
    """``used_bytes``: prefetched and then used, ``unused_bytes``: and not; ``in_memory_bytes``:
    used, or asked for, and there already; ``job_storage_bytes``: what the job's own page faults
    have had read, from the first byte on, also before they were followed."""
    what, saved, cost = GainVerdict.UNKNOWN, None, None
    from_storage = used_bytes + misses * MISS_BYTES
    measured = storage.bandwidth_bytes_per_second > 0 and storage.latency_seconds > 0
    if not from_storage and not in_memory_bytes and not unused_bytes:
        what = GainVerdict.NOTHING_READ
    elif (from_storage + unused_bytes) * LITTLE_SHARE <= in_memory_bytes:
        what = (
            GainVerdict.IN_MEMORY
            if 2 * job_storage_bytes <= in_memory_bytes
            else GainVerdict.JUST_READ
        )
    elif measured and watched.wall_seconds:
        found = gain(reads, misses, unused_bytes, watched, storage)
        what, saved, cost = GainVerdict.EVEN, 0.0, 0.0
        # waits and bytes are seen in different ways: what is told, both have to say
        less = round(found.saved_seconds, 3)
        more = round(min(-found.saved_seconds, found.lost_seconds), 3)
        if less > 0 > found.lost_seconds:
            what, saved = GainVerdict.SAVED, less
        elif more > 0:
            what, cost = GainVerdict.COST, more
    return Gained(
        what.value,
        saved,
        cost,
        METHOD,
        round(watched.waited_seconds, 3) if watched.wall_seconds else None,
        WAITED_SENSOR,
    )
