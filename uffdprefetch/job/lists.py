# SPDX-License-Identifier: Apache-2.0
"""Lists in a dataset's attributes whose element i may lead to the record of sample i.

Keys, paths, record numbers, kept as ``self.keys``, ``self.samples = [(path, label), ...]``,
``self.annotations = [{"image": ...}, ...]`` or ``{0: "a", 1: "b"}``. orders/mapping.py finds which
of them are used. No code of the user's is called: only exact built-in types and numpy's array
are read, through the instance dictionaries, and no array that maps a file.
"""

from __future__ import annotations

import os
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

#: Bytes of all lists of one announcement.
CAP_BYTES = 256 << 20
#: Columns of one dataset: bounds the time for one with a thousand attributes.
CAP_LISTS = 32
#: Elements checked for their type before the whole list is.
_PROBES = 16
#: Fields of an element that become columns.
_FIELDS = 8
_BUILTIN = (list, tuple, dict)
#: Packages whose objects are not searched for lists.
_FOREIGN = ("builtins", "numpy", "pandas", "pyarrow", "torch.nn", "torch.distributed", "logging")


class CandidateList:
    """A candidate list: ``count`` elements of one kind.

    ``name``: the attribute, for people, with ``[field]`` for a field of each element. ``kind``:
    "text", "bytes" or "ints". ``signature``: changes with the list or its order.
    """

    def __init__(
        self, name: str, kind: str, count: int, signature: int, values: Callable[[], Any]
    ) -> None:
        self.name, self.kind, self.count, self.signature = name, kind, count, signature
        self._values = values

    def data(self) -> bytes | None:
        """All elements as an array of an announcement: int64, or packed (channel.packed()), text as
        UTF-8. None when one of them is of another type."""
        values = self._values()
        try:
            if self.kind == "ints":
                return array("q", values).tobytes() if _only(values, int) else None
            if self.kind == "text":
                if _only(values, _path_type()):
                    values = list(map(os.fspath, values))
                if not _only(values, str):
                    return None
                body = "".join(values)
                if body.isascii():  # a million paths at once
                    return _packed(values, body.encode())
                values = [str.encode(value, "utf-8", "surrogateescape") for value in values]
            return _packed(values, b"".join(values)) if _only(values, bytes) else None
        except (TypeError, OverflowError, UnicodeError):
            return None


def _packed(strings: Any, body: bytes) -> bytes:
    """As channel.packed(), with ``body`` the strings' concatenated bytes."""
    ends = array("q", accumulate(map(len, strings)))
    return array("q", (len(ends),)).tobytes() + ends.tobytes() + body


def _only(values: Any, kind: Any) -> bool:
    return isinstance(values, array) or set(map(type, values)) <= {kind}


def _path_type() -> Any:
    return getattr(sys.modules.get("pathlib"), "PosixPath", None)


def inventory(dataset: object) -> dict[str, tuple[int, int]]:
    """Its present containers: name -> (id, length)."""
    return {name: (id(value), len(value)) for name, value in _containers(dataset)}


def columns(dataset: object, samples: int) -> list[CandidateList]:
    """Candidate lists of a dataset of ``samples`` samples, cut to that length."""
    return _candidates(dataset, samples, None)


def late_columns(dataset: object, least: int, names: set[str]) -> list[CandidateList]:
    """Candidate lists of at least ``least`` elements in the attributes ``names``, uncut."""
    return _candidates(dataset, least, names)


def _candidates(dataset: object, samples: int, names: set[str] | None) -> list[CandidateList]:
    found: list[CandidateList] = []
    seen: set[int] = set()
    for name, value in _containers(dataset):
        if len(value) < max(samples, 1) or id(value) in seen:
            continue
        seen.add(id(value))  # the same list under two names
        if names is None:
            found += _columns(name, value, samples)
        elif name in names:
            found += _columns(name, value, len(value))
    return found[:CAP_LISTS]


# ---- where they are ------------------------------------------------------------------------------


def _containers(dataset: object) -> Iterator[tuple[str, Any]]:
    """Attributes that are containers, and those of attributes that are objects: (name, value)."""
    for name, value in attributes(dataset):
        if _is_container(value):
            yield name, value
        elif _is_holder(value):
            for inner, member in attributes(value):
                if _is_container(member):
                    yield f"{name}.{inner}", member


