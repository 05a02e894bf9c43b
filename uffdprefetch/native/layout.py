# SPDX-License-Identifier: Apache-2.0
"""The structs and numbers of csrc/common/wire.h, as the C compiler has them."""

from __future__ import annotations

import struct
from typing import Any

from uffdprefetch import _uffd  # type: ignore[attr-defined]

_ffi: Any = _uffd.ffi

#: Every constant and enumerator of wire.h and helper.h is an attribute, by its name in C.
CONSTANTS: Any = _uffd.lib

_CODES = {
    "char": "s", "uint16_t": "H", "int32_t": "i", "uint32_t": "I", "int64_t": "q", "uint64_t": "Q",
}  # fmt: skip


def layout(name: str) -> struct.Struct:
    """``struct NAME`` for the struct module: one value a field or item of an array, bytes for an
    array of char. Raises KeyError for a field of another type."""
    kind = _ffi.typeof(f"struct {name}")
    code, end = "<", 0
    for _, field in kind.fields:
        is_array = field.type.kind == "array"
        item, count = (field.type.item, field.type.length) if is_array else (field.type, 1)
        code += f"{field.offset - end}x{count}{_CODES[item.cname]}"
        end = field.offset + _ffi.sizeof(field.type)
    return struct.Struct(f"{code}{_ffi.sizeof(kind) - end}x")
