# SPDX-License-Identifier: Apache-2.0
"""readers/file_stream.py: what of a file is missing, and a stream that brings it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guess_bed import BLOCK, MIB, SIZE, Bed, opened
from small_pool import part_of

from uffdprefetch.native import pool as uffd_pool
from uffdprefetch.native import uffd
from uffdprefetch.predict.bounds import LATELY_NS
from uffdprefetch.predict.storage import MISS_BYTES, Storage
from uffdprefetch.predict.streams import Stream
from uffdprefetch.readers import file_stream as module
from uffdprefetch.readers.file_stream import FileStream, missing_bytes
from uffdprefetch.readers.fixed_windows import FollowedStream
from uffdprefetch.state.files import FileState
from uffdprefetch.warm.consumer import FileConsumer, PrefetchRange, Priority
from uffdprefetch.warm.scheduler import EXTENT_BYTES, EXTENTS

pytest_plugins = ("guess_bed",)

KIB = 1 << 10


# ---- what is missing ----------------------------------------------------------------------------


def test_missing_is_what_the_kernel_has_not_cached(tmp_path: Path) -> None:
    path = tmp_path / "half"
    path.write_bytes(bytes(256 * KIB))
    with open(path, "r+b") as half:
        half.seek(768 * KIB)
        half.write(bytes(256 * KIB))
    file = opened(path)
    assert missing_bytes(file) == 512 * KIB
    assert missing_bytes(file, 128 * KIB) == 512 * KIB
    assert missing_bytes(file, 128 * KIB, 512 * KIB) == 256 * KIB
    assert missing_bytes(file, 64 * KIB, 192 * KIB) == 0
    assert missing_bytes(file, 512 * KIB, 640 * KIB) == 128 * KIB
    file.close()


def test_where_nobody_tells_what_is_cached_all_is_missing_but_what_we_have_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "foreign"
    path.touch()
    os.truncate(path, 10 * BLOCK - 100)
    file = opened(path)
    monkeypatch.setattr(uffd, "resident_bytes", lambda *_: (None, "not permitted"))
    file.blocks.mark_used(0, 10 * BLOCK)  # which may be the demand of its readers, long ago
    assert missing_bytes(file) == 10 * BLOCK - 100
    file.blocks.mark_prefetched(2 * BLOCK, 5 * BLOCK)
    assert missing_bytes(file) == 7 * BLOCK - 100
    assert missing_bytes(file, 4 * BLOCK, 8 * BLOCK) == 3 * BLOCK
    assert missing_bytes(file, 2 * BLOCK, 5 * BLOCK) == 0
    file.blocks.mark_prefetched(0, 10 * BLOCK - 100)
    assert missing_bytes(file) == 0, "the last block is shorter"
    file.close()


def test_of_a_file_in_the_pool_what_the_pool_does_not_hold_is_missing(tmp_path: Path) -> None:
    """The page cache has nothing of it, and need not."""
    path = tmp_path / "pooled"
    path.write_bytes(bytes(MIB - 100))
    file = opened(path)
    state: Any = np.zeros(16, np.uint8)
    state[[0, 1, 2, 9]] = uffd_pool.PRESENT
    state[3] = uffd_pool.PRESENT + 1  # on its way out, or in
    part = part_of(None, 3, 64 * KIB, state, np.zeros(16, np.uint32))
    assert missing_bytes(file, pooled=part) == 12 * 64 * KIB
    assert missing_bytes(file, 0, 192 * KIB, part) == 0
    assert missing_bytes(file, 128 * KIB, 320 * KIB, part) == 128 * KIB
    assert missing_bytes(file, 660 * KIB, 661 * KIB, part) == KIB, "of a chunk that is longer"
    assert missing_bytes(file, 960 * KIB, MIB - 100, part) == 64 * KIB - 100
    file.close()


# ---- a stream -----------------------------------------------------------------------------------


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Bed:
    return Bed(monkeypatch)


def whole(bed: Bed, file: FileState) -> FileStream:
    """A stream of all of a file that somebody maps."""
    bed.region(file)
    stream = FileStream(file, bed.scheduler, bed.arbiter.want, FileConsumer(0, 7), False, bed.now)
    stream.add(0, SIZE)
    return stream


def goes_on(bed: Bed, stream: FileStream, turns: int = 400) -> bool:
    """Turns of the service; whether all has come."""
    for _ in range(turns):
        bed.scheduler.reap()
        if stream.go_on(bed.now):
            return True
        bed.scheduler.pump(bed.now)
    return False


def test_it_goes_in_order_and_what_waits_at_one_time_is_bounded(bed: Bed, file: FileState) -> None:
    bed.of(file).add(64 * MIB, 192 * MIB)
    stream, most = whole(bed, file), 0
    while not goes_on(bed, stream, 1):
        most = max(most, bed.scheduler.queued_bytes + bed.scheduler.under_way_bytes)
    assert list(bed.read()) == [(0, 64 * MIB), (192 * MIB, SIZE)], "of what was not there"
    assert bed.sent == sorted(bed.sent) and most <= module.PIECE_BYTES + module.WAITING_BYTES
    assert stream.absent_bytes == 128 * MIB


@pytest.mark.parametrize(("dropped_bytes", "times"), [(32 * MIB, 2), (2 * MIB, 1)])
def test_what_the_kernel_drops_is_read_once_more_and_a_little_is_not(
    bed: Bed, file: FileState, dropped_bytes: int, times: int
) -> None:
    """Of what it drops again and again, there is an end."""
    stream = whole(bed, file)
    for _ in range(400):
        if goes_on(bed, stream, 1):
            break
        bed.of(file).remove(0, dropped_bytes)
        file.cache.forget_recent()
    assert sum(n for start, n in bed.sent if start < dropped_bytes) == times * dropped_bytes
    assert sum(n for start, n in bed.sent if start >= dropped_bytes) == SIZE - dropped_bytes


def test_what_is_there_already_is_looked_at_bit_by_bit(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn of the service must not take long, whatever the size of the file."""
    monkeypatch.setattr(module, "LOOK_AT_ONCE_BYTES", 7 * EXTENT_BYTES)
    bed.of(file).add(0, SIZE - 8 * MIB)
    stream = whole(bed, file)
    stream.feed()
    assert len(bed.looked) == 7 and not bed.sent
    assert goes_on(bed, stream) and not bed.missing(file)


