# SPDX-License-Identifier: Apache-2.0
"""What the screen shows, as one frozen value: it crosses from the fetching thread to the screen.

A service's Snapshot, what has become of the service since, and what follows from both: nothing else
is needed for a picture, which can be made, and tested, without a service, a terminal or a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from uffdprefetch.protocol.snapshot import Rank, Snapshot, StreamState, UnservedProcess

LIVE, ENDED, LOST, SILENT = "live", "ended", "lost", "silent"


@dataclass(frozen=True)
class View:
    """``state``: live; ended (the job has); lost (the service has, the job goes on); silent (no
    answer for ``silent_seconds``)."""

    snapshot: Snapshot
    state: str = LIVE
    silent_seconds: float = 0.0


def streams(rank: Rank) -> list[StreamState]:
    """Those in the rank's file; its first one leads."""
    return [stream for stream in rank.streams if stream.file == rank.file]


def share(rank: Rank) -> float | None:
    """How far into its file the rank is, 0 to 1."""
    if not streams(rank) or not rank.size_bytes:
        return None
    return min(1.0, max(0.0, streams(rank)[0].position_bytes / rank.size_bytes))


def shares(snapshot: Snapshot) -> tuple[float, float] | None:
    """The same of the least and the most advanced rank."""
    known = [at for rank in snapshot.ranks if (at := share(rank)) is not None]
    return (min(known), max(known)) if known else None


def wasted_bytes(snapshot: Snapshot) -> int | None:
    """Of all files; ranks that read the same stretch would count it twice."""
    known = [f.wasted_bytes for f in snapshot.files if f.wasted_bytes is not None]
    return sum(known) if known else None


def hit_share(snapshot: Snapshot) -> float | None:
    """Of all ranks of which it is known, weighted by what they read."""
    known = [r.hit for r in snapshot.ranks if r.hit.share is not None and r.hit.blocks]
    blocks = sum(hit.blocks or 0 for hit in known)
    return max(0.0, 1 - sum(hit.misses or 0 for hit in known) / blocks) if blocks else None


def stall_share(snapshot: Snapshot) -> float | None:
    """The mean of the ranks of which it is known."""
    known = [r.stall.share for r in snapshot.ranks if r.stall.share is not None]
    return sum(known) / len(known) if known else None


def not_managed(snapshot: Snapshot) -> list[UnservedProcess]:
    """Those that map something that would be served."""
    return [p for p in snapshot.not_managed.processes or () if p.maps_bytes]
