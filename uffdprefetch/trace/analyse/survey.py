# SPDX-License-Identifier: Apache-2.0
"""File by file through a trace: who it was, what was filled and touched, by which readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.ranges import Ranges, total, union
from uffdprefetch.trace.analyse import reader_report
from uffdprefetch.trace.analyse import readers as reading
from uffdprefetch.trace.analyse.accesses import POOL, Accesses, accesses, distinct
from uffdprefetch.trace.analyse.coverage import Coverage
from uffdprefetch.trace.analyse.fills import evicted_bytes, extents, fill_report, readahead_report
from uffdprefetch.trace.analyse.folios import Folios
from uffdprefetch.trace.analyse.others import read_calls
from uffdprefetch.trace.analyse.ranks import SERVICE, Ranks
from uffdprefetch.trace.analyse.records import RecordPages
from uffdprefetch.trace.analyse.served import SERVICE_KINDS, Served, pool_report
from uffdprefetch.trace.analyse.stall import Stalls, stalls
from uffdprefetch.trace.analyse.streams import StreamPattern
from uffdprefetch.trace.file.events import Kind
from uffdprefetch.trace.file.sensors import Sensor, is_of
from uffdprefetch.trace.file.trace_file import Trace, TracedFile

OpenRecords = Callable[[str, int, int], RecordPages | None]

#: file.read_all() gives the processes of each node numbers of their own, above these bits.
NODE_BITS = 22
NO_INDEX = {"format": None, "lmdb": None, "records": None}
#: No file is larger: events that claim to lie beyond are left out.
OFFSET_MAX = 1 << 56


class Survey:
    """State of going through a trace, file by file."""

    def __init__(self, trace: Trace, open_index: OpenRecords) -> None:
        self.trace = trace
        self.open_index = open_index
        meta, events = trace.meta, trace.events
        self.page_bytes, self.start_ns = trace.page_bytes, trace.start_ns
        last_ns = int(events["time_ns"][-1]) if len(events) else self.start_ns
        self.ranks = Ranks(trace)
        end_ns = int((trace.end or {}).get("ended_ns") or last_ns)
        if meta.get(
            "job_ended_ns"
        ):  # after it, and what other ranks still did, nothing is of the run
            own = np.flatnonzero(self.ranks.of(events["pid"]) >= 0)
            last_ns = int(events["time_ns"][own[-1]]) if len(own) else 0
            end_ns = min(end_ns, max(int(meta["job_ended_ns"]), last_ns))
        self.seconds = max(0.0, (end_ns - self.start_ns) / 1e9)
        self.kinds = np.bincount(events["kind"], minlength=32)
        self.by_bpf = str(meta.get("source", "bpf")).startswith("bpf")
        self.by_service = any(self.kinds[kind] for kind in SERVICE_KINDS)
        #: Whether the job was read ahead of; recordings before "wrapped" tell only where it was.
        self.wrapped = bool(meta.get("wrapped", self.by_service))
        self.served = Served()

    def misses(self, sensor: Sensor) -> bool:
        """Whether the recorder said that this sensor was not there."""
        missing = self.trace.meta.get("missing") or []
        return not self.by_bpf or any(is_of(lack, [sensor]) for lack in missing)

    @property
    def unseen_faults(self) -> str | None:
        """Why the kernel's own events do not tell of faults and how long they took; None: they do.
        With eBPF on a kernel that lacks the tracepoint, everything else may be there."""
        if not self.by_bpf:
            return "without BPF the kernel does not tell of faults, nor how long they took"
        for lack in self.trace.meta.get("missing") or []:
            if is_of(lack, [Sensor.FAULTS]):
                return f"faults are not told of: {lack.get('why')}"
        return None

    # ------------------------------------------------------------ one file

    def file(
        self, file: TracedFile, events: Array
    ) -> tuple[dict[str, Any], list[reading.ReaderAnalysis]]:
        """The file's entry, and its readers."""
        page = self.page_bytes
        if len(events) and int(events["offset"].max()) > OFFSET_MAX - int(events["length"].max()):
            events = events[(events["offset"] < OFFSET_MAX) & (events["length"] < OFFSET_MAX)]
        events = _reads_within(events, -(-file.size_bytes // page) * page)
        owner = self.ranks.of(events["pid"])
        maps = events[events["kind"] == Kind.MAP]
        by_rank: dict[int, Accesses] = {}
        folios = Folios(events, page, -(-file.size_bytes // page))
        ranks = distinct(owner[owner >= 0]).tolist()
        for one in ranks:
            found = accesses(events[owner == one], maps, self.start_ns, page)
            if len(found):
                by_rank[one] = folios.widen(found)
        index = None
        if by_rank:
            index = self.open_index(file.path, file.size_bytes, page)
        slack = 1 if self.by_bpf and self.by_service else 0
        node = events["pid"] >> NODE_BITS
        several = len(node) and int(node.max()) != int(node.min())
        parts: list[dict[str, Any]] = []
        found_readers: list[reading.ReaderAnalysis] = []
        for one in distinct(node).tolist() if several else [0]:
            here = node == one if several else slice(None)
            mine = by_rank
            if several:
                mine = {r: a.part(a.pid >> NODE_BITS == one) for r, a in by_rank.items()}
            part, found_here = self._on_node(file, events[here], owner[here], mine, index, slack)
            parts.append(part)
            found_readers += found_here
        entry = _sum_of_nodes(parts)
        mapped = _of_all([r.mapped for r in found_readers])
        sure = _of_all([r.sure for r in found_readers])
        sensors = sorted({reader_report.sensor_of(r.accesses, page) for r in found_readers})
        bound = "upper bound, see touched_pages_least; " if found_readers else ""
        return {
            "id": file.id,
            "path": file.path,
            "size_bytes": file.size_bytes,
            "pages": -(-file.size_bytes // page),
            "file_system": file.file_system,
            "read_ahead_bytes": file.read_ahead_bytes,
            "stripe_bytes": file.stripe_bytes,
            "stripe_count": file.stripe_count,
            **(index.report(mapped, sure) if index is not None else NO_INDEX),
            "touched_pages": total(mapped),
            "touched_pages_least": total(sure),
            "touched_sensor": bound + ("; ".join(sensors) or "nothing was seen"),
            "ranks": ranks,
            "read_calls": read_calls(events[owner >= 0]),
            **entry,
        }, found_readers

    def _on_node(
        self, file: TracedFile, events: Array, owner: Array, by_rank: dict[int, Accesses],
        index: RecordPages | None, slack: int,
    ) -> tuple[dict[str, Any], list[reading.ReaderAnalysis]]:  # fmt: skip
        page, kind = self.page_bytes, events["kind"]
        by_rank = {rank: a for rank, a in by_rank.items() if len(a)}
        is_fill = kind == Kind.FILL
        filled = extents(events[is_fill], self.start_ns, page)
        ahead = events[(kind == Kind.READAHEAD) & (owner != SERVICE)]
        warm = events[kind == Kind.WARM]
        edges = [c for some in (ahead, warm) for c in extents(some, self.start_ns, page)[:2]]
        cover = Coverage(list(by_rank.values()), filled, edges)
        found = [reading.find(rank, file.id, a, cover, index, slack) for rank, a in by_rank.items()]
        for reader in found:
            pids = distinct(reader.accesses.pid)[: reader_report.PIDS_LISTED]
            reader.processes = [
                reading.find(
                    reader.rank, file.id, reader.accesses.part(reader.accesses.pid == pid), cover,
                    index, slack,
                )
                for pid in (pids.tolist() if len(pids) > 1 else [])
            ]  # fmt: skip
        if self.by_service:
            self.served.add(events, list(by_rank.values()), cover, self.start_ns, page)
        entry: dict[str, Any] = {
            "filled_pages": None, "fill_bytes": None, "fill_by": None, "refilled_bytes": None,
            "evicted_bytes": None, "useless_bytes": None, "useless_most_bytes": None,
            "extra_bytes": None, "readahead": None,
            "pool": pool_report(events, self.start_ns, page),
        }  # fmt: skip
        if not self.misses(Sensor.FILLS):
            reads = events[(kind == Kind.READ) & (owner >= 0)]
            entry |= fill_report(
                events[is_fill], owner[is_fill], list(by_rank.values()), reads, self.start_ns, page
            )
            useless = cover.pieces.pages(cover.useless) * page
            entry["useless_bytes"] = useless
            unsure = cover.filled & ~cover.pieces.holds(_of_all([r.sure for r in found]))
            entry["useless_most_bytes"] = cover.pieces.pages(unsure) * page
            entry["extra_bytes"] = useless + entry["refilled_bytes"]
        if not self.misses(Sensor.EVICTIONS):
            entry["evicted_bytes"] = evicted_bytes(events)
        entry["readahead"] = readahead_report(ahead, cover, self.start_ns, page)
        return entry, found

    # ------------------------------------------------------------ readers

    def readers(self, found: list[reading.ReaderAnalysis], events: Array) -> list[dict[str, Any]]:
        """The entries of one file's readers; ``events`` are the file's."""
        owner = self.ranks.of(events["pid"])
        waiting = np.isin(events["kind"], (Kind.MAJOR, Kind.WAIT))
        entries = []
        for reader in found:
            mine = events[waiting & (owner == reader.rank)]
            others = [o.pattern for o in found if o.rank != reader.rank]
            entry = self._entry(reader, mine, others)
            entry["processes"] = [
                self._process(one, mine, [*others, *(o.pattern for o in rest)])
                for one, rest in _each_and_the_rest(reader.processes)
            ]
            entries.append(entry)
        return entries

    def _entry(
        self, reader: reading.ReaderAnalysis, mine: Array, others: list[StreamPattern]
    ) -> dict[str, Any]:
        stall, why, majors = self._stall(reader, mine)
        return reader_report.report(
            reader, others, stall, why, majors, self.seconds, self.page_bytes
        )

    def _process(
        self, reader: reading.ReaderAnalysis, of_rank: Array, others: list[StreamPattern]
    ) -> dict[str, Any]:
        """A rank's process's own part."""
        (pid,) = distinct(reader.accesses.pid).tolist()
        entry = self._entry(reader, of_rank[of_rank["pid"] == pid], others)
        return {"pid": pid, **{name: entry[name] for name in reader_report.OF_A_PROCESS}}

    def _stall(
        self, reader: reading.ReaderAnalysis, mine: Array
    ) -> tuple[Stalls | None, str, int | None]:
        majors = int(reader.accesses.major.sum())
        if POOL in reader.accesses.sensor:
            why = "n/a (the pool tells how long its touches waited in the run's summary only)"
            return None, why, majors
        unseen = self.unseen_faults
        if unseen is None:
            return stalls(mine, self.start_ns, self.page_bytes), "", majors
        why = f"n/a ({unseen})"
        events = self.trace.events
        counts = events[events["kind"] == Kind.MAJORS]
        counts = counts[np.isin(counts["pid"], distinct(reader.accesses.pid))]
        one_file = len(np.unique(events["file"][self._is_demand(reader.rank)])) == 1
        return None, why, int(counts["value"].sum()) if len(counts) and one_file else None

    def _is_demand(self, rank: int) -> Array:
        events = self.trace.events
        seen = np.isin(events["kind"], (Kind.SEEN, Kind.TOUCH))
        seen[seen] = self.ranks.of(events["pid"][seen]) == rank
        return seen


def _reads_within(events: Array, end: int) -> Array:
    """A READ event tells of all that its call asked for: cut at the file's last page."""
    beyond = (events["kind"] == Kind.READ) & (events["offset"] < end)
    beyond &= events["offset"] + events["length"] > end
    if beyond.any():
        events = events.copy()
        events["length"][beyond] = end - events["offset"][beyond]
    return events


def _each_and_the_rest(
    readers: list[reading.ReaderAnalysis],
) -> Iterator[tuple[reading.ReaderAnalysis, list[reading.ReaderAnalysis]]]:
    for i, one in enumerate(readers):
        yield one, readers[:i] + readers[i + 1 :]


def _of_all(ranges: list[Ranges]) -> Ranges:
    """Union of several readers' ranges of pages."""
    none: Array = np.zeros(0, np.int64)
    starts, ends = zip((none, none), *ranges, strict=True)
    return union(np.concatenate(starts), np.concatenate(ends))


def _sum_of_nodes(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Each node has a page cache of its own: what they did adds up. The shares come last."""

    def total(values: list[Any]) -> Any:
        known = [v for v in values if v is not None]
        if not known:
            return None
        if isinstance(known[0], dict):
            return {key: total([v[key] for v in known]) for key in known[0]}
        return sum(known)

    entry = {key: total([part[key] for part in parts]) for key in parts[0]} if parts else {}
    ahead = [part["readahead"] for part in parts if part["readahead"]]
    if ahead:
        entry["readahead"]["mean_bytes"] = (
            entry["readahead"]["bytes"] // entry["readahead"]["decisions"]
        )
        entry["readahead"]["used_share"] = sum(
            a["used_share"] * a["bytes"] for a in ahead
        ) / sum(a["bytes"] for a in ahead)  # fmt: skip
    whole = (entry.get("fill_bytes") or 0) - (entry.get("refilled_bytes") or 0)
    known = entry.get("useless_bytes") is not None
    entry["useless_share"] = entry["useless_bytes"] / whole if known and whole else None
    entry["useless_denominator_bytes"] = whole if known else None
    entry["useless_sensor"] = (
        "filled and not mapped or read since: a lower bound, for a fault maps more than it touches;"
        " at most useless_most_bytes, of which no page faulted or was read"
        if known
        else "n/a (no tracepoint for page-cache fills)"
    )
    return entry
