# SPDX-License-Identifier: Apache-2.0
"""Messages between the service, the agents and the launchers: csrc/common/wire.h in Python.

Layouts and numbers are the C compiler's. Every message is 256 bytes; :func:`unpack` refuses
anything else.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

from uffdprefetch.native.layout import CONSTANTS as C
from uffdprefetch.native.layout import layout

MAGIC: int = C.UP_MAGIC
VERSION: int = C.UP_VERSION
MESSAGE_BYTES: int = C.UP_MSG_BYTES
PAGES_MAX: int = C.UP_PAGES_MAX
RUNS_MAX: int = C.UP_RUNS_MAX

HEADER = layout("up_header")
HELLO = layout("up_hello")
ATTACH = layout("up_attach")
GONE = layout("up_gone")
FILE = layout("up_file")
COMMAND = layout("up_command")
ACK = layout("up_ack")
BYPASS = layout("up_bypass")
STATEMENT = layout("up_statement")
TOUCHED = layout("up_touched")
WELCOME = layout("up_welcome")
JOB = layout("up_started")
FINISH = layout("up_finish")
SUMMARY = layout("up_summary")
PLAN = layout("up_plan")


class Type(IntEnum):
    """enum up_type."""

    HELLO = C.UP_HELLO
    WELCOME = C.UP_WELCOME
    JOB = C.UP_JOB
    FINISH = C.UP_FINISH
    SUMMARY = C.UP_SUMMARY
    SNAPSHOT = C.UP_SNAPSHOT
    ATTACH = C.UP_ATTACH
    GONE = C.UP_GONE
    ACK = C.UP_ACK
    BYE = C.UP_BYE
    PLAN = C.UP_PLAN
    BYPASS = C.UP_BYPASS
    STATED = C.UP_STATED
    TOUCHED = C.UP_TOUCHED
    FILE = C.UP_FILE
    REARM = C.UP_REARM
    DETACH = C.UP_DETACH
    BYE_OK = C.UP_BYE_OK
    QUIT = C.UP_QUIT
    EVENTS = C.UP_EVENTS  # to a recorder: stream(), of any length
    TABLES = C.UP_TABLES


class Role(IntEnum):
    """enum up_role."""

    LAUNCHER = C.UP_LAUNCHER
    AGENT = C.UP_AGENT
    RECORDER = C.UP_RECORDER
    WATCHER = C.UP_WATCHER
    PLANNER = C.UP_PLANNER
    TRANSPORT = C.UP_TRANSPORT


class ServingMode(IntEnum):
    """enum up_serving_mode: how a mapping is served, or a file that is read by calls."""

    REFUSE = C.UP_REFUSE
    CHECKPOINTS = C.UP_CHECKPOINTS
    PAGE_TABLES = C.UP_PAGE_TABLES
    POOL = C.UP_POOL
    READS = C.UP_READS


class Brief(IntEnum):
    """enum up_brief: whether files like one are mapped for moments."""

    NO = C.UP_BRIEF_NO
    KNOWN = C.UP_BRIEF_KNOWN
    UNTOLD = C.UP_BRIEF_UNTOLD


class Stated(IntEnum):
    """enum up_stated: what a job says by madvise(2), of a range or of how it reads."""

    NEEDED = C.UP_STATED_NEEDED
    UNNEEDED = C.UP_STATED_UNNEEDED
    NORMAL = C.UP_STATED_NORMAL
    SEQUENTIAL = C.UP_STATED_SEQUENTIAL
    RANDOM = C.UP_STATED_RANDOM


class Gone(IntEnum):
    """enum up_gone_reason: why a mapping is not managed any more."""

    CHANGED = C.UP_GONE_CHANGED
    WANTED = C.UP_GONE_WANTED
    WRITTEN = C.UP_GONE_WRITTEN


class Bypass(IntEnum):
    """enum up_bypass_reason: how it was seen that a process bypasses the interposers."""

    UNMAPPED = C.UP_BYPASS_UNMAPPED
    MOVED = C.UP_BYPASS_MOVED
    REPLACED = C.UP_BYPASS_REPLACED
    PATCHED = C.UP_BYPASS_PATCHED


HELLO_UFFD: int = C.UP_HELLO_UFFD
HELLO_SENDS_POOL: int = C.UP_HELLO_SENDS_POOL
HELLO_LEFT_ALONE: int = C.UP_HELLO_LEFT_ALONE
#: enum up_left_alone: why a process is not managed
LEFT_ALONE: dict[int, str] = {
    C.UP_ALONE_ASAN: "it runs under AddressSanitizer",
    C.UP_ALONE_TSAN: "it runs under ThreadSanitizer",
    C.UP_ALONE_MSAN: "it runs under MemorySanitizer",
    C.UP_ALONE_LSAN: "it runs under LeakSanitizer",
    C.UP_ALONE_LINKED: "a sanitizer is linked into it",
    C.UP_ALONE_VALGRIND: "it runs under valgrind",
    C.UP_ALONE_RR: "it is recorded by rr",
    C.UP_ALONE_LIBC: "its C library is not glibc",
    C.UP_ALONE_IDLE: "our thread would be SCHED_IDLE, as the one that maps: "
    "readers would wait for it",
}
ATTACH_INHERITED: int = C.UP_ATTACH_INHERITED
ATTACH_WRITABLE: int = C.UP_ATTACH_WRITABLE
ATTACH_KNOWN: int = C.UP_ATTACH_KNOWN
ATTACH_COPIES: int = C.UP_ATTACH_COPIES
ATTACH_STATED: int = C.UP_ATTACH_STATED
ATTACH_MANY: int = C.UP_ATTACH_MANY
ATTACH_BRIEF: int = C.UP_ATTACH_BRIEF


class Hello(NamedTuple):
    """struct up_hello."""

    role: int
    pid: int
    ppid: int
    rank: int
    local_rank: int
    world: int
    job_pid: int
    flags: int
    uffd_error: int
    overlays_max: int
    parent_pid: int
    page_bytes: int
    command: str


class Attach(NamedTuple):
    """struct up_attach: addresses, lengths and offsets in bytes."""

    region: int
    flags: int
    address: int
    length_bytes: int
    offset_bytes: int
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    map_flags: int
    advice: int  # MADV_NORMAL, MADV_RANDOM or MADV_SEQUENTIAL
    anchor: int = 0  # where the agent has mapped the file beside it (docs/pool.md); 0: nowhere


class Ack(NamedTuple):
    """struct up_ack."""

    sequence: int
    region: int
    done: int
    error: int
    overlays: int


class Statement(NamedTuple):
    """struct up_statement: what the job has said of [start_bytes, end_bytes) of the region's file;
    ``what``: a Stated, or a number that a later agent may send."""

    region: int
    what: int
    start_bytes: int
    end_bytes: int


class WireError(ValueError):
    """A message that is not ours: wrong length, magic, version or type."""


def pack(kind: Type, body: bytes = b"") -> bytes:
    """One message of MESSAGE_BYTES bytes."""
    return (HEADER.pack(MAGIC, VERSION, kind) + body).ljust(MESSAGE_BYTES, b"\0")


def unpack(data: bytes) -> tuple[Type, bytes]:
    """(type, body) of a message; raises WireError and nothing else."""
    if len(data) != MESSAGE_BYTES:
        raise WireError(f"{len(data)} bytes instead of {MESSAGE_BYTES}")
    magic, version, kind = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise WireError(f"magic {magic:#x} version {version}")
    try:
        return Type(kind), data[HEADER.size :]
    except ValueError:
        raise WireError(f"type {kind}") from None


def stream(kind: Type, body: bytes) -> bytes:
    """A message to a recorder: EVENTS, TABLES or FINISH, as long as its body."""
    return HEADER.pack(MAGIC, VERSION, kind) + body


def unpack_stream(data: bytes) -> tuple[Type, bytes]:
    """(type, body) of a message that stream() made; raises WireError and nothing else."""
    if len(data) < HEADER.size:
        raise WireError(f"{len(data)} bytes are no message")
    magic, version, kind = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION or kind not in (Type.EVENTS, Type.TABLES, Type.FINISH):
        raise WireError(f"magic {magic:#x} version {version} type {kind}")
    return Type(kind), data[HEADER.size :]


def hello(body: bytes) -> Hello:
    """Read a struct up_hello."""
    fields: tuple[Any, ...] = HELLO.unpack_from(body)
    command: bytes = fields[-1]
    return Hello._make((*fields[:-1], command.split(b"\0")[0].decode(errors="replace")))


def attach(body: bytes) -> Attach:
    """Read a struct up_attach."""
    return Attach(*ATTACH.unpack_from(body))


def statement(body: bytes) -> Statement:
    """Read a struct up_statement."""
    return Statement(*STATEMENT.unpack_from(body))


def touched(body: bytes) -> tuple[int, list[tuple[int, int]]]:
    """Read a struct up_touched: the region, and runs [start, end) of its file in bytes."""
    fields = TOUCHED.unpack_from(body)
    region, count, runs = fields[0], fields[1], fields[2:]
    if count > RUNS_MAX:
        raise WireError(f"{count} runs in one message")
    return region, [(runs[2 * i], runs[2 * i + 1]) for i in range(count)]


def ack(body: bytes) -> Ack:
    """Read a struct up_ack."""
    return Ack(*ACK.unpack_from(body))


def _padded(pages: list[int]) -> list[int]:
    if len(pages) > PAGES_MAX:
        raise ValueError(f"{len(pages)} pages in one message")
    return pages + [0] * (PAGES_MAX - len(pages))


def file(
    region: int, mode: ServingMode, pages: list[int], settled: bool = False, leased: bool = False,
    brief: Brief = Brief.NO,
) -> bytes:  # fmt: skip
    """UP_FILE: how a mapping is served, and the page numbers of its checkpoints (PAGES_MAX).
    ``settled``: who maps the file again need not wait for the answer. ``leased``: the last
    descriptor that comes with it has the file's lease. ``brief``: of mappings of about its size."""
    body = FILE.pack(region, mode, len(pages), settled, leased, brief, *_padded(pages))
    return pack(Type.FILE, body)


def command(kind: Type, sequence: int, region: int, pages: list[int]) -> bytes:
    """UP_REARM or UP_DETACH; at most PAGES_MAX page numbers."""
    return pack(kind, COMMAND.pack(sequence, region, len(pages), 0, *_padded(pages)))
