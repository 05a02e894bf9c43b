# SPDX-License-Identifier: Apache-2.0
"""json.dumps() of plain values, for `wrap`: the standard module loads re, this takes nothing."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def dumps(value: Any, indent: int | None = None, depth: int = 0) -> str:
    """The text that json.dumps(value, indent=indent) makes of it.

    ``value``: None, bool, int, float, str, list, tuple, or dict with strings as keys.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, dict):
        opened, closed = "{}"
        items = [
            f"{_quoted(name)}: {dumps(each, indent, depth + 1)}" for name, each in value.items()
        ]
    else:
        opened, closed = "[]"
        items = [dumps(each, indent, depth + 1) for each in value]
    if not items or indent is None:
        return opened + ", ".join(items) + closed
    inner, outer = (f"\n{' ' * (indent * n)}" for n in (depth + 1, depth))
    return opened + inner + f",{inner}".join(items) + outer + closed


def _quoted(text: str) -> str:
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    import json

    return json.dumps(text)
