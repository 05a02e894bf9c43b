# SPDX-License-Identifier: Apache-2.0
"""Lines to people. stdout belongs to the wrapped program: ours go to stderr, with a prefix."""

from __future__ import annotations

import sys

PREFIX = "uffdprefetch: "


def say(message: str) -> None:
    """Write one prefixed line to stderr, in one piece: the ranks of a node share a terminal.

    A stderr that is closed or full is the user's choice and never an error of the job.
    """
    if sys.stderr is None:  # closed when we started: descriptor 2 may be anything by now
        return
    try:
        sys.stderr.write(f"{PREFIX}{message}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass
