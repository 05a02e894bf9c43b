# SPDX-License-Identifier: Apache-2.0
"""The ranks of a snapshot (live.py): where each is in which file, how fast, what lies ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from uffdprefetch.predict.randomness import Access
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.predict.streams import Stream
from uffdprefetch.protocol import snapshot as doc
from uffdprefetch.service.sampling import RANK_TICKS, RANKS_MAX, RankTrack
from uffdprefetch.state.job_processes import JobProcess, JobProcesses
from uffdprefetch.state.reader import Reader
from uffdprefetch.warm.scheduler import Scheduler
from uffdprefetch.warm.windows import Windows

STREAMS_MAX = 8
PIDS_MAX = 64
#: A stream moves as long as it is silent for no more than this; a sure one, than GAPS times what
#: its reader takes from one checkpoint to the next.
MOVING_SECONDS = 2.0
MOVING_GAPS = 3.0
MOVING_SECONDS_MAX = 30.0
#: Fewer blocks are no base for a share.
BLOCKS_MIN = 16


class LiveRanks:
    """Those of one run."""

    def __init__(
        self, processes: JobProcesses, readers: Callable[[], list[Reader]], windows: Windows,
        scheduler: Scheduler, tracks: dict[int, RankTrack],
    ) -> None:  # fmt: skip
        """``tracks``: of each rank
        over the last seconds."""
        self._processes, self._readers, self._windows = processes, readers, windows
        self._scheduler, self._tracks = scheduler, tracks

    def snapshot(self, now: int) -> list[doc.Rank]:
        """All of them, in their order."""
        members: dict[int, list[JobProcess]] = {}
        for process in self._processes.all():
            members.setdefault(process.rank, []).append(process)
        readers: dict[int, list[Reader]] = {}
        for reader in self._readers():
            readers.setdefault(reader.rank, []).append(reader)
        under_way = self._scheduler.under_way_by_rank()
        return [
            self._rank(rank, members[rank], readers.get(rank, []), under_way.get(rank, 0), now)
            for rank in sorted(members)
        ]

    def _rank(
        self,
        rank: int,
        members: list[JobProcess],
        readers: list[Reader],
        in_flight_bytes: int,
        now: int,
    ) -> doc.Rank:
        streams = self._streams_of(readers, now)
        moving = [one for one in streams if self._moves(one[1], now)] or streams[:1]
        random = next((r for r in reversed(readers) if r.access is Access.JUMPS), None)
        told = moving[0][0] if moving else (random or (readers[-1] if readers else None))
        alive = _alive(members)
        track = self._tracks.get(rank)
        wasted = sum(track.wasted_bytes.values()) if track and track.wasted_bytes else None
        made = doc.Rank(
            rank=rank,
            local_rank=members[0].local_rank,
            pids=tuple(p.watched.pid for p in alive[:PIDS_MAX]),
            pids_not_listed=max(0, len(alive) - PIDS_MAX),
            commands=tuple(sorted({p.command for p in alive})[:PIDS_MAX]),
            file=told.file.path if told else None,
            size_bytes=told.file.size_bytes if told else None,
            pattern=_pattern(told, moving[0][1] if moving else None, random),
            direction=None,
            start_bytes=None,
            position_bytes=None,
            frontier_bytes=None,
            stride_bytes=None,
            density_64KiB=None,
            quiet_seconds=None,
            rate_bytes_per_second=round(sum(self._rate(s, now) for _, s in moving)),
            read_bytes_per_second=round(sum(self._reads(s, now) for _, s in moving)),
            window_bytes=sum(self._windows.shown_bytes(s) for _, s in moving),
            ahead_bytes=sum(self._windows.ahead_bytes(s) for _, s in moving),
            in_flight_bytes=in_flight_bytes,
            wasted_bytes=wasted,
            wasted_why=None if wasted is not None else "not counted yet",
            late_extents=sum(self._windows.late_extents(s) for _, s in streams),
            hit=_hit(track, bool(random)),
            demand_misses=sum(p.watched.misses for p in members),
            stall=doc.Stall(share=None, seconds=None, sensor=None, why=doc.ADDED_BY_WATCHER),
            walks=len(streams),
            streams=tuple(self._stream(*one, now) for one in moving[:STREAMS_MAX]),
        )
        return _with_leading(made, moving[0][1], now) if moving else made

    def _streams_of(self, readers: list[Reader], now: int) -> list[tuple[Reader, Stream]]:
        """Those that were touched lately, the leading one first."""
        streams = [(reader, stream) for reader in readers for stream in reader.table.active()]
        return sorted(streams, key=lambda one: self._leads(one[1], now))

    def _stream(self, reader: Reader, stream: Stream, now: int) -> doc.StreamState:
        size_bytes = reader.file.size_bytes  # pages end where the file does
        return doc.StreamState(
            file=reader.file.path,
            pid=stream.reader,
            pattern=stream.pattern,
            start_bytes=min(stream.start_bytes, size_bytes),
            position_bytes=min(stream.position_bytes, size_bytes),
            frontier_bytes=min(self._windows.of(stream).frontier_bytes, size_bytes),
            rate_bytes_per_second=round(self._rate(stream, now)),
        )

    def _leads(self, stream: Stream, now: int) -> tuple[bool, int, int]:
        """For sorting: a sure stream first, then the fastest, then the latest. A B-tree's root and
        a file's header are streams too, short ones."""
        return not stream.settled, -round(self._rate(stream, now)), -stream.last_ns

    def _moves(self, stream: Stream, now: int) -> bool:
        """Whether its reader is still on this stream, as far as one can know."""
        patience = MOVING_SECONDS
        if stream.settled and stream.rate_bytes_per_second > 0:
            gap = self._windows.of(stream).step_bytes / stream.rate_bytes_per_second
            patience = min(MOVING_SECONDS_MAX, max(MOVING_SECONDS, MOVING_GAPS * gap))
        return now - stream.last_ns < patience * 1e9

    def _rate(self, stream: Stream, now: int) -> float:
        """The planner's moving average does not fall while nothing is touched; this one does."""
        quiet_seconds = (now - stream.last_ns) / 1e9
        rate = stream.rate_bytes_per_second
        if quiet_seconds > 1.0:
            rate = min(rate, self._windows.of(stream).step_bytes / quiet_seconds)
        return rate

    def _reads(self, stream: Stream, now: int) -> float:
        """Of its speed what it touches: the rates of ranks that skip add up to that of all."""
        density = stream.passed.density
        return self._rate(stream, now) * (1.0 if density is None else density)


