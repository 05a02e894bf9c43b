# SPDX-License-Identifier: Apache-2.0
"""A list of a data set whose element i may lead to the record or the file of sample i, as it is
published."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from .containers import path_type

#: Elements checked for their type before the whole list is.
PROBES = 16


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
                if _only(values, path_type()):
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


def probe_indices(samples: int, most: int = PROBES) -> list[int]:
    """Evenly spaced indices at which a list's elements are checked first."""
    if samples <= most:
        return list(range(samples))
    return [k * (samples - 1) // (most - 1) for k in range(most)]


def kind_of(probes: list[Any]) -> str | None:
    """The kind of a list with such elements; None: it is no candidate."""
    types = set(map(type, probes))
    for kind, name in ((str, "text"), (bytes, "bytes"), (int, "ints")):
        if types == {kind}:
            return name
    return "text" if types == {path_type()} else None
