# SPDX-License-Identifier: Apache-2.0
"""How far ahead of a stream to warm: [Haderbache]'s fixed windows, and the measured ones.

Pure functions of a stream, the options and what was measured; they return byte ranges and move the
stream's own planner fields (frontier, window). The executor is warm/scheduler.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from uffdprefetch.predict.streams import Stream

MIB = 1 << 20
#: Never less ahead than this (auto): two extents under way and one to be read.
LOOKAHEAD_MIN_BYTES = 16 * MIB
#: Window of a walk that is not settled, which may be a B-tree's branch pages: a multiple of what it
#: has walked, as the kernel's readahead begins, and at least one request of storage.
UNSURE_TIMES_WALKED = 4
UNSURE_MIN_BYTES = 1 * MIB
#: The same where the job has said that it goes in order: what one request brings where that brings
#: most (Lustre), and the most that such a word costs when it is wrong.
TRUSTED_MIN_BYTES = 4 * MIB
#: A window grows by no less than this, or by an eighth of it.
STEP_MIN_BYTES = 1 * MIB
#: Nor more per stream: what is read so early may be gone again before it is used.
LOOKAHEAD_MAX_BYTES = 256 * MIB
#: auto stays this long ahead of the reader's own rate: longer than any batch, shorter than a phase.
LOOKAHEAD_SECONDS = 0.4
#: Pool: the part of it that all windows together take from what stays over the epochs.
POOL_SHARE = 64
#: Pool: a window of less is no better than reading on demand, 1 MiB at a time.
POOL_WINDOW_LEAST_BYTES = 4 * MIB
#: Readers so close to each other want the same: the ranks that slice a tensor.
NEAR_BYTES = 16 * MIB
#: Headroom over Little's law (rate x fetch latency).
LATENCY_HEADROOM = 8.0
#: What a disk here or a link of 20 Gb/s brings, bytes/s: not yet known of a file that was just
#: mapped, nor to be told later, as the kernel's own readahead takes its part of it.
NEARBY_BYTES_PER_SECOND = 2.5e9


@dataclass(frozen=True)
class Storage:
    """What the warmers measured: bandwidth in bytes/s and fetch latency of one extent in s."""

    bandwidth_bytes_per_second: float = 0.0
    latency_seconds: float = 0.0


def ahead_at_rate(rate_bytes_per_second: float, storage: Storage, boost: float = 1.0) -> int:
    """How far ahead of a reader of this rate, no less than LOOKAHEAD_MIN_BYTES and no more than
    LOOKAHEAD_MAX_BYTES."""
    seconds = max(LOOKAHEAD_SECONDS, LATENCY_HEADROOM * storage.latency_seconds)
    ahead = max(LOOKAHEAD_MIN_BYTES, rate_bytes_per_second * seconds) * boost
    return int(min(ahead, LOOKAHEAD_MAX_BYTES))


def kernel_suffices(readahead_bytes: int, storage: Storage) -> bool:
    """Whether the kernel's own readahead is enough for who reads in order.

    It is where it asks for so much at once that the latency is little beside what that takes even
    on a fast storage. Windows have nothing to add then, and cost: readahead(2) fills the cache in
    folios of one page, the kernel's own in large ones, of which one fault maps all (mm/readahead.c,
    do_page_cache_ra() and page_cache_ra_order()). ``storage``: latency 0 where it is not known.
    """
    bandwidth = max(NEARBY_BYTES_PER_SECOND, storage.bandwidth_bytes_per_second)
    least = LATENCY_HEADROOM * bandwidth * storage.latency_seconds
    return 0 < least <= readahead_bytes


def lookahead_bytes(stream: Stream, storage: Storage, allowed_bytes: int) -> int:
    """The window of `--policy auto`: window >= rate x fetch latency, with headroom.

    The rate is the reader's; a reader that waits for storage shows storage's rate, so the window
    also grows (``boost``) each time the reader came to an extent before it was there.
    """
    ahead = ahead_at_rate(stream.rate_bytes_per_second, storage, stream.feedback.boost)
    if not stream.settled:
        walked = abs(stream.position_bytes - stream.start_bytes)
        least = TRUSTED_MIN_BYTES if stream.trusted else UNSURE_MIN_BYTES
        ahead = min(ahead, max(least, UNSURE_TIMES_WALKED * walked))
    return min(ahead, max(allowed_bytes, MIB))


def places(at: Iterable[tuple[int, int]]) -> int:
    """At how many places files are read: (file, offset in bytes) of each walk, those that are near
    each other as one. At least 1."""
    apart = sum(a[0] != b[0] or b[1] - a[1] > NEAR_BYTES for a, b in pairwise(sorted(at)))
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
    least = min(POOL_WINDOW_LEAST_BYTES, budget_bytes // (4 * places))
    return max(least, share // places)


def auto(stream: Stream, file_bytes: int, ahead_bytes: int) -> tuple[int, int] | None:
    """The next range [start, end) to warm for an active stream, or None.

    It begins where the last one ended (or at the reader, when that has been overtaken), and is no
    short one while there is something ahead: a request costs the same whatever its length.
    """
    least = min(STEP_MIN_BYTES, ahead_bytes // 8)
    if stream.direction < 0:
        start = min(stream.frontier_bytes, stream.position_bytes)
        target = max(0, stream.position_bytes - ahead_bytes)
        ahead, is_last = stream.position_bytes - start, target == 0
    else:
        start = max(stream.frontier_bytes, stream.position_bytes)
        target = min(file_bytes, stream.position_bytes + ahead_bytes)
        ahead, is_last = start - stream.position_bytes, target == file_bytes
    more = (target - start) * stream.direction
    if more <= 0 or (ahead and more < least and not is_last):
        return None
    stream.frontier_bytes = target
    return min(start, target), max(start, target)


def fixed(
    stream: Stream, file_bytes: int, size_bytes: int, threshold: float
) -> tuple[int, int] | None:
    """[Haderbache] section 3.2: the first checkpoint triggers; the next window begins at the end of
    the current one, and the first checkpoint at or past ``threshold`` of it triggers that."""
    if stream.direction < 0:
        return None
    if stream.window_end_bytes <= stream.start_bytes or stream.trigger_bytes == 0:
        start = stream.position_bytes
    elif stream.position_bytes >= stream.trigger_bytes:
        start = max(stream.window_end_bytes, stream.position_bytes)
    else:
        return None
    end = min(file_bytes, start + size_bytes)
    stream.trigger_bytes = start + int(threshold * size_bytes)
    if end <= start:
        return None
    stream.window_end_bytes = stream.frontier_bytes = end
    return start, end
