# SPDX-License-Identifier: Apache-2.0
"""How a mapping is served: by checkpoints, by page tables alone, or not at all, and why. Pure; the
pool's answer is its own (pool_bridge.py)."""

from __future__ import annotations

import os
from dataclasses import dataclass

from uffdprefetch.protocol import wire
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState
from uffdprefetch.state.reader import FIRST_OBSERVED
from uffdprefetch.state.unserved import Coarse, Reason, Refusal


@dataclass(frozen=True)
class Serving:
    """``reason``: for people. ``coarse``: why by page tables; ``refusal``: why not at all."""

    mode: wire.ServingMode
    reason: str = ""
    coarse: Coarse | None = None
    refusal: Refusal | None = None


def refused(refusal: Refusal) -> Serving:
    """Not served."""
    return Serving(wire.ServingMode.REFUSE, refusal=refusal)


def by_page_tables(client: Client, coarse: Coarse, more: str = "") -> Serving:
    """Followed by page tables, where they can be seen."""
    if client.pagemap_fd < 0:
        hidden = f"its process hides its page tables ({client.pagemap_error})"
        return refused(Refusal(Reason.PAGE_TABLE, hidden))
    return Serving(wire.ServingMode.PAGE_TABLES, coarse.words + more, coarse)


def serving_of(client: Client, a: wire.Attach, file: FileState, engine: str) -> Serving:
    """How a mapping of a file that can be served is."""
    if file.guard.changed:
        return refused(Refusal(Reason.CHANGED, file.guard.changed))
    coarse = _coarse(client, a, file, engine)
    if coarse is Coarse.NO_USERFAULTFD:
        error = os.strerror(client.hello.uffd_error)
        return by_page_tables(client, coarse, f" ({error}): see doctor")
    if coarse is not None:
        return by_page_tables(client, coarse)
    return Serving(wire.ServingMode.CHECKPOINTS, "userfaultfd with kernel faults works in the job")


def _coarse(client: Client, a: wire.Attach, file: FileState, engine: str) -> Coarse | None:
    if a.flags & wire.ATTACH_WRITABLE:
        return Coarse.OPENED_FOR_WRITING
    if file.guard.writer:
        return Coarse.WRITER
    if a.flags & wire.ATTACH_COPIES:
        return Coarse.COPIES
    if client.observed:
        if engine == "off":
            return Coarse.ENGINE_OFF
        return Coarse.STATIC if client.static else Coarse.NOT_LOADED
    if a.region >= FIRST_OBSERVED:
        return Coarse.BYPASSES if client.bypasses else Coarse.PAST_LIBC
    if not client.has_uffd:
        return Coarse.NO_USERFAULTFD
    return Coarse.MANY if a.flags & wire.ATTACH_MANY else None
