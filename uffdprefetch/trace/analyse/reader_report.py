# SPDX-License-Identifier: Apache-2.0
"""What was found of a reader, put into the report's numbers and words. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from uffdprefetch.base.ranges import covered, total
from uffdprefetch.base.units import format_size
from uffdprefetch.trace.analyse import accesses as sensors
from uffdprefetch.trace.analyse import iterations, records
from uffdprefetch.trace.analyse.accesses import Accesses
from uffdprefetch.trace.analyse.readers import ReaderAnalysis
from uffdprefetch.trace.analyse.stall import Stalls
from uffdprefetch.trace.analyse.streams import ACCESSES_MIN, StreamPattern

#: Most processes of a reader that a report lists.
PIDS_LISTED = 256
#: Keys of a reader's entry that each of its processes has, too.
OF_A_PROCESS = (
    "pattern", "runs", "faults", "touched_pages", "touched_pages_least", "epochs",
    "epochs_at_least", "stall_seconds", "stalls", "stall_share", "hit",
)  # fmt: skip
POOL_FAULTS = (
    "our service: touches that reached the pool (a page that is mapped does not), major: those that"
    " it had to read for; and faults by tracepoints where the kernel served the file"
)
EPOCHS_SEEN = "those that show: one over pages that are still mapped makes no event"


def sensor_of(a: Accesses, page_bytes: int) -> str:
    """The sensor of the accesses, and its resolution."""
    kinds = sensors.distinct(a.sensor).tolist()
    names = "; ".join(sensors.SENSORS[k] for k in kinds) or "nothing"
    if sensors.TABLES in kinds:
        return f"{names}: 64 KiB, in the order of the file within one scan"
    if kinds == [sensors.CHECKPOINTS]:
        return f"{names}: only where they lie, so no stride is told"
    if sensors.POOL in kinds:
        names += ": what lies between two of them in a stream is taken as touched"
    if sensors.BPF not in kinds:
        return names
    faults = a.part(a.sensor == sensors.BPF)
    pages = int((faults.mapped.high - faults.mapped.low).max())
    size = format_size(pages * page_bytes)
    finely = f"; a fault maps up to {size}, in which what is touched later is not seen"
    blurred = "" if bool(faults.exact.all()) else "; of some faults the page is not known"
    return names + (finely if pages > 1 else "") + blurred


def _has_threads(a: Accesses) -> bool:
    """Whether a process read with several threads, which share their page table."""
    return len(sensors.distinct(a.tid)) > len(sensors.distinct(a.pid))


def _in_pool(name: str, a: Accesses) -> str:
    """What a pattern is where touches of the pool tell it: what it maps at once may hold anything,
    and where most go on from the one before there is no stride."""
    if sensors.POOL not in a.sensor:
        return name
    go_on = bool(np.median(a.mapped.high - a.mapped.low) > 1)
    return "sequential" if name == "consecutive" or (name == "strided" and go_on) else name


def _pattern(
    reader: ReaderAnalysis, others: list[StreamPattern], page_bytes: int
) -> dict[str, Any]:
    pattern, a = reader.pattern, reader.accesses
    name, stride, n, how = pattern.name, pattern.stride.pages, pattern.stride.records, ""
    if bool((a.sensor == sensors.CHECKPOINTS).all()):
        # they lie at distances of ours: any stream over them looks strided
        name = "sequential" if name in ("strided", "consecutive") else name
        stride = n = None
    elif sensors.POOL in a.sensor:
        known = _in_pool(name, a)
        stride, n = stride if name == known else None, None
        name = known
    elif name == "strided" and sensors.TABLES in a.sensor:
        n, how = None, "how many records it skips is not told"
    elif name == "strided" and (pattern.stride.indexed or not _has_threads(a)):
        n, how = records.stride_in_records(pattern, others, reader.index)
    elif name == "strided":
        n, how = None, "threads map for each other: how many records one skips is not told"
    elif name == "sequential" and not _has_threads(a) and sensors.TABLES not in a.sensor:
        n = records.strided_by_neighbours(pattern, others)
        if n is not None:
            name, how = "strided", "records from where the other ranks begin"
    low, top = reader.span
    skipped = None
    if top > low and len(a) >= ACCESSES_MIN:
        alone = len(sensors.distinct(a.tid)) == 1 and sensors.POOL not in a.sensor
        ends = np.array([low]), np.array([top])
        read = float(covered(reader.mapped, *ends)[0])
        if alone and name in ("strided", "sequential"):
            read = (read + float(covered(reader.probable, *ends)[0])) / 2
        skipped = max(0.0, 1 - read / (top - low))
        if alone and n is not None and n > 1:
            skipped = 1 - 1 / n
    return {
        "name": name,
        "direction": pattern.direction,
        "stride_bytes": None if stride is None else round(stride * page_bytes),
        "stride_records": n,
        "skipped_share": skipped,
        "share": round(pattern.share, 4),
        "accesses": len(a),
        "sensor": sensor_of(a, page_bytes) + (f"; {how}" if how else ""),
    }


def _runs(pattern: StreamPattern, page_bytes: int) -> dict[str, Any]:
    """Lengths between what was surely touched and what may have been: the middle of both."""
    size = (pattern.runs.sure + pattern.runs.high - 2 * pattern.runs.start) * (page_bytes / 2)
    if not len(size):
        return {"count": 0, "bytes_p50": 0, "bytes_mean": 0, "bytes_max": 0}
    return {
        "count": len(size),
        "bytes_p50": int(np.median(size)),
        "bytes_mean": int(size.mean()),
        "bytes_max": int(size.max()),
    }


def _iterations(
    reader: ReaderAnalysis, stall: Stalls | None
) -> tuple[dict[str, Any] | None, float | None]:
    """(iterations, pages read in one) of the reader as a whole; (None, None) without a beat, as of
    several workers that read at the same time.

    The pages are the middle of what was probably touched and of what was mapped.
    """
    a = reader.accesses
    first = iterations.starts_of(a.time_ns, a.until_ns)
    if first is None:
        return None, None
    between = (lambda s, e: np.zeros(len(s))) if stall is None else stall.seconds_between
    entry = iterations.report(first, a.time_ns, between, int(a.until_ns.max()))
    if stall is None:
        entry["stall_seconds"] = []
    part = float(np.median(np.diff(first))) / len(a)
    middle = (total(reader.probable) + reader.touched_pages) / 2 / max(1, reader.touched_pages)
    return entry, sum(e.touched_pages for e in reader.epochs) * part * middle


def _majors_of_next_page(a: Accesses) -> int:
    """Major faults of the page beside that of the thread's major fault before."""
    tid, page = a.tid[a.major], a.page[a.major]
    order = np.argsort(tid, kind="stable")
    beside = np.abs(np.diff(page[order])) == 1
    return int((beside & (np.diff(tid[order]) == 0)).sum())


