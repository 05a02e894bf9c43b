# SPDX-License-Identifier: Apache-2.0
"""The page tables of the readers as a sensor: where streams are found and followed, what was used;
and when to look, how far, and at what cost.

Same user only, no privilege: PAGEMAP_SCAN on /proc/PID/pagemap (6.7), else the entries one by one.
A page shows once: what was mapped at the last look (``Region.scan.mapped``) is subtracted. It shows
again after it has left the table because the kernel has reclaimed it. Resolution 64 KiB
(fault-around), 4 KiB on Lustre.
"""

from __future__ import annotations

from collections.abc import Callable

from uffdprefetch.base.clock import CLOCK, MS, Clock
from uffdprefetch.base.intervals import IntervalSet
from uffdprefetch.native import uffd
from uffdprefetch.predict.bounds import CPU_PART, LATELY_NS
from uffdprefetch.predict.randomness import NEAR_BYTES
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.predict.streams import FORGET_NS, PIECE_BYTES, REACH_BYTES, Stream
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.sense.observation import Batch, Observation
from uffdprefetch.state.client import Client
from uffdprefetch.state.publisher import SEEN, EventPublisher
from uffdprefetch.state.reader import NEXT_TO_BYTES, Region
from uffdprefetch.warm.windows import Windows

#: Looking for streams in page tables: at first as often, and no longer at a time; ...
LOOK_FIRST_NS = 2 * MS
#: ... at last as rarely: a new reader's first quarter of a second is read without help at the most.
LOOK_SLOWEST_NS = 250 * MS
#: One looks so many times while something takes its time: a reader that begins late is seen late by
#: one part in so many of how long it has waited.
LOOKS = 16
#: How recent a touch keeps scans frequent while no stream is settled, and how rare those of one
#: that stands are: a storage's reply takes that long at most, where prefetching pays.
RECENT_NS = 100 * MS
#: A look over a large file is spread over several turns: 10 GiB that are mapped take 13 ms. In so
#: much there are seven periods of the longest skip that a Stream follows (REACH_BYTES), four times.
LOOK_AT_ONCE_BYTES = 1 << 30
#: Looking may take CPU_PART of a core; what a few hundred looks take at once, as where a stream
#: begins, before it has rested for it.
LOOK_CREDIT_NS = 10 * MS
#: Progress of a stream that is sure: as often as the window demands, but no more often than this.
POLL_FASTEST_NS = 4 * MS
#: A stream of --policy fixed is looked at so many times while its reader comes over its window, so
#: that the next one is asked for in time.
POLLS_PER_WINDOW = 8
#: A reader of the pool whose faults tell nothing is looked at this often.
SILENT_NS = 50 * MS
#: More gaps than so many of what a mapping has mapped: one look over all of it costs less.
GAPS_MAX = 32


def runs(region: Region, start: int, end: int) -> list[tuple[int, int]]:
    """Mapped pages of the region within file offsets [start, end), as (offset, bytes).

    Empty when the page table cannot be read, or the file is not mapped but read by calls. One
    call's worth (512 runs) at most.
    """
    if region.mode == ServingMode.READS:
        return []
    start = max(start, region.offset_bytes)
    end = min(end, region.offset_bytes + region.length_bytes)
    if start >= end:
        return []
    found = region.reader.client.page_table.runs(region.address_of(start), end - start)
    shift = region.offset_of(0)
    return [(address + shift, length) for address, length in found]


def note_used(region: Region, found: list[tuple[int, int]]) -> None:
    """Book the runs as used. What the first look finds nobody has seen the reader wait for."""
    by_tables = region.mode != ServingMode.POOL
    seen = region.scan.last_end_ns > 0
    blocks, under_way, mine = region.file.blocks, region.file.under_way, region.scan.mapped
    for offset, length in found:
        if by_tables:
            blocks.tell_used(offset, offset + length, *under_way, mine=mine, seen=seen)
        blocks.mark_used(offset, offset + length)


def note_all_used(client: Client) -> None:
    """Read all page tables of a process while they are there: what was used."""
    for region in client.regions.values():
        start = region.offset_bytes
        if region.mode == ServingMode.POOL:
            continue
        while start < region.span.end_bytes:
            found = runs(region, start, region.span.end_bytes)
            note_used(region, found)
            if len(found) < uffd.RUNS_AT_ONCE:
                break
            start = found[-1][0] + found[-1][1]


