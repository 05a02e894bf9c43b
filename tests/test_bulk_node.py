# SPDX-License-Identifier: Apache-2.0
"""node/bulk.py under our own clock, with workers that only take notes: what it asks for, in what
order, and when it ends."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from uffdprefetch import uffd
from uffdprefetch.config import Config
from uffdprefetch.intervals import IntervalSet
from uffdprefetch.node import bulk as module
from uffdprefetch.node.bulk import LAST, PIECE_BYTES, WAITING_BYTES, Bulk
from uffdprefetch.node.files import FileState
from uffdprefetch.node.layout import Layout
from uffdprefetch.node.ledger import Ledger
from uffdprefetch.node.wire import Verdict
from uffdprefetch.progress.streams import Stream, StreamTable
from uffdprefetch.warm.limits import TokenBucket
from uffdprefetch.warm.scheduler import Scheduler

MIB = 1 << 20
MS = 1_000_000
BLOCK = 65536
SIZE = 256 * MIB
#: One read, and 300 MB/s.
LATENCY_NS, NS_A_BYTE = 1 * MS, 1e9 / 300e6


class Bed:
    """A clock, workers whose reads are done when it is told so, and the engine's part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.now = 10**12
        self.there: dict[int, IntervalSet] = {}  # by descriptor
        self.sent: list[tuple[int, int]] = []
        self.most_bytes = 0
        self.latency_ns = LATENCY_NS
        self._under_way: list[tuple[int, int, int, int]] = []
        self.ledger = Ledger()
        settings = Config(**config)
        self.scheduler = Scheduler(self, TokenBucket(None, MIB), lambda *_: None, 4 * MIB)  # type: ignore[arg-type]
        self.bulk = Bulk(
            settings, self.scheduler, self.ledger, Layout(settings, self.scheduler, self.ledger)
        )
        self._random = random.Random(3)
        monkeypatch.setattr(module, "now_ns", lambda: self.now)
        monkeypatch.setattr(module, "missing_bytes", self.missing)
        monkeypatch.setattr(module, "read_ahead_bytes", lambda _: 128 << 10)

    def of(self, fd: int) -> IntervalSet:
        return self.there.setdefault(fd, IntervalSet())

    def missing(self, file: FileState, start: int = 0, end: int | None = None) -> int:
        gaps = self.of(file.fd).missing(start, file.size_bytes if end is None else end)
        return sum(b - a for a, b in gaps)

    # -- workers

    def submit(self, number: int, fd: int, start: int, length: int, **_: Any) -> bool:
        if length:
            self.sent.append((start, length))
        self._under_way.append((number, fd, start, length))
        return True

    def reap(self) -> list[uffd.WarmResult]:
        done = []
        for number, fd, start, length in self._under_way:
            began = self.now
            self.now += self.latency_ns + int(length * NS_A_BYTE)
            self.of(fd).add(start, start + length)
            done.append(
                uffd.WarmResult(
                    id=number, submit_ns=began, start_ns=began, done_ns=self.now, resident_bytes=0,
                    bytes=length, copied=0, method=uffd.WARM_READAHEAD, chunk_bytes=MIB, error=0,
                )
            )  # fmt: skip
        self._under_way.clear()
        return done

    # -- the engine

    def region(self, file: FileState, rank: int = 0, pid: int = 7) -> Any:
        file.attached += 1
        table = StreamTable(rank, pid)
        return SimpleNamespace(file=file, table=table, verdict=Verdict.CHECKPOINTS, look_from=0)

    def touch(self, region: Any, at: int) -> bool:
        """One miss."""
        self.now += 2 * MS
        stream, forward = region.table.touch(at, at + BLOCK, self.now)
        random = self.bulk.saw(region, stream, (at, at + BLOCK, self.now), forward, (BLOCK, BLOCK))
        self.turn()
        return random

    def turn(self) -> None:
        """Turns of the service, of which the second is woken by reads that are done."""
        for _ in range(2):
            self.scheduler.reap()
            self.bulk.step(self.now)
            self.scheduler.pump(self.now)
        waiting = self.scheduler.queued_bytes + self.scheduler.under_way_bytes
        self.most_bytes = max(self.most_bytes, waiting)

    def crops(self, region: Any, count: int) -> None:
        for _ in range(count):
            self.touch(region, self._random.randrange(region.file.size_bytes // BLOCK) * BLOCK)

    def rest(self, turns: int = 400, step_ns: int = MS) -> None:
        """Turns in which nobody reads."""
        for _ in range(turns):
            self.now += step_ns
            self.turn()

    def said(self, file: FileState) -> dict[str, Any]:
        found = self.bulk.describe(file.path)
        assert found is not None
        return found


@pytest.fixture
def file(tmp_path: Path) -> Iterator[FileState]:
    path = tmp_path / "tokens.bin"
    with open(path, "wb") as sparse:
        sparse.truncate(SIZE)
    state = FileState.open(os.open(path, os.O_RDONLY), str(path))
    state.method = uffd.WARM_READAHEAD
    yield state
    state.close()


def streaming(bed: Bed, file: FileState) -> Any:
    """A region of which the file is just being streamed."""
    region = bed.region(file)
    for _ in range(600):
        bed.crops(region, 1)
        found = bed.bulk.describe(file.path)
        if found is not None and found["state"] == "streamed":
            break
    assert bed.said(file)["state"] == "streamed"
    assert bed.missing(file) > SIZE // 2
    return region


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
    assert sum(length for _, length in bed.sent) <= SIZE + 3 * module.MISS_BYTES
    assert bed.said(file)["read_bytes"] == sum(length for _, length in bed.sent)
    assert bed.ledger.degradations == []
    bed.crops(region, 400)  # all is there: not again
    assert sum(length for _, length in bed.sent) <= SIZE + 3 * module.MISS_BYTES


def test_only_what_is_not_there_is_read(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    bed.scheduler.want(file, far, wanted, SIZE)
    bed.scheduler.pump(bed.now)
    assert bed.sent[before][0] == wanted
    assert LAST > 1 << 50  # behind a plan's coordinate, too


def test_several_ranks_have_one_stream(file: FileState, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(monkeypatch)
    regions = [bed.region(file, rank, 10 + rank) for rank in range(4)]
    for _ in range(200):
        for region in regions:
            bed.crops(region, 1)
    bed.rest()
    assert bed.said(file)["state"] == "done" and bed.said(file)["ranks"] == [0, 1, 2, 3]
    assert sum(length for _, length in bed.sent) <= SIZE + 3 * module.MISS_BYTES


def test_a_mapping_for_each_batch_is_one_reader(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which none lives long enough to be known as random by itself."""
    bed = Bed(monkeypatch)
    for _ in range(40):
        region = bed.region(file)
        bed.crops(region, 12)
        file.attached -= 1
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
    assert bed.bulk.rest_ns(regions[0]) > 0, "its page tables need not be looked at so often"


def test_two_files_that_fit_only_singly(
    file: FileState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "validation.bin"
    with open(path, "wb") as sparse:
        sparse.truncate(SIZE)
    other = FileState.open(os.open(path, os.O_RDONLY), str(path))
    bed = Bed(monkeypatch, budget_bytes=SIZE + SIZE // 2)
    bed.crops(bed.region(file), 400)
    bed.rest()
    bed.crops(bed.region(other, pid=8), 400)
    bed.rest()
    assert (bed.said(file)["state"], bed.said(other)["state"]) == ("done", "refused")
    other.close()


def test_storage_on_which_random_reads_cost_nothing_is_left_alone(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    bed.latency_ns = 0
    bed.crops(bed.region(file), 400)
    bed.rest()
    (finding,) = bed.ledger.degradations
    assert "as good as a stream" in finding
    assert sum(length for _, length in bed.sent) <= module.PROBE_BYTES + 3 * module.MISS_BYTES


@pytest.mark.parametrize("policy", ["none", "fixed"])
def test_only_the_automatic_policy_streams(
    file: FileState, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    bed = Bed(monkeypatch, policy=policy)
    region = bed.region(file)
    bed.crops(region, 600)
    assert bed.sent == [] and bed.bulk.describe(file.path) is None
    assert bed.bulk.trusts(region), "paper 1's windows are the user's"


def ended(bed: Bed, file: FileState) -> None:
    """Nothing of it waits any more, and nothing more is asked for."""
    bed.rest(1)
    assert not bed.scheduler.queued_bytes
    before = len(bed.sent)
    bed.rest()
    assert len(bed.sent) == before and bed.missing(file)


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
    monkeypatch.setattr(module, "now_ns", lambda: bed.now)
    monkeypatch.setattr(module, "missing_bytes", bed.missing)
    assert bed.bulk.trusts(region)
    ended(bed, file)


def test_a_stream_ends_when_the_order_is_known(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    region = streaming(bed, file)
    bed.bulk.planned(region, True)
    ended(bed, file)
    assert not bed.touch(region, 0), "the walks of a planned reader are not ours to judge"


def test_when_a_known_order_was_a_wrong_one_its_reader_is_judged_by_what_it_has_touched(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    region, source = bed.region(file), random.Random(5)
    for _ in range(100):
        bed.now += 2 * MS
        at = source.randrange(SIZE // BLOCK) * BLOCK
        bed.bulk.saw_planned(region, at, at + BLOCK, bed.now)
        bed.turn()
    assert bed.bulk.describe(file.path) is None and bed.sent == [], "as long as it is followed"
    bed.bulk.planned(region, False)
    bed.rest(20)
    assert bed.said(file)["state"] == "streamed" and bed.said(file)["ranks"] == [0]


def test_a_stream_ends_when_memory_becomes_short(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    streaming(bed, file)
    monkeypatch.setattr(module.limits, "allowed_bytes", lambda _: (MIB, "MemAvailable"))
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
    bed.now += 2 * module.GONE_NS
    bed.rest()
    assert bed.missing(file) and bed.said(file)["state"] == "streamed"
    file.attached = 1
    bed.crops(region, 5)
    bed.rest()
    assert not bed.missing(file)


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
            region.look_from = at
            assert not bed.bulk.trusts(region)
        region.look_from = 0


def test_a_file_that_is_opened_anew_is_watched_anew(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle files are closed when there are many: our descriptor is another one then."""
    bed = Bed(monkeypatch)
    streaming(bed, file)
    again = FileState.open(os.open(file.path, os.O_RDONLY), file.path)
    bed.touch(bed.region(again), 5 * MIB)
    assert bed.said(again)["state"] == "undecided"
    again.close()


def test_the_summary_has_one_row_of_a_random_reader_however_often_it_maps(
    file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(monkeypatch)
    for _ in range(20):
        region = bed.region(file)
        bed.crops(region, 12)
        bed.bulk.note_streams(SimpleNamespace(rank=0), region)  # type: ignore[arg-type]
    assert [row["pattern"] for row in bed.ledger.streams if row["pattern"] == "random"] == [
        "random"
    ]
    assert len(bed.ledger.streams) < 12