def attributes(thing: object) -> list[tuple[str, Any]]:
    try:  # not vars(): __getattribute__ may be the user's
        state = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return []
    return list(state.items()) if type(state) is dict else []


def _is_container(value: object) -> bool:
    return type(value) in _BUILTIN or _is_array(value)


def _is_array(value: Any) -> bool:
    """A one-dimensional numpy array whose base is known to be no mapped file."""
    numpy: Any = sys.modules.get("numpy")
    kind = getattr(numpy, "ndarray", None)
    if kind is None or type(value) is not kind or value.ndim != 1:
        return False
    while type(value) is kind and value.base is not None:
        value = value.base
    return type(value) is kind or type(value) is bytes


def _is_holder(value: object) -> bool:
    kind = type(value)
    return not issubclass(kind, type) and not any(
        (str(base.__module__) + ".").startswith(name + ".")
        for base in kind.__mro__[:-1] or (kind,)
        for name in _FOREIGN
    )


# ---- what is in them -----------------------------------------------------------------------------


def _columns(name: str, value: Any, samples: int) -> list[CandidateList]:
    if type(value) is dict:
        if any(number not in value for number in _probe_indices(samples)):
            return []
        return _of_rows(name, value, samples, lambda: [value[i] for i in range(samples)])
    if type(value) in (list, tuple):
        return _of_rows(name, value, samples, lambda: value[:samples])
    return _of_array(name, value, samples)


def _probe_indices(samples: int) -> list[int]:
    """Evenly spaced indices at which a list's elements are checked first."""
    if samples <= _PROBES:
        return list(range(samples))
    return [k * (samples - 1) // (_PROBES - 1) for k in range(_PROBES)]


def _of_array(name: str, value: Any, samples: int) -> list[CandidateList]:
    kind = value.dtype.kind
    if kind == "O":
        return _of_rows(name, value, samples, lambda: value[:samples].tolist())
    if kind not in "SUiu" or (kind == "U" and value.dtype.itemsize * samples > 4 * CAP_BYTES):
        return []
    probes = [value[i].item() for i in _probe_indices(samples)]
    if kind in "iu":
        return [
            CandidateList(
                name, "ints", samples, _signature(value, probes),
                lambda: array("q", value[:samples].astype("<i8").tobytes()),
            )
        ]  # fmt: skip
    return [
        CandidateList(
            name, "bytes" if kind == "S" else "text", samples, _signature(value, probes),
            lambda: value[:samples].tolist(),
        )
    ]  # fmt: skip


def _of_rows(name: str, value: Any, samples: int, rows: Callable[[], Any]) -> list[CandidateList]:
    """Columns of a sequence of elements, of lists of elements, or of dictionaries."""
    probes = [value[i] for i in _probe_indices(samples)]
    kind = _kind(probes)
    if kind is not None:
        return [CandidateList(name, kind, samples, _signature(value, probes), rows)]
    fields: list[Any] = []
    if all(type(row) is tuple or type(row) is list for row in probes):
        fields = list(range(min(min(map(len, probes)), _FIELDS)))
    elif all(type(row) is dict for row in probes):
        fields = [
            key for key in probes[0] if type(key) is str and all(key in row for row in probes)
        ]
    found = []
    for field in fields[:_FIELDS]:
        part = [row[field] for row in probes]
        kind = _kind(part)
        if kind is not None:
            found.append(
                CandidateList(
                    f"{name}[{field}]", kind, samples, _signature(value, part),
                    partial(_field, rows, field),
                )
            )  # fmt: skip
    return found


def _field(get_rows: Callable[[], Any], field: Any) -> list[Any]:
    rows = get_rows()
    if set(map(type, rows)) <= {tuple, list, dict}:
        try:
            return [row[field] for row in rows]
        except (KeyError, IndexError):
            pass
    return [None]  # of no kind: data() is None


def _kind(probes: list[Any]) -> str | None:
    types = set(map(type, probes))
    for kind, name in ((str, "text"), (bytes, "bytes"), (int, "ints")):
        if types == {kind}:
            return name
    return "text" if types == {_path_type()} else None


def _signature(value: Any, probes: list[Any]) -> int:
    return zlib.crc32(repr((id(value), len(value), probes)).encode("utf-8", "surrogatepass"))
