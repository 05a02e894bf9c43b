# SPDX-License-Identifier: Apache-2.0
"""Documents of parts, which are dataclasses, as JSON: the summary, and the snapshot of a run.

What the parts of a snapshot are is in protocol/snapshot.py, which a service loads when somebody
watches.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Quantiles:
    """Of a histogram of times; ``sum`` where it is told."""

    count: int
    p50: int | None
    p99: int | None
    max: int | None
    sum: int | None = None


def encode(document: Any) -> str:
    """A snapshot, or a summary that has some of its parts, as JSON."""
    return json.dumps(document, default=_object)


def _object(part: Any) -> dict[str, Any]:
    """A part's object. Fields with a default are left out while none of them is known."""
    values, kind = vars(part), part.__class__
    spare = [name for name, _, optional in _keys(kind) if optional]
    if any(values[name] is not None for name in spare):
        return values
    return {name: value for name, value in values.items() if name not in spare}


@cache
def _keys(part: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Name, type and whether a document may lack it, of each field of a dataclass."""
    types = get_type_hints(part)
    return tuple((f.name, types[f.name], f.default is not MISSING) for f in fields(part))


def decoded(kind: Any, value: Any, where: str) -> Any:
    """``value`` as a ``kind``: dataclass, tuple[T, ...], dict[str, T], T | None, Any, or scalar."""
    if type(value) is kind or kind is Any or (kind is float and type(value) is int):
        return value
    origin, of, is_part = get_origin(kind), get_args(kind), is_dataclass(kind)
    if origin is UnionType:
        return None if value is None else decoded(of[0], value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(decoded(of[0], one, f"{where}[{i}]") for i, one in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {name: decoded(of[1], one, f"{where}.{name}") for name, one in value.items()}
    if is_part and isinstance(value, dict):
        read = {}
        for name, part, optional in _keys(kind):
            if name in value:
                read[name] = decoded(part, value[name], f"{where}.{name}")
            elif not optional:
                raise ValueError(f"not a snapshot ({where}.{name} is missing)")
        return kind(**read)
    wanted, found = getattr(kind, "__name__", kind), type(value).__name__
    raise ValueError(f"not a snapshot ({where}: {found} instead of {wanted})")
