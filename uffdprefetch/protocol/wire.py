# SPDX-License-Identifier: Apache-2.0
"""Messages between the service, the agents and the launchers: csrc/common/wire.h in Python.

Every message is 256 bytes; :func:`unpack` refuses anything else. tests/unit/service/test_wire.py
compares the sizes with the C compiler's.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, NamedTuple

MAGIC = 0x50444655
VERSION = 4
MESSAGE_BYTES = 256
PAGES_MAX = 28

HEADER = struct.Struct("<IHH")
HELLO = struct.Struct("<I6iIiIiI16s")
ATTACH = struct.Struct("<II6QqII")
GONE = struct.Struct("<II")
FILE = struct.Struct(f"<IIII{PAGES_MAX}Q")
COMMAND = struct.Struct(f"<IIII{PAGES_MAX}Q")
ACK = struct.Struct("<IIIiI")
BYPASS = struct.Struct("<I")
WELCOME = struct.Struct("<I")
JOB = struct.Struct("<i")
SUMMARY = struct.Struct("<II")
PLAN = struct.Struct("<IiI")


class Type(IntEnum):
    """enum up_type."""

    HELLO = 1
    WELCOME = 2
    JOB = 3
    FINISH = 4
    SUMMARY = 5
    SNAPSHOT = 7
    ATTACH = 16
    GONE = 17
    ACK = 18
    BYE = 19
    PLAN = 20
    BYPASS = 21
    FILE = 32
    REARM = 35
    DETACH = 37
    BYE_OK = 38
    QUIT = 40
    EVENTS = 48  # to a recorder: stream(), of any length
    TABLES = 49


class Role(IntEnum):
    """enum up_role."""

    LAUNCHER = 1
    AGENT = 2
    RECORDER = 4
    WATCHER = 3
    PLANNER = 5


class ServingMode(IntEnum):
    """enum up_verdict: how a mapping is served."""

    REFUSE = 0
    CHECKPOINTS = 1
    PAGE_TABLES = 2
    POOL = 3


class Bypass(IntEnum):
    """enum up_bypass_reason: how it was seen that a process bypasses the interposers."""

    UNMAPPED = 1
    MOVED = 2
    REPLACED = 3
    PATCHED = 4


HELLO_UFFD = 1
HELLO_FORKED = 2
HELLO_SENDS_POOL = 8
HELLO_LEFT_ALONE = 16
#: enum up_left_alone: why a process is not managed
LEFT_ALONE = {
    1: "it runs under AddressSanitizer",
    2: "it runs under ThreadSanitizer",
    3: "it runs under MemorySanitizer",
    4: "it runs under LeakSanitizer",
    5: "a sanitizer is linked into it",
    6: "it runs under valgrind",
    7: "it is recorded by rr",
    8: "its C library is not glibc",
    9: "our thread would be SCHED_IDLE, as the one that maps: readers would wait for it",
}
ATTACH_INHERITED = 1
ATTACH_WRITABLE = 2
ATTACH_KNOWN = 4
#: of up_attach.map_flags, as in mmap(2)
MAP_TYPE, MAP_PRIVATE = 0x0F, 2


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
    advice_swallowed: int


class Ack(NamedTuple):
    """struct up_ack."""

    sequence: int
    region: int
    done: int
    error: int
    overlays: int


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


def ack(body: bytes) -> Ack:
    """Read a struct up_ack."""
    return Ack(*ACK.unpack_from(body))


def _padded(pages: list[int]) -> list[int]:
    if len(pages) > PAGES_MAX:
        raise ValueError(f"{len(pages)} pages in one message")
    return pages + [0] * (PAGES_MAX - len(pages))


def file(region: int, verdict: ServingMode, pages: list[int]) -> bytes:
    """UP_FILE: how a mapping is served, and the page numbers of its checkpoints (PAGES_MAX)."""
    return pack(Type.FILE, FILE.pack(region, verdict, len(pages), 0, *_padded(pages)))


def command(kind: Type, sequence: int, region: int, pages: list[int]) -> bytes:
    """UP_REARM or UP_DETACH; at most PAGES_MAX page numbers."""
    return pack(kind, COMMAND.pack(sequence, region, len(pages), 0, *_padded(pages)))
