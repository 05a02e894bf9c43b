# SPDX-License-Identifier: Apache-2.0
"""Orders by the user's functions: ``prefetch(loader, key=...)`` and ``path=...``."""

from __future__ import annotations

import operator
import os
from array import array
from typing import Any

from .channel import packed
from .epochs import Settings


def part(given: Settings, order: array[int]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The part of an announcement, and its arrays, from ``given.key`` of each item of ``order``: a
    key (bytes, or str as UTF-8), a record number, or a list of these; or from ``given.path``: a
    path, or a list of these.

    Calls it once for each item number. An invalid result is reported on stderr, once, and raises
    TypeError.
    """
    answers: list[Any] = []
    data: Any
    described: dict[str, Any]
    turns = array("q")
    known = given.answers
    try:
        for turn, number in enumerate(order):
            if number not in known:
                known[number] = _answer(given, number)
            some = known[number]
            if type(some) is list:
                answers += some
                turns.extend([turn] * len(some))
            else:
                answers.append(some)
                turns.append(turn)
        kinds = set(map(type, answers))
        if given.path is not None:
            described = {"what": "paths", "array": "p0.paths", "turns": "p0.turns",
                         "cwd": os.getcwd()}  # fmt: skip
            return [described], {"p0.paths": packed(answers), "p0.turns": turns}
        if len(kinds) > 1:
            raise TypeError("key() gives keys for some samples and record numbers for others")
        if kinds == {bytes}:
            what, data = "keys", packed(answers)
        else:
            what, data = "records", array("q", answers)
    except (TypeError, OverflowError, OSError) as error:
        given.complain(f"prefetch: {error}; nothing is prefetched for this loader")
        raise
    described = {"what": what, "array": "p0." + what, "turns": "p0.turns", "file": given.file}
    return [described], {"p0." + what: data, "p0.turns": turns}


def _answer(given: Settings, number: int) -> Any:
    ask, name, one = given.key, "key", _one
    wanted = "a key is bytes, str, int or a list of these"
    if given.path is not None:
        ask, name, one = given.path, "path", _path
        wanted = "a path is str, bytes, os.PathLike or a list of these"
    assert ask is not None
    try:
        answer = ask(number)
    except Exception as error:
        raise TypeError(f"{name}({number}) raised {type(error).__name__}: {error}") from error
    try:
        if isinstance(answer, (list, tuple)):
            return [one(item) for item in answer]
        return one(answer)
    except (TypeError, ValueError):
        raise TypeError(f"{name}({number}) gave {repr(answer)[:60]}: {wanted}") from None


def _path(item: Any) -> bytes:
    encoded = os.fsencode(item)
    if not encoded or b"\0" in encoded:
        raise ValueError(item)
    return encoded


def _one(item: Any) -> Any:
    if isinstance(item, (bytes, bytearray, memoryview)):
        return bytes(item)
    return item.encode() if isinstance(item, str) else operator.index(item)
