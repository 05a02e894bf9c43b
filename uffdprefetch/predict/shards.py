# SPDX-License-Identifier: Apache-2.0
"""Which file comes after a file: the naming of checkpoints in several shards. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: NAME-00001-of-00004.EXT, as transformers and those who follow it name shards: from 1 on.
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})((?:\.[^./]+)+)", re.DOTALL)


def successor(name: str) -> str | None:
    """The name of the next shard; None: the name says of none, or it is the last."""
    found = _NUMBERED.fullmatch(name)
    if found is None:
        return None
    base, number, count, suffix = found.groups()
    if not 0 < int(number) < int(count):
        return None
    return f"{base}-{int(number) + 1:05d}-of-{count}{suffix}"


def after(name: str, names: Iterable[object]) -> str | None:
    """The one after ``name`` of the shards that an index names, each often: loaders take them by
    their names. None: it is the last, or none of them, or the index is none."""
    shards = sorted({one for one in names if isinstance(one, str) and "/" not in one})
    if name not in shards[:-1]:
        return None
    return shards[shards.index(name) + 1]
