# SPDX-License-Identifier: Apache-2.0
"""The page tables of the readers as a sensor: where streams are, and what was used.

Same user only, no privilege: PAGEMAP_SCAN on /proc/PID/pagemap (6.7), else the entries one by one.
A page shows once: it stays in the table until it is dropped from there, so what is known to be
mapped (``Region.seen``) is subtracted. Resolution 64 KiB (fault-around), 4 KiB on Lustre.
"""

from __future__ import annotations

from uffdprefetch import uffd
from uffdprefetch.node.client import Client, Region
from uffdprefetch.node.files import BLOCK_BYTES

#: Runs closer than this are one touch: a B-tree skips pages, a record spans many.
CLUSTER_BYTES = 1 << 20
#: More separate ranges than this: the reader jumps about.
SCATTER_MAX = 2048


def runs(client: Client, region: Region, start: int, end: int) -> list[tuple[int, int]]:
    """Mapped pages of the region within file offsets [start, end), as (offset, bytes).

    Empty when the page table cannot be read. One call's worth (512 runs) at most.
    """
    start = max(start, region.offset_bytes)
    end = min(end, region.offset_bytes + region.length_bytes)
    if client.pagemap_fd < 0 or start >= end:
        return []
    try:
        found, _ = uffd.touched_runs(client.pagemap_fd, region.address_of(start), end - start)
    except OSError:
        return []
    return [(region.offset_of(a), length) for a, length in found]


def note_used(region: Region, found: list[tuple[int, int]]) -> None:
    """Book the runs as used."""
    for offset, length in found:
        region.file.mark_used(offset, offset + length)


def _forget_dropped(region: Region, found: list[tuple[int, int]], start: int, end: int) -> None:
    """A block that was to be dropped and is not mapped any more may show again."""
    for block in [b for b in region.dropping if start <= b and b + BLOCK_BYTES <= end]:
        if not any(a < block + BLOCK_BYTES and block < a + n for a, n in found):
            region.dropping.discard(block)
            region.seen.remove(block, block + BLOCK_BYTES)


def new_touches(
    client: Client, region: Region, start: int, end: int
) -> tuple[list[tuple[int, int]], int]:
    """What is mapped in [start, end) and was not at the last look: clusters [start, end).

    The second value is where to go on: 0 when the whole range has been seen.
    """
    found = runs(client, region, start, end)
    note_used(region, found)
    more = 0
    if len(found) >= uffd.RUNS_AT_ONCE:
        more = end = found[-1][0] + found[-1][1]
    if region.dropping:
        _forget_dropped(region, found, start, end)
    clusters: list[tuple[int, int]] = []
    for offset, length in found:
        for a, b in region.seen.missing(offset, offset + length):
            if clusters and a - clusters[-1][1] <= CLUSTER_BYTES:
                clusters[-1] = (clusters[-1][0], b)
            else:
                clusters.append((a, b))
        region.seen.add(offset, offset + length)
    region.scattered = len(region.seen) > SCATTER_MAX
    return clusters, more