def report(
    reader: ReaderAnalysis,
    others: list[StreamPattern],
    stall: Stalls | None,
    why_no_stall: str,
    majors: int | None,
    seconds: float,
    page_bytes: int,
) -> dict[str, Any]:
    """The reader's entry of the document.

    ``others``: patterns of the file's other readers; ``stall``: None where it could not be measured
    (``why_no_stall``); ``majors``: accesses that waited for storage, or what /proc counted, None
    where unknown.
    """
    a = reader.accesses
    by_bpf = stall is not None
    counts, counted_by = _faults(reader, stall, why_no_stall, majors)
    low, top = reader.span
    beat, batch_pages = _iterations(reader, stall)
    return {
        "rank": reader.rank,
        "file": reader.file,
        "pids": sensors.distinct(a.pid)[:PIDS_LISTED].tolist(),
        "pattern": _pattern(reader, others, page_bytes),
        "runs": _runs(reader.pattern, page_bytes),
        "faults": counts,
        "faults_sensor": counted_by,
        "majors_of_next_page": _majors_of_next_page(a) if by_bpf else None,
        "touched_pages": reader.touched_pages,
        "touched_pages_least": total(reader.sure),
        "first_offset_bytes": low * page_bytes,
        "last_offset_bytes": top * page_bytes,
        "span_bytes": (top - low) * page_bytes,
        "epochs_sensor": EPOCHS_SEEN,
        "epochs_at_least": bool((a.sensor != sensors.READS).any()),
        "epochs": [_epoch(reader, i, stall) for i in range(len(reader.epochs))],
        "stall_seconds": stall.seconds() if stall is not None else None,
        "stalls": len(stall.page) if stall is not None else None,
        "stall_sensor": (
            "tracepoints: from a major fault's begin to its end, and sleeps in other faults"
            if by_bpf
            else why_no_stall
        ),
        "stall_share": stall.seconds_of_run() / seconds if stall and seconds > 0 else None,
        "stall_by_offset": stall.by_offset(page_bytes) if stall is not None else [],
        "iterations": beat,
        "batch_bytes": None if batch_pages is None else int(batch_pages * page_bytes),
        "read_call_bytes": int((a.mapped.high - a.mapped.low)[a.sensor == sensors.READS].sum())
        * page_bytes,
        "hit": _hit(reader, stall, why_no_stall, majors),
    }


