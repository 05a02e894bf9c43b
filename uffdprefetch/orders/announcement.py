# SPDX-License-Identifier: Apache-2.0
"""Parses what a process of the job has announced (job/channel.py): untrusted input.

``PID-N.json`` in the directory beside the service's socket::

    {"schema": "uffdprefetch.announce/1", "pid": 4711, "number": 1, "reader": "loader-1", "slot": 1,
     "items": 50000, "parts": [...]}

``items``: the order's length; ``slot``: index into ``PID.progress`` (uint64 each) of the number of
items read so far. A part says what is read of one file, or of one data set whose files are to be
found:

- ``what``: "records" (numbers), "keys", "ranges" (pairs of byte offsets), "paths" (of whole files),
  "samples" (indices into a data set; which records or files they read has to be found), "lists" (no
  order: see below);
- ``array``: the name of the array ``PID-N.NAME``: int64, or keys as channel.packed() makes them;
- ``turns``: name of an int64 array, the item of each element, ascending; without it they are the
  items;
- ``file``: the path, or null: any that the process maps;
- ``cwd``: the directory to which paths that do not begin with "/" are relative; ``texts``: of a
  data set, among which directories of its files, or their endings, may be;
- of samples: ``ahead``, how many items DataLoader workers may read beyond the reported progress;
  ``samples``, the data set's length; ``token``, its name, the same in later announcements;
  ``files`` and ``buffers``, names of arrays, where the data set tells in which buffers of which
  mapped Arrow files its samples lie (orders/buffers.py): paths, as keys are packed, and int64 of
  shape (n, 4);
  ``tokens``, where they are Megatron's: the ``file``, ``token_bytes``, ``extra_tokens``, and the
  arrays that lead to a sample's tokens (orders/token_files.py), {"path", "offset"} or {"array"}
  each, with ``type`` and ``count``;
  ``lists``: [{"name", "array", "kind": "bytes" | "text" | "ints", "count"}], which may map a
  sample's index to a key or a file (``known``: unchanged since the last announcement). "lists"
  parts bring these alone, for a token of the process ``parent``;
- "nothing": the order is not known; ``why``, a line.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.job.channel import SCHEMA, SLOTS
from uffdprefetch.orders.buffers import Buffers
from uffdprefetch.orders.file_order import PathColumn, PathOrder, check_paths, of_items
from uffdprefetch.orders.key_lists import KeyList
from uffdprefetch.orders.token_files import NAMES, StoredArray, TokenFile

#: Bounds on untrusted input, above anything that job/ writes.
JSON_MAX_BYTES = 1 << 20
ARRAY_MAX_BYTES = 1 << 30
PARTS_MAX = 256
LISTS_MAX = 64
TEXTS_MAX = 64
WHAT = ("records", "keys", "ranges", "paths", "samples", "lists", "nothing")
KINDS = ("bytes", "text", "ints")


class AnnounceError(ValueError):
    """An announcement that is not one; the text says why."""


@dataclass(frozen=True)
class List:
    """A candidate list of a data set."""

    name: str
    array: str
    kind: str


class StoredBuffers(NamedTuple):
    """The arrays that say where in Arrow files samples lie: of paths, and of numbers."""

    files: str
    numbers: str


class PathSurroundings(NamedTuple):
    """cwd: of the process. texts: of a data set, which may be directories or endings of paths."""

    cwd: str = "/"
    texts: Sequence[str] = ()


class DataSetSaid(NamedTuple):
    """The data set that samples are of. ``owner``: the process that iterates over it; ``known``:
    its lists are unchanged since the last announcement; ``samples``: its length."""

    owner: int
    token: str
    known: bool
    samples: int

    @property
    def name(self) -> tuple[int, str]:
        """The same in later announcements."""
        return self.owner, self.token


#: Of a part that has no relative names.
NOWHERE = PathSurroundings()


@dataclass(frozen=True)
class Part:
    """The part of an announcement about one file or data set."""

    what: str
    array: str
    turns: str | None
    file: str | None
    data_set: DataSetSaid
    why: str  # of "nothing"
    ahead: int  # items that may be read beyond the reported progress
    lists: Sequence[List]
    buffers: StoredBuffers | None = None
    tokens: TokenFile | None = None
    surroundings: PathSurroundings = NOWHERE

    @property
    def arrays(self) -> set[str]:
        """The names of its arrays."""
        names = {self.array, self.turns}
        names |= set() if self.buffers is None else set(self.buffers)
        stored = () if self.tokens is None else self.tokens.arrays.values()
        names |= {each.array for each in (*self.lists, *stored)}
        return {name for name in names if name}


@dataclass(frozen=True)
class StoredAnnouncement:
    """An announcement as its process stored it. ``stem``: path that its arrays begin with."""

    stem: str
    pid: int
    number: int
    reader: str
    slot: int
    items: int
    parts: Sequence[Part]

    def array(self, name: str) -> Array:
        """The bytes of one of its arrays. Raises AnnounceError."""
        return np.frombuffer(_read(f"{self.stem}.{name}", ARRAY_MAX_BYTES), np.uint8)

    def numbers(self, name: str) -> Array:
        """An array of int64. Raises AnnounceError."""
        data = self.array(name)
        if len(data) % 8:
            raise AnnounceError(f"array {name}: {len(data)} bytes are no int64 numbers")
        return data.view(np.int64)

    def turns(self, part: Part, count: int) -> Array:
        """The item of each of ``count`` elements of a part. Raises AnnounceError."""
        if part.turns is None:
            if count > self.items:
                raise AnnounceError(f"{count} elements of {self.items} items")
            return np.arange(count, dtype=np.int64)
        turns = self.numbers(part.turns)
        if len(turns) != count:
            raise AnnounceError(f"{len(turns)} turns of {count} elements")
        if count and (turns[0] < 0 or turns[-1] >= self.items or (turns[1:] < turns[:-1]).any()):
            raise AnnounceError(f"turns do not ascend from 0 to {self.items - 1}")
        return turns

    def buffers(self, part: Part) -> Buffers:
        """Where the data set says that its samples lie. Raises AnnounceError."""
        assert part.buffers is not None
        try:
            paths = KeyList.parse("files", "bytes", self.array(part.buffers.files))
            names = [os.fsdecode(path) for path in paths.take(np.arange(len(paths)))]
            return Buffers.parse(names, self.numbers(part.buffers.numbers), part.data_set.samples)
        except ValueError as error:
            raise AnnounceError(f"files of a data set: {error}") from None

    def paths(self, part: Part) -> PathOrder:
        """The order of the files of a "paths" part. Raises AnnounceError."""
        try:
            elements = KeyList.parse("paths", "bytes", self.array(part.array))
            check_paths(elements)
            turns = self.turns(part, len(elements))
            before = os.fsencode(os.path.join(part.surroundings.cwd, ""))
            column = PathColumn(elements, before)
            return of_items([column], [np.arange(len(elements))], turns, self.items)
        except ValueError as error:
            raise AnnounceError(f"paths of files: {error}") from None

    def remove(self) -> None:
        """Remove its files: all has been read."""
        for name in {"json"}.union(*(part.arrays for part in self.parts)):
            try:
                os.unlink(f"{self.stem}.{name}")
            except OSError:
                pass


def load(directory: str, pid: int, number: int) -> StoredAnnouncement:
    """Read an announcement's JSON. Raises AnnounceError."""
    stem = os.path.join(directory, f"{pid}-{number}")
    try:
        value = json.loads(_read(f"{stem}.json", JSON_MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise AnnounceError(f"no announcement: {error}") from None
    try:
        return _announced(stem, pid, number, value)
    except (KeyError, TypeError, AttributeError) as error:
        raise AnnounceError(f"no announcement: {type(error).__name__} {error}") from None


def _announced(stem: str, pid: int, number: int, value: Mapping[str, Any]) -> StoredAnnouncement:
    if value["schema"] != SCHEMA or value["pid"] != pid or value["number"] != number:
        raise AnnounceError(f"no announcement of schema {SCHEMA}")
    slot, items = _number(value["slot"], SLOTS - 1), _number(value["items"], 1 << 26)
    if len(value["parts"]) > PARTS_MAX:
        raise AnnounceError(f"{len(value['parts'])} parts: at most {PARTS_MAX}")
    parts = tuple(_part(part, pid) for part in value["parts"])
    return StoredAnnouncement(stem, pid, number, _text(value["reader"]), slot, items, parts)


def _part(value: Mapping[str, Any], pid: int) -> Part:
    what = value["what"]
    if what not in WHAT:
        raise AnnounceError(f"a part of {what!r}")
    lists = value.get("lists") or []
    if len(lists) > LISTS_MAX:
        raise AnnounceError(f"{len(lists)} lists: at most {LISTS_MAX}")
    found = []
    for each in lists:
        if each["kind"] not in KINDS:
            raise AnnounceError(f"a list of {each['kind']!r}")
        found.append(List(_text(each["name"]), _name(each["array"]), each["kind"]))
    turns, file = value.get("turns"), value.get("file")
    files, buffers, tokens = value.get("files"), value.get("buffers"), value.get("tokens")
    return Part(
        what=what,
        array="" if what in ("lists", "nothing") else _name(value["array"]),
        turns=None if turns is None else _name(turns),
        file=None if file is None else os.path.abspath(_text(file)),
        data_set=_data_set(value, pid),
        why=" ".join(_text(value.get("why", "")).split()),
        ahead=_number(value.get("ahead", 0), 1 << 26),
        lists=tuple(found),
        buffers=None
        if buffers is None or files is None
        else StoredBuffers(_name(files), _name(buffers)),
        tokens=None if tokens is None else _tokens(tokens),
        surroundings=PathSurroundings(
            _directory(value.get("cwd", "/")),
            tuple(map(_text, (value.get("texts") or [])[:TEXTS_MAX])),
        ),
    )


def _data_set(value: Mapping[str, Any], pid: int) -> DataSetSaid:
    samples, token = _number(value.get("samples", 0), 1 << 62), _text(value.get("token", ""))
    owner = _number(value.get("parent", pid), 1 << 31)
    return DataSetSaid(owner, token, value.get("known") is True, samples)


def _directory(value: object) -> str:
    name = _text(value)
    if not name.startswith("/"):
        raise AnnounceError(f"{name[:64]!r} is no absolute path")
    return name


def _tokens(value: Mapping[str, Any]) -> TokenFile:
    arrays = {}
    for name in NAMES:
        each = value[name]
        path, array = each.get("path"), each.get("array")
        if (path is None) == (array is None):
            raise AnnounceError(f"array {name} is in a file or in the announcement")
        arrays[name] = StoredArray(
            None if path is None else _text(path), None if array is None else _name(array),
            _number(each.get("offset", 0), 1 << 62), _text(each["type"]),
            _number(each["count"], 1 << 32),
        )  # fmt: skip
    return TokenFile(
        os.path.abspath(_text(value["file"])), _number(value["token_bytes"], 16),
        _number(value["extra_tokens"], 16), arrays,
    )  # fmt: skip


def _number(value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise AnnounceError(f"{value!r} is no number from 0 to {most}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > 4096 or "\0" in value:
        raise AnnounceError("a text that is none, or too long")
    return value


def _name(value: object) -> str:
    name = _text(value)
    if not name or not all(c.isalnum() or c in "._-" for c in name) or len(name) > 64:
        raise AnnounceError(f"{name[:64]!r} is no array's name")
    return name


def _read(path: str, most_bytes: int) -> bytes:
    """A whole regular file of ours. Raises AnnounceError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise AnnounceError(f"{os.path.basename(path)}: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise AnnounceError(f"{os.path.basename(path)} is no file of ours")
        if status.st_size > most_bytes:
            raise AnnounceError(f"{os.path.basename(path)}: {status.st_size} bytes are too many")
        with open(fd, "rb", closefd=False) as file:
            return file.read(status.st_size)
    finally:
        os.close(fd)
