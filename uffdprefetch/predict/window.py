# SPDX-License-Identifier: Apache-2.0
"""How far ahead of a stream to be: [Haderbache]'s fixed windows, and by its rate.

Pure functions of a stream, the options and what was measured. The executor is warm/scheduler.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from uffdprefetch.base.cache_call import CHUNK_MAX_BYTES
from uffdprefetch.base.record import dataclass
from uffdprefetch.base.units import MIB
from uffdprefetch.predict.storage import Storage
from uffdprefetch.predict.streams import BOOST_MAX, Stream

#: Never less ahead of a known order than this: two extents under way and one to be read.
LOOKAHEAD_MIN_BYTES = 16 * MIB
#: Nor more per stream: what is read so early may be gone again before it is used. What is read now
#: was asked for no farther back.
LOOKAHEAD_MAX_BYTES = 256 * MIB
#: Who knows an order stays this long ahead of the reader's own rate: longer than any batch, shorter
#: than a phase.
LOOKAHEAD_SECONDS = 0.4
#: Pool: the part of it that all windows together take from what stays over the epochs.
POOL_SHARE = 64


def ahead_at_rate(rate_bytes_per_second: float, storage: Storage, boost: float = 1.0) -> int:
    """How far ahead of a reader of this rate, no less than LOOKAHEAD_MIN_BYTES and no more than
    LOOKAHEAD_MAX_BYTES."""
    # of a long latency (Little's law) as much as being late would make it grow to
    seconds = max(LOOKAHEAD_SECONDS, BOOST_MAX * storage.latency_seconds)
    ahead = max(LOOKAHEAD_MIN_BYTES, rate_bytes_per_second * seconds) * boost
    return int(min(ahead, LOOKAHEAD_MAX_BYTES))


@dataclass(frozen=True)
class Window:
    """What a stream has, or is to have, ahead of it: ``size_bytes``, asked for up to the offset
    ``frontier_bytes``. ``step_bytes``: how finely its progress is followed."""

    size_bytes: int
    frontier_bytes: int
    step_bytes: int


def lookahead_bytes(
    rate_bytes_per_second: float, storage: Storage, allowed_bytes: int, boost: float = 1.0
) -> int:
    """How far ahead of a stream what it will need may lie by now: what its checkpoints are apart
    by, and what of a full pool is kept for it. Reading ahead is readers/ahead.py's."""
    ahead = ahead_at_rate(rate_bytes_per_second, storage, boost)
    return min(ahead, max(allowed_bytes, MIB))


def places(at: Iterable[tuple[int, int]]) -> int:
    """At how many places files are read: (file, offset in bytes) of each stream; those that are
    within the least lookahead of each other want the same, as ranks that slice a tensor do, and
    count as one. At least 1."""
    apart = sum(a[0] != b[0] or b[1] - a[1] > LOOKAHEAD_MIN_BYTES for a, b in pairwise(sorted(at)))
    return apart + 1


def pool_bytes(budget_bytes: int, files_bytes: int, places: int, reserve_bytes: int = 0) -> int:
    """What a stream may have ahead of it in a pool from which so many places are read: readers
    that are near each other share one window.

    Where everything fits, that is half of the pool; else what waits to be read for the first time
    is missing from what stays over the epochs. ``reserve_bytes`` of it are for nothing that stays:
    half of that; the rest is for what has been read and is passed on.
    """
    share = budget_bytes // (2 if files_bytes <= budget_bytes else POOL_SHARE)
    share = max(share, reserve_bytes // 2)
    # less than one large request is no better than reading on demand
    least = min(CHUNK_MAX_BYTES, budget_bytes // (4 * places))
    return max(least, share // places)


@dataclass(frozen=True)
class FixedWindow:
    """One of [Haderbache]'s: [start, end) bytes; the first checkpoint at or past ``trigger_bytes``
    triggers the next."""

    start_bytes: int
    end_bytes: int
    trigger_bytes: int


def fixed(
    stream: Stream, last: FixedWindow | None, file_bytes: int, size_bytes: int, threshold: float
) -> FixedWindow | None:
    """[Haderbache] section 3.2: the first checkpoint triggers; the next window begins at the end of
    the ``last`` one, and the first checkpoint at or past ``threshold`` of it triggers that. None:
    nothing is triggered."""
    if stream.direction < 0:
        return None
    if last is None:
        start = stream.position_bytes
    elif stream.position_bytes >= last.trigger_bytes:
        start = max(last.end_bytes, stream.position_bytes)
    else:
        return None
    end = min(file_bytes, start + size_bytes)
    return FixedWindow(start, end, start + int(threshold * size_bytes)) if start < end else None
