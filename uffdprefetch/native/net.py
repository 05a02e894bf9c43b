# SPDX-License-Identifier: Apache-2.0
"""cffi binding of what a service and its transport share (csrc/common/net.h), and of the pool's
side of it (csrc/service/net/)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from uffdprefetch.native import uffd

_ffi: Any = uffd._ffi
_lib: Any = uffd._lib
_checked = uffd._checked

OF_SERVICE: int = _lib.UP_NET_OF_SERVICE
OF_TRANSPORT: int = _lib.UP_NET_OF_TRANSPORT

ASK: int = _lib.UP_NET_ASK
HURRY: int = _lib.UP_NET_HURRY
SEND: int = _lib.UP_NET_SEND
REFUSE: int = _lib.UP_NET_REFUSE
READING: int = _lib.UP_NET_READING
QUESTION: int = _lib.UP_NET_QUESTION
KEPT: int = _lib.UP_NET_KEPT
DROPPED: int = _lib.UP_NET_DROPPED
CAME: int = _lib.UP_NET_CAME
WORD: int = _lib.UP_NET_WORD
SENT: int = _lib.UP_NET_SENT
REQUEST: int = _lib.UP_NET_REQUEST
HURRIED: int = _lib.UP_NET_HURRIED
HINTS: int = _lib.UP_NET_HINTS
NODE: int = _lib.UP_NET_NODE

DEMAND: int = _lib.UP_NET_DEMAND
AHEAD: int = _lib.UP_NET_AHEAD

OK: int = _lib.UP_NET_OK
ABSENT: int = _lib.UP_NET_ABSENT
BUSY: int = _lib.UP_NET_BUSY
LATE: int = _lib.UP_NET_LATE
FAILED: int = _lib.UP_NET_FAILED

AHEAD_NOW: int = _lib.UP_NET_AHEAD_NOW
AHEAD_SOON: int = _lib.UP_NET_AHEAD_SOON
AHEAD_HELD: int = _lib.UP_NET_AHEAD_HELD

ROOM_NONE: int = _lib.UP_NET_ROOM_NONE
ROOM_STILL: int = _lib.UP_NET_ROOM_STILL
ROOM: int = _lib.UP_NET_ROOM

COPY: int = _lib.UP_NET_COPY
PART: int = _lib.UP_NET_PART
KEEP_PART: int = _lib.UP_NET_KEEP_PART
READ: int = _lib.UP_NET_READ
READ_PART: int = _lib.UP_NET_READ_PART
KEEP: int = _lib.UP_NET_KEEP
UNKNOWN: int = _lib.UP_NET_UNKNOWN
NONE: int = _lib.UP_NET_NONE

BLOCKS: int = _lib.UP_NET_BLOCKS
NODES: int = _lib.UP_NET_NODES
VERSION: int = _lib.UP_NET_VERSION
HEADER_BYTES: int = _ffi.sizeof("struct up_net_header")

FileId = tuple[int, int]
#: Size in bytes, mtime and ctime in ns, as of fstat(2).
Stamp = tuple[int, int, int]
_STRUCT = "struct up_net_message"
MESSAGE_BYTES: int = _ffi.sizeof(_STRUCT)


@dataclass(frozen=True)
class Message:
    """struct up_net_message: what each kind of it has is said in csrc/common/net.h."""

    kind: int
    node: int = NONE
    slot: int = NONE
    theirs: int = NONE
    file: FileId = (0, 0)
    first: int = 0
    count: int = 0
    mask: int = 0
    class_: int = DEMAND
    status: int = OK
    useful_ms: int = 0
    serial: int = 0
    missing_at: int = NONE
    room: int = 0
    copy: int = 0
    length: int = 0
    together: int = 0
    due_ms: int = 0
    cpu_short: int = 0
    part: int = 0
    word: dict[int, int] = field(default_factory=dict)  # by place, of HINTS

    @property
    def blocks(self) -> list[int]:
        """Those that ``mask`` names."""
        return [self.first + i for i in range(BLOCKS) if self.mask >> i & 1]


_SCALARS = (
    "kind", "node", "slot", "theirs", "first", "count", "mask", "class_", "status", "useful_ms",
    "serial", "missing_at", "room", "copy", "length", "together", "due_ms", "cpu_short",
    "part",
)  # fmt: skip


def _write(m: Any, message: Message) -> None:
    _ffi.memmove(m, bytes(MESSAGE_BYTES), MESSAGE_BYTES)
    for name in _SCALARS:
        setattr(m, name, getattr(message, name))
    m.file[0], m.file[1] = message.file
    for place, word in message.word.items():
        m.word[place] = word


def _read(m: Any) -> Message:
    word = {}
    if m.kind == HINTS:
        word = {i: int(m.word[i]) for i in range(BLOCKS) if m.mask >> i & 1}
    values = {name: int(getattr(m, name)) for name in _SCALARS}
    return Message(**values, file=(int(m.file[0]), int(m.file[1])), word=word)


def encode(message: Message) -> bytes:
    """MESSAGE_BYTES, as they go from node to node."""
    m = _ffi.new(f"{_STRUCT} *")
    _write(m, message)
    return bytes(_ffi.buffer(m))


def decode(data: bytes | bytearray | memoryview) -> Message:
    """The message that encode() was given; its content is not checked. Raises ValueError for
    another length."""
    if len(data) != MESSAGE_BYTES:
        raise ValueError(f"{len(data)} bytes are no message")
    m = _ffi.new(f"{_STRUCT} *")
    _ffi.memmove(m, data, MESSAGE_BYTES)
    return _read(m)


class Layout(NamedTuple):
    """Sizes in bytes; the slots for asking come first."""

    slot_bytes: int
    ask_slots: int
    serve_slots: int


class NetRing:
    """The memory between a service and its transport, as one of the two sees it."""

    def __init__(self, pointer: Any, side: int, fd: int = -1) -> None:
        """See create() and open()."""
        self.pointer, self.side, self.fd = pointer, side, fd
        told = _ffi.new("struct up_net_layout *")
        _lib.up_net_ring_layout(pointer, told)
        self.layout = Layout(int(told.slot_bytes), int(told.ask_slots), int(told.serve_slots))
        self._message = _ffi.new(f"{_STRUCT} *")

    @classmethod
    def create(cls, layout: Layout) -> NetRing:
        """The service's; ``fd`` is for its transport, and the caller's to close. Raises OSError."""
        pointer, fd = _ffi.new("struct up_net_ring **"), _ffi.new("int *")
        _checked(_lib.up_net_ring_create(pointer, *layout, fd), "network ring")
        return cls(pointer[0], OF_SERVICE, int(fd[0]))

    @classmethod
    def open(cls, fd: int) -> NetRing:
        """The transport's; ``fd`` stays the caller's. Raises OSError: EPROTO where it is none."""
        pointer = _ffi.new("struct up_net_ring **")
        _checked(_lib.up_net_ring_open(pointer, fd), "network ring")
        return cls(pointer[0], OF_TRANSPORT)

    def close(self) -> None:
        """Unmap it. Of a service that serves, up_net_stop() does."""
        _lib.up_net_ring_close(self.pointer)
        self.pointer = _ffi.NULL

    def put(self, message: Message) -> bool:
        """Whether the other side's queue had room for it."""
        m = self._message
        _write(m, message)
        return int(_lib.up_net_put(self.pointer, self.side, m)) == 0

    def take(self) -> Message | None:
        """The next one of the other side's."""
        m = self._message
        if not _lib.up_net_take(self.pointer, self.side, m):
            return None
        return _read(m)

    def slot(self, number: int, length: int | None = None) -> memoryview:
        """A slot's header and ``length`` bytes after it (None: all that it can hold)."""
        if not 0 <= number < self.layout.ask_slots + self.layout.serve_slots:
            raise ValueError(f"slot {number}")
        bytes_ = self.layout.slot_bytes if length is None else length
        if not 0 <= bytes_ <= self.layout.slot_bytes:
            raise ValueError(f"{bytes_} bytes in a slot")
        header = _lib.up_net_slot(self.pointer, number)
        return memoryview(_ffi.buffer(header, HEADER_BYTES + bytes_))

    @property
    def out(self) -> int:
        """Requests of the service's that have no answer yet."""
        return int(_lib.up_net_out(self.pointer))


