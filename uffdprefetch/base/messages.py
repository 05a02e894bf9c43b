# SPDX-License-Identifier: Apache-2.0
"""Messages to the user: prefixed lines on stderr, since stdout is the wrapped program's."""

from __future__ import annotations

import sys

PREFIX = "uffdprefetch: "


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
