# SPDX-License-Identifier: Apache-2.0
"""A convener's side of the pipe to its service (service/convener_pipe.py): lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import select
from typing import Any


class ServicePipe:
    """``out``: a file for text, the service's end of which may be gone."""

    def __init__(self, out: Any) -> None:
        self._out = out
        self._rest = b""

    def tell(self, **values: Any) -> None:
        """One line to the service."""
        with contextlib.suppress(BrokenPipeError):
            self._out.write(json.dumps(values) + "\n")
            self._out.flush()

    def hear(self, stdin: int, seconds: float) -> list[dict[str, Any]] | None:
        """What the service has said, for which this waits; None: it has hung up."""
        ready, _, _ = select.select([stdin], [], [], seconds)
        if not ready:
            return []
        data = os.read(stdin, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict):
                    found.append(said)
        return found if data else None
