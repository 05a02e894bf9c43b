# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch.plan.announce()``: code that knows its order says it."""

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

    ``active``: whether a service has heard it. Without one (not under `uffdprefetch wrap`, or it
    has died) everything here does nothing.
    """

    def __init__(self, announcement: channel.Announcement | None) -> None:
        self._channel = announcement

    @property
    def active(self) -> bool:
        """Whether a service has heard it."""
        return self._channel is not None

    def said(self, items: int) -> None:
        """``items`` of the order have been read. It takes some microseconds."""
        if self._channel is not None:
            self._channel.said(items)

    def end(self) -> None:
        """Nothing of it is read any more, however far it has come."""
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
    file: str | os.PathLike[str],
    *,
    records: Iterable[int] | None = None,
    keys: Iterable[bytes | str] | None = None,
    ranges: Iterable[Sequence[int]] | None = None,
    reader: str = "plan",
) -> Announcement:
    """Say in which order this process, and those that it starts, will read a record file.

    file: path of the file, or of an LMDB's directory. One of: records, their numbers as
    `uffdprefetch index` counts them; keys (text stands for its UTF-8); ranges, [start, end) in
    bytes. Each is an *item*. numpy arrays of integers are taken as they are. reader: a new order of
    the same reader takes the place of its last one, however far that has come; other readers are
    independent.

    What has been read is found out by touches, and by Announcement.said(). Raises ValueError for
    arguments that cannot be; that there is no such record is told in the run's summary.
    """
    given = [name for name, value in (("records", records), ("keys", keys), ("ranges", ranges))
             if value is not None]  # fmt: skip
    if len(given) != 1:
        raise ValueError(f"one of records, keys and ranges, not {', '.join(given) or 'none'}")
    part: dict[str, Any] = {"what": given[0], "array": "order", "file": os.path.abspath(file)}
    if records is not None:
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
    """(int64 numbers, how many items they are). Raises ValueError."""
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


def _warn(why: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        say(f"an order is announced to nobody: {why}")
