# SPDX-License-Identifier: Apache-2.0
"""A generation's key: who leads makes it, and seals it for each node (sealed.py)."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from uffdprefetch.cluster.meeting import Meeting
from uffdprefetch.cluster.sealed import KEY_BYTES, Pair
from uffdprefetch.cluster.service_pipe import ServicePipe

#: Prefix of the note with a generation's key, sealed for one node.
KEY = "key-"


class GenerationKey:
    """One node's pair, by which it gets the keys."""

    def __init__(self, meeting: Meeting, service: ServicePipe) -> None:
        self._meeting, self._service = meeting, service
        self._pair = Pair()

    @property
    def public(self) -> str:
        """The half that others seal a key with."""
        return self._pair.public

    def take(self, names: Sequence[str]) -> None:
        """Take the key of a generation that this node is to be in, where there is one."""
        if f"{KEY}{self._meeting.node}" not in names:
            return
        note = self._meeting.take(f"{KEY}{self._meeting.node}") or {}
        try:
            generation = int(note["generation"])
            about = f"{generation} {self._meeting.node}"
            key = self._pair.open(str(note["sealed"]), str(note["by"]), about)
        except (KeyError, TypeError, ValueError):
            return  # nothing that we could have written
        self._service.tell(key=key.hex(), generation=generation)

    def give(self, generation: int, there: Mapping[int, Mapping[str, Any]]) -> None:
        """A new one to each node of the generation. Raises OSError."""
        key = secrets.token_bytes(KEY_BYTES)
        self._service.tell(key=key.hex(), generation=generation)
        for node in there.keys() - {self._meeting.node}:
            with contextlib.suppress(ValueError):  # it would not be let in
                about = f"{generation} {node}"
                sealed = self._pair.seal(key, str(there[node].get("public")), about)
                self._meeting.post(
                    f"{KEY}{node}",
                    {"generation": generation, "by": self._pair.public, "sealed": sealed},
                )
