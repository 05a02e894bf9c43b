# SPDX-License-Identifier: Apache-2.0
"""Messages to the user: prefixed lines on stderr, since stdout is the wrapped program's."""

from __future__ import annotations

import os
import sys

PREFIX = "uffdprefetch: "


def columns() -> int | None:
    """Of the terminal that lines are written to; None: to a file or pipe."""
    try:
        return os.get_terminal_size(2).columns or None if sys.stderr is not None else None
    except OSError:
        return None


def say(message: str) -> None:
    """Write one prefixed line to stderr by one write: the ranks of a node share a terminal.

    A closed or full stderr is no error.
    """
    if sys.stderr is None:  # closed when we started: descriptor 2 may be anything by now
        return
    try:
        sys.stderr.write(f"{PREFIX}{message}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass
