# SPDX-License-Identifier: Apache-2.0
"""The messages: names and copies agree with csrc/common/wire.h, and nothing else is let in."""

from __future__ import annotations

import random
import struct
from enum import IntEnum
from typing import Any

import pytest

from uffdprefetch import _uffd  # type: ignore[attr-defined]
from uffdprefetch.job import messages
from uffdprefetch.native import uffd
from uffdprefetch.native.layout import layout
from uffdprefetch.protocol import node as node_client
from uffdprefetch.protocol import wire

ENUMS: dict[str, type[IntEnum]] = {
    "up_type": wire.Type,
    "up_role": wire.Role,
    "up_serving_mode": wire.ServingMode,
    "up_bypass_reason": wire.Bypass,
}


@pytest.mark.parametrize("name", ENUMS)
def test_an_enum_has_every_number_of_the_header(name: str) -> None:
    prefix = "UP_BYPASS_" if name == "up_bypass_reason" else "UP_"
    numbers = _uffd.ffi.typeof(f"enum {name}").relements
    assert {prefix + member.name: member.value for member in ENUMS[name]} == numbers


def test_every_reason_to_leave_a_process_alone_has_its_words() -> None:
    reasons = set(_uffd.ffi.typeof("enum up_left_alone").elements)
    assert set(wire.LEFT_ALONE) | {_uffd.lib.UP_ALONE_NO} == reasons


@pytest.mark.parametrize(
    ("name", "read"),
    [("up_hello", wire.Hello), ("up_attach", wire.Attach), ("up_ack", wire.Ack),
     ("up_event", uffd.Event)],
)  # fmt: skip
def test_a_tuple_has_the_fields_of_its_struct(name: str, read: Any) -> None:
    fields = _uffd.ffi.typeof(f"struct {name}").fields
    assert read._fields == tuple(field for field, _ in fields)


def test_a_layout_is_where_the_c_compiler_puts_each_field() -> None:
    data = random.Random(7).randbytes(wire.ATTACH.size)
    attach = _uffd.ffi.from_buffer("struct up_attach *", data)
    assert wire.attach(data) == tuple(getattr(attach, name) for name in wire.Attach._fields)
    command = _uffd.ffi.new("struct up_command *", {"count": 2, "page": [5, 1 << 40]})
    packed = wire.COMMAND.pack(0, 0, 2, 0, *wire._padded([5, 1 << 40]))
    assert bytes(_uffd.ffi.buffer(command)) == packed


def test_the_largest_body_fits_into_a_message() -> None:
    bodies = [wire.HELLO, wire.ATTACH, wire.COMMAND, wire.ACK, wire.FILE, wire.GONE, wire.WELCOME]
    assert max(body.size for body in bodies) + wire.HEADER.size <= wire.MESSAGE_BYTES


def test_a_hello_of_the_c_layout_is_read_field_by_field() -> None:
    numbers = [2, 11, 12, 13, 14, 15, 16, 5, 38, 8191, 17, 4096]
    read = wire.hello(struct.pack("<I6iIiIiI", *numbers) + b"a name that is 1".ljust(16, b"\0"))
    assert list(read) == [*numbers, "a name that is 1"]
    assert wire.hello(bytes(wire.HELLO.size)).command == ""
    assert "\ufffd" in wire.hello(bytes(48) + b"\xff\xfe" + bytes(14)).command


def test_a_command_carries_its_pages_in_order_and_no_more_than_fit() -> None:
    message = wire.command(wire.Type.REARM, 7, 9, [5, 1 << 40])
    kind, body = wire.unpack(message)
    sequence, region, count, _, *pages = wire.COMMAND.unpack_from(body)
    assert (kind, sequence, region, count) == (wire.Type.REARM, 7, 9, 2)
    assert pages == [5, 1 << 40] + [0] * (wire.PAGES_MAX - 2)
    with pytest.raises(ValueError, match="29 pages"):
        wire.command(wire.Type.REARM, 1, 1, list(range(29)))


def test_unpack_refuses_random_bytes_of_any_length() -> None:
    source = random.Random(20240229)
    for _ in range(20_000):
        length = source.choice([0, 1, 7, 8, 255, 256, 256, 256, 257, 4096])
        data = bytearray(source.randbytes(length))
        if length >= 8 and source.random() < 0.7:
            # near misses: one of magic, version, type is wrong
            fields = [wire.MAGIC, wire.VERSION, source.choice([0, 6, 15, 24, 31, 41, 65535])]
            if source.random() < 0.5:
                fields[2] = source.choice(list(wire.Type))
                broken = source.randrange(2)
                fields[broken] = fields[broken] ^ (1 << source.randrange(16))
            data[:8] = struct.pack("<IHH", *fields)
        with pytest.raises(wire.WireError):
            wire.unpack(bytes(data))


def test_unpack_takes_what_pack_made() -> None:
    for kind in wire.Type:
        body = random.Random(kind).randbytes(wire.MESSAGE_BYTES - wire.HEADER.size)
        assert wire.unpack(wire.pack(kind, body)) == (kind, body)


def test_who_loads_no_c_has_the_same_messages() -> None:
    for name in ("MAGIC", "VERSION", "MESSAGE_BYTES"):
        assert getattr(messages, name) == getattr(wire, name)
    for name in ("HELLO", "WELCOME", "JOB", "FINISH", "SUMMARY", "SNAPSHOT", "PLAN"):
        assert getattr(messages, name) == wire.Type[name]
    for name in ("LAUNCHER", "WATCHER", "PLANNER"):
        assert getattr(messages, name) == wire.Role[name]
    data = random.Random(8).randbytes(wire.MESSAGE_BYTES)
    assert messages.HEADER.unpack_from(data) == wire.HEADER.unpack_from(data)
    # of a hello it writes the first fields: the others are zero
    assert messages.HELLO_BODY.unpack_from(data) == wire.HELLO.unpack_from(data)[:7]
    for name in ("WELCOME", "JOB", "SUMMARY", "PLAN"):
        body = getattr(messages, f"{name}_BODY")
        assert body.unpack_from(data) == getattr(wire, name).unpack_from(data)
    assert messages.FINISH_BODY.unpack_from(data) == layout("up_finish").unpack_from(data)
    assert wire.unpack(messages.pack(messages.JOB, data[:4])) == (
        wire.Type.JOB, data[:4].ljust(wire.MESSAGE_BYTES - wire.HEADER.size, b"\0"),
    )  # fmt: skip


def test_the_launcher_refuses_what_is_not_a_message() -> None:
    good = wire.pack(wire.Type.WELCOME)
    with pytest.raises(node_client.NotOurService, match=f"version {wire.VERSION + 1}"):
        node_client.unpack(good[:4] + struct.pack("<H", wire.VERSION + 1) + good[6:])
    for bad in (good[:-1], good + b"x", b"\1" + good[1:]):
        with pytest.raises(node_client.NotOurService):
            node_client.unpack(bad)
    with pytest.raises(node_client.ServiceGone):
        node_client.unpack(b"")


def test_runs_that_do_not_fit_into_a_message_are_refused() -> None:
    runs = [value for i in range(wire.RUNS_MAX) for value in (i * 8192, i * 8192 + 4096)]
    told = wire.TOUCHED.pack(5, wire.RUNS_MAX, *runs)
    assert wire.touched(told) == (5, [(i * 8192, i * 8192 + 4096) for i in range(wire.RUNS_MAX)])
    with pytest.raises(wire.WireError):
        wire.touched(wire.TOUCHED.pack(5, wire.RUNS_MAX + 1, *runs))
