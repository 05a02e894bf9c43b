# SPDX-License-Identifier: Apache-2.0
"""`--policy fixed`: windows of one size ahead of walks, as the user has said ([Haderbache],
predict/window.py)."""

from __future__ import annotations

from collections.abc import Iterator

from uffdprefetch.base.config import Config
from uffdprefetch.pool.walkers import walks_of
from uffdprefetch.predict import window
from uffdprefetch.predict.randomness import Access
from uffdprefetch.readers.predictor import GUESS_CONFIDENCE, Predictor
from uffdprefetch.readers.walks import Walks
from uffdprefetch.state.publisher import WINDOW, EventPublisher
from uffdprefetch.state.reader import Reader
from uffdprefetch.warm.consumer import Consumer, PrefetchRange
from uffdprefetch.warm.placement import CheckpointPlacer


class FixedWindows(Predictor):
    """See readers/predictor.py."""

    name = "windows"
    policies = frozenset({"fixed"})

    def __init__(
        self, config: Config, walks: Walks, tap: EventPublisher, layout: CheckpointPlacer
    ) -> None:
        self._config, self._walks, self._tap, self._layout = config, walks, tap, layout

    def confidence(self, reader: Reader, now_ns: int) -> float:
        """See Predictor."""
        return GUESS_CONFIDENCE

    def demand(self, reader: Reader, now_ns: int) -> Iterator[tuple[Consumer, PrefetchRange]]:
        """See Predictor: of each walk the next window."""
        if reader.access is Access.JUMPS:
            return
        pooled, end_bytes = reader.reads_pool, reader.span.end_bytes
        for stream in walks_of(reader, now_ns) if pooled else reader.table.active():
            ahead = self._layout.lookahead(stream, pooled)
            wanted = window.fixed(stream, end_bytes, ahead, self._config.threshold)
            for start, end in reader.unneeded.ranges.missing(*wanted) if wanted else ():
                yield stream, PrefetchRange(reader.file, start, end, pooled=pooled)
                self._tap.put(WINDOW, now_ns, stream.reader, reader.file, start, end - start, 0)

    def dismissed(self, reader: Reader) -> None:
        """See Predictor."""
        self._walks.take_back(reader)
