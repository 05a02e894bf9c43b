# SPDX-License-Identifier: Apache-2.0
"""Forms of a file's keys that encode a number. Pure.

"image-%09d" is a form, so is "%d-label", and the eight bytes of a number.
"""

from __future__ import annotations

import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from uffdprefetch.base.arrays import Array

#: Forms of one file, the most frequent first.
FORMS_MAX = 16
#: Digits of a number that always fits int64; runs of digits considered in one key.
_DIGITS_MAX, _RUNS_MAX = 18, 8
#: Share of the sampled keys that a form must have; below it, it is a few names.
_SHARE_MIN = 1 / 64
_RUN = re.compile(rb"[0-9]+")


def is_number(text: bytes) -> bool:
    """Whether it is a decimal number that fits int64."""
    return len(text) <= _DIGITS_MAX and _RUN.fullmatch(text) is not None


class Form(Protocol):
    """How a key encodes a number."""

    @property
    def name(self) -> str: ...

    def keys(self, numbers: Array) -> list[bytes]:
        """The key of each number (int64); b"", which no record has, of one that cannot have any."""
        ...

    def number(self, key: bytes) -> int | None:
        """The number in a key of this form, None for another key."""
        ...


@dataclass(frozen=True)
class Decimal:
    """``prefix``, the number, ``suffix``; zeros before it up to ``width`` digits (1: none)."""

    prefix: bytes = b""
    width: int = 1
    suffix: bytes = b""

    @property
    def name(self) -> str:
        number = "%d" if self.width == 1 else f"%0{self.width}d"
        return repr(f"{shown(self.prefix)}{number}{shown(self.suffix)}")

    def keys(self, numbers: Array) -> list[bytes]:
        before, after = (part.replace(b"%", b"%%") for part in (self.prefix, self.suffix))
        form = before + b"%%0%dd" % self.width + after
        return [form % number if number >= 0 else b"" for number in numbers.tolist()]

    def number(self, key: bytes) -> int | None:
        digits = key[len(self.prefix) : len(key) - len(self.suffix)]
        if not (key.startswith(self.prefix) and key.endswith(self.suffix)):
            return None
        if not is_number(digits) or len(digits) < self.width:
            return None
        return int(digits) if len(digits) == self.width or digits[:1] != b"0" else None


@dataclass(frozen=True)
class Binary:
    """The number's ``size`` (4, 8) bytes; order: "<" or ">"."""

    size: int
    order: str

    @property
    def name(self) -> str:
        return f"as {'little' if self.order == '<' else 'big'}-endian uint{8 * self.size}"

    def keys(self, numbers: Array) -> list[bytes]:
        most = (1 << 8 * self.size) - 1 if self.size < 8 else np.iinfo(np.int64).max
        data = np.clip(numbers, 0, most).astype(f"{self.order}u{self.size}").tobytes()
        fits = ((numbers >= 0) & (numbers <= most)).tolist()
        return [
            data[i * self.size : (i + 1) * self.size] if fit else b"" for i, fit in enumerate(fits)
        ]

    def number(self, key: bytes) -> int | None:
        found = int.from_bytes(key, "little" if self.order == "<" else "big")
        return found if len(key) == self.size and found >> 63 == 0 else None


@dataclass(frozen=True)
class Pickled:
    """The number as pickle writes it."""

    protocol: int

    @property
    def name(self) -> str:
        return f"as pickle of protocol {self.protocol}"

    def keys(self, numbers: Array) -> list[bytes]:
        return [pickle.dumps(number, self.protocol) for number in numbers.tolist()]

    def number(self, key: bytes) -> int | None:
        return None  # nobody's pickle is opened here


def protocols(keys: Iterable[bytes]) -> list[int]:
    """The protocols of the pickles among these keys."""
    return sorted({key[1] for key in keys if key[:1] == b"\x80" and key[1:2] and key[1] <= 5})


def shown(part: bytes | str, most: int = 40) -> str:
    """A piece of a key, or a name, in a line for people: printable, no longer than ``most``."""
    text = part if isinstance(part, str) else part.decode("utf-8", "backslashreplace")
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def forms(keys: Sequence[bytes], least: int = 2) -> list[Form]:
    """The forms that at least ``least`` of these keys (a sample of a file's) have, the most
    frequent first."""
    around: defaultdict[tuple[bytes, bytes], list[bytes]] = defaultdict(list)
    for key in keys:
        runs = [run for run, _ in zip(_RUN.finditer(key), range(_RUNS_MAX), strict=False)]
        for run in runs:
            if len(run[0]) <= _DIGITS_MAX:
                around[key[: run.start()], key[run.end() :]].append(run[0])
    enough = max(least, len(keys) * _SHARE_MIN)
    often = sorted(around.items(), key=lambda item: (-len(item[1]), item[0]))
    found: list[Form] = []
    for (prefix, suffix), digits in often:
        if len(digits) >= enough:
            found += [Decimal(prefix, width, suffix) for width in _widths(digits)]
    return [*found[:FORMS_MAX], *_binary(keys), *map(Pickled, protocols(keys))]


def _widths(digits: Iterable[bytes]) -> list[int]:
    """Widths to which these numbers may be zero-padded, the likeliest first."""
    lengths = Counter(map(len, digits))
    led = {len(each) for each in digits if each[:1] == b"0" and len(each) > 1}
    if len(led) > 1:
        return []  # 01 and 001: no one form
    if led:
        return sorted(led)
    # no zero before any: 1000 to 9999 are the same with and without
    return [1] if len(lengths) > 1 else sorted({1, *lengths})


def _binary(keys: Sequence[bytes]) -> Iterable[Form]:
    """Where most keys are 4 or 8 bytes: the byte order that makes three quarters of them numbers
    with a zero top byte, which random bytes do not."""
    for size in (4, 8):
        alike = [key for key in keys if len(key) == size]
        if 2 * len(alike) > len(keys):
            for order in ("big", "little"):
                numbers = sorted(int.from_bytes(key, order) for key in alike)  # type: ignore[arg-type]
                if numbers[3 * len(numbers) // 4] < 1 << (8 * size - 8):
                    yield Binary(size, ">" if order == "big" else "<")
