# SPDX-License-Identifier: Apache-2.0
"""Whether compressing pays, and the dictionary: found out on a sample before anything is packed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass

from uffdprefetch.base.errors import usage_error
from uffdprefetch.base.units import KIB, MIB
from uffdprefetch.data.codec import Codec, library
from uffdprefetch.pack.found import Found
from uffdprefetch.pack.reading import ChangedError, read_whole

#: Values that the dictionary is trained on, and others that show what that brings: of its own it
#: knows too much. Of fewer files the same shares.
_TRAINED, _SHOWN = 1000, 250
SAMPLE = _TRAINED + _SHOWN
#: Below it nothing is compressed: it would cost time in each epoch, and bring less than a tenth.
RATIO_MIN = 1.1
#: zstd's own size of a dictionary (zstd --train), and of each value's beginning that it is trained
#: on: a hundred times as much in all, as zstd's manual has it.
_DICTIONARY_BYTES, _TRAINED_BYTES = 110 * KIB, 16 * KIB
#: Read of all values of the sample: bounds memory, and the time before packing begins.
_SAMPLE_BYTES = 64 * MIB
#: zstd's own level, and its limits.
_LEVEL, _LEVELS = 3, range(1, 23)
#: Values without which no dictionary can be trained.
_TRAINED_MIN = 16


def level_of(text: str) -> int:
    """Of `--compress zstd[:LEVEL]`. Raises UffdPrefetchError (2)."""
    name, colon, number = text.partition(":")
    if name != "zstd":
        raise usage_error(f"--compress {text}: zstd, or zstd:LEVEL")
    if not colon:
        return _LEVEL
    if not number.isdecimal() or int(number) not in _LEVELS:
        raise usage_error(f"--compress {text}: a level is {_LEVELS[0]} to {_LEVELS[-1]}")
    return int(number)


@dataclass(frozen=True)
class CompressionTrial:
    """What compressing a sample brought. ``codec``: None where it does not pay; ``text``: all that,
    for people."""

    codec: Codec | None
    text: str


def drawn(found: Iterable[Found]) -> list[bytes]:
    """Bytes of SAMPLE files, drawn from all with the same chance, or of as many as there are."""
    chance = random.Random(0)
    chosen: list[Found] = []
    for number, each in enumerate(found):
        if number < SAMPLE:
            chosen.append(each)
            continue
        at = chance.randrange(number + 1)
        if at < SAMPLE:
            chosen[at] = each
    chance.shuffle(chosen)
    values: list[bytes] = []
    left_bytes = _SAMPLE_BYTES
    for each in chosen:
        value = _bytes(each)
        if value:
            values.append(value[: max(left_bytes, _TRAINED_BYTES)])
            left_bytes -= len(values[-1])
    return values


def first(found: Iterable[Found]) -> list[bytes]:
    """Bytes of the first files of tars, in no order."""
    values: list[bytes] = []
    left_bytes = _SAMPLE_BYTES
    for each in found:
        if each.data:
            values.append(each.data[: max(left_bytes, _TRAINED_BYTES)])
            left_bytes -= len(each.data)
        if len(values) == SAMPLE or left_bytes <= 0:
            break
    random.Random(0).shuffle(values)
    return values


def _bytes(found: Found) -> bytes:
    if found.data is not None:
        return found.data
    try:
        return read_whole(found.file, lambda size_bytes: None)[0]
    except (OSError, ChangedError):
        return b""  # packing it says so


def tried(values: list[bytes], level: int) -> CompressionTrial:
    """Compress the sample. Raises UffdPrefetchError where the library is missing."""
    cut = len(values) * _TRAINED // SAMPLE
    codec = Codec(level, _dictionary(values[:cut], level))
    shown = values[cut:]
    before = sum(map(len, shown))
    if not before:
        return CompressionTrial(None, "nothing to compress")
    began = time.process_time()
    encoded = [codec.encode(value) for value in shown]
    middle = time.process_time()
    for value in encoded:
        codec.decode(value)
    ended = time.process_time()
    ratio = before / sum(map(len, encoded))
    text = (
        f"of {len(shown):,} files zstd:{level} makes {1 / ratio:.0%}, a ratio of {ratio:.2f}, at"
        f" {before / 1e6 / max(middle - began, 1e-9):,.0f} MB/s of one core, and reads them at"
        f" {before / 1e6 / max(ended - middle, 1e-9):,.0f} MB/s"
    )
    if ratio < RATIO_MIN:
        return CompressionTrial(
            None, f"nothing is compressed: {text}; from {RATIO_MIN} on it would be"
        )
    return CompressionTrial(codec, text)


def _dictionary(values: list[bytes], level: int) -> bytes:
    zstandard = library()
    samples = [value[:_TRAINED_BYTES] for value in values]
    if len(samples) < _TRAINED_MIN:
        return b""
    size_bytes = min(_DICTIONARY_BYTES, sum(map(len, samples)) // 8)
    try:
        return bytes(zstandard.train_dictionary(size_bytes, samples, level=level).as_bytes())
    except zstandard.ZstdError:
        return b""  # they have nothing in common, or are too short
