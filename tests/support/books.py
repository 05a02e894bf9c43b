# SPDX-License-Identifier: Apache-2.0
"""Of stand-ins for files: what the books for what was gained are asked (FileState)."""

from __future__ import annotations

from typing import Any

from uffdprefetch.predict.gain import Used


def books() -> dict[str, Any]:
    """Fields of a file of which nothing is told to them."""
    return {"tell_used": lambda start, end: None, "used": Used(), "cold": False}