def note_told(region: Region, start: int, end: int, at_ns: int, *, by_page: bool = False) -> None:
    """A touch of the pool's memory has told that its reader has come over [start, end) by then;
    ``by_page``: by going back from each page to the one before."""
    since_ns, used = at_ns - (region.scan.told_ns or region.scan.news_ns), region.file.blocks.used
    region.file.blocks.tell_used(start, end, *region.file.under_way, mine=region.scan.mapped)
    used.looked(max(0, since_ns), by_page=by_page)
    region.file.blocks.mark_used(start, end)
    region.scan.told_ns = at_ns


def note_mapped(region: Region) -> None:
    """What is mapped now was touched by another process: it is no news of this one."""
    start = region.offset_bytes
    while True:
        _, more = new_touches(region, start, region.span.end_bytes)
        if not more:
            return
        start = more


def new_touches(
    region: Region,
    start: int,
    end: int,
    tell: Callable[[int, int], None] | None = None,
) -> tuple[list[tuple[int, int]], int]:
    """What is mapped in [start, end) and was not at the last look: clusters [start, end).

    The second value is where to go on: 0 when the whole range has been seen. ``tell`` hears of each
    range by itself, and of those that are in no cluster, too: tensor starts.
    """
    found, more = runs(region, start, end), 0
    if len(found) >= uffd.RUNS_AT_ONCE:
        more = end = found[-1][0] + found[-1][1]
    return note_found(region, start, end, found, tell), more


def note_found(
    region: Region,
    start: int,
    end: int,
    found: list[tuple[int, int]],
    tell: Callable[[int, int], None] | None = None,
) -> list[tuple[int, int]]:
    """Book what is mapped in [start, end), as (offset, bytes): the clusters of what was not at the
    last look. ``tell``: see new_touches()."""
    clusters, news = list[tuple[int, int]](), region.scan.mapped.changed(start, end, found)
    note_used(region, news)
    starts = region.file.blocks.tensor_starts
    for offset, length in news:
        for a, b in region.scan.mapped.missing(offset, offset + length):
            if tell is not None:
                tell(a, b)
            if starts and not starts.missing(a, b):
                continue  # of tensors that a loader looks at: no stream (readers/tensor_starts.py)
            if clusters and a - clusters[-1][1] <= NEAR_BYTES:
                clusters[-1] = (clusters[-1][0], b)
            else:
                clusters.append((a, b))
    now_mapped = [(offset, offset + length) for offset, length in found]
    if now_mapped:
        start, end = min(start, now_mapped[0][0]), max(end, now_mapped[-1][1])
    region.scan.mapped.replace(start, end, now_mapped)
    return clusters


def _going(region: Region, active: list[Stream]) -> list[Stream]:
    """Of its active streams those that are sure, and have not come to their end."""
    return [stream for stream in active if stream.settled and not _at_the_end(stream, region)]


def _at_the_end(stream: Stream, region: Region) -> bool:
    """Whether a stream cannot go on in a mapping: where its reader goes next is not known."""
    if stream.direction < 0:
        return stream.position_bytes <= region.span.start_bytes + NEXT_TO_BYTES
    return stream.position_bytes >= region.span.end_bytes - NEXT_TO_BYTES


def tell_seen(publisher: EventPublisher, region: Region, start: int, end: int, now: int) -> None:
    """[start, end) was found mapped: some time since the last look."""
    since = now - region.scan.last_end_ns if region.scan.last_end_ns else 0
    publisher.put(SEEN, now, region.reader.pid, region.file, start, end - start, since)


