# SPDX-License-Identifier: Apache-2.0
"""Windows ahead of walks: what lies before a reader that goes in order (predict/window.py). It
knows something of every reader, and is asked where nobody knows more."""

from __future__ import annotations

from collections.abc import Iterator

from uffdprefetch.base.config import Config
from uffdprefetch.pool.walkers import walks_of
from uffdprefetch.predict import window
from uffdprefetch.predict.streams import REACH_BYTES, Stream
from uffdprefetch.predict.usage import NOTE_BYTES
from uffdprefetch.readers.next_shard import NextShard
from uffdprefetch.readers.predictor import Predictor
from uffdprefetch.readers.walks import Walks
from uffdprefetch.readers.waste import Prefetcher, Waste
from uffdprefetch.state.publisher import WINDOW, EventPublisher
from uffdprefetch.state.reader import Reader
from uffdprefetch.warm.consumer import Consumer, PrefetchRange
from uffdprefetch.warm.placement import CheckpointPlacer

#: A walk that leaves something out is judged by what lies further behind: by then it is known
#: whether it follows a sequence (readers/strides.py), and others prefetch for it.
SKIPS_BEHIND_BYTES = 3 * REACH_BYTES
#: It always knows something; whoever knows an order knows more.
CONFIDENCE = 0.1


class Windows(Predictor):
    """See readers/predictor.py."""

    name = "windows"
    policies = frozenset({"auto", "fixed", "stride"})

    def __init__(
        self, config: Config, walks: Walks, tap: EventPublisher, layout: CheckpointPlacer,
        waste: Waste, next_shard: NextShard | None = None,
    ) -> None:  # fmt: skip
        self._config, self._walks, self._tap, self._layout = config, walks, tap, layout
        self._waste, self._next_shard = waste, next_shard

    def confidence(self, reader: Reader, now_ns: int) -> float:
        """See Predictor."""
        return CONFIDENCE

    def demand(self, reader: Reader, now_ns: int) -> Iterator[tuple[Consumer, PrefetchRange]]:
        """See Predictor: of each walk the next window."""
        fixed = self._config.policy == "fixed"  # whose windows are the user's
        if reader.random or not (fixed or reader.may_prefetch):
            return
        says_random = self._config.policy == "auto" and reader.says_random
        if says_random and not reader.jumps.shows_walk:
            return
        pooled, end_bytes = reader.reads_pool, reader.span.end_bytes
        judged = not (fixed or pooled or reader.file.streamed) and reader.shows_touches
        for stream in walks_of(reader, now_ns) if pooled else reader.table.active():
            needless = self._config.policy == "auto" and self._is_the_kernels(reader, stream)
            if needless or (judged and self._wastes(reader, stream)):
                # from there on, should it begin again
                stream.frontier_bytes = stream.position_bytes
                continue
            wanted = self._next(stream, end_bytes, pooled)
            for start, end in reader.unneeded.ranges.missing(*wanted) if wanted else ():
                yield stream, PrefetchRange(reader.file, start, end, pooled=pooled)
                self._tap.put(WINDOW, now_ns, stream.reader, reader.file, start, end - start, 0)
            ahead = self._layout.lookahead(stream, pooled)
            if self._next_shard is None or stream.position_bytes + ahead <= end_bytes:
                continue
            if self._config.policy == "auto":
                yield from self._next_shard.beyond(reader, stream, ahead, now_ns)

    def _is_the_kernels(self, reader: Reader, stream: Stream) -> bool:
        """Whether a walk is one that the kernel reads ahead of, well enough: forward, leaving
        nothing out, of a job that does not say that it reads at random."""
        goes_on = stream.direction > 0 and not stream.sparse_pieces
        if not goes_on or reader.says_random or reader.reads_pool:
            return False
        return self._waste.is_needless(reader.file)

    def _wastes(self, reader: Reader, stream: Stream) -> bool:
        """Whether what is read ahead of a process in a file is mostly for nothing, by what the walk
        has passed. REACH_BYTES behind it other threads and ranks may still come by."""
        behind = SKIPS_BEHIND_BYTES if stream.skips else REACH_BYTES
        self._judge(reader, stream, stream.position_bytes - behind * stream.direction)
        return self._waste.stopped(Prefetcher.WINDOWS, reader.pid, reader.file)

    def _judge(self, reader: Reader, stream: Stream, passed: int) -> None:
        """It is known what came of the bytes from where it was last known up to ``passed``."""
        judged = stream.start_bytes if stream.judged_bytes is None else stream.judged_bytes
        if (passed - judged) * stream.direction < NOTE_BYTES:
            return
        self._waste.passed(
            Prefetcher.WINDOWS, reader.pid, reader.file, min(judged, passed), max(judged, passed)
        )
        stream.judged_bytes = passed

    def _next(self, stream: Stream, end_bytes: int, pooled: bool) -> tuple[int, int] | None:
        ahead = self._layout.lookahead(stream, pooled)
        if self._config.policy == "fixed":
            return window.fixed(stream, end_bytes, ahead, self._config.threshold)
        return window.auto(stream, end_bytes, ahead)

    def dismissed(self, reader: Reader) -> None:
        """See Predictor."""
        self._walks.take_back(reader)
        if self._next_shard is not None:
            self._next_shard.dismissed(reader)
        for stream in reader.table.streams:  # what comes of it now is the other one's affair
            stream.judged_bytes = stream.position_bytes
