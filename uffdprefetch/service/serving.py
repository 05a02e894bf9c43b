# SPDX-License-Identifier: Apache-2.0
"""How a mapping is served: by page tables, with checkpoints over it, or not at all, and why. Pure;
the pool's answer is its own (pool_bridge.py)."""

from __future__ import annotations

import os
from typing import NamedTuple

from uffdprefetch.base.config import Config
from uffdprefetch.protocol import wire
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState
from uffdprefetch.state.reader import FIRST_OBSERVED
from uffdprefetch.state.unserved import Coarse, Reason, Refusal


class Serving(NamedTuple):
    """``reason``: for people. ``coarse``: why it is followed less closely than others of the run;
    ``refusal``: why not at all. CHECKPOINTS: something of ours may lie there, or the pool's."""

    mode: wire.ServingMode
    reason: str = ""
    coarse: Coarse | None = None
    refusal: Refusal | None = None


def refused(refusal: Refusal) -> Serving:
    """Not served."""
    return Serving(wire.ServingMode.REFUSE, refusal=refusal)


def by_page_tables(client: Client, coarse: Coarse | None, more: str = "") -> Serving:
    """Followed by page tables, where they can be seen."""
    if not client.page_table.is_readable:
        hidden = f"its process hides its page tables ({client.page_table.error})"
        return refused(Refusal(Reason.PAGE_TABLE, hidden))
    words = coarse.words if coarse is not None else "the job's page tables can be read"
    return Serving(wire.ServingMode.PAGE_TABLES, words + more, coarse)


def serving_of(client: Client, a: wire.Attach, file: FileState, config: Config) -> Serving:
    """How a mapping of a file that can be served is."""
    if file.guard.changed:
        return refused(Refusal(Reason.CHANGED, file.guard.changed))
    if not config.keeps_copies:
        return by_page_tables(client, _found_late(client, a, config.engine))
    coarse = _uncovered(client, a, file) or _found_late(client, a, config.engine)
    if coarse is None:
        coarse = _cannot_be_covered(client, a)
    if coarse is Coarse.NO_USERFAULTFD:
        error = os.strerror(client.hello.uffd_error)
        return by_page_tables(client, coarse, f" ({error}): see doctor")
    if coarse is not None:
        return by_page_tables(client, coarse)
    return Serving(wire.ServingMode.CHECKPOINTS, "userfaultfd with kernel faults works in the job")


def _uncovered(client: Client, a: wire.Attach, file: FileState) -> Coarse | None:
    """Nothing of ours may lie over it, for what is done with it or its file."""
    if a.flags & wire.ATTACH_WRITABLE:
        return Coarse.OPENED_FOR_WRITING
    if file.guard.writer:
        return Coarse.WRITER
    return Coarse.COPIES if a.flags & wire.ATTACH_COPIES else None


def _found_late(client: Client, a: wire.Attach, engine: str) -> Coarse | None:
    """No agent has told of it: it was found in /proc."""
    if client.observed:
        if engine == "off":
            return Coarse.ENGINE_OFF
        if client.sightings.is_loaded:
            return Coarse.PAST_LIBC
        return Coarse.STATIC if client.sightings.is_static else Coarse.NOT_LOADED
    if a.region >= FIRST_OBSERVED:
        return Coarse.BYPASSES if client.sightings.bypasses else Coarse.PAST_LIBC
    return None


def _cannot_be_covered(client: Client, a: wire.Attach) -> Coarse | None:
    """Something of ours could lie over it, but for this process."""
    if not client.has_uffd:
        return Coarse.NO_USERFAULTFD
    if a.flags & wire.ATTACH_BRIEF:
        return Coarse.BRIEF
    return Coarse.MANY if a.flags & wire.ATTACH_MANY else None