def test_it_goes_on_between_two_batches_and_not_for_good(bed: Bed, file: FileState) -> None:
    stream = whole(bed, file)
    file.mappings.attached = 0
    goes_on(bed, stream, 5)
    before = bed.missing(file)
    assert 0 < before < SIZE
    bed.now += 2 * LATELY_NS
    goes_on(bed, stream)
    assert bed.missing(file) > SIZE // 2
    file.mappings.attached = 1
    assert goes_on(bed, stream) and not bed.missing(file)


def test_no_more_than_it_may_is_asked_for(bed: Bed, file: FileState) -> None:
    stream = whole(bed, file)
    for most, sent in ((0, 0), (MIB // 2, 0), (10 * MIB, 10 * MIB), (50 * MIB + 1, 50 * MIB)):
        stream.most_bytes = most
        goes_on(bed, stream, 50)
        assert bed.sent_bytes == sent


# ---- what is under way of it --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("latency_seconds", "least", "most"),
    [(0.001, 4 * MIB, 4 * MIB), (0.05, 30 * MIB, 34 * MIB)],
    ids=["near storage", "far storage"],
)
def test_no_more_is_under_way_than_keeps_the_storage_busy(
    bed: Bed, file: FileState, monkeypatch: pytest.MonkeyPatch, latency_seconds: float,
    least: int, most: int,
) -> None:  # fmt: skip
    """A reader's own miss waits behind all of it."""
    storage = Storage(300e6, latency_seconds)
    monkeypatch.setattr(type(bed.scheduler.meter), "storage", property(lambda _: storage))
    bed.scheduler.device_of(file).depth.bytes = 64 * MIB
    background = PrefetchRange(file, 0, SIZE // 2, 0, Priority.BACKGROUND)
    bed.scheduler.want(FileConsumer(0, 7), background)
    bed.scheduler.pump(bed.now)
    assert least <= bed.scheduler.under_way_bytes <= most
    walk = Stream(1, 0, 7, SIZE // 2, SIZE // 2, bed.now, bed.now, active=True)
    reader = FollowedStream(walk)
    bed.scheduler.want(reader, PrefetchRange(file, SIZE // 2, SIZE))
    bed.scheduler.pump(bed.now)
    assert bed.scheduler.under_way_bytes >= 64 * MIB


def test_of_a_stream_that_yields_a_few_pieces_are_under_way(bed: Bed, file: FileState) -> None:
    bed.scheduler.device_of(file).depth.bytes = 64 * MIB
    background = PrefetchRange(file, 0, SIZE // 2, 0, Priority.BACKGROUND, yield_bytes=512 << 10)
    consumer = FileConsumer(0, 7)
    bed.scheduler.want(consumer, background)
    bed.scheduler.pump(bed.now)
    assert bed.scheduler.under_way_bytes == 512 << 10 and len(bed.sent) == EXTENTS
    bed.scheduler.reap()
    bed.scheduler.change(consumer, Priority.BACKGROUND, 2 * MISS_BYTES)
    bed.scheduler.pump(bed.now)
    assert bed.scheduler.under_way_bytes == 2 * MISS_BYTES
    bed.scheduler.reap()
    assert bed.scheduler.under_way_bytes == 0
    file.call.method = uffd.WARM_PREAD  # whose requests have a size of their own
    bed.scheduler.pump(bed.now)
    assert bed.scheduler.under_way_bytes >= MIB
