# SPDX-License-Identifier: Apache-2.0
"""What the service counts for its watchers, on books and clocks of the test's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.predict.streams import Stream
from uffdprefetch.predict.window import Window
from uffdprefetch.service import sampling
from uffdprefetch.service.live_ranks import LiveRanks, _hit
from uffdprefetch.service.sampling import RANK_TICKS, Sampling
from uffdprefetch.state.files import FileState
from uffdprefetch.state.job_processes import JobProcess, JobProcesses
from uffdprefetch.state.job_reads import JobReads
from uffdprefetch.state.opening import reopen
from uffdprefetch.state.processes import Watched

SECOND = 1_000_000_000
MIB = 1 << 20


@dataclass
class Run:
    """Files, processes, a scheduler and a ledger as far as Sampling reads them."""

    files: dict[Any, FileState]
    clients: dict[int, Any] = field(default_factory=dict)
    processes: JobProcesses = field(default_factory=JobProcesses)
    jobs: JobReads = field(default_factory=JobReads)
    prefetched_bytes: int = 0

    @property
    def results(self) -> Run:
        """Of the scheduler."""
        return self

    def reader(self, rank: int, file: FileState, start: int = 0) -> Stream:
        """A process of a rank with one walk in the file."""
        stream = Stream(1, rank, 100 + rank, start, start, 0, 0, active=True)
        reader = SimpleNamespace(file=file, table=SimpleNamespace(streams=[stream]))
        self.clients[rank] = SimpleNamespace(
            rank=rank, pid=100 + rank, readers={file.key: reader}, regions={}
        )
        watched = Watched(0, ended=True)
        self.processes.single.append(JobProcess(rank, rank, "", watched))
        return stream


def walk(stream: Stream, length: int, touched: int | None = None) -> None:
    """Move a walk on, with so many bytes of it in the page table."""
    stream.position_bytes += length
    stream.passed.touched_bytes += length if touched is None else touched


@pytest.fixture
def file(tmp_path: Path) -> Iterator[FileState]:
    path = tmp_path / "file"
    path.write_bytes(bytes(16 * MIB))
    made = FileState.open(reopen(os.open(path, os.O_RDONLY)), str(path))
    yield made
    made.close()


@pytest.fixture
def run(file: FileState) -> Run:
    return Run({file.key: file})


def sample(run: Run) -> Sampling:
    return Sampling(run.files, run.clients, run, run)  # type: ignore[arg-type]


def test_a_touch_that_the_pool_had_to_read_for_is_a_miss(run: Run, file: FileState) -> None:
    stream = run.reader(0, file)
    samples = sample(run)
    samples.tick(SECOND)
    walk(stream, 4 * MIB, touched=4 * MIB)
    run.processes.single[0].watched.pool_misses += 16
    samples.tick(2 * SECOND)
    hit = _hit(samples.ranks[0], False)
    assert (hit.misses, hit.blocks, hit.share) == (16, 64, 0.75)


def test_a_block_that_a_call_has_read_before_it_was_read_ahead_is_a_miss(
    run: Run, file: FileState
) -> None:
    stream, samples = run.reader(0, file), sample(run)
    samples.tick(SECOND)
    walk(stream, 4 * MIB, touched=4 * MIB)
    run.jobs.missed(0, 16)
    samples.tick(2 * SECOND)
    assert _hit(samples.ranks[0], False).share == 0.75
    assert samples.history[-1].misses_per_second == 16.0


def test_a_sample_that_follows_at_once_is_no_rate(run: Run) -> None:
    samples = sample(run)
    samples.tick(SECOND)
    run.prefetched_bytes += 10 * MIB
    samples.tick(SECOND + SECOND // 1000)
    assert not samples.history
    samples.tick(2 * SECOND)
    assert samples.history[-1].prefetch_bytes_per_second == 10 * MIB


def test_misses_and_blocks_of_the_last_ten_seconds_make_the_hit_share(
    run: Run, file: FileState
) -> None:
    stream, samples = run.reader(0, file), sample(run)
    faults = run.processes.single[0].watched.now
    faults.major_faults = 500  # of its start: long ago
    for second in range(30):
        samples.tick(second * SECOND)
        walk(stream, 100 * BLOCK_BYTES)
        faults.major_faults += 2
    hit = _hit(samples.ranks[0], False)
    assert hit.seconds == RANK_TICKS == 10
    assert (hit.misses, hit.blocks) == (20, 1000)
    assert hit.share == pytest.approx(0.98) and hit.why is None


def test_a_share_without_a_base_is_null_and_says_why(run: Run, file: FileState) -> None:
    stream, samples = run.reader(0, file), sample(run)
    assert "2 s" in _hit(samples.ranks.get(0) or sampling.RankTrack(), False).why
    samples.tick(SECOND)
    walk(stream, 15 * BLOCK_BYTES)
    samples.tick(2 * SECOND)
    hit = _hit(samples.ranks[0], False)
    assert hit.share is None and "less than 16 blocks" in hit.why
    walk(stream, 100 * BLOCK_BYTES)
    samples.tick(3 * SECOND)
    assert _hit(samples.ranks[0], False).share == 1.0
    assert "jumps about" in _hit(samples.ranks[0], True).why


def test_more_misses_than_blocks_are_no_negative_share(run: Run, file: FileState) -> None:
    stream, samples = run.reader(0, file), sample(run)
    samples.tick(SECOND)
    walk(stream, 20 * BLOCK_BYTES)
    run.processes.single[0].watched.now.major_faults = 300
    samples.tick(2 * SECOND)
    assert _hit(samples.ranks[0], False).share == 0.0


def test_the_history_is_of_rates_and_bounded(run: Run, file: FileState) -> None:
    stream, samples = run.reader(0, file), sample(run)
    for second in range(500):
        samples.tick(2 * second * SECOND)
        run.prefetched_bytes += 10 * MIB
        walk(stream, 4 * MIB)
        run.processes.single[0].watched.now.major_faults += 6
    assert len(samples.history) == sampling.HISTORY_TICKS
    last = samples.history[-1]
    assert last.prefetch_bytes_per_second == 5 * MIB
    assert last.reader_bytes_per_second == 2 * MIB
    assert last.misses_per_second == 3.0


def test_what_is_read_by_who_jumps_about_is_in_the_readers_rate(run: Run, file: FileState) -> None:
    """It was 0 B/s, beside 70 misses a second."""
    samples = sample(run)
    run.reader(0, file)
    samples.tick(SECOND)
    for at in (3, 11, 7):
        file.blocks.tell_used(at * MIB, at * MIB + MIB // 2, mine=IntervalSet())
    samples.tick(2 * SECOND)
    samples.slow.asked(2 * SECOND)
    passed(samples)
    assert samples.history[-1].reader_bytes_per_second == 3 * MIB // 2
    assert samples.slow.counted[file.key].wasted_bytes is None, "nobody has passed anything"


def test_a_stream_that_ends_takes_nothing_away(run: Run, file: FileState) -> None:
    stream, samples = run.reader(0, file), sample(run)
    walk(stream, 8 * MIB)
    samples.tick(SECOND)
    run.clients.clear()
    samples.tick(2 * SECOND)
    run.reader(0, file)
    samples.tick(3 * SECOND)
    assert samples.ranks[0].touched_bytes == 8 * MIB
    assert all(t.reader_bytes_per_second >= 0 for t in samples.history)


def passed(samples: Sampling) -> None:
    """Let the slow pass run to its end."""
    for _ in range(1000):
        samples.slow.step(samples.slow.due_ns)
        if samples.slow.counted_all and samples.slow._pass is None:
            return
    raise AssertionError("the pass does not end")


def ahead(file: FileState, length: int) -> None:
    """So much of it was read ahead, from its beginning."""
    file.account.came(length, 0)
    file.blocks.mark_prefetched(0, length)


def test_no_more_is_used_than_was_prefetched(run: Run, file: FileState) -> None:
    """Of blocks of which the pool had a part already `top` told 192 MiB used of 101 prefetched."""
    stream, samples = run.reader(0, file), sample(run)
    file.blocks.mark_prefetched(0, 16 * MIB)
    file.account.came(4 * MIB, 12 * MIB)
    file.blocks.mark_used(0, 8 * MIB)
    walk(stream, 12 * MIB)
    samples.tick(SECOND)
    samples.slow.asked(2 * SECOND)
    passed(samples)
    counted = samples.slow.counted[file.key]
    assert (counted.used_bytes, counted.unused_bytes) == (2 * MIB, 2 * MIB)
    assert counted.wasted_bytes == 1 * MIB
    assert samples.ranks[0].wasted_bytes == {file.key: 1 * MIB}


def test_wasted_is_what_lies_unused_behind_the_reader_not_ahead_of_it(
    run: Run, file: FileState
) -> None:
    stream, samples = run.reader(0, file), sample(run)
    ahead(file, 12 * MIB)
    file.blocks.mark_used(0, 3 * MIB)
    file.blocks.mark_used(13 * MIB, 14 * MIB)
    walk(stream, 4 * MIB + 5000)  # in the middle of a block: that one is not behind it
    samples.tick(SECOND)
    samples.slow.asked(2 * SECOND)
    passed(samples)
    counted = samples.slow.counted[file.key]
    assert (counted.used_bytes, counted.unused_bytes) == (3 * MIB, 9 * MIB)
    assert (counted.wasted_bytes, counted.demand_bytes) == (1 * MIB, 1 * MIB)
    assert samples.ranks[0].wasted_bytes == {file.key: 1 * MIB}
    assert counted.resident_bytes is not None and counted.sensor in ("cachestat", "mincore")


def test_two_ranks_that_pass_the_same_stretch_waste_it_once_in_the_file(
    run: Run, file: FileState
) -> None:
    streams = [run.reader(rank, file) for rank in range(2)]
    samples = sample(run)
    ahead(file, 8 * MIB)
    for stream in streams:
        walk(stream, 8 * MIB, touched=0)
    samples.tick(SECOND)
    samples.slow.asked(2 * SECOND)
    passed(samples)
    assert samples.slow.counted[file.key].wasted_bytes == 8 * MIB
    assert [samples.ranks[r].wasted_bytes[file.key] for r in range(2)] == [8 * MIB, 8 * MIB]


def test_the_slow_pass_runs_only_while_somebody_asks(run: Run, file: FileState) -> None:
    run.reader(0, file)
    samples = sample(run)
    samples.tick(SECOND)
    assert samples.slow.due_ns == 0  # nobody has asked
    samples.slow.asked(2 * SECOND)
    assert samples.slow.due_ns
    passed(samples)
    before = samples.slow.counted[file.key]
    samples.slow.step(2 * SECOND + sampling.WATCHED_NS + samples.slow.due_ns)
    assert samples.slow.due_ns == 0 and samples.slow.counted[file.key] is before
    samples.slow.step(100 * SECOND)
    assert samples.slow.counted[file.key] is before


def test_who_comes_when_nobody_has_watched_is_told_what_is_so_now(
    run: Run, file: FileState
) -> None:
    """And not what was counted for the one before, minutes ago."""
    run.reader(0, file)
    samples = sample(run)
    samples.tick(SECOND)
    samples.slow.asked(2 * SECOND)
    passed(samples)
    assert samples.slow.counted[file.key].unused_bytes == 0
    ahead(file, 8 * MIB)
    samples.slow.asked(3 * SECOND)  # somebody watches: it is counted in its turn
    assert samples.slow.counted[file.key].unused_bytes == 0
    samples.slow.asked(3 * SECOND + sampling.WATCHED_NS + 1)
    assert not samples.slow.counted_all or samples.slow.counted[file.key].unused_bytes == 8 * MIB
    passed(samples)
    assert samples.slow.counted[file.key].unused_bytes == 8 * MIB


def test_what_ranks_that_skip_read_adds_up_to_what_is_read(run: Run, file: FileState) -> None:
    """Four ranks that read each fourth block: each goes on four times as fast as it reads."""
    streams = [run.reader(rank, file) for rank in range(4)]
    samples, now = sample(run), SECOND
    windows = SimpleNamespace(of=lambda _: Window(0, 0, 4 * MIB))
    live = LiveRanks.__new__(LiveRanks)
    live._windows = windows  # type: ignore[assignment]
    samples.tick(now)
    for _ in range(4):
        for stream in streams:
            walk(stream, 4 * MIB, touched=MIB)
            stream.passed.bytes += 4 * MIB
            stream.rate.note(4 * MIB, now)
            stream.last_ns = now
        samples.tick(now := now + SECOND)
    ahead = sum(live._rate(stream, now) for stream in streams)
    read = sum(live._reads(stream, now) for stream in streams)
    assert ahead > 0 and read == pytest.approx(ahead / 4)


def test_pieces_keep_their_distance_in_proportion_to_their_cost(
    run: Run, file: FileState, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = [0]

    def costs() -> int:
        cpu[0] += 4_000_000  # each look at the clock: 4 ms later
        return cpu[0]

    run.reader(0, file)
    samples = sample(run)
    samples.slow._asked_ns = samples.slow.due_ns = 1
    monkeypatch.setattr(sampling.time, "thread_time_ns", costs)
    samples.slow.step(SECOND)
    assert samples.slow.due_ns - SECOND >= sampling.COST * 4_000_000


def test_a_file_that_is_closed_meanwhile_ends_its_part_only(run: Run, file: FileState) -> None:
    run.reader(0, file)
    samples = sample(run)
    samples.tick(SECOND)
    samples.slow._asked_ns = samples.slow.due_ns = 2 * SECOND
    samples.slow.step(2 * SECOND)
    file.close()
    for _ in range(20):
        samples.slow.step(samples.slow.due_ns)
    assert samples.slow.counted == {}
    run.files.clear()
    samples.tick(3 * SECOND)
    assert samples.ranks[0].passed == {}


def test_ranks_without_end_are_not_followed_without_end(run: Run, file: FileState) -> None:
    for rank in range(sampling.RANKS_MAX + 50):
        run.reader(rank, file)
    samples = sample(run)
    samples.tick(SECOND)
    assert len(samples.ranks) == sampling.RANKS_MAX
