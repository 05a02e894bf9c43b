# SPDX-License-Identifier: Apache-2.0
"""The JSON of a plan file, checked key by key: each error says where in the file it is."""

from __future__ import annotations

import base64
import binascii
import difflib
import glob
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from uffdprefetch.base.errors import UffdPrefetchError, usage_error
from uffdprefetch.base.units import parse_size
from uffdprefetch.formats.detect import FORMATS
from uffdprefetch.formats.index import FormatOptions
from uffdprefetch.orders import path_plan, stated
from uffdprefetch.orders.path_plan import PathPlan
from uffdprefetch.orders.plan_of_file import ANY_RANK, FilePlan
from uffdprefetch.orders.plan_schema import SCHEMA

UNITS = ("records", "keys", "bytes")
_INT64_MAX = 2**63 - 1
_RANK = re.compile(r"0|[1-9][0-9]{0,8}")

_PLAN_KEYS = ("schema", "files", "paths")
_PATHS_KEYS = ("list", "epochs", "repeat")
_FILE_KEYS = ("file", "unit", "format", "record_size", "header_size", "epochs", "repeat")


def _kind(value: Any) -> str:
    """Kind of a JSON value, in words."""
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        text = str(value)
        return text if len(text) <= 40 else f"a number of {len(text)} digits"
    names = {str: "text", list: "a list", dict: "an object"}
    return next(name for kind, name in names.items() if isinstance(value, kind))


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _INT64_MAX