def refusal(message: Message) -> bytes:
    """The header that answers a request with a status alone."""
    header = _ffi.new("struct up_net_header *")
    header.file[0], header.file[1] = message.file
    header.first, header.count = message.first, message.count & 0xFFFFFFFF
    header.status, header.serial = message.status, message.serial
    return bytes(_ffi.buffer(header, HEADER_BYTES))


def checksum(data: bytes | memoryview) -> int:
    """CRC-32C."""
    return int(_lib.up_net_checksum(_ffi.from_buffer(data), len(data)))


@dataclass(frozen=True)
class TransportCounts:
    """Totals since a transport began (csrc/service/helper.h, struct up_net_counts)."""

    from_bytes: int
    to_bytes: int
    questions: int
    asks: int
    hurries: int
    refused: int
    late: int
    corrupt: int
    passed_over: int
    quicker_bytes: int
    unknown_bytes: int
    away_bytes: int
    unanswered_bytes: int
    refused_bytes: int
    served_reads: int
    lost_slots: int
    hedged_bytes: int
    serve_cpu_ns: int
    declined: int
    failed: int


class NodeCounts(NamedTuple):
    """Counts of one other node; of this one, ``cpu_short`` only."""

    from_bytes: int
    to_bytes: int
    answer_ns: int
    late: int
    corrupt: int
    here: int
    failures: int
    out: int
    cpu_short: int


