# SPDX-License-Identifier: Apache-2.0
"""The orders in which ranks have come to the blocks of mapped files, as `wrap --learn` keeps them:
plan files (docs/plans.md) of unit "bytes", one a file, rank and number of ranks, in a directory for
each key. They are read by orders/learned_plan.py, which brings numpy.

A directory may be a stranger's: what is looked at in it is bounded.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import struct
import sys
from array import array
from collections.abc import Collection, Sequence
from typing import NamedTuple

from uffdprefetch.base.start_key import RANGES_SUFFIX
from uffdprefetch.orders import profile_store
from uffdprefetch.orders.plan_schema import SCHEMA
from uffdprefetch.predict.bounds import ENTRIES_MAX
from uffdprefetch.predict.first_touches import RankOf

DOCUMENT, NUMBERS, DOUBT = ".json", ".npy", ".drops"
#: After so many drops in a row the runs that learn nothing are no more than before: 255.
_DROPS_COUNTED = 9
_DOUBT_BYTES = 64
#: Of a digest in a name: no two files of a user's share one.
_DIGEST_CHARS = 16
_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9]{1,9})of([0-9]{1,9})")
#: Orders of a key: a job of 256 files on a node of 16 ranks. Beyond, the oldest go; so they do
#: where all take more than this.
ORDERS_MAX, BYTES_MAX = ENTRIES_MAX, 1 << 30
#: Names of a directory that are looked at: documents, their numbers, and what else lies there.
_NAMES_MAX = 4 * ORDERS_MAX
#: The alignment of what follows the head of a .npy file (numpy.lib.format).
_ALIGNED = 64


def name_of(path: str, times: tuple[int, int, int], rank: RankOf) -> str:
    """By which the order of a rank in a file is kept, as that is by its size, mtime and ctime."""
    file, was = (
        hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:_DIGEST_CHARS]
        for text in (path, "-".join(map(str, times)))
    )
    return f"{file}-{was}-{rank.rank}of{rank.world}"


def rank_of(name: str) -> RankOf | None:
    """Whose order it is; None: it is no name of any."""
    found = _NAME.fullmatch(name)
    return RankOf(int(found[3]), int(found[4])) if found else None


def names(directory: str) -> list[str]:
    """Of the orders that lie there; none where there is no directory. Raises OSError."""
    texts = _listed(directory)
    documents = (text.removesuffix(DOCUMENT) for text in texts if text.endswith(DOCUMENT))
    return sorted(name for name in documents if rank_of(name))


def _listed(directory: str) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry in itertools.islice(entries, _NAMES_MAX)]
    except FileNotFoundError:
        return []


class KeptOrders(NamedTuple):
    """Those of a key: how many, the bytes that they take, and when the last was written."""

    orders: int
    bytes: int
    written_ns: int


def kept_in(directory: str) -> dict[str, KeptOrders]:
    """By key, what orders lie in a directory of profiles; nothing where there is none. Raises
    OSError."""
    found: dict[str, KeptOrders] = {}
    try:
        with os.scandir(directory) as entries:
            texts = [entry.name for entry in entries if entry.name.endswith(RANGES_SUFFIX)]
    except FileNotFoundError:
        return found
    for text in sorted(texts)[:ORDERS_MAX]:
        there = os.path.join(directory, text)
        with contextlib.suppress(OSError):  # no directory, or none of ours
            kept = [sizes(there, name) for name in names(there)]
            if kept:
                taken, written_ns = (list(column) for column in zip(*kept, strict=True))
                key = text.removesuffix(RANGES_SUFFIX)
                found[key] = KeptOrders(len(kept), sum(taken), max(written_ns))
    return found


def document_path(directory: str, name: str) -> str:
    """Of a plan file."""
    return os.path.join(directory, name + DOCUMENT)


def sizes(directory: str, name: str) -> tuple[int, int]:
    """Bytes that an order takes, and when it was written, in ns; (0, 0) where it has gone."""
    taken = written_ns = 0
    for suffix in (NUMBERS, DOCUMENT):
        with contextlib.suppress(OSError):
            status = os.lstat(os.path.join(directory, name + suffix))
            taken, written_ns = taken + status.st_size, status.st_mtime_ns
    return taken, written_ns


def store(
    directory: str, name: str, path: str, spans: array[int], mode: int = 0o600
) -> None:  # fmt: skip
    """Keep an order in a file: ``spans``, starts and ends in turn, in bytes; with this ``mode``.
    Raises OSError."""
    os.makedirs(directory, 0o700, exist_ok=True)
    profile_store.sweep(directory)
    rank, _ = rank_of(name) or RankOf(0, 0)
    entry = {
        "file": path, "unit": "bytes", "epochs": [{"ranks": {str(rank): name + NUMBERS}}],
    }  # fmt: skip
    document = json.dumps({"schema": SCHEMA, "files": [entry]}) + "\n"
    # the numbers first: a document without any is none
    numbers = os.path.join(directory, name + NUMBERS)
    profile_store.write_whole(numbers, (_head(len(spans) // 2), spans), mode)
    profile_store.write_whole(document_path(directory, name), (document.encode(),), mode)


class OrderDrops(NamedTuple):
    """Whether what a rank does with a file is worth learning: how often in a row its order was
    dropped, and for how many runs none is kept. Each drop doubles them: who never repeats itself
    pays for a wrong order ever more rarely, and who does so again is found out."""

    drops: int = 0
    runs_left: int = 0

    def dropped(self) -> OrderDrops:
        """Once more. The first time the next run is learned."""
        return OrderDrops(self.drops + 1, (1 << min(self.drops, _DROPS_COUNTED - 1)) - 1)

    def put_off(self) -> OrderDrops:
        """A run has gone by."""
        return self._replace(runs_left=self.runs_left - 1)


def doubt(directory: str, name: str) -> OrderDrops:
    """As it was kept; none where nothing was."""
    try:
        with open(os.path.join(directory, name + DOUBT), "rb") as file:
            drops, runs_left = map(int, file.read(_DOUBT_BYTES).split())
    except (OSError, ValueError):
        return OrderDrops()
    most = (1 << _DROPS_COUNTED) - 1
    return OrderDrops(max(0, min(drops, most)), max(0, min(runs_left, most)))


def doubted(directory: str) -> set[str]:
    """Names of which there is a doubt. Raises OSError."""
    return {text.removesuffix(DOUBT) for text in _listed(directory) if text.endswith(DOUBT)}


def set_doubt(directory: str, name: str, told: OrderDrops) -> None:
    """Keep it. Raises OSError."""
    path = os.path.join(directory, name + DOUBT)
    if told.drops:
        os.makedirs(directory, 0o700, exist_ok=True)
        profile_store.write_whole(path, (f"{told.drops} {told.runs_left}\n".encode(),))
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _head(rows: int) -> bytes:
    """Of a .npy file, version 1.0, with int64 of shape (rows, 2)."""
    order = "<" if sys.byteorder == "little" else ">"
    text = f"{{'descr': '{order}i8', 'fortran_order': False, 'shape': ({rows}, 2), }}"
    text += " " * (-(len(text) + 11) % _ALIGNED) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def remove(directory: str, name: str) -> None:
    """Forget an order. Raises OSError."""
    for suffix in (DOCUMENT, NUMBERS):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name + suffix))


def remove_all(directory: str) -> None:
    """Forget those of a key; nothing else that lies there goes. Raises OSError."""
    for name in names(directory):
        remove(directory, name)
    for name in doubted(directory):
        set_doubt(directory, name, OrderDrops())
    with contextlib.suppress(OSError):  # not ours alone
        os.rmdir(directory)


def tidy(directory: str, written: Collection[str]) -> None:
    """Once these were written: orders in other versions of their files go, and where there are too
    many the oldest. Raises OSError."""
    instead = {_without_times(name) for name in written}
    for name in doubted(directory):
        if name not in written and _without_times(name) in instead:
            set_doubt(directory, name, OrderDrops())
    kept = []
    for name in names(directory):
        if name not in written and _without_times(name) in instead:
            remove(directory, name)
        else:
            kept.append((*sizes(directory, name)[::-1], name))
    kept.sort(reverse=True)
    room = BYTES_MAX
    for number, (_, taken, name) in enumerate(kept):
        room -= taken
        if number >= ORDERS_MAX or room < 0:
            remove(directory, name)


def _without_times(name: str) -> Sequence[str]:
    found = _NAME.fullmatch(name)
    return (found[1], found[3], found[4]) if found else ()