class Parser:
    """Each method takes where it is, which begins each message of the UffdPrefetchError (exit 2)
    that it raises."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._directory = os.path.dirname(os.path.abspath(path))
        self._stored: dict[tuple[str, int], stated.NpyNumbers] = {}

    def plan(self, value: Any) -> tuple[list[FilePlan], PathPlan | None]:
        """The plan file's entries of data files, and the one of whole files."""
        needed = ("schema",) if isinstance(value, dict) and "paths" in value else _PLAN_KEYS[:2]
        top = self._object(self._path, value, _PLAN_KEYS, needed)
        if top["schema"] != SCHEMA:
            detail = repr(top["schema"])[:60] if isinstance(top["schema"], str) else "no text"
            raise usage_error(f"{self._path}: schema: {detail}, not {SCHEMA!r}")
        paths = None
        if "paths" in top:
            paths = self._paths(f"{self._path}: paths", top["paths"])
        if "files" not in top:
            return [], paths
        entries = self._list(f"{self._path}: files", top["files"])
        files: list[FilePlan] = []
        names: dict[str, str] = {}
        for number, entry in enumerate(entries):
            where = f"{self._path}: files[{number}]"
            files.append(self._file(where, entry))
            first = names.setdefault(files[-1].file, f"files[{number}]")
            if first != f"files[{number}]":
                raise usage_error(f"{where}.file: {entry['file']!r} is what {first} is about")
        return files, paths

    def _paths(self, where: str, value: Any) -> PathPlan:
        entry = self._object(where, value, _PATHS_KEYS, ("list",))
        here, given = f"{where}.list", entry["list"]
        if isinstance(given, str):
            names = path_plan.of_lines(here, self._beside(here, given))
        elif isinstance(given, list):
            texts = [self._text(f"{here}[{i}]", name) for i, name in enumerate(given)]
            encoded = [name.encode("utf-8", "surrogateescape") for name in texts]
            names = path_plan.of_names(here, encoded)
        else:
            raise usage_error(
                f"{here}: {_kind(given)}: a list of paths, or the name of a text file"
            )
        if "epochs" not in entry:
            if "repeat" in entry:
                raise usage_error(f"{where}.repeat: of epochs, and there are no 'epochs'")
            return path_plan.in_list_order(where, os.path.join(self._directory, "plan"), names)
        epochs: list[dict[str, Any]] = [
            self._epoch(f"{where}.epochs[{number}]", epoch, "records")
            for number, epoch in enumerate(self._list(f"{where}.epochs", entry["epochs"]))
        ]
        repeat = self._truth(f"{where}.repeat", entry.get("repeat", False))
        return PathPlan(where, self._directory, names, epochs, repeat)

    def _file(self, where: str, value: Any) -> FilePlan:
        entry = self._object(where, value, _FILE_KEYS, ("file", "unit", "epochs"))
        name, unit = self._text(f"{where}.file", entry["file"]), entry["unit"]
        if unit not in UNITS:
            detail = repr(unit)[:40] if isinstance(unit, str) else _kind(unit)
            raise usage_error(f"{where}.unit: {detail}: one of {', '.join(UNITS)}")
        repeat = self._truth(f"{where}.repeat", entry.get("repeat", False))
        epochs = [
            self._epoch(f"{where}.epochs[{number}]", epoch, unit)
            for number, epoch in enumerate(self._list(f"{where}.epochs", entry["epochs"]))
        ]
        full = os.path.normpath(os.path.join(self._directory, name))
        format_name, options = self._format(where, entry)
        is_glob = glob.has_magic(name) and not os.path.lexists(full)
        return FilePlan(where, full, is_glob, unit, format_name, options, tuple(epochs), repeat)

    def _format(self, where: str, entry: dict[str, Any]) -> tuple[str | None, FormatOptions]:
        name = entry.get("format")
        if name is not None and name not in FORMATS:
            detail = repr(name)[:40] if isinstance(name, str) else _kind(name)
            raise usage_error(f"{where}.format: {detail}: one of {', '.join(FORMATS)}")
        record = self._size(f"{where}.record_size", entry.get("record_size"), 1)
        header = self._size(f"{where}.header_size", entry.get("header_size"), 0)
        if header is not None and record is None:
            raise usage_error(f"{where}.header_size: of raw records: give record_size too")
        if record is not None and name not in (None, "raw"):
            raise usage_error(f"{where}.record_size: of raw records, not of {name}")
        if name == "raw" and record is None:
            raise usage_error(f"{where}.format: raw records: how long is one? give record_size")
        return name, FormatOptions(record, header or 0)

    def _size(self, where: str, value: Any, least: int) -> int | None:
        if isinstance(value, str):
            try:
                value = parse_size(value)
            except UffdPrefetchError as error:
                raise usage_error(f"{where}: {error.message}") from None
        if value is None:
            return None
        if not _is_number(value) or value < least:
            raise usage_error(f"{where}: {_kind(value)}: a size, {least} or more bytes")
        return int(value)

    def _epoch(self, where: str, value: Any, unit: str) -> dict[str, stated.OrderSpec]:
        ranks = self._object(where, value, ("ranks",), ("ranks",))["ranks"]
        if not isinstance(ranks, dict) or not ranks:
            raise usage_error(f"{where}.ranks: {_kind(ranks)}: an object with a rank or more")
        found = {}
        for rank, order in ranks.items():
            here = f"{where}.ranks[{json.dumps(rank)[:40]}]"
            if rank != ANY_RANK and not _RANK.fullmatch(rank):
                raise usage_error(f'{here}: a rank is a number as "0", or "*" for all others')
            found[rank] = self._order(here, order, unit)
            items = found[rank].items
            if items > stated.ITEMS_MAX:
                raise usage_error(f"{here}: {items:,} items: at most {stated.ITEMS_MAX:,}")
        return found

    def _order(self, where: str, value: Any, unit: str) -> stated.OrderSpec:
        if isinstance(value, list):
            if unit == "keys":
                keys = [self._key(f"{where}[{i}]", key) for i, key in enumerate(value)]
                return stated.KeyOrder(where, keys)
            if unit == "bytes":
                return stated.RangeOrder(where, stated.InlineNumbers(self._pairs(where, value)))
            return stated.RecordOrder(where, stated.InlineNumbers(self._numbers(where, value)))
        if isinstance(value, str) and unit != "keys":
            columns = 2 if unit == "bytes" else 1
            stored = self._npy(where, value, columns)
            return (
                stated.RangeOrder(where, stored)
                if columns == 2
                else stated.RecordOrder(where, stored)
            )
        if isinstance(value, dict) and unit == "records":
            return stated.RecordOrder(where, stated.RangeNumbers(self._range(where, value)))
        forms = {
            "records": 'a list of record numbers, a .npy file\'s name or {"range": [start, stop]}',
            "keys": "a list of keys",
            "bytes": "a list of [start, end] or a .npy file's name",
        }
        raise usage_error(f"{where}: {_kind(value)}: {forms[unit]}")

    def _numbers(self, where: str, value: list[Any]) -> stated.Array:
        wrong = next((i for i, one in enumerate(value) if not _is_number(one)), None)
        if wrong is not None:
            raise usage_error(f"{where}[{wrong}]: {_kind(value[wrong])}: a record's number, from 0")
        return np.array(value, np.int64)

    def _pairs(self, where: str, value: list[Any]) -> stated.Array:
        for i, one in enumerate(value):
            if not isinstance(one, list) or len(one) != 2 or not all(map(_is_number, one)):
                raise usage_error(f"{where}[{i}]: {_kind(one)}: [start, end] in bytes, from 0")
        pairs = np.array(value, np.int64).reshape(-1, 2)
        stated.check_ranges(where, pairs)
        return pairs

    def _key(self, where: str, value: Any) -> bytes:
        if isinstance(value, str):
            return value.encode("utf-8", "surrogateescape")
        one = self._object(where, value, ("hex", "base64"), ())
        if len(one) != 1:
            raise usage_error(f'{where}: a key is text, {{"hex": ...}} or {{"base64": ...}}')
        ((how, text),) = one.items()
        try:
            decode = bytes.fromhex if how == "hex" else lambda t: base64.b64decode(t, validate=True)
            return decode(self._text(f"{where}.{how}", text))
        except (ValueError, binascii.Error):
            raise usage_error(f"{where}.{how}: {text[:40]!r}: no {how}") from None

    def _range(self, where: str, value: dict[str, Any]) -> range:
        parts = self._object(where, value, ("range",), ("range",))["range"]
        here = f"{where}.range"
        if not isinstance(parts, list) or not 2 <= len(parts) <= 3:
            raise usage_error(f"{here}: {_kind(parts)}: [start, stop] or [start, stop, step]")
        for i, one in enumerate(parts):
            if type(one) is not int or abs(one) > _INT64_MAX:
                raise usage_error(f"{here}[{i}]: {_kind(one)}: a whole number")
        if parts[2:] == [0]:
            raise usage_error(f"{here}[2]: a step of 0 goes nowhere")
        found = range(*parts)
        if found and min(found[0], found[-1]) < 0:
            raise usage_error(f"{here}: {parts}: it goes below record 0")
        if found and max(found[0], found[-1]) - min(found[0], found[-1]) >= _INT64_MAX:
            raise usage_error(f"{here}: {parts}: too long")
        return found

    def _npy(self, where: str, name: str, columns: int) -> stated.NpyNumbers:
        if not name.endswith(".npy"):
            raise usage_error(f"{where}: {name[:60]!r}: the name of a .npy file, or a list")
        path = self._beside(where, name)
        if (path, columns) not in self._stored:
            self._stored[path, columns] = stated.NpyNumbers(where, path, columns)
        return self._stored[path, columns]

    def _beside(self, where: str, name: str) -> str:
        if os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
            raise usage_error(f"{where}: {name[:60]!r}: a file beside the plan file, by its name")
        return os.path.join(self._directory, name)

    def _truth(self, where: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise usage_error(f"{where}: {_kind(value)}: true or false")
        return value

    def _object(
        self, where: str, value: Any, known: Sequence[str], needed: Sequence[str]
    ) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise usage_error(f"{where}: {_kind(value)}: an object with {', '.join(known)}")
        for name in value:
            if name not in known:
                near = difflib.get_close_matches(name[:60], known, n=1, cutoff=0.0)
                detail = repr(name[:60])
                raise usage_error(f"{where}: unknown key {detail}, the nearest is {near[0]!r}")
        for name in needed:
            if name not in value:
                raise usage_error(f"{where}: no {name!r}")
        return value

    def _list(self, where: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or not value:
            detail = "an empty list" if value == [] else _kind(value)
            raise usage_error(f"{where}: {detail}: a list of one or more")
        return value

    def _text(self, where: str, value: Any) -> str:
        if not isinstance(value, str) or not value or "\0" in value:
            detail = "an empty text" if value == "" else _kind(value)
            raise usage_error(f"{where}: {detail}: text")
        return value
