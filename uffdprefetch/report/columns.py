# SPDX-License-Identifier: Apache-2.0
"""Tables as plain text, and how a command shows its document."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

Document = dict[str, Any]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line a row: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [
                first.ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)),
            ]
        ).rstrip()
        for first, *cells in rows
    ]


def show(
    document: Document,
    as_json: bool,
    plain: Callable[[Document], str],
    table: Callable[[Document], None],
) -> None:
    """On stdout: JSON, a table for a terminal, or plain text."""
    if as_json:
        print(json.dumps(document, indent=2))
    elif sys.stdout.isatty():
        table(document)
    else:
        sys.stdout.write(plain(document))
