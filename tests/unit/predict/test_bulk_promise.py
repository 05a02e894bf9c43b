# SPDX-License-Identifier: Apache-2.0
"""What bulk warm promises to random readers (docs/bulk.md), on a modelled storage of any latency
and bandwidth, with a reader that ends after any touch (tests/support/random_reader.py)."""

from __future__ import annotations

import random
from functools import cache

import pytest
from random_reader import KNOWN_TOUCHES, MIB, Bed, course

from uffdprefetch.predict.bulk import COST_MOST, MISS_BYTES, MISS_READS, PROBE_LEAST_BYTES

#: Where it is measured (bench/bulk_share.py): seconds, bytes/s.
MEASURED = [(1e-3, 3e8), (5e-3, 3e8), (1e-3, 1e9), (2e-4, 1e9)]
#: Until so much of a file is touched; then all of it is in memory, with a stream and without.
MOST_SHARE = 0.25
#: The promises.
TIME, BYTES, GOOD_TIME, WHOLE_TIME = 1.10, 2.0, 0.80, 1.6
#: Where a miss takes longer than so many times as long as its bytes, keeping pace to the end would
#: take longer than WHOLE_TIME: who ends while misses alone cost so many streams has more read.
DEAR, DEAR_STREAMS = 4.5, (COST_MOST - 1, 2.1)


def drawn() -> list[Bed]:
    source = random.Random(5)
    return [
        Bed(
            latency=10 ** source.uniform(-4, -2),
            bandwidth=10 ** source.uniform(8, 9.5),
            file_bytes=source.randrange(64, 512) * MIB,
        )
        for _ in range(12)
    ]


@cache
def both(bed: Bed) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    return course(bed, MOST_SHARE, warmed=False), course(bed, MOST_SHARE, warmed=True)


@pytest.mark.parametrize(("latency", "bandwidth"), MEASURED)
@pytest.mark.parametrize("share", [0.001, 0.01, 0.1])
def test_who_touches_less_than_half_has_little_read_for_nothing(
    latency: float, bandwidth: float, share: float
) -> None:
    plain, ours = both(Bed(latency, bandwidth))
    last = round(share / MOST_SHARE * len(plain)) - 1
    (plain_seconds, plain_bytes), (seconds, read_bytes) = plain[last], ours[last]
    assert seconds <= TIME * plain_seconds
    assert read_bytes <= BYTES * plain_bytes or seconds <= GOOD_TIME * plain_seconds


@pytest.mark.parametrize("bed", [Bed(*one) for one in MEASURED] + drawn())
def test_who_touches_half_of_it_or_more_waits_little_longer_than_the_stream_takes(
    bed: Bed,
) -> None:
    seconds, read_bytes = both(bed)[1][-1]
    known_late = max(0.0, KNOWN_TOUCHES * bed.miss_seconds / bed.stream_seconds - (COST_MOST - 1))
    assert seconds <= (WHOLE_TIME + known_late) * bed.stream_seconds
    assert read_bytes <= bed.file_bytes


@pytest.mark.parametrize("bed", [Bed(*one) for one in MEASURED] + drawn())
def test_whenever_a_reader_ends_it_keeps_what_is_promised_but_where_misses_are_dear(
    bed: Bed,
) -> None:
    """The measuring is read for nothing where the reader ends during it."""
    probe_bytes = PROBE_LEAST_BYTES + MISS_READS * MISS_BYTES
    known = KNOWN_TOUCHES * bed.miss_seconds / bed.stream_seconds
    few, many = DEAR_STREAMS[0], max(DEAR_STREAMS[1], 2.3 * known)
    for (plain_seconds, plain_bytes), (seconds, read_bytes) in zip(*both(bed), strict=True):
        assert seconds <= TIME * plain_seconds + plain_bytes / bed.bandwidth
        streams = plain_seconds / bed.stream_seconds
        if bed.miss_to_bytes < DEAR or not few < streams < many:
            cheap = read_bytes <= BYTES * plain_bytes + probe_bytes
            assert cheap or seconds <= GOOD_TIME * plain_seconds, streams
