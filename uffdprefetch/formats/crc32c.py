# SPDX-License-Identifier: Apache-2.0
"""CRC-32C (RFC 3720, appendix B.4) of many pieces at once, with numpy. Pure.

A CRC is linear: that of a piece is the xor of its blocks' registers, each advanced over the zero
bytes behind it. So all pieces' blocks are processed in parallel, a byte of each in one step.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from uffdprefetch.base.ranges import spread
from uffdprefetch.formats.reader import Array

_POLYNOMIAL = 0x82F63B78
_BLOCK_BYTES = 64
_ONES = np.uint32(0xFFFFFFFF)


def _table() -> Array:
    """The byte table of the reflected register."""
    table: Array = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


_TABLE = _table()


def _step(register: Array, byte: Array) -> Array:
    moved: Array = _TABLE[(register ^ byte) & 0xFF] ^ register >> 8
    return moved


@cache
def _move(power: int) -> Array:
    """Advancing over 2^power zero bytes, as four tables: one for each byte of the register."""
    values: Array = np.arange(256, dtype=np.uint32)
    tables: Array = np.stack([values << (8 * place) for place in range(4)])
    if power == 0:
        return _step(tables, np.uint32(0))
    half = _move(power - 1)
    return _moved_by(half, _moved_by(half, tables))


def _moved_by(tables: Array, register: Array) -> Array:
    moved: Array = tables[0][register & 0xFF]
    for place in range(1, 4):
        moved = moved ^ tables[place][register >> (8 * place) & 0xFF]
    return moved


def _moved(register: Array, distance_bytes: Array) -> Array:
    """Registers (uint32) advanced over ``distance_bytes`` zero bytes each."""
    power = 0
    while len(distance_bytes) and int(distance_bytes.max()) >> power:
        which = np.flatnonzero(distance_bytes >> power & 1)
        register[which] = _moved_by(_move(power), register[which])
        power += 1
    return register


def of_words(words: Array) -> Array:
    """The CRC of each row of ``words``, uint8 of shape (n, length); for short rows."""
    register: Array = np.full(len(words), _ONES, np.uint32)
    for place in range(words.shape[1]):
        register = _step(register, words[:, place])
    return register ^ _ONES


def of_windows(data: Array, length: int) -> Array:
    """The CRC of data[i : i + length] for every i; ``data``: uint8."""
    count = max(len(data) - length + 1, 0)
    register: Array = np.full(count, _ONES, np.uint32)
    for place in range(length):
        register = _step(register, data[place : place + count])
    return register ^ _ONES


def registers(data: Array, starts: Array, lengths: Array) -> Array:
    """The register after each piece [start, +length) of ``data`` (uint8), from zero."""
    blocks: Array = -(-lengths // _BLOCK_BYTES)
    owner, inner = spread(blocks)
    # blocks are aligned to the end: the first is short, leading zeros leave the register zero
    behind = (blocks[owner] - 1 - inner) * _BLOCK_BYTES
    end = (starts + lengths)[owner] - behind
    before = np.maximum(end - _BLOCK_BYTES, starts[owner])
    padded: Array = np.concatenate([np.zeros(_BLOCK_BYTES, np.uint8), data])
    register: Array = np.zeros(len(owner), np.uint32)
    for place in range(_BLOCK_BYTES):
        at = end - _BLOCK_BYTES + place
        byte = np.where(at >= before, padded[at + _BLOCK_BYTES], 0)
        register = _step(register, byte)
    register = _moved(register, behind)
    found: Array = np.zeros(len(starts), np.uint32)
    some = blocks > 0
    if some.any():
        first = (np.cumsum(blocks) - blocks)[some]
        found[some] = np.bitwise_xor.reduceat(register, first)
    return found


def joined(left: Array, right: Array, right_bytes: Array) -> Array:
    """The register after two adjacent pieces, from both of theirs."""
    return _moved(left.copy(), right_bytes) ^ right


def finished(register: Array, lengths: Array) -> Array:
    """The CRC of pieces of these lengths (bytes) from their registers."""
    begun = _moved(np.full(len(lengths), _ONES, np.uint32), lengths)
    return register ^ begun ^ _ONES


def masked(crc: Array) -> Array:
    """A checksum as TFRecord writes it (tensorflow/core/lib/hash/crc32c.h, Mask())."""
    turned: Array = (crc >> 15 | crc << 17) + np.uint32(0xA282EAD8)
    return turned