class Net:
    """The exchange of a pool with other nodes, by one transport."""

    def __init__(
        self, pool: Any, ring: NetRing, me: int, to_fd: int, from_fd: int, *,
        chunks_per_block: int, serve_threads: int = 4, patience_ms: int = 0,
        serve_cpu: float = 0,
    ) -> None:  # fmt: skip
        """``pool``: native.pool.Pool; the ring is this object's from now on; ``to_fd``,
        ``from_fd``: eventfds that tell the transport of messages, and are told by it;
        ``patience_ms``: the least that an answer is waited for (0: as usual); ``serve_cpu``:
        cores for the threads that answer other nodes (0: no limit). Raises OSError."""
        options = _ffi.new("struct up_net_options *")
        options.me, options.chunks_per_block = me, chunks_per_block
        options.serve_threads = serve_threads
        options.to_fd, options.from_fd = to_fd, from_fd
        options.patience_ms = patience_ms
        options.serve_percent = round(100 * serve_cpu)
        pointer = _ffi.new("struct up_net **")
        _checked(_lib.up_net_start(pointer, pool.pointer, ring.pointer, options), "network")
        self._pointer = pointer[0]

    def close(self) -> None:
        """Stop: whatever waits for other nodes reads storage."""
        _lib.up_net_stop(self._pointer)
        self._pointer = _ffi.NULL

    def share(self, file: int, identity: FileId, stamp: Stamp) -> None:
        """The pool's file of this number is what other nodes call so. ``stamp``: that with which it
        became the pool's; where it has another one after a read, nothing of it is handed on any
        more. Raises OSError."""
        of = _ffi.new("struct up_net_stamp *", tuple(stamp))
        identifier = _ffi.new("uint64_t[2]", identity)
        _checked(_lib.up_net_share(self._pointer, file, identifier, of), "shared file")

    def pending(self, file: int, patience_ms: int) -> None:
        """It is not known yet whether the file is shared: prefetches wait for that up to
        ``patience_ms``, as of 0 no longer."""
        _lib.up_net_pending(self._pointer, file, patience_ms)

    def ahead(self, file: int, first: int, count: int, expected: int) -> int:
        """AHEAD_NOW: these chunks, which a reader may come to, are to be read ahead; AHEAD_SOON:
        who has them is being asked; AHEAD_HELD: others keep them, and no reader here has come to
        such lately. ``expected``: the last chunk that will be asked for."""
        return int(_lib.up_net_ahead(self._pointer, file, first, count, expected))

    def reads_alike(self, file: int) -> bool:
        """Whether other nodes read the same of it as readers here do."""
        return bool(_lib.up_net_reads_alike(self._pointer, file))

    def unshare(self, file: int) -> None:
        """Stop sharing a file."""
        _lib.up_net_unshare(self._pointer, file)

    def counts(self) -> TransportCounts:
        """The present totals."""
        c = _ffi.new("struct up_net_counts *")
        _lib.up_net_counts(self._pointer, c)
        return TransportCounts(
            **{name: int(getattr(c, name)) for name in TransportCounts.__dataclass_fields__}
        )

    def node(self, number: int) -> NodeCounts:
        """Counts of the traffic with another node."""
        c = _ffi.new("struct up_net_node_counts *")
        _lib.up_net_node_counts(self._pointer, number, c)
        return NodeCounts(*(int(getattr(c, name)) for name in NodeCounts._fields))

    def rates(self) -> tuple[int | None, int | None]:
        """Bytes per second of large requests to other nodes, and to storage, with whatever else
        was under way; None: not known."""
        found = _ffi.new("uint64_t[2]")
        _lib.up_net_rates(self._pointer, found, found + 1)
        return int(found[0]) or None, int(found[1]) or None

    def map(self, file: int, cells: int) -> list[int | None]:
        """For each of ``cells`` equal parts of a file a node that keeps some of it, or None."""
        found = _ffi.new("uint16_t[]", cells)
        _lib.up_net_map(self._pointer, file, cells, found)
        return [None if node == UNKNOWN else int(node) for node in found]
