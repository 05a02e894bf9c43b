# SPDX-License-Identifier: Apache-2.0
"""Windows ahead of walks: what lies before a reader that goes in order (predict/window.py). It
knows something of every reader, and is asked where nobody knows more."""

from __future__ import annotations

from collections.abc import Iterator

from uffdprefetch.base.config import Config
from uffdprefetch.pool.walkers import walks_of
from uffdprefetch.predict import window
from uffdprefetch.predict.streams import Stream
from uffdprefetch.readers.next_shard import NextShard
from uffdprefetch.readers.predictor import Predictor
from uffdprefetch.readers.walks import Walks
from uffdprefetch.state.publisher import WINDOW, EventPublisher
from uffdprefetch.state.reader import Reader
from uffdprefetch.warm.consumer import Consumer, PrefetchRange
from uffdprefetch.warm.placement import CheckpointPlacer

#: It always knows something; whoever knows an order knows more.
CONFIDENCE = 0.1


class Windows(Predictor):
    """See readers/predictor.py."""

    name = "windows"
    policies = frozenset({"auto", "fixed", "stride"})

    def __init__(
        self, config: Config, walks: Walks, tap: EventPublisher, layout: CheckpointPlacer,
        next_shard: NextShard | None = None,
    ) -> None:  # fmt: skip
        self._config, self._walks, self._tap, self._layout = config, walks, tap, layout
        self._next_shard = next_shard

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
        for stream in walks_of(reader, now_ns) if pooled else reader.table.active():
            wanted = self._next(stream, end_bytes, pooled)
            for start, end in reader.unneeded.ranges.missing(*wanted) if wanted else ():
                yield stream, PrefetchRange(reader.file, start, end, pooled=pooled)
                self._tap.put(WINDOW, now_ns, stream.reader, reader.file, start, end - start, 0)
            ahead = self._layout.lookahead(stream, pooled)
            if self._next_shard is None or stream.position_bytes + ahead <= end_bytes:
                continue
            if self._config.policy == "auto":
                yield from self._next_shard.beyond(reader, stream, ahead, now_ns)

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