def _faults_seen(a: Accesses) -> int:
    """Accesses that were faults, as tracepoints and the pool tell them."""
    return int(((a.sensor == sensors.BPF) | (a.sensor == sensors.POOL)).sum())


def _faults(
    reader: ReaderAnalysis, stall: Stalls | None, why_no_stall: str, majors: int | None
) -> tuple[dict[str, int | None] | None, str]:
    """The number of faults and its sensor, or the reason why there is none."""
    by_pool = sensors.POOL in reader.accesses.sensor
    if not by_pool and stall is None:
        if majors is None:
            return None, why_no_stall
        counts: dict[str, int | None] = {"total": None, "minor": None, "major": majors}
        return counts, "/proc/PID/stat: major faults of the process, in whatever file"
    faults = _faults_seen(reader.accesses)
    counts = {"total": faults, "minor": max(0, faults - (majors or 0)), "major": majors or 0}
    if by_pool:
        return counts, POOL_FAULTS
    return counts, "tracepoints, each fault once; a page that is still mapped does not fault again"


def _hit(
    reader: ReaderAnalysis, stall: Stalls | None, why_no_stall: str, majors: int | None
) -> dict[str, Any]:
    """The share of faults for which nobody waited for storage."""
    by_pool = sensors.POOL in reader.accesses.sensor
    if not by_pool and stall is None:
        return {"share": None, "of": 0, "sensor": why_no_stall}
    faults = _faults_seen(reader.accesses)
    found_in = "touches that found their page in the pool"
    if not by_pool:
        found_in = "faults that found their page in the cache, and nobody reading it"
    # who comes while the kernel's readahead brings a page waits, in a minor fault
    waited = max(majors or 0, 0 if by_pool or stall is None else len(stall.end_ns))
    share = max(0, faults - waited) / faults if faults else None
    return {"share": share, "of": faults, "sensor": found_in}


def _epoch(reader: ReaderAnalysis, i: int, stall: Stalls | None) -> dict[str, Any]:
    epoch, a = reader.epochs[i], reader.accesses
    start, end = int(a.time_ns[epoch.first]), int(a.until_ns[epoch.first : epoch.end].max())
    part = a.part(slice(epoch.first, epoch.end))
    faults = (part.sensor == sensors.BPF) | (part.sensor == sensors.POOL)
    by_pool = sensors.POOL in a.sensor
    stalled = None
    if stall is not None:
        # all of the time up to the next epoch: a stall is reported at its end
        last = i + 1 == len(reader.epochs)
        until = np.iinfo(np.int64).max if last else int(a.time_ns[epoch.end])
        after = start if i else 0
        stalled = float(stall.seconds_between(np.array([after]), np.array([until]))[0])
    return {
        "index": i,
        "start_seconds": start / 1e9,
        "end_seconds": end / 1e9,
        "touched_pages": epoch.touched_pages,
        "reread_pages": epoch.reread_pages,
        "faults": int(faults.sum()) if stall is not None or by_pool else None,
        "major": int(part.major.sum()) if stall is not None or by_pool else None,
        "stall_seconds": stalled,
        "pattern": _in_pool(epoch.pattern.name, part),
    }
