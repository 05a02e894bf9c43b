# SPDX-License-Identifier: Apache-2.0
"""Marks as compact text: columns of integers as byte planes, deflated, in base64.

page/data.js is the other side. A blob is the length of a JSON index (4 bytes, little-endian), the
index, then planes. A column is [mode, planes, base, scale] in the index: `planes` times one byte
per value, the low bytes of all values first, so that deflate finds what repeats.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.trace.analyse.density import Grid
from uffdprefetch.trace.analyse.marks import KINDS, MarkStream

#: Modes of a column. FRAME: base + x. RISING: base + the running sum of x. JUMPING: the same with
#: zigzag differences. LOGARITHM: 1000 * (2^(x / 16) - 1). REMAINDER, of `before` only:
#: (base + offset) mod length, and no planes: the kernel's fault-around begins at multiples of its
#: size. SIGNED: base + zigzag x. All times `scale`.
FRAME, RISING, JUMPING, LOGARITHM, REMAINDER, SIGNED = range(6)
LOG_STEPS = 16

#: Bytes of base64 that all windows may have: with the grid (some 2 MB) and the rest the page stays
#: below 20 MB.
BYTES_MAX = 15_500_000
#: A window is what the page unpacks at once.
MARKS_PER_WINDOW = 100_000
WINDOWS_MAX = 128
#: Streams times windows: each costs some bytes of index and a call.
PIECES_MAX = 10_000
#: Steps of time over the whole trace, and what is left of them when space is short.
TIME_STEPS, TIME_STEPS_COARSE = 1 << 27, 1 << 23
#: Up to here durations are exact to a step of time; in more marks they are rounded to 2 %.
EXACT_MARKS = 200_000
_TIME_STEP_MIN_NS = 100


class _Blob:
    """Columns on their way into one blob."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def _put(self, mode: int, values: Array, base: int, scale: int) -> list[int]:
        most = int(values.max()) if len(values) else 0
        planes = (most.bit_length() + 7) // 8
        for plane in range(planes):
            self.parts.append(((values >> (8 * plane)) & 0xFF).astype(np.uint8).tobytes())
        return [mode, planes, base, scale]

    def frame(self, values: Array, scale: int = 1) -> list[int]:
        """Multiples of `scale`, as differences to the least of them."""
        scaled: Array = values // scale
        base = int(scaled.min()) if len(scaled) else 0
        return self._put(FRAME, scaled - base, base, scale)

    def rising(self, values: Array) -> list[int]:
        """Values that never fall."""
        steps = np.diff(values, prepend=values[:1])
        return self._put(RISING, steps, int(values[0]) if len(values) else 0, 1)

    def jumping(self, values: Array, scale: int) -> list[int]:
        """Multiples of `scale` of which the next is near the one before."""
        scaled: Array = values // scale
        steps = np.diff(scaled, prepend=scaled[:1])
        zigzag = (steps << 1) ^ (steps >> 63)
        return self._put(JUMPING, zigzag, int(scaled[0]) if len(scaled) else 0, scale)

    def signed(self, values: Array, base: int, scale: int) -> list[int]:
        """Multiples of `scale` that are mostly `base`."""
        away: Array = values // scale - base
        return self._put(SIGNED, (away << 1) ^ (away >> 63), base, scale)

    def logarithm(self, values: Array) -> list[int]:
        """Durations in ns, to 2 %, from 1 us on."""
        codes = np.rint(np.log2(1 + np.maximum(values, 0) / 1000) * LOG_STEPS).astype(np.int64)
        return self._put(LOGARITHM, codes, 0, 1)

    def text(self, index: Any) -> str:
        """The blob in base64."""
        head = json.dumps(index, separators=(",", ":")).encode()
        body = b"".join([len(head).to_bytes(4, "little"), head, *self.parts])
        return base64.b64encode(zlib.compress(body, 6)).decode()


def _unit(stream: MarkStream) -> int:
    """The largest number of bytes that every place and length is a multiple of."""
    if not len(stream):
        return 1
    parts = (stream.offset, stream.before, stream.length)
    return max(1, int(np.gcd.reduce([int(np.gcd.reduce(part)) for part in parts])))


@dataclass(frozen=True)
class _Shape:
    """How the windows of a trace are packed."""

    step_ns: int
    exact: bool
    units: list[int]


