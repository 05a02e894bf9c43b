# SPDX-License-Identifier: Apache-2.0
"""The clock of every time in the service and in the agents' events."""

from __future__ import annotations

import time

MS = 1_000_000


def now_ns() -> int:
    """CLOCK_MONOTONIC, ns."""
    return time.monotonic_ns()
