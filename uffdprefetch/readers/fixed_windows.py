# SPDX-License-Identifier: Apache-2.0
"""`--policy fixed`: windows of one size ahead of streams, as the user has said ([Haderbache],
predict/window.py)."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from uffdprefetch.base.config import Config
from uffdprefetch.predict import window
from uffdprefetch.predict.randomness import Access
from uffdprefetch.predict.streams import Feedback, Stream
from uffdprefetch.predict.window import FixedWindow
from uffdprefetch.readers.predictor import Confidence, Predictor
from uffdprefetch.state.publisher import WINDOW, EventPublisher
from uffdprefetch.state.reader import Reader
from uffdprefetch.warm.consumer import Consumer, PrefetchRange
from uffdprefetch.warm.scheduler import Scheduler
from uffdprefetch.warm.windows import Windows


class FollowedStream:
    """A stream, as the scheduler sees it (see Consumer), and its last window."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.rank, self.reader = stream.rank, stream.reader
        self.feedback = Feedback()
        self.window: FixedWindow | None = None
        self.depth_bytes = self.depth_of_all_bytes = 0

    @property
    def direction(self) -> int:
        """See Consumer."""
        return self.stream.direction

    @property
    def position_bytes(self) -> int:
        """See Consumer."""
        return self.stream.position_bytes

    @property
    def rate_bytes_per_second(self) -> float:
        """See Consumer."""
        return self.stream.rate_bytes_per_second

    def expected_bytes(self, now_ns: int, most_bytes: int) -> int:
        """See Consumer."""
        return self.stream.expected_bytes(now_ns, most_bytes)


class FixedWindows(Predictor):
    """See readers/predictor.py."""

    name = "windows"
    policies = frozenset({"fixed"})

    def __init__(
        self, config: Config, scheduler: Scheduler, publisher: EventPublisher, windows: Windows
    ) -> None:
        self._config, self._scheduler, self._publisher = config, scheduler, publisher
        self._windows = windows
        self._followed: WeakKeyDictionary[Stream, FollowedStream] = WeakKeyDictionary()

    def confidence(self, reader: Reader, now_ns: int) -> Confidence:
        """See Predictor."""
        return Confidence.GUESS

    def demand(self, reader: Reader, now_ns: int) -> list[tuple[Consumer, PrefetchRange]]:
        """See Predictor: of each stream the next window."""
        found = list[tuple[Consumer, PrefetchRange]]()
        if reader.access is Access.JUMPS:
            return found
        pooled, end_bytes = reader.reads_pool, reader.span.end_bytes
        active = reader.table.active()
        for stream in reader.pool.followed(active, now_ns) if pooled else active:
            size_bytes = self._windows.of(stream, pooled).size_bytes
            one = self._followed.get(stream) or FollowedStream(stream)
            wanted = window.fixed(
                stream, one.window, end_bytes, size_bytes, self._config.fixed.threshold
            )
            if wanted is None:
                continue
            self._followed[stream], one.window = one, wanted
            self._windows.asked(stream, wanted.end_bytes, one.feedback)
            for start, end in reader.unneeded.ranges.missing(wanted.start_bytes, wanted.end_bytes):
                found.append((one, PrefetchRange(reader.file, start, end, pooled=pooled)))
                self._publisher.put(
                    WINDOW, now_ns, stream.reader, reader.file, start, end - start, 0
                )
        return found

    def take_back(self, reader: Reader, start: int, end: int) -> None:
        """See Predictor."""
        for stream in reader.table.streams:
            one = self._followed.get(stream)
            asked = one.window.end_bytes if one is not None and one.window is not None else 0
            if stream.position_bytes < end and start < asked:
                self.ended([stream])

    def ended(self, streams: Sequence[Stream]) -> None:
        """See Predictor."""
        for stream in streams:
            one = self._followed.pop(stream, None)
            if one is not None:
                self._scheduler.forget(one)
                self._windows.asked(stream, stream.position_bytes, one.feedback)

    def dismissed(self, reader: Reader) -> None:
        """See Predictor."""
        self.ended(reader.table.streams)
