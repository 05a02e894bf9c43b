# SPDX-License-Identifier: Apache-2.0
"""Parses a TOML table key by key; each error is one line with its place."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import MISSING
from typing import Any

from uffdprefetch.base.errors import UffdPrefetchError, usage_error


class TomlTable:
    """A TOML table whose keys are consumed one by one, with its place for messages."""

    def __init__(self, values: Any, where: str, place: str = "") -> None:
        self.where, self.place = where, place
        if not isinstance(values, dict):
            raise self.error("", f"a table is needed, not {values!r}")
        self.values: dict[str, Any] = dict(values)
        self.known: list[str] = []

    def error(self, key: str, message: str) -> UffdPrefetchError:
        place = ".".join(part for part in (self.place, key) if part)
        return usage_error(f"{self.where}: {place + ': ' if place else ''}{message}")

    def take(self, key: str, convert: Callable[[Any], Any], default: Any = MISSING) -> Any:
        """The converted value of ``key``; ValueError of ``convert`` becomes the error line."""
        self.known.append(key)
        if key not in self.values:
            if default is MISSING:
                raise self.error(key, "missing")
            return default
        try:
            return convert(self.values.pop(key))
        except ValueError as error:
            raise self.error(key, str(error)) from None

    def table(self, key: str) -> TomlTable:
        self.known.append(key)
        if key not in self.values:
            raise self.error(key, "missing")
        place = f"{self.place}.{key}" if self.place else key
        return TomlTable(self.values.pop(key), self.where, place)

    def done(self) -> None:
        """Raise for keys that have not been taken."""
        for key in self.values:
            near = difflib.get_close_matches(key, self.known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(self.known)}"
            raise self.error(key, f"unknown key; {hint}")
