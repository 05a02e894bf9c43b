# SPDX-License-Identifier: Apache-2.0
"""Signals that are passed on to a job."""

from __future__ import annotations

import os
import signal

from uffdprefetch.base import follow


def test_what_is_no_signal_ends_nobody() -> None:
    """A tracer may have us take any number."""
    follow.send(os.getpid(), max(signal.valid_signals()) + 1)