class PagetableScanner:
    """The looks of one service."""

    def __init__(
        self,
        windows: Windows,
        publisher: EventPublisher,
        observe: Callable[[Batch], None],
        clock: Clock = CLOCK,
        pace: Callable[[Region, int], int | None] | None = None,
    ) -> None:
        """``observe`` hears, once for each look at a mapping, of all that is news. ``pace``: who is
        read ahead for everywhere in a mapping, so that each look goes over all of it, says of a
        mapping at a time in how many ns something more may be wanted, None: nothing is ahead."""
        self._clock, self._pace = clock, pace
        self._credit_ns, self._credited_ns = LOOK_CREDIT_NS, 0
        self._windows, self._publisher, self._observe = windows, publisher, observe

    def look(self, region: Region, now: int, share: int, crowd: int = 1) -> None:
        """Tell what has been touched since the last look, and say when the next is due, which may
        cost one part in ``share`` of what looking may. ``crowd``: how many mappings there are;
        where a look at each takes too long, those of which nothing has been touched share."""
        began = self._clock.cpu_ns()
        streams = region.streams
        active = [] if region.reader.order.announced else [s for s in streams if s.active]
        by_tables = region.mode != ServingMode.POOL
        batch = Batch(region, now)
        for stream in active:
            quiet = now - stream.last_ns
            if quiet > FORGET_NS or (not by_tables and quiet < SILENT_NS):
                continue
            self._follow(batch, stream)
        # who follows an order that is known begins nowhere else
        everywhere = self._pace is not None and by_tables and not region.reader.order.announced
        self._look_beyond(batch, active, everywhere)
        self._tell(batch)
        if region.scan.whole_ns == now and not region.scan.resume_at:
            region.scan.known_ns = region.scan.began_ns
        region.file.blocks.used.looked(now - (region.scan.last_end_ns or region.scan.news_ns))
        region.scan.last_end_ns = now
        if batch.touches:
            region.reader.looked(region, batch.found)
            region.scan.news_ns = now
        going = _going(region, active)
        settled = bool(going) and (not everywhere or now - region.scan.elsewhere_ns > RECENT_NS)
        due = self._next_look_ns(region, going, settled, now)
        # our own CPU time: on a crowded node the wall clock would count the others' too
        cost = self._clock.cpu_ns() - began
        rest = self._rest_ns(share * cost, now)
        if not region.scan.mapped and crowd * cost > LOOK_FIRST_NS:
            rest = max(rest, min(LOOK_SLOWEST_NS, crowd * CPU_PART * cost))
        region.scan.due_ns = now + max(due, rest)

    def _look_beyond(self, batch: Batch, active: list[Stream], everywhere: bool) -> None:
        """Look where no stream is: at all of it often until a stream is sure, and the reader does
        walk; then now and then, for walks yet to begin."""
        scan, now = batch.region.scan, batch.at_ns
        settled = bool(_going(batch.region, active))
        if everywhere:
            if self._look_elsewhere(batch):
                scan.elsewhere_ns = now
            settled = settled and now - scan.elsewhere_ns > RECENT_NS
        whole_due = scan.resume_at or now - scan.whole_ns >= LOOK_SLOWEST_NS
        if whole_due or not (settled or everywhere):
            if not scan.resume_at:
                scan.began_ns = now
            self._look_at_all(batch)
            scan.whole_ns = now

    def _rest_ns(self, cost_ns: int, now: int) -> int:
        """How long to rest after a look that has cost so much of our CPU time."""
        gained = (now - self._credited_ns) // CPU_PART
        self._credit_ns = min(LOOK_CREDIT_NS, self._credit_ns + gained)
        self._credited_ns = now
        if cost_ns <= self._credit_ns:
            self._credit_ns -= cost_ns
            return 0
        return CPU_PART * cost_ns

    def _follow(self, batch: Batch, stream: Stream) -> None:
        """Look ahead of a stream, and again from where that leads."""
        at, forward = stream.position_bytes, stream.direction > 0
        began = self._clock.now_ns()
        while self._clock.now_ns() - began < LOOK_FIRST_NS:
            start = at - (BLOCK_BYTES if forward else REACH_BYTES)
            clusters, _ = self._new_touches(batch, start, start + REACH_BYTES, batch.at_ns)
            ends = [end if forward else start for start, end in clusters]
            on = max(at, *ends, at) if forward else min(at, *ends, at)
            if abs(on - at) < REACH_BYTES // 2:
                break
            at = on

    def _look_at_all(self, batch: Batch) -> None:
        """Go on with the look over the whole region, for a bounded time."""
        region = batch.region
        now = began = self._clock.now_ns()
        while now == began or now - began < LOOK_FIRST_NS:
            start = max(region.scan.resume_at, region.offset_bytes)
            end = min(start + LOOK_AT_ONCE_BYTES, region.span.end_bytes)
            _, more = self._new_touches(batch, start, end, now)
            region.scan.resume_at = more or end
            if region.scan.resume_at >= region.span.end_bytes:
                region.scan.resume_at = 0
                break
            now = self._clock.now_ns()

    def _look_elsewhere(self, batch: Batch) -> bool:
        """Look at what is not mapped yet, wherever that is, and the more of it the less was ever
        touched: no page tables, no cost. Whether it saw news."""
        span, before = batch.region.span, len(batch.touches)
        gaps, mapped = [(span.start_bytes, span.end_bytes)], batch.region.scan.mapped
        if len(mapped) <= GAPS_MAX + 1:  # one lies between any two; of thousands no list is made
            some = mapped.missing(span.start_bytes, span.end_bytes)
            gaps = some if len(some) <= GAPS_MAX else gaps
        began = self._clock.now_ns()
        for start, end in gaps:
            more = start
            while more < end and self._clock.now_ns() - began < LOOK_FIRST_NS:
                _, more = self._new_touches(batch, more, end, began)
                if not more:
                    break
        return len(batch.touches) > before

    def _next_look_ns(self, region: Region, going: list[Stream], settled: bool, now: int) -> int:
        """In how long to look again, whatever that costs."""
        order = region.reader.order
        by_tables = region.mode != ServingMode.POOL
        begun = any(now - s.last_ns < RECENT_NS for s in region.streams)
        if region.scan.resume_at or (not settled and begun and not order.announced):
            return LOOK_FIRST_NS
        if settled and by_tables:
            if self._pace is not None:
                due = self._pace(region, now) or RECENT_NS
            else:
                due = min(self._poll_ns(s, now) for s in going)
            return min(RECENT_NS, max(POLL_FASTEST_NS, due))
        if order.announced:
            heard = now - order.last_progress_ns < 2 * SILENT_NS
            return LOOK_SLOWEST_NS if heard or now < order.left_until_ns else SILENT_NS
        if order.followed or (settled and now - max(s.last_ns for s in going) < LATELY_NS):
            return SILENT_NS
        quiet = now - region.scan.news_ns
        return min(LOOK_SLOWEST_NS, max(LOOK_FIRST_NS, quiet // LOOKS))

    def _poll_ns(self, stream: Stream, now: int) -> int:
        """In how long a stream may have come so far that its window is to go on: a part of the
        window, or half of what has been asked for, where that is less."""
        moves = now - stream.last_ns < RECENT_NS
        window = self._windows.of(stream)
        step_bytes = window.size_bytes // POLLS_PER_WINDOW
        asked_bytes = (window.frontier_bytes - stream.position_bytes) * stream.direction
        if moves and asked_bytes > 0:
            step_bytes = min(step_bytes, asked_bytes // 2)
        if stream.passed.sparse_pieces:  # it may skip: piece by piece tells
            step_bytes = min(step_bytes, PIECE_BYTES)
        rate = stream.rate_bytes_per_second
        if not rate:
            return POLL_FASTEST_NS if moves else RECENT_NS
        return int(step_bytes / rate * 1e9)

    def seen_last(self, client: Client, region_id: int, runs: list[tuple[int, int]]) -> None:
        """A mapping goes, and its agent has looked: these runs of its file were in the page
        table."""
        region = client.regions.get(region_id)
        if region is None or region.mode == ServingMode.POOL:
            return
        low, high = region.offset_bytes, region.offset_bytes + region.length_bytes
        touched = IntervalSet()
        for start, end in runs:
            if max(start, low) < min(end, high):
                touched.add(max(start, low), min(end, high))
        if touched:
            found = [(start, end - start) for start, end in touched]
            self._last_look(region, found, self._clock.now_ns())

    def _last_look(self, region: Region, found: list[tuple[int, int]], now: int) -> None:
        """What it has found, (offset, bytes) in the order of the file, is news."""
        batch = Batch(region, now)
        start, end = found[0][0], sum(found[-1])
        clusters = note_found(region, start, end, found, self._teller(batch))
        self._add(batch, clusters, now)
        self._tell(batch)
        region.file.blocks.used.looked(now - (region.scan.last_end_ns or region.scan.news_ns))
        region.scan.last_end_ns = now
        if clusters:
            region.reader.looked(region, batch.found)
            region.scan.news_ns = now

    def _new_touches(
        self, batch: Batch, start: int, end: int, now: int
    ) -> tuple[list[tuple[int, int]], int]:
        region = batch.region
        clusters, more = new_touches(region, start, end, self._teller(batch))
        self._add(batch, clusters, now)
        return clusters, more

    @staticmethod
    def _add(batch: Batch, clusters: list[tuple[int, int]], now: int) -> None:
        again = bool(batch.region.scan.resume_at)
        batch.touches += [
            Observation(a, b, now, new=True, told=False, again=again) for a, b in clusters
        ]

    def _teller(self, batch: Batch) -> Callable[[int, int], None]:
        def tell(a: int, b: int) -> None:
            batch.found.append((a, b))
            if self._publisher.active:
                tell_seen(self._publisher, batch.region, a, b, self._clock.now_ns())

        return tell

    def _tell(self, batch: Batch) -> None:
        """Who follows an order is judged by what was not touched, too."""
        if batch.touches or batch.found or batch.region.reader.order.followed:
            self._observe(batch)
