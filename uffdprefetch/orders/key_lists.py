# SPDX-License-Identifier: Apache-2.0
"""Lists among a data set's attributes whose element i may be, or lead to, the key of sample i.
Pure; the input is another process's and untrusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array

KINDS = ("bytes", "text", "ints")
_NONE: Array = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class KeyList:
    """name: the attribute, for people. kind: "bytes", "text" (UTF-8), "ints". numbers: int64, of
    ints. Of the others element i is ``data[ends[i-1] : ends[i]]`` (uint8; ends int64)."""

    name: str
    kind: str
    numbers: Array
    ends: Array
    data: Array

    def __len__(self) -> int:
        return len(self.numbers) if self.kind == "ints" else len(self.ends)

    def take(self, samples: Array) -> list[bytes]:
        """The elements of these samples (0 <= sample < len), numbers as decimal text. Raises
        IndexError."""
        wanted = np.asarray(samples).astype(np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"{self.name}: no such element: there are {len(self)}")
        if self.kind == "ints":
            return [b"%d" % number for number in self.numbers[wanted].tolist()]
        ends = self.ends[wanted]
        starts: Array = np.where(wanted > 0, self.ends[wanted - 1], 0)
        view = self.data.data
        return [bytes(view[a:b]) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]

    def find(self, element: bytes) -> Array:
        """The numbers of the elements that are this one, int64; of kind "bytes" or "text". Takes
        some milliseconds for each million."""
        found: Array = np.flatnonzero(np.diff(self.ends, prepend=0) == len(element))
        for back in range(1, len(element) + 1):  # names differ in their ends, mostly
            if not len(found):
                break
            found = found[self.data[self.ends[found] - back] == element[-back]]
        return found

    @classmethod
    def parse(cls, name: str, kind: str, data: Any) -> KeyList:
        """Parse the bytes of an announcement's array: int64 for ints, else what
        job/channel.packed() makes: how many (int64), where each ends (int64), all their bytes.

        ``data``: bytes, or an array of uint8 (which is not copied). Raises ValueError.
        """
        if kind not in KINDS:
            raise ValueError(f"{name}: a list of kind {kind!r}, not one of {', '.join(KINDS)}")
        raw: Array = np.frombuffer(memoryview(data).cast("B"), np.uint8)
        if kind == "ints":
            if len(raw) % 8:
                raise ValueError(f"{name}: {len(raw)} bytes are no array of int64")
            return cls(name, kind, raw.view("<i8"), _NONE, raw[:0])
        if len(raw) < 8:
            raise ValueError(f"{name}: {len(raw)} bytes are no packed list")
        count = int(raw[:8].view("<i8")[0])
        if not 0 <= count <= len(raw) // 8 - 1:
            raise ValueError(f"{name}: {count} elements cannot be in {len(raw)} bytes")
        begins = 8 * (count + 1)
        ends: Array = raw[8:begins].view("<i8")
        rest = raw[begins:]
        if (int(ends[-1]) if count else 0) != len(rest):
            raise ValueError(f"{name}: the elements do not end where the list does")
        if count and (int(ends[0]) < 0 or (ends[1:] < ends[:-1]).any()):
            raise ValueError(f"{name}: the ends of the elements do not ascend")
        return cls(name, kind, _NONE, ends, rest)