def _alive(members: list[JobProcess]) -> list[JobProcess]:
    return [p for p in members if p.watched.pid and not p.watched.ended]


def _pattern(told: Reader | None, stream: Stream | None, random: Reader | None) -> str:
    """In a word, of what is ``told`` of a rank and its leading ``stream``. ``random``: one of its
    readers that jumps about."""
    if told is None:
        return "no mapping"
    if told.order.followed:
        return "planned"
    if random is not None:
        return "random"
    return stream.pattern if stream is not None else "unknown"


def _with_leading(rank: doc.Rank, stream: Stream, now: int) -> doc.Rank:
    """With the place of its leading stream, the first of those that it tells of."""
    leading = rank.streams[0]
    return replace(
        rank,
        direction=stream.direction,
        start_bytes=leading.start_bytes,
        position_bytes=leading.position_bytes,
        frontier_bytes=leading.frontier_bytes,
        stride_bytes=stream.passed.stride_bytes,
        density_64KiB=stream.passed.density,
        quiet_seconds=round((now - stream.last_ns) / 1e9, 1),
    )


def _hit(track: RankTrack | None, random: bool) -> doc.Hit:
    """Of the blocks that a rank has read lately, the share that cost no major fault."""
    if track is None or len(track.ticks) < 2:
        short = f"more than {RANKS_MAX} ranks" if track is None else "it runs for less than 2 s"
        return doc.Hit(share=None, misses=None, blocks=None, seconds=None, why=short)
    first, last = track.ticks[0], track.ticks[-1]
    misses = last.misses - first.misses
    blocks = (last.touched_bytes - first.touched_bytes) // BLOCK_BYTES
    share: float | None = None
    why: str | None = None
    if random:
        why = "it jumps about: what it reads between two streams is not counted"
    elif blocks < BLOCKS_MIN:
        why = f"less than {BLOCKS_MIN} blocks read in the last {RANK_TICKS} s"
    else:
        share = max(0.0, 1 - misses / blocks)
    seconds = round((last.at_ns - first.at_ns) / 1e9, 1)
    return doc.Hit(share, misses, blocks, seconds, why)
