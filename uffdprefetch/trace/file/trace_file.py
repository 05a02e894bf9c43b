# SPDX-License-Identifier: Apache-2.0
"""The trace file (docs/trace-format.md): blocks of msgpack, each whole in itself.

Append-only: a recorder that is killed leaves every block that it wrote, and a reader stops at the
first one that is not whole. Events lie in columns, as differences in the narrowest type that holds
them, deflated.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import msgpack
import numpy as np

from uffdprefetch.base.errors import EXIT_OURS, EXIT_USAGE, UffdPrefetchError
from uffdprefetch.trace.file.events import (
    COST_KINDS,
    EVENT,
    FAULT_AFTER_AROUND,
    HUGE_BYTES,
    NO_FILE,
    POOL_TOUCH,
    Kind,
    empty,
)

FORMAT = "uffdprefetch.trace"
VERSION = 1
SUFFIX = ".uptrace"
#: Errors of a full file system: a later file may be written.
FULL = (errno.ENOSPC, errno.EDQUOT)
#: A block that claims to be larger is damaged.
BLOCK_MAX_BYTES = 256 << 20
EVENTS_PER_BLOCK = 1 << 16
PAGE_BYTES = 4096
#: Longest time between the two events of a fault, its exception and its look-up in the page cache:
#: a page that faults again was unmapped in between, which takes longer.
SAME_FAULT_NS = 1_000_000
#: Wall clocks of two nodes differ by less.
CLOCKS_NS = 5_000_000_000
#: Columns whose differences are small and positive, small of either sign, or that stay as they are.
_RISING, _JUMPING = ("time_ns",), ("offset", "value", "length")
_UNSIGNED = (np.uint8, np.uint16, np.uint32)


class TraceError(UffdPrefetchError):
    """A file that cannot be read as a trace: what was seen, and where. Exit 2, as of any file that
    is not what it should be."""

    def __init__(self, message: str) -> None:
        super().__init__(message, EXIT_USAGE)


# ---- columns ------------------------------------------------------------------------------------


def _narrow(values: np.ndarray[Any, Any]) -> bytes:
    """One byte that names the width, then the values in it."""
    most = int(values.max()) if len(values) else 0
    for kind in _UNSIGNED:
        if most <= np.iinfo(kind).max:
            return bytes([np.dtype(kind).itemsize]) + values.astype(kind).tobytes()
    return b"\x08" + values.astype("<u8").tobytes()


def _widen(data: bytes, n: int) -> np.ndarray[Any, Any]:
    values = np.frombuffer(data, f"<u{data[0]}", n, 1)
    return values.astype("<u8")


def _differences(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Zigzag: 0, -1, 1, -2 ... become 0, 1, 2, 3 ..."""
    signed = np.diff(column.astype("<u8"), prepend=np.uint64(0)).astype("<i8")
    return ((signed << 1) ^ (signed >> 63)).astype("<u8")


