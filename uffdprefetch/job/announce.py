# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch.plan.announce()``: code that knows its order announces it."""

from __future__ import annotations

import array
import os
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from uffdprefetch.base.messages import say
from uffdprefetch.job import channel

_warned = False


class Announcement:
    """An order that has been announced; as a context manager it ends with the block.

    Without a service (not under `uffdprefetch wrap`, or it has died) every method does nothing.
    """

    def __init__(self, announcement: channel.ProgressSlot | None) -> None:
        self._channel = announcement

    @property
    def active(self) -> bool:
        """Whether a service has received it."""
        return self._channel is not None

    def said(self, items: int) -> None:
        """The first ``items`` of the order have been read. Takes some microseconds."""
        if self._channel is not None:
            self._channel.said(items)

    def end(self) -> None:
        """End the order, however far it has been read."""
        if self._channel is not None:
            self._channel.end()

    def __enter__(self) -> Announcement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        where: TracebackType | None,
    ) -> None:  # fmt: skip
        self.end()


def announce(
    file: str | os.PathLike[str] | None = None,
    *,
    records: Iterable[int] | None = None,
    keys: Iterable[bytes | str] | None = None,
    ranges: Iterable[Sequence[int]] | None = None,
    paths: Iterable[str | bytes | os.PathLike[str]] | None = None,
    reader: str = "plan",
) -> Announcement:
    """Announce the order in which this process and its children will read a record file, or which
    files they will read.

    file: path of the record file, or of an LMDB's directory. Exactly one of: records, numbered as
    in `uffdprefetch index`; keys (str as UTF-8); ranges, [start, end) in bytes; or, without a file,
    paths of whole files, relative to the present working directory. Each is an *item*. Iterables,
    or numpy arrays of integers. reader: a new order replaces the same reader's last one; other
    readers are independent.

    Progress is observed from touches and opens, and from Announcement.said(). Raises ValueError for
    invalid arguments; a record that does not exist is reported in the run's summary, a file that
    does not exist is passed over.
    """
    orders = {"records": records, "keys": keys, "ranges": ranges, "paths": paths}
    given = [name for name, value in orders.items() if value is not None]
    if len(given) != 1:
        raise ValueError(
            f"one of records, keys, ranges and paths, not {', '.join(given) or 'none'}"
        )
    part: dict[str, Any] = {"what": given[0], "array": "order"}
    if (file is None) != (paths is not None):
        raise ValueError(f"{given[0]}: {'of which file?' if file is None else 'of no one file'}")
    if file is not None:
        part["file"] = os.path.abspath(file)
    if paths is not None:
        part["cwd"] = os.getcwd()
        data, items = _paths(paths)
    elif records is not None:
        data, items = _numbers(records)
    elif ranges is not None:
        data, items = _numbers(ranges, pairs=True)
    else:
        assert keys is not None
        encoded = [key.encode() if isinstance(key, str) else bytes(key) for key in keys]
        data, items = channel.packed(encoded), len(encoded)
    if not items:
        raise ValueError("an order of no items")
    try:
        return Announcement(channel.announce(reader, items, [part], {"order": data}))
    except OSError as error:
        _warn(str(error))
        return Announcement(None)


def _numbers(values: Iterable[Any], pairs: bool = False) -> tuple[Any, int]:
    """(int64 numbers, number of items). Raises ValueError."""
    if hasattr(values, "__array_interface__") or hasattr(values, "__array__"):
        import numpy as np

        found = np.asarray(values)
        if found.dtype.kind not in "iu" or found.ndim != (2 if pairs else 1):
            raise ValueError(f"an array of {found.dtype} and shape {found.shape}")
        if pairs and found.shape[1] != 2:
            raise ValueError(f"ranges of shape {found.shape}, not (n, 2)")
        return np.ascontiguousarray(found, np.int64), len(found)
    numbers = array.array("q")
    try:
        for value in values:
            if pairs:
                start, end = value
                numbers.extend((start, end))
            else:
                numbers.append(value)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"no numbers: {error}") from None
    return numbers, len(numbers) // (2 if pairs else 1)


def _paths(values: Iterable[Any]) -> tuple[bytes, int]:
    """(paths, packed; their number). Raises ValueError."""
    if isinstance(values, (str, bytes, os.PathLike)):
        raise ValueError(f"paths: a list of them, not {values!r}")
    try:
        encoded = [os.fsencode(value) for value in values]
    except TypeError as error:
        raise ValueError(f"no paths: {error}") from None
    wrong = next((path for path in encoded if not path or b"\0" in path), None)
    if wrong is not None:
        raise ValueError(f"{wrong[:60]!r} is no path")
    return channel.packed(encoded), len(encoded)


def _warn(why: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        say(f"an order is announced to nobody: {why}")