def _window(streams: list[MarkStream], bounds: list[Array], number: int, shape: _Shape) -> str:
    blob = _Blob()
    index: list[list[Any]] = []
    # Of each file and rank the piece with most accesses: what is missed or read ahead is mostly
    # next to one of them.
    bases: dict[tuple[int, int], tuple[int, MarkStream]] = {}
    for stream, bound, unit in zip(streams, bounds, shape.units, strict=True):
        part = stream.part(slice(int(bound[number]), int(bound[number + 1])))
        if not len(part):
            continue
        base, near = bases.get((part.file, part.rank)), None
        if base is not None and part.layer != "demand":
            near = _near(blob, part, base[1], unit, shape.step_ns)
        columns = near or [
            blob.rising(part.start_ns // shape.step_ns),
            blob.jumping(part.offset, unit),
        ]
        columns += [
            _before(blob, part, unit),
            blob.frame(part.length, unit),
            blob.frame(part.duration_ns, 100) if shape.exact else blob.logarithm(part.duration_ns),
        ]
        entry = [part.file, part.rank, KINDS.index(part.kind), len(part), columns]
        if near and base:
            entry.append(base[0])
        if part.layer == "demand" and (base is None or len(part) > len(base[1])):
            bases[part.file, part.rank] = (len(index), part)
        index.append(entry)
    return blob.text(index)


def _near(
    blob: _Blob, part: MarkStream, base: MarkStream, unit: int, step_ns: int
) -> list[list[int]] | None:
    """Start and offset as differences to the last access before, as a third column in front names
    it; None when most are not at one distance from it."""
    start: Array = part.start_ns // step_ns
    accesses: Array = base.start_ns // step_ns
    which = np.maximum(np.searchsorted(accesses, start, side="right") - 1, 0)
    away = (part.offset - base.offset[which]) // unit
    if ((part.offset - base.offset[which]) % unit).any():
        return None
    values, counts = np.unique(away, return_counts=True)
    if counts.max() * 2 < len(part):
        return None
    return [
        blob.rising(which),
        blob.frame(start - accesses[which]),
        [*blob.signed(away, int(values[counts.argmax()]), 1)[:3], unit],
    ]


def _before(blob: _Blob, part: MarkStream, unit: int) -> list[int]:
    """How far into its range each mark was entered; mostly that follows from the offset."""
    length = np.maximum(part.length, 1)
    base = (part.before[0] - part.offset[0]) % length[0]
    if part.before.any() and ((part.offset + base) % length == part.before).all():
        return [REMAINDER, 0, int(base), 1]
    return blob.frame(part.before, unit)


def windows(streams: list[MarkStream], span_ns: int, bytes_max: int = BYTES_MAX) -> dict[str, Any]:
    """All marks in windows of time of equal numbers of marks.

    Gives ``step_ns`` (the resolution in time), ``exact`` (whether durations are), ``kinds``, and
    ``windows``: [start_seconds, end_seconds, marks, text], where text is None for windows that
    found no space within ``bytes_max``; those that have it are spread evenly over the trace.
    """
    total = sum(len(s) for s in streams)
    shape = _Shape(
        max(_TIME_STEP_MIN_NS, -(-span_ns // TIME_STEPS)),
        total <= EXACT_MARKS,
        [_unit(s) for s in streams],
    )
    answer: dict[str, Any] = {"kinds": KINDS, "exact": shape.exact, "windows": []}
    if not total:
        return {**answer, "step_ns": shape.step_ns}
    most = max(1, min(WINDOWS_MAX, PIECES_MAX // len(streams)))
    n = max(1, min(most, -(-total // MARKS_PER_WINDOW)))
    cuts = _cuts(streams, n, total)
    n = len(cuts) - 1
    bounds: list[Any] = [np.searchsorted(s.start_ns, cuts) for s in streams]

    def pack(numbers: range | list[int]) -> dict[int, str]:
        return {i: _window(streams, bounds, i, shape) for i in numbers}

    # A few windows tell whether all will fit, at a fraction of the time.
    sample = pack(range(0, n, max(1, n // 8)))
    if sum(map(len, sample.values())) * n / len(sample) > bytes_max * 0.97:
        coarse = max(shape.step_ns, -(-span_ns // TIME_STEPS_COARSE))
        shape = _Shape(coarse, shape.exact, shape.units)
        sample = pack(list(sample))
    texts = _that_fit(pack, sample, n, bytes_max)
    for i in range(n):
        marks = sum(int(b[i + 1] - b[i]) for b in bounds)
        start, end = int(cuts[i]) / 1e9, min(int(cuts[i + 1]), span_ns) / 1e9
        answer["windows"].append([start, end, marks, texts.get(i)])
    return {**answer, "step_ns": shape.step_ns}


def _cuts(streams: list[MarkStream], n: int, total: int) -> Array:
    """Where windows begin, and the end of the last: all of about the same number of marks."""
    stride = max(1, total // 400_000)
    times = np.sort(np.concatenate([s.start_ns[::stride] for s in streams]))
    inner = times[[len(times) * i // n for i in range(1, n)]]
    last = max(int(s.start_ns[-1]) for s in streams if len(s)) + 1
    return np.unique(np.concatenate([[0], inner, [last]]).astype(np.int64))


def _that_fit(pack: Any, texts: dict[int, str], n: int, bytes_max: int) -> dict[int, str]:
    """All windows if they fit into ``bytes_max``, else evenly spaced ones that do."""
    mean = sum(map(len, texts.values())) / len(texts)
    keep = min(n, max(1, int(bytes_max / max(mean, 1))))
    while True:
        wanted = [i for i in range(n) if i == 0 or i * keep // n != (i - 1) * keep // n]
        texts |= pack([i for i in wanted if i not in texts])
        used = sum(len(texts[i]) for i in wanted)
        if used <= bytes_max or len(wanted) == 1:
            return {i: texts[i] for i in wanted}
        keep = max(1, int(keep * bytes_max / used * 0.98))


def cells(grid: Grid) -> str:
    """A grid's cells as one blob; counts to 4 %, as 1 + code of their logarithm."""
    blob = _Blob()
    index = []
    for some in grid.cells:
        if not len(some.index):
            continue
        codes = np.rint(np.log2(some.count) * LOG_STEPS).astype(np.int64)
        columns = [blob.rising(some.index), blob.frame(codes)]
        index.append([some.file, some.rank, KINDS.index(some.kind), len(some.index), columns])
    return blob.text(index)
