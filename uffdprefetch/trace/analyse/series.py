# SPDX-License-Identifier: Apache-2.0
"""Quantities over time: stall, hits and bytes per bin, and the system calls' dots. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.trace.analyse.block import requests_of_job
from uffdprefetch.trace.analyse.marks import MarkStream
from uffdprefetch.trace.analyse.ranks import NOBODY, SERVICE, Ranks
from uffdprefetch.trace.file.events import Call, Kind, of_kind
from uffdprefetch.trace.file.trace_file import Trace

#: Bins of time of a picture: most, and least where a row per rank would exceed CELLS_MAX.
BINS, BINS_MIN = 2048, 128
CELLS_MAX = 200_000
#: Dots of the system calls' picture: per kind of call and bin, and the bins.
DOTS_PER_BIN, DOT_BINS = 6, 1024
#: Kinds of marks that are accesses known to hit or miss.
_FAULTS = ("around", "fault", "pool")


def bins_for(ranks: int) -> int:
    """Number of bins of a picture with this number of ranks."""
    return max(BINS_MIN, min(BINS, CELLS_MAX // max(1, ranks)))


def spread(start: Array, end: Array, weight: Array, span: float, bins: int) -> Array:
    """Weights of intervals, each divided evenly over the bins of [0, span) that it lies in."""
    total = np.zeros(bins)
    if not len(start):
        return total
    width = span / bins
    start = np.clip(start.astype(np.float64), 0, span)
    end = np.clip(end.astype(np.float64), start, span)
    weight = weight.astype(np.float64)
    first = np.minimum((start / width).astype(np.int64), bins - 1)
    last = np.minimum((end / width).astype(np.int64), bins - 1)
    within = first == last
    total += np.bincount(first[within], weight[within], bins)
    start, end, weight, first, last = (v[~within] for v in (start, end, weight, first, last))
    if len(start):
        density = weight / (end - start)
        total += np.bincount(first, density * ((first + 1) * width - start), bins)
        total += np.bincount(last, density * (end - last * width), bins)
        steps = np.bincount(first + 1, density, bins + 1) - np.bincount(last, density, bins + 1)
        total += np.cumsum(steps)[:bins] * width
    return np.maximum(total, 0.0)


def _by_rank(
    streams: list[MarkStream], kinds: tuple[str, ...], ranks: list[int], span_ns: int, bins: int,
    seconds: bool,
) -> Array:  # fmt: skip
    """ranks x bins: how many marks began, or how many seconds they lasted."""
    rows = np.zeros((len(ranks), bins))
    place = {rank: i for i, rank in enumerate(ranks)}
    for stream in streams:
        if stream.kind not in kinds or stream.rank not in place:
            continue
        start, lasted = stream.start_ns, stream.duration_ns
        weight = lasted / 1e9 if seconds else np.ones(len(stream))
        end: Array = start + (lasted if seconds else 0)
        rows[place[stream.rank]] += spread(start, end, weight, span_ns, bins)
    return rows


def _overview_rows(
    overview: dict[str, Any], name: str, ranks: list[int], who: Ranks, start_ns: int, from_ns: int,
    span_ns: int, bins: int,
) -> dict[int, Array]:  # fmt: skip
    """By rank (or SERVICE, NOBODY): a quantity of the overview after `from_ns`, per bin."""
    rows: dict[int, Array] = {}
    try:
        width_ns, first_ns = int(overview["width_ns"]), int(overview["start_ns"]) - start_ns
        for entry in overview["series"]:
            if name not in entry:
                continue
            rank = int(who.of(np.array([entry["pid"]]))[0])
            held = np.array(entry[name], np.int64).reshape(-1, 2)
            start = first_ns + held[:, 0] * width_ns
            # Of the bin in which the single events end the later part is counted.
            later = np.clip((start + width_ns - from_ns) / width_ns, 0.0, 1.0)
            weight = held[:, 1] * later
            row = spread(np.maximum(start, from_ns), start + width_ns, weight, span_ns, bins)
            rows[rank] = rows.get(rank, 0.0) + row
    except (KeyError, ValueError, TypeError):
        return {}
    return rows


def _add_rows(rows: Array, ranks: list[int], more: dict[int, Array], scale: float = 1.0) -> Array:
    for i, rank in enumerate(ranks):
        if rank in more:
            rows[i] += more[rank] * scale
    return rows


def series(
    trace: Trace, streams: list[MarkStream], ranks: list[int], start_ns: int, span_ns: int,
    raw_until_ns: int | None,
) -> dict[str, Any]:  # fmt: skip
    """Per rank and bin: accesses, misses and stall; bytes per second by who brought them.

    What no event tells of is None. Shapes: ranks x bins for `accesses`, `misses`, `stall_share`;
    bins for each of `bytes_per_second`.
    """
    bins, who = bins_for(len(ranks)), Ranks(trace)
    kinds = {int(k) for k in np.unique(trace.events["kind"])}
    width_seconds = span_ns / bins / 1e9

    def later(name: str) -> dict[int, Array]:
        if raw_until_ns is None or not trace.overview:
            return {}
        return _overview_rows(
            trace.overview, name, ranks, who, start_ns, raw_until_ns, span_ns, bins
        )

    accesses = misses = stall = None
    by_kernel, by_pool = kinds & {Kind.FAULT, Kind.AROUND}, any(s.kind == "pool" for s in streams)
    if by_kernel or by_pool:
        accesses = _by_rank(streams, _FAULTS, ranks, span_ns, bins, False)
        accesses = _add_rows(accesses, ranks, later("faults"))
        misses = _by_rank(streams, ("major", "missed"), ranks, span_ns, bins, False)
        misses = _add_rows(misses, ranks, later("majors"))
    if by_kernel:  # how long a touch of the pool waited is not told
        stall = _by_rank(streams, ("major", "late"), ranks, span_ns, bins, True)
        stall = _add_rows(stall, ranks, later("wait_ns"), 1e-9)
    elif misses is None and Kind.MAJORS in kinds:
        misses = _sampled_majors(trace, who, ranks, start_ns, span_ns, bins)
        misses = _add_rows(misses, ranks, later("majors"))
    return {
        "bins": bins,
        "bin_seconds": width_seconds,
        "accesses": accesses,
        "misses": misses,
        "stall_share": None if stall is None else stall / width_seconds,
        "bytes_per_second": bytes_per_second(trace, who, start_ns, span_ns, bins, later),
    }


def _sampled_majors(
    trace: Trace, who: Ranks, ranks: list[int], start_ns: int, span_ns: int, bins: int
) -> Array:
    events = of_kind(trace.events, Kind.MAJORS)
    times: Array = events["time_ns"].astype(np.int64) - start_ns
    owner = who.of(events["pid"])
    rows = [
        spread(times[owner == rank], times[owner == rank], events["value"][owner == rank],
               span_ns, bins)
        for rank in ranks
    ]  # fmt: skip
    return np.array(rows).reshape(len(ranks), bins)


def bytes_per_second(
    trace: Trace, who: Ranks, start_ns: int, span_ns: int, bins: int, later: Any = None
) -> dict[str, Array]:
    """What came into the page cache, per bin, by who brought it (ranks, service, others), of small
    files, programs and libraries, too, and what came from the disks. What the kernel reads ahead is
    its rank's: a fill lasts, and nothing says when of that time the part came that was demand.
    ``later(name)`` gives rows of the overview by rank; None: there are none.
    """
    found: dict[str, Array] = {}

    def put(name: str, row: Array) -> None:
        if row.any():
            found[name] = found[name] + row if name in found else row

    def of(events: Array, end_first: bool = False, weight: Array | None = None) -> Array:
        start: Array = events["time_ns"].astype(np.int64) - start_ns
        took: Array = events["value"].astype(np.int64)
        end = start + took
        if end_first:
            start, end = start - took, start
        return spread(start, end, events["length"] if weight is None else weight, span_ns, bins)

    names = {SERVICE: "service", NOBODY: "others"}
    everything = (trace.events, trace.other_events)
    fills = np.concatenate([of_kind(events, Kind.FILL) for events in everything])
    owner = who.of(fills["pid"])
    put("ranks", of(fills[owner >= 0]))
    put("service", of(fills[owner == SERVICE]))
    put("others", of(fills[owner == NOBODY]))
    if "service" not in found:  # no witness of the page cache, or one that did not see our service
        warmed = of_kind(trace.events, Kind.WARM)
        new = warmed["length"].astype(np.int64) - (warmed["aux"].astype(np.int64) << 10)
        put("service", of(warmed, weight=np.maximum(new, 0)))
    put("disks", of(requests_of_job(trace.events, who), end_first=True))
    if later is not None:
        for rank, row in later("fill_bytes").items():
            put(names.get(rank, "ranks"), row)
        for rank, row in later("block_bytes").items():
            if rank != NOBODY:
                put("disks", row)
    width_seconds = span_ns / bins / 1e9
    return {name: row / width_seconds for name, row in found.items()}


def call_dots(trace: Trace, ranks: list[int], start_ns: int, span_ns: int) -> list[dict[str, Any]]:
    """The system calls by kind: how many, and of each bin of time some dots (seconds, rank)."""
    calls = of_kind(trace.events, Kind.CALL)
    what = calls["aux"] & 0xFF
    owner = Ranks(trace).of(calls["pid"])
    started = calls["time_ns"].astype(np.int64) - calls["value"].astype(np.int64) - start_ns
    found = []
    for call in Call:
        chosen = np.flatnonzero((what == call) & (owner != SERVICE))
        if not len(chosen):
            continue
        chosen = chosen[np.argsort(started[chosen], kind="stable")]
        times = np.maximum(started[chosen], 0)
        bins = times // max(1, -(-span_ns // DOT_BINS))
        first = np.searchsorted(bins, bins)  # where the bin of each begins
        of_bin = np.searchsorted(bins, bins, side="right") - first
        # Every k-th of a full bin, so that the dots do not all lie at its left.
        step = -(-of_bin // DOTS_PER_BIN)
        keep = (np.arange(len(times)) - first) % step == 0
        found.append(
            {
                "name": call.name.lower(),
                "count": len(chosen),
                "seconds": times[keep] / 1e9,
                "rank": owner[chosen][keep],
            }
        )
    return found
