# SPDX-License-Identifier: Apache-2.0
"""readers/bulk.py under our own clock, with workers that only take notes: what it asks for, in what
order, and when it ends."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from bulk_bed import AROUND, BLOCK, MIB, MS, SIZE, Bed, ended, opened, streaming, until

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.native import uffd
from uffdprefetch.predict import bulk as decision
from uffdprefetch.predict.bulk import MISS_BYTES, PROBE_MOST_BYTES
from uffdprefetch.predict.streams import Stream
from uffdprefetch.predict.window import Storage
from uffdprefetch.readers import bulk as module
from uffdprefetch.readers import file_stream
from uffdprefetch.readers.file_stream import PIECE_BYTES, WAITING_BYTES
from uffdprefetch.state.files import FileState
from uffdprefetch.state.opening import reopen
from uffdprefetch.warm.consumer import FileConsumer, PrefetchRange, Priority
from uffdprefetch.warm.limits import Limit

pytest_plugins = ("bulk_bed",)


def test_a_random_reader_has_its_file_streamed_once_and_in_order(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    region = bed.region(file)
    bed.crops(region, 400)
    bed.rest()
    assert bed.said(file)["state"] == "done"
    assert not bed.missing(file)
    starts = [start for start, length in bed.sent if length >= MIB]
    assert starts == sorted(starts)
    assert sum(length for _, length in bed.sent) <= SIZE + 3 * MISS_BYTES
    singly = [(start, start + length) for start, length in bed.sent if length < MIB]
    assert bed.said(file)["read_bytes"] == SIZE, "where a single read was, the stream found it"
    assert len(singly) == 3
    assert bed.ledger.degradations == []
    bed.crops(region, 400)  # all is there: not again
    assert sum(length for _, length in bed.sent) <= SIZE + 3 * MISS_BYTES


def test_only_what_is_not_there_is_read(file: FileState, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(monkeypatch)
    bed.of(file.fd).add(64 * MIB, 192 * MIB)
    bed.crops(bed.region(file), 400)
    bed.rest()
    assert bed.said(file)["state"] == "done"
    assert not [s for s, n in bed.sent if n >= MIB and 64 * MIB <= s < 192 * MIB]


def test_what_is_asked_for_at_once_is_bounded(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    bed.crops(bed.region(file), 400)
    bed.rest()
    assert bed.said(file)["state"] == "done"
    assert 16 * MIB <= bed.most_bytes <= PIECE_BYTES + WAITING_BYTES + 64 * MIB
    assert bed.most_bytes < SIZE // 2


def test_any_stream_comes_first(file: FileState, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(monkeypatch)
    streaming(bed, file)
    bed.scheduler.reap()
    bed.bulk.step(bed.now)
    assert bed.scheduler.queued_bytes > 8 * MIB, "else there is nothing to come before"
    before = len(bed.sent)
    far = Stream(1, 0, 7, 0, 0, 1, bed.now, active=True)  # its reader stands at the beginning
    wanted = SIZE - 4 * MIB
    bed.scheduler.want(far, PrefetchRange(file, wanted, SIZE))
    bed.scheduler.pump(bed.now)
    assert bed.sent[before][0] == wanted


def test_several_ranks_have_one_stream(file: FileState, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(monkeypatch)
    regions = [bed.region(file, rank, 10 + rank) for rank in range(4)]
    for _ in range(200):
        for region in regions:
            bed.crops(region, 1)
    bed.rest()
    assert bed.said(file)["state"] == "done" and bed.said(file)["ranks"] == [0, 1, 2, 3]
    assert sum(length for _, length in bed.sent) <= SIZE + 3 * MISS_BYTES


def test_a_mapping_for_each_batch_is_one_reader(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which none lives long enough to be known as random by itself."""
    bed = Bed(monkeypatch)
    for _ in range(40):
        region = bed.region(file)
        bed.crops(region, 12)
        bed.unmap(region)
    bed.rest()
    assert bed.said(file)["state"] == "done"


