# SPDX-License-Identifier: Apache-2.0
"""Between a service and its run's convener on this node (cluster/convene.py)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

LINE_MOST_BYTES = 1 << 16
#: The convener's own bounds (END_SECONDS of cluster/started.py, twice), and some.
END_SECONDS = 3.5


class ConvenerPipe:
    """The run's convener on this node, a process, and what is said between it and the service: a
    line of JSON each."""

    def __init__(self, argv: Sequence[str] | None = None) -> None:
        """Raises OSError."""
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            argv or [sys.executable, "-m", "uffdprefetch.cluster.convene"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self.fd = self._process.stdout.fileno()
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_NONBLOCK)
        os.set_blocking(self._process.stdin.fileno(), False)
        self._rest, self._unsaid = b"", b""

    def tell(self, **said: Any) -> None:
        """One line to it, as soon as that can be."""
        self._unsaid += json.dumps(said).encode() + b"\n"
        self._say()

    def housekeep(self) -> None:
        """Once a second: what it has not taken yet."""
        if self._unsaid:
            self._say()

    def _say(self) -> None:
        assert self._process.stdin is not None
        try:
            self._unsaid = self._unsaid[os.write(self._process.stdin.fileno(), self._unsaid) :]
        except BlockingIOError:
            pass  # later
        except BrokenPipeError:
            self._unsaid = b""  # its end is heard of below

    def hear(self) -> list[dict[str, Any]] | None:
        """What it has said; None: it has ended, and ``fd`` says nothing any more."""
        try:
            data = os.read(self.fd, LINE_MOST_BYTES)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        heard = []
        for line in lines:
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if isinstance(said, dict):
                heard.append(said)
        return heard

    def close(self) -> None:
        """End it, and with it what it has started."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
