# SPDX-License-Identifier: Apache-2.0
"""The messages: Python's layouts are the C compiler's, and nothing else is let in."""

from __future__ import annotations

import random
import re
import struct

import pytest
from paths import ROOT

from uffdprefetch.native import uffd
from uffdprefetch.protocol import node as node_client
from uffdprefetch.protocol import wire

HEADER_H = (ROOT / "csrc" / "common" / "wire.h").read_text()


def enum(prefix: str) -> dict[str, int]:
    """The enumerators UP_<prefix>... = N of wire.h, without the prefix."""
    found = re.findall(rf"\bUP_{prefix}(\w+) = (\d+)\b", HEADER_H)
    return {name: int(value) for name, value in found}


def define(name: str) -> int:
    found = re.search(rf"#define {name} (?:\(1u << (\d+)\)|(0x[0-9a-f]+|\d+)u?)", HEADER_H)
    assert found is not None, name
    return 1 << int(found[1]) if found[1] else int(found[2], 0)


def test_every_layout_is_as_long_as_the_c_compiler_makes_it() -> None:
    message, hello, attach, command, ack, event, ring, pages, version, magic = uffd.LAYOUT
    assert message == wire.MESSAGE_BYTES == node_client.MESSAGE_BYTES
    assert hello == wire.HELLO.size
    assert attach == wire.ATTACH.size
    assert command == wire.COMMAND.size
    assert ack == wire.ACK.size
    assert event == uffd.EVENT.size
    assert ring > 2048 * event  # the counters are before the events
    assert (pages, version, magic) == (wire.PAGES_MAX, wire.VERSION, wire.MAGIC)


def test_the_largest_body_fits_into_a_message() -> None:
    bodies = [wire.HELLO, wire.ATTACH, wire.COMMAND, wire.ACK, wire.FILE, wire.GONE, wire.WELCOME]
    assert max(body.size for body in bodies) + wire.HEADER.size <= wire.MESSAGE_BYTES


def test_every_type_verdict_role_and_flag_has_the_number_of_the_header() -> None:
    c = enum("")
    for kind in wire.Type:
        assert c[kind.name] == kind
    block = HEADER_H.split("enum up_type {")[1].split("}")[0]
    assert {k.name for k in wire.Type} == set(re.findall(r"\tUP_(\w+) = \d+,", block))
    assert (c["LAUNCHER"], c["AGENT"]) == (wire.Role.LAUNCHER, wire.Role.AGENT)
    for verdict in wire.ServingMode:
        assert c[verdict.name] == verdict
    for name in ("HELLO_UFFD", "HELLO_FORKED", "HELLO_SENDS_POOL"):
        assert define(f"UP_{name}") == getattr(wire, name)
    for name in ("ATTACH_INHERITED", "ATTACH_WRITABLE"):
        assert define(f"UP_{name}") == getattr(wire, name)


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
            fields = [wire.MAGIC, wire.VERSION, source.choice([0, 6, 15, 22, 31, 41, 65535])]
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


def test_the_launchers_copy_of_the_protocol_is_the_same_protocol() -> None:
    assert (node_client.MAGIC, node_client.VERSION) == (wire.MAGIC, wire.VERSION)
    for name in ("HELLO", "WELCOME", "JOB", "FINISH", "SUMMARY"):
        assert getattr(node_client, name) == wire.Type[name]
    assert node_client.LAUNCHER == wire.Role.LAUNCHER
    # a launcher's hello is read by the service's layout: the fields that it leaves out are zero
    hello = node_client._HELLO.pack(1, 100, 99, 3, 1, 8, 0)
    kind, body = wire.unpack(node_client.pack(node_client.HELLO, hello))
    assert kind == wire.Type.HELLO
    read = wire.hello(body)
    assert (read.role, read.pid, read.ppid) == (wire.Role.LAUNCHER, 100, 99)
    assert (read.rank, read.local_rank, read.world, read.flags) == (3, 1, 8, 0)
    # and the service's answers by the launcher's
    welcome = wire.pack(wire.Type.WELCOME, wire.WELCOME.pack(77))
    kind, payload = node_client.unpack(welcome)
    assert kind == node_client.WELCOME and node_client._WORD.unpack_from(payload) == (77,)


def test_the_launcher_refuses_what_is_not_a_message() -> None:
    good = wire.pack(wire.Type.WELCOME)
    with pytest.raises(node_client.NotOurService, match=f"version {wire.VERSION + 1}"):
        node_client.unpack(good[:4] + struct.pack("<H", wire.VERSION + 1) + good[6:])
    for bad in (good[:-1], good + b"x", b"\1" + good[1:]):
        with pytest.raises(node_client.NotOurService):
            node_client.unpack(bad)
    with pytest.raises(node_client.ServiceGone):
        node_client.unpack(b"")