def test_a_file_that_does_not_fit_is_one_finding_and_no_read(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch, budget_bytes=SIZE - 1)
    regions = [bed.region(file, rank, 10 + rank) for rank in range(2)]
    for region in 3 * regions:
        bed.crops(region, 200)
    bed.rest()
    assert bed.sent == []
    (finding,) = bed.ledger.degradations
    assert "tokens.bin" in finding and "--budget" in finding and "plan" in finding
    assert bed.said(file)["state"] == "refused" and bed.said(file)["read_bytes"] == 0
    assert bed.bulk.rest_ns(regions[0].reader) > 0, "its page tables need not be looked at so often"


def is_streamed(bed: Bed, file: FileState) -> bool:
    said = bed.bulk.describe(file.path)
    return said is not None and said["state"] in ("streamed", "done")


def touches_until_streamed(bed: Bed, file: FileState) -> int:
    region = bed.region(file)
    for touches in range(1, 3000):
        bed.crops(region, 1)
        if is_streamed(bed, file):
            return touches
    raise AssertionError(f"never streamed: {bed.said(file)}")


def test_who_has_left_a_file_before_its_stream_was_worth_it_pays_all_of_the_next_first(
    file: FileState, other: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    bed.there[other.fd] = IntervalSet()
    first = touches_until_streamed(bed, file)
    bed.rest()
    second = touches_until_streamed(bed, other)
    stream_seconds, miss_seconds = SIZE / 300e6, bed.said(other)["miss_seconds"]
    assert first * miss_seconds < 0.5 * stream_seconds
    assert second * miss_seconds >= decision.RENT_AGAIN * stream_seconds * 0.9


@pytest.mark.parametrize("how", ["used up", "read on in", "another rank's"])
def test_who_has_not_does_not(
    file: FileState, other: FileState, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    bed = Bed(monkeypatch)
    first = touches_until_streamed(bed, file)
    bed.rest()
    if how == "used up":
        bed.crops(bed.region(file), 6 * SIZE // BLOCK)
    again, region = bed.region(file), bed.region(other, int(how == "another rank's"), 8)
    for _ in range(2 * first):
        bed.crops(region, 1)
        if how == "read on in":
            bed.crops(again, 1)
    assert is_streamed(bed, other)


def test_two_files_that_fit_only_singly(
    file: FileState, other: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch, budget_bytes=SIZE + SIZE // 2)
    bed.crops(bed.region(file), 400)
    bed.rest()
    bed.crops(bed.region(other, pid=8), 400)
    bed.rest()
    assert (bed.said(file)["state"], bed.said(other)["state"]) == ("done", "refused")


def test_storage_on_which_random_reads_cost_nothing_is_left_alone(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    bed.latency_ns = 0
    bed.crops(bed.region(file), 400)
    bed.rest()
    (finding,) = bed.ledger.degradations
    assert "as good as a stream" in finding
    assert sum(length for _, length in bed.sent) <= PROBE_MOST_BYTES + 3 * MISS_BYTES


@pytest.mark.parametrize("policy", ["none", "fixed"])
def test_only_the_automatic_policy_streams(
    file: FileState, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    bed = Bed(monkeypatch, policy=policy)
    region = bed.region(file)
    bed.crops(region, 600)
    assert bed.sent == [] and bed.bulk.describe(file.path) is None


def test_a_stream_ends_when_the_file_changes(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    streaming(bed, file)
    file.changed = "modified"
    ended(bed, file)
    assert bed.said(file)["state"] == "stopped"


def test_a_stream_ends_when_the_reader_goes_in_order(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    region = streaming(bed, file)
    monkeypatch.setattr(bed.bulk, "step", lambda now: None)  # so that it does not end before
    for at in range(0, 64 * BLOCK, BLOCK):
        bed.touch(region, at)
    monkeypatch.undo()
    monkeypatch.setattr(file_stream, "missing_bytes", bed.missing)
    assert region.reader.may_prefetch
    ended(bed, file)


def test_a_stream_ends_when_the_order_is_known(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    region = streaming(bed, file)
    bed.order(region, True)
    ended(bed, file)


def test_when_a_known_order_was_a_wrong_one_its_reader_is_judged_by_what_it_has_touched(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    region = bed.region(file)
    bed.order(region, True)
    bed.crops(region, 180)
    assert bed.bulk.describe(file.path) is None and bed.sent == [], "as long as it is followed"
    bed.order(region, False)
    bed.rest(20)
    assert bed.said(file)["state"] in ("streamed", "done") and bed.said(file)["ranks"] == [0]


def test_a_stream_ends_when_memory_becomes_short(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    streaming(bed, file)
    monkeypatch.setattr(bed.limits, "ahead_bytes", lambda: (MIB, Limit.MEMORY))
    bed.now += 2 * module.MEMORY_NS
    ended(bed, file)
    (finding,) = bed.ledger.degradations
    assert "memory became short (MemAvailable)" in finding


def test_a_stream_waits_while_nobody_maps_the_file_and_then_goes_on(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    region = streaming(bed, file)
    file.attached = 0
    bed.now += 2 * file_stream.GONE_NS
    bed.rest()
    assert bed.missing(file) and bed.said(file)["state"] == "streamed"
    file.attached = 1
    bed.crops(region, 5)
    bed.rest()
    assert not bed.missing(file)


@pytest.mark.parametrize(("dropped_bytes", "times"), [(32 * MIB, 2), (2 * MIB, 1)])
def test_what_the_kernel_drops_is_read_once_more_and_a_little_is_not(
    file: FileState, monkeypatch: pytest.MonkeyPatch, dropped_bytes: int, times: int
) -> None:
    """Of what it drops again and again, there is an end."""
    bed = Bed(monkeypatch)
    until(bed, file, "streamed")
    for _ in range(400):
        bed.rest(1)
        bed.of(file.fd).remove(0, dropped_bytes)
        file.recent = IntervalSet()
    assert bed.said(file)["state"] == "done"
    read = [(start, length) for start, length in bed.sent if length >= MIB]
    assert sum(n for start, n in read if start < dropped_bytes) == times * dropped_bytes
    assert sum(n for start, n in read if start >= dropped_bytes) == SIZE - dropped_bytes


def test_what_is_there_already_is_looked_at_bit_by_bit(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn of the service must not take long, whatever the size of the file."""
    bed = Bed(monkeypatch)
    bed.scheduler.meter.bandwidth = 300e6
    bed.of(file.fd).add(0, SIZE - 60 * MIB)
    region = until(bed, file, "measured")
    monkeypatch.setattr(file_stream, "LOOKS_AT_ONCE", 7)
    step, in_a_step = bed.bulk.step, []

    def counted(now: int) -> None:
        before = len(bed.looked)
        step(now)
        pieces = [(start, end) for start, end in bed.looked[before:] if end - start < SIZE]
        assert all(start < end for start, end in pieces)
        in_a_step.append(sum(end - start >= MIB for start, end in pieces))

    monkeypatch.setattr(bed.bulk, "step", counted)
    bed.crops(region, 200)
    bed.rest()
    assert not bed.missing(file)
    assert max(in_a_step) == 7


def test_memory_is_looked_at_once_a_second(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed, asked = Bed(monkeypatch), []

    def ahead_bytes() -> tuple[int, Limit]:
        asked.append(bed.now)
        return 1 << 40, Limit.BUDGET

    monkeypatch.setattr(bed.limits, "ahead_bytes", ahead_bytes)
    until(bed, file, "streamed")
    before = len(asked)
    monkeypatch.setattr(bed.scheduler, "pump", lambda now: 0)  # so that the stream lasts
    bed.rest(100, 50 * MS)
    assert bed.said(file)["state"] == "streamed"
    assert 4 <= len(asked) - before <= 6, "in five seconds"


def test_a_file_that_just_fits_is_streamed(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch, budget_bytes=SIZE)
    monkeypatch.setattr(bed.limits, "ahead_bytes", lambda: (SIZE, Limit.BUDGET))
    bed.crops(bed.region(file), 400)
    bed.rest()
    assert bed.said(file)["state"] == "done" and bed.ledger.degradations == []


def test_a_stream_goes_on_between_two_batches(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    streaming(bed, file)
    file.attached = 0
    bed.rest(5)
    assert bed.missing(file), "else it has not been short"
    before = bed.missing(file)
    bed.rest(40)
    assert bed.missing(file) < before


def test_a_stream_ends_when_the_file_is_closed(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    streaming(bed, file)
    bed.scheduler.forget_file(file)
    bed.scheduler.reap()
    file.close()
    ended(bed, file)
    assert bed.said(file)["state"] == "stopped"


def test_a_stream_that_begins_again_begins_where_the_file_begins(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    region = streaming(bed, file)
    bed.order(region, True)
    bed.rest(20)
    assert bed.said(file)["state"] == "undecided"
    bed.of(file.fd).remove(0, 4 * MIB)  # and the kernel has dropped something meanwhile
    file.recent = IntervalSet()
    bed.order(region, False)
    bed.rest()
    assert bed.said(file)["state"] == "done" and not bed.missing(file)


def test_a_long_look_at_a_page_table_is_no_walk(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It brings what was touched since the last one piece by piece, in the order of the file."""
    bed = Bed(monkeypatch, budget_bytes=SIZE - 1)
    region = bed.region(file)
    bed.crops(region, 100)
    source = random.Random(5)
    for _ in range(5):
        for at in sorted(source.randrange(SIZE // BLOCK) * BLOCK for _ in range(40)):
            assert bed.touch(region, at)
            region.scan.resume_at = at
            assert not region.reader.may_prefetch
        region.scan.resume_at = 0


def test_a_file_that_is_opened_anew_is_watched_anew(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle files are closed when there are many: our descriptor is another one then."""
    bed = Bed(monkeypatch)
    streaming(bed, file)
    again = FileState.open(reopen(os.open(file.path, os.O_RDONLY)), file.path)
    monkeypatch.setattr(decision, "RENT_SHARE", 10.0)
    bed.touch(bed.region(again), 5 * MIB)
    assert bed.said(again)["state"] == "undecided"
    again.close()


def test_what_was_read_before_a_file_was_opened_anew_is_counted(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    streaming(bed, file)
    bed.turn()
    before = bed.said(file)["read_bytes"]
    bed.scheduler.forget_file(file)
    again = opened(Path(file.path))
    again.prefetched_bytes = 300 * MIB  # by windows
    bed.touch(bed.region(again), 5 * MIB)
    bed.rest()
    assert before > 0
    assert before < bed.said(again)["read_bytes"] <= before + SIZE + 4 * MISS_BYTES
    again.close()


def test_a_file_that_is_opened_anew_is_streamed_from_its_beginning(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the new descriptor finds nothing cached any more."""
    bed = Bed(monkeypatch)
    streaming(bed, file)
    bed.scheduler.forget_file(file)
    again = opened(Path(file.path))
    before = len(bed.sent)
    bed.crops(bed.region(again), 100)
    bed.rest()
    assert bed.said(again)["state"] == "done" and not bed.missing(again)
    assert min(start for start, _ in bed.sent[before:]) == 0
    again.close()


def test_the_summary_has_one_row_of_a_random_reader_however_often_it_maps(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    for _ in range(20):
        region = bed.region(file)
        bed.crops(region, 12)
        bed.unmap(region)
    bed.bulk.note_streams(region.reader)
    assert [row["pattern"] for row in bed.ledger.streams if row["pattern"] == "random"] == [
        "random"
    ]
    assert len(bed.ledger.streams) < 12


@pytest.mark.parametrize(
    ("latency_seconds", "least", "most"),
    [(0.001, 4 * MIB, 4 * MIB), (0.05, 30 * MIB, 34 * MIB)],
    ids=["near storage", "far storage"],
)
def test_no_more_of_a_stream_is_under_way_than_keeps_the_storage_busy(
    file: FileState, monkeypatch: pytest.MonkeyPatch, latency_seconds: float, least: int, most: int
) -> None:
    """A reader's own miss waits behind all of it."""
    bed = Bed(monkeypatch)
    storage = Storage(300e6, latency_seconds)
    monkeypatch.setattr(type(bed.scheduler.meter), "storage", property(lambda _: storage))
    bed.scheduler.device_of(file).depth.bytes = 64 * MIB
    background = PrefetchRange(file, 0, SIZE // 2, 0, Priority.BACKGROUND)
    bed.scheduler.want(FileConsumer(0, 7), background)
    bed.scheduler.pump(bed.now)
    assert least <= bed.scheduler.under_way_bytes <= most
    reader = Stream(1, 0, 7, SIZE // 2, SIZE // 2, bed.now, bed.now, active=True)
    bed.scheduler.want(reader, PrefetchRange(file, SIZE // 2, SIZE))
    bed.scheduler.pump(bed.now)
    assert bed.scheduler.under_way_bytes >= 64 * MIB


def test_a_stream_keeps_pace_with_the_misses_of_its_readers(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads a little has no more than twice of it read; who reads on until misses have become
    much fewer has all of it."""
    bed, plain = Bed(monkeypatch, paced=True), IntervalSet()
    region = bed.region(file)
    source = random.Random(9)
    state = ""
    for count in range(1, 4001):
        at = source.randrange(SIZE // BLOCK) * BLOCK
        around = at - at % AROUND
        plain.add(around, around + AROUND)
        bed.touch(region, at)
        found = bed.bulk.describe(file.path)
        state = found["state"] if found else ""
        if count % 50 == 0 and count > 100 and plain.total_bytes() < 0.3 * SIZE:
            assert SIZE - bed.missing(file) <= 2 * plain.total_bytes() + MIB, count
        if state == "done":
            break
    assert state == "done" and not bed.missing(file)
    assert plain.total_bytes() < 0.75 * SIZE, "and long before they have come by everywhere"


def test_a_stream_does_not_go_on_while_nobody_reads(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch, paced=True)
    region = streaming(bed, file)
    bed.rest(50)
    before = bed.missing(file)
    bed.rest(400)
    assert bed.missing(file) == before > SIZE // 2
    bed.crops(region, 100)
    assert bed.missing(file) < before - 20 * MIB


def test_where_nobody_tells_what_misses_bring_a_stream_keeps_no_pace(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch, paced=True)
    monkeypatch.setattr(FileState, "resident_bytes", lambda *_: None)
    streaming(bed, file)
    bed.rest()
    assert not bed.missing(file)


def test_of_a_stream_that_yields_a_few_pieces_are_under_way(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader's own miss waits behind all of them."""
    bed = Bed(monkeypatch)
    bed.scheduler.device_of(file).depth.bytes = 64 * MIB
    background = PrefetchRange(
        file, 0, SIZE // 2, 0, Priority.BACKGROUND, yield_bytes=512 << 10
    )  # fmt: skip
    consumer = FileConsumer(0, 7)
    bed.scheduler.want(consumer, background)
    bed.scheduler.pump(bed.now)
    assert bed.scheduler.under_way_bytes == 512 << 10
    assert len(bed.sent) == decision.EXTENTS
    bed.scheduler.reap()
    bed.scheduler.change(consumer, Priority.BACKGROUND, 2 * decision.PIECE_BYTES)
    bed.scheduler.pump(bed.now)
    assert bed.scheduler.under_way_bytes == 2 * decision.PIECE_BYTES
    bed.scheduler.reap()
    assert bed.scheduler.under_way_bytes == 0
    file.method = uffd.WARM_PREAD  # whose requests have a size of their own
    bed.scheduler.pump(bed.now)
    assert bed.scheduler.under_way_bytes >= MIB