def _sums(zigzag: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    signed = (zigzag >> np.uint64(1)).astype("<i8") ^ -(zigzag & np.uint64(1)).astype("<i8")
    return np.cumsum(signed.astype("<u8"), dtype="<u8")


def pack_events(events: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Columns of the events, as a block's body holds them."""
    names = EVENT.names or ()
    columns = {}
    for name in names:
        column = events[name]
        if name in _RISING or name in _JUMPING:
            columns[name] = _narrow(_differences(column))
        else:
            columns[name] = _narrow(column)
    return {"n": len(events), "columns": columns}


def unpack_events(body: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The inverse of pack_events(); raises KeyError, ValueError or TypeError for anything else."""
    n = int(body["n"])
    events = empty(n)
    for name in EVENT.names or ():
        values = _widen(body["columns"][name], n)
        events[name] = _sums(values) if name in _RISING or name in _JUMPING else values
    return events


# ---- writing ------------------------------------------------------------------------------------


def _packed(value: Any) -> bytes:
    """Names are bytes to the kernel: what is no UTF-8 is written as it is."""
    packed: bytes = msgpack.packb(value, unicode_errors="surrogateescape")
    return packed


def _for_people(value: Any) -> Any:
    """Of a block's body all texts, where bytes that are no UTF-8 are shown as \\xHH."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if isinstance(value, dict):
        return {_for_people(name): _for_people(each) for name, each in value.items()}
    return [_for_people(each) for each in value] if isinstance(value, list) else value


class Writer:
    """Appends blocks to a file that it has made. Raises OSError where the file system does."""

    def __init__(self, file: BinaryIO, meta: dict[str, Any]) -> None:
        """``file`` is open for writing, unbuffered; ``meta`` describes the recording."""
        self._file = file
        self.written_bytes = 0
        self._put(_packed({"format": FORMAT, "version": VERSION, "meta": meta}))

    def block(self, kind: str, body: Any) -> None:
        """Write one block. Whole or, when the disk is full or we die, not counted by a reader."""
        data = zlib.compress(_packed(body), 1)
        self._put(_packed([kind, zlib.crc32(data), data]))

    def events(self, events: np.ndarray[Any, Any]) -> None:
        """Write events, in blocks of EVENTS_PER_BLOCK."""
        for i in range(0, len(events), EVENTS_PER_BLOCK):
            self.block("events", pack_events(events[i : i + EVENTS_PER_BLOCK]))

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            done = self._file.write(view)
            self.written_bytes += done or 0
            view = view[done or 0 :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def remove(self, path: str) -> None:
        """Close it, and remove it from its path, unless another one is there by now. Raises
        OSError."""
        with self._file:
            if os.path.samestat(os.fstat(self._file.fileno()), os.lstat(path)):
                os.unlink(path)


def exists_error(path: str) -> UffdPrefetchError:
    """A recording is not written over what is there."""
    return UffdPrefetchError(f"{path} exists; give -f or another name", EXIT_USAGE)


def create(path: str, force: bool, meta: dict[str, Any]) -> Writer:
    """Make a trace file. Raises UffdPrefetchError: exit 2 when it exists and not ``force``, or
    cannot be there; 125 when there is no room."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if force else os.O_EXCL)
    try:
        file = os.fdopen(os.open(path, flags, 0o666), "wb", buffering=0)
        try:
            return Writer(file, meta)
        except OSError:
            file.close()
            os.unlink(path)
            raise
    except FileExistsError:
        raise exists_error(path) from None
    except OSError as error:
        code = EXIT_OURS if error.errno in FULL else EXIT_USAGE
        raise UffdPrefetchError(f"cannot write {path}: {error.strerror}", code) from None


# ---- reading ------------------------------------------------------------------------------------


@dataclass
class TracedFile:
    """A file that was read. ``id`` is the events' ``file``."""

    id: int
    path: str
    size_bytes: int
    device: int = 0
    inode: int = 0
    file_system: str = ""
    read_ahead_bytes: int | None = None
    stripe_bytes: int | None = None
    stripe_count: int | None = None
    #: Not empty: no record file but a program, a library or a small file, of this package or
    #: directory; of its events only COST_KINDS are kept.
    group: str = ""


@dataclass
class TracedProcess:
    """A process of the job, or our own service (role "service")."""

    pid: int
    parent: int = 0
    rank: int = 0
    local_rank: int = -1
    command: str = ""
    role: str = "job"


@dataclass
class Trace:
    """A trace in memory. ``events`` is sorted by time; its raw events may end before the run does
    (``raw_until_ns``), the overview does not."""

    meta: dict[str, Any]
    events: np.ndarray[Any, Any] = field(default_factory=empty)
    files: dict[int, TracedFile] = field(default_factory=dict)
    processes: dict[int, TracedProcess] = field(default_factory=dict)
    overview: dict[str, Any] | None = None
    end: dict[str, Any] | None = None  # totals; None: the recorder did not come to its end
    truncated: str | None = None  # why the file was not read to its last byte
    path: str = ""
    others: dict[int, TracedFile] = field(default_factory=dict)  # those with a group
    other_events: np.ndarray[Any, Any] = field(default_factory=empty)  # theirs, by time

    @property
    def start_ns(self) -> int:
        """CLOCK_MONOTONIC ns that the times of a report and of its pictures count from."""
        started_ns = self.meta.get("started_ns")
        if started_ns is not None:
            return int(started_ns)
        return int(self.events["time_ns"][0]) if len(self.events) else 0

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on the machine of the trace."""
        return int(self.meta.get("page_bytes") or PAGE_BYTES)


def _blocks(file: BinaryIO, path: str) -> Iterator[tuple[str, Any] | TraceError]:
    """(kind, body) of each whole block; last, perhaps, why there was no other."""
    unpacker = msgpack.Unpacker(
        file, max_buffer_size=BLOCK_MAX_BYTES, strict_map_key=False,
        unicode_errors="surrogateescape",
    )  # fmt: skip
    try:
        head = unpacker.unpack()
    except msgpack.OutOfData:
        raise TraceError(f"{path} is no trace: it is empty, or ends in its first line") from None
    except (ValueError, msgpack.UnpackException) as error:
        raise TraceError(f"{path} is no trace: {error}") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise TraceError(f"{path} is no trace of ours")
    if head.get("version") != VERSION:
        raise TraceError(
            f"{path} has version {head.get('version')}, this program reads version {VERSION}"
        )
    yield "meta", _for_people(head.get("meta") or {})
    while True:
        at = unpacker.tell()
        try:
            kind, crc, data = unpacker.unpack()
            if zlib.crc32(data) != crc:
                raise ValueError("its checksum does not match")
            body = msgpack.unpackb(
                zlib.decompress(data), strict_map_key=False, unicode_errors="surrogateescape"
            )
        except msgpack.OutOfData:
            if at < os.fstat(file.fileno()).st_size:
                yield TraceError(f"the last block, at byte {at}, is not whole")
            return
        except (ValueError, TypeError, zlib.error, msgpack.UnpackException) as error:
            yield TraceError(f"the block at byte {at} is damaged: {error}")
            return
        yield str(kind), _for_people(body) if kind in ("files", "processes", "meta") else body


def read(path: str) -> Trace:
    """Read a trace up to its last whole block.

    Raises TraceError when it is no trace, UffdPrefetchError when it cannot be opened.
    """
    parts: list[np.ndarray[Any, Any]] = []
    trace = Trace(meta={}, path=path)
    try:
        file = open(path, "rb")
    except OSError as error:
        raise UffdPrefetchError(f"cannot read {path}: {error.strerror}", 2) from None
    with file:
        for item in _blocks(file, path):
            if isinstance(item, TraceError):
                trace.truncated = item.message
                break
            try:
                _take(trace, parts, *item)
            except (KeyError, ValueError, TypeError, IndexError) as error:
                trace.truncated = f"a block of kind {item[0]!r} is damaged: {error}"
                break
    if parts:
        events = np.concatenate(parts)
        # of files that turned out not to be wanted only after their first events
        known: np.ndarray[Any, Any] = np.zeros(65536, bool)
        known[[NO_FILE, *trace.files, *trace.others]] = True
        events = events[known[events["file"]]]
        events = events[np.argsort(events["time_ns"], kind="stable")]
        events = _without_checkpoints(_set_apart(trace, events))
        trace.events = events
        _count_retries_once(trace.events)
    return trace


def _set_apart(trace: Trace, events: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Those of files with a group go to ``other_events``. Returns the rest, and their calls, which
    are the job's as any other."""
    is_other: np.ndarray[Any, Any] = np.zeros(65536, bool)
    is_other[list(trace.others)] = True
    other = is_other[events["file"]]
    if not other.any():
        return events
    trace.other_events = events[other & np.isin(events["kind"], COST_KINDS)]
    call = events["kind"] == Kind.CALL
    rest = events[~other | call]
    rest["file"][is_other[rest["file"]]] = NO_FILE
    return rest


def _without_checkpoints(events: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A fault that no tracepoint tells of is taken for one in a huge page
    (trace/record/traced_mappings.py). A checkpoint's is none of the job's. It is known by its page,
    of which our service tells that it was touched, or, where the job ended before, by faults of
    single pages around it: a huge page has none. Where our pool serves a file there are no others.
    """
    touches = events[events["kind"] == Kind.TOUCH]
    if not len(touches):
        return events
    around = events["kind"] == Kind.AROUND
    at = np.flatnonzero(around & (events["length"] == HUGE_BYTES))
    huge, small = events[at], events[around & (events["length"] < HUGE_BYTES)]

    def reader(some: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = some["pid"].astype("<u8") << np.uint64(16) | some["file"]
        return found

    def places(some: np.ndarray[Any, Any], unit: int, more: Any = 0) -> np.ndarray[Any, Any]:
        offset = some["offset"] + more
        found: np.ndarray[Any, Any] = np.rec.fromarrays([reader(some), offset // np.uint64(unit)])
        return found

    page = huge["aux"].astype("<u8") * np.uint64(PAGE_BYTES)
    drop = np.isin(places(huge, PAGE_BYTES, page), places(touches, PAGE_BYTES))
    drop |= np.isin(reader(huge), reader(touches[touches["aux"] & POOL_TOUCH > 0]))
    units, first = np.unique(places(small, HUGE_BYTES), return_index=True)
    mine = np.minimum(np.searchsorted(units, places(huge, HUGE_BYTES)), max(0, len(units) - 1))
    if len(units):
        before = small["time_ns"][first[mine]] < huge["time_ns"]  # the first of them: by time
        drop |= (units[mine] == places(huge, HUGE_BYTES)) & before
    return np.delete(events, at[drop])


def _count_retries_once(events: np.ndarray[Any, Any]) -> None:
    """Fault-around at the end of a fault that had to wait becomes MAPPED, where the program in the
    kernel has not seen that it was that: its time is the exception's, before the FAULT's own."""
    faults = np.flatnonzero(np.isin(events["kind"], (Kind.AROUND, Kind.FAULT)))
    faults = faults[np.argsort(events["tid"][faults], kind="stable")]
    first, then = events[faults[:-1]], events[faults[1:]]
    page = first["offset"] + first["aux"].astype("<u8") * np.uint64(PAGE_BYTES)
    same = (first["kind"] == Kind.AROUND) & (then["kind"] == Kind.FAULT)
    same &= (first["tid"] == then["tid"]) & (first["file"] == then["file"])
    same &= (page == then["offset"]) & (then["aux"] & FAULT_AFTER_AROUND == 0)
    same &= then["time_ns"] - first["time_ns"] < SAME_FAULT_NS
    events["kind"][faults[:-1][same]] = Kind.MAPPED


def _take(trace: Trace, parts: list[np.ndarray[Any, Any]], kind: str, body: Any) -> None:
    if kind == "meta":
        trace.meta = {**trace.meta, **body}
    elif kind == "events":
        parts.append(unpack_events(body))
    elif kind == "files":
        for entry in body:
            file = TracedFile(**entry)
            (trace.others if file.group else trace.files)[file.id] = file
    elif kind == "processes":
        for entry in body:
            trace.processes[entry["pid"]] = TracedProcess(**entry)
    elif kind == "overview":
        trace.overview = body
    elif kind == "end":
        trace.end = body
    # any other: of a later version that only adds; not for us


def read_all(paths: Sequence[str]) -> Trace:
    """Several traces (of several nodes) as one, on one axis of time; one is read as it is.

    Clocks are brought together by the wall clock that each recorder noted at its start; processes
    and files of the second one and those after it get numbers of their own. Raises as read() does,
    and UffdPrefetchError (exit 2) where they are not of one run: their ranks would be mixed.
    """
    traces = [read(path) for path in paths]
    first = traces[0]
    for i, one in enumerate(traces):
        for other in traces[:i]:
            why = _why_not_one_run(other, one)
            if why is not None:
                raise UffdPrefetchError(
                    f"{other.path} and {one.path} are not of one run ({why}): show one at a time",
                    EXIT_USAGE,
                )
    for k, other in enumerate(traces[1:], 1):
        _join(first, other, k)
    if len(traces) > 1:
        for name in ("events", "other_events"):
            some = getattr(first, name)
            setattr(first, name, some[np.argsort(some["time_ns"], kind="stable")])
        first.overview = None  # their bins do not lie on one another
        first.path = ", ".join(paths)
    return first


def _wall_ns(trace: Trace) -> tuple[int, int] | None:
    """(begin, end) of the recording by the wall clock; None where it does not tell both."""
    began, end = trace.meta.get("started_unix_ns"), trace.meta.get("job_ended_ns")
    end = end or (trace.end or {}).get("ended_ns")
    if not began or not end:
        return None
    return int(began), int(began) + int(end) - trace.start_ns


def _why_not_one_run(a: Trace, b: Trace) -> str | None:
    """Why traces are not of one run; None: they are. Of one node, and of several: recorders of one
    run run at the same time, and each has ranks of its own."""
    ranks = [{p.rank for p in one.processes.values() if p.role == "job"} for one in (a, b)]
    both = ranks[0] & ranks[1]
    if both and a.meta.get("host") == b.meta.get("host"):
        return f"both have a rank {min(both)} on {a.meta.get('host')}"
    walls = _wall_ns(a), _wall_ns(b)
    if walls[0] is None or walls[1] is None:
        return None
    apart = max(walls[0][0], walls[1][0]) - min(walls[0][1], walls[1][1])
    if apart > CLOCKS_NS:
        return f"{apart / 1e9:.0f} s lie between them"
    return None


def _join(into: Trace, other: Trace, k: int) -> None:
    def zero(trace: Trace) -> int:
        return int(trace.meta.get("started_unix_ns", 0)) - int(trace.meta.get("started_ns", 0))

    events, shift = other.events.copy(), zero(other) - zero(into)
    costs = other.other_events.copy()
    numbers: np.ndarray[Any, Any] = np.zeros(65536, "<u2")
    ids = [{f.path: f.id for f in some.values()} for some in (into.files, into.others)]
    free = iter(sorted({*range(1, 65536)} - {*into.files, *into.others}))
    for file in (*other.files.values(), *other.others.values()):
        taken = ids[bool(file.group)].get(file.path)
        if taken is None:
            taken = next(free, None)
            if taken is None:
                continue
            (into.others if file.group else into.files)[taken] = replace(file, id=taken)
        numbers[file.id] = taken
    base = k << 22  # pids of a node are smaller (PID_MAX_LIMIT)
    for some in (events, costs):
        some["time_ns"] = (some["time_ns"].astype("<i8") + shift).astype("<u8")
        some["file"] = numbers[some["file"]]
        some["pid"] += np.uint32(base)
        some["tid"] += np.uint32(base)
    for process in other.processes.values():
        moved = replace(process, pid=process.pid + base, parent=process.parent + base)
        into.processes[moved.pid] = moved
    into.events = np.concatenate([into.events, events])
    into.other_events = np.concatenate([into.other_events, costs])
    into.truncated = into.truncated or other.truncated
    hosts = [into.meta.get("host", "?"), other.meta.get("host", "?")]
    one, two = into.meta.get("job_ended_ns"), other.meta.get("job_ended_ns")
    last_ns = None if one is None or two is None else max(one, two + shift)
    into.meta = {
        **into.meta,
        "job_ended_ns": last_ns,
        "host": ", ".join(dict.fromkeys(hosts)),
        "missing": [*into.meta.get("missing", []), *other.meta.get("missing", [])],
    }
    if into.end is not None and other.end is not None:
        ended = max(int(into.end["ended_ns"]), int(other.end["ended_ns"]) + shift)
        lost = into.end.get("lost_events", 0) + other.end.get("lost_events", 0)
        into.end = {**into.end, "ended_ns": ended, "lost_events": lost}
    else:
        into.end = None
