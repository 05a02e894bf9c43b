# SPDX-License-Identifier: Apache-2.0
"""Compares a packed database with what it was packed of, every byte of both."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from uffdprefetch.data.layout import DamagedError, Entry, shown
from uffdprefetch.pack.found import Found, LeftOut
from uffdprefetch.pack.in_order import Admit, in_order
from uffdprefetch.pack.packing import Sources
from uffdprefetch.pack.reading import ChangedError, read_whole
from uffdprefetch.pack.stored import Stored


@dataclass(frozen=True)
class Compared:
    """What came of a file: ``why`` it is not as it was packed, "" where it is. ``damaged``: it is
    the database's value that is not."""

    path: bytes
    why: str
    damaged: bool = False
    held_bytes: int = 0


@dataclass(frozen=True)
class Unmatched:
    """An entry whose file is in no source."""

    entry: Entry
    held_bytes: int = 0


def verify(path: str, roots: Sequence[str], say: Callable[[str], None]) -> tuple[int, int, int]:
    """How many files are the same in both, how many are not, each of which ``say`` is told of, and
    how many of these are damaged. ``roots``: the sources, (): those that it was packed of.

    Raises UffdPrefetchError: 1 when something cannot be read, 2 when it is the database, or that is
    damaged.
    """
    with Stored(path) as stored:
        quiet = LeftOut(lambda text: None)
        sources = Sources(roots or stored.description.roots, quiet)
        by_path = {entry.path: entry for entry in stored.entries.values()}
        of_path: dict[bytes, Compared] = {}

        def compare(found: Found, admit: Admit) -> Compared:
            return _compared(stored, by_path.get(found.path), found, admit)

        for each in in_order(sources.files(), compare):
            of_path[each.path] = each  # of a path that a tar has twice the last one counts

        def value_alone(given: Unmatched, admit: Admit) -> Compared:
            admit(given.entry.size_bytes)
            damage = _damage(stored, given.entry)
            why = damage or "the source does not have it any more"
            return Compared(given.entry.path, why, bool(damage))

        left = (Unmatched(entry) for entry in stored.in_order() if entry.path not in of_path)
        of_path.update((each.path, each) for each in in_order(left, value_alone))
        of_path.update((key, Compared(key, "the database has a value that it has not packed"))
                       for key in stored.unknown())  # fmt: skip
        wrong = [each for each in of_path.values() if each.why]
        if not wrong:
            stored.check_lookups()
        for each in wrong:
            say(f"{shown(each.path)}: {each.why}")
        if not stored.description.complete:
            say(f"{path}: packing has not come to its end: --resume goes on")
        incomplete = not stored.description.complete
        damaged = sum(each.damaged for each in wrong)
        return len(of_path) - len(wrong), len(wrong) + incomplete, damaged


def _compared(stored: Stored, entry: Entry | None, found: Found, admit: Admit) -> Compared:
    if entry is None:
        return Compared(found.path, "it is not in the database")
    if entry.source != found.source:
        return Compared(found.path, "")  # a second one of its path, which was named when packed
    try:
        if found.data is None:
            data = read_whole(found.file, lambda size: admit(size + entry.size_bytes))[0]
        else:
            admit(entry.size_bytes)
            data = found.data
    except OSError as error:
        return Compared(found.path, f"it cannot be read: {error.strerror}")
    except ChangedError:
        return Compared(found.path, "it changed while it was read")
    same = hashlib.sha256(data).digest() == entry.sha256
    del data
    damage = _damage(stored, entry)
    why = damage or ("" if same else "the source has other bytes by now")
    return Compared(found.path, why, bool(damage))


def _damage(stored: Stored, entry: Entry) -> str:
    try:
        stored.value(entry)
    except DamagedError as error:
        return f"damaged in the database: {error.message}"
    return ""
