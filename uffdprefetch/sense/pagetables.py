# SPDX-License-Identifier: Apache-2.0
"""The page tables of the readers as a sensor: where streams are, and what was used.

Same user only, no privilege: PAGEMAP_SCAN on /proc/PID/pagemap (6.7), else the entries one by one.
A page shows once: what was mapped at the last look (``Region.seen``) is subtracted. It shows again
after it has left the table because the kernel has reclaimed it. Resolution 64 KiB
(fault-around), 4 KiB on Lustre.
"""

from __future__ import annotations

from collections.abc import Callable

from uffdprefetch.native import uffd
from uffdprefetch.predict.randomness import NEAR_BYTES
from uffdprefetch.protocol.wire import ServingMode
from uffdprefetch.state.client import Client
from uffdprefetch.state.reader import Region


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
    """Book the runs as used."""
    by_tables = region.mode != ServingMode.POOL
    blocks, under_way = region.file.blocks, region.file.under_way
    for offset, length in found:
        if by_tables:
            blocks.tell_used(offset, offset + length, *under_way)
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


def note_told(region: Region, start: int, end: int, at_ns: int) -> None:
    """A touch of the pool's memory has told that its reader has come over [start, end) by then."""
    since_ns = at_ns - (region.scan.told_ns or region.scan.news_ns)
    region.file.blocks.tell_used(start, end, *region.file.under_way)
    region.file.blocks.used.looked(max(0, since_ns), by_look=False)
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
                continue  # of tensors that a loader looks at: no walk (readers/tensor_starts.py)
            if clusters and a - clusters[-1][1] <= NEAR_BYTES:
                clusters[-1] = (clusters[-1][0], b)
            else:
                clusters.append((a, b))
    now_mapped = [(offset, offset + length) for offset, length in found]
    if now_mapped:
        start, end = min(start, now_mapped[0][0]), max(end, now_mapped[-1][1])
    region.scan.mapped.replace(start, end, now_mapped)
    return clusters
