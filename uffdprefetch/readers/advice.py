# SPDX-License-Identifier: Apache-2.0
"""What a job says by madvise(2), and what follows from it (docs/advice.md).

Advice is believed where it costs little should it be wrong: it says when to begin and what to leave
out, and what a reader does outweighs it. Under `--policy auto`; other policies are the user's word.
"""

from __future__ import annotations

import mmap

from uffdprefetch.base.clock import Clock
from uffdprefetch.protocol.wire import Stated
from uffdprefetch.readers.arbiter import Arbiter
from uffdprefetch.readers.stated import StatedRanges
from uffdprefetch.state.reader import UNNEEDED_MAX, Region

#: How the kernel's numbers, which come with a mapping, are said.
_OF_MAPPING = {mmap.MADV_RANDOM: Stated.RANDOM, mmap.MADV_SEQUENTIAL: Stated.SEQUENTIAL}


class Advice:
    """What the jobs of a service say. Its thread calls everything here."""

    def __init__(self, policy: str, arbiter: Arbiter, stated: StatedRanges, clock: Clock) -> None:
        self._believed = policy == "auto"
        self._arbiter, self._stated, self._clock = arbiter, stated, clock

    def attached(self, region: Region, advice: int) -> None:
        """A mapping is managed from now on, which the job has advised (MADV_NORMAL, MADV_RANDOM,
        MADV_SEQUENTIAL) before, or the process that it was forked from."""
        self._reads(region, _OF_MAPPING.get(advice, Stated.NORMAL))

    def populated(self, region: Region) -> None:
        """The job has mapped it with MAP_POPULATE: without us the kernel had read all of it before
        that returned."""
        if self._believed:
            start, end = region.span.start_bytes, region.span.end_bytes
            self._lift(region, start, end)
            self._stated.needed(region, start, end, is_populated=True)

    def said(self, region: Region, what: int, start: int, end: int) -> None:
        """The job has said it of [start, end) bytes of the file, within the mapping."""
        if not self._believed:
            return
        if what == Stated.NEEDED:
            self._lift(region, start, end)
            self._stated.needed(region, start, end)
        elif what == Stated.UNNEEDED:
            self._unneeded(region, start, end)
        elif what in (Stated.NORMAL, Stated.SEQUENTIAL, Stated.RANDOM):
            self._reads(region, Stated(what))

    @staticmethod
    def _reads(region: Region, how: Stated) -> None:
        region.reads = how
        file, so = region.file, region.reader.says_random
        file.mappings.say_random(so)
        if file.pooled is not None:
            file.pooled.say_random(so)

    def _lift(self, region: Region, start: int, end: int) -> None:
        unneeded = region.reader.unneeded
        if unneeded.ranges.overlaps(start, end):
            unneeded.ranges.remove(start, end)
            self._arbiter.take_back(region.reader, start, end)

    def _unneeded(self, region: Region, start: int, end: int) -> None:
        reader = region.reader
        reader.unneeded.ranges.add(start, end)
        reader.unneeded.said_ns = self._clock.now_ns()
        if len(reader.unneeded.ranges) > UNNEEDED_MAX:
            reader.unneeded.clear()
        self._arbiter.take_back(reader, start, end)
        self._stated.unneeded(region, start, end)
