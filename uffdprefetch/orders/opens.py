# SPDX-License-Identifier: Apache-2.0
"""What an announcing process and its children were seen to open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from uffdprefetch.base.record import dataclass

#: Latest opens that the helper hears of: it compares with the files of the latest 1,024 samples
#: (orders/path_search.py), of which each may have several.
OPENS_MAX = 4096


@dataclass(frozen=True)
class JobOpens:
    """What was seen since it has announced.

    paths: real paths of files that they opened, the latest last. directories: those, by their real
    paths, in which all opens are seen (none: all are seen everywhere); since_items: what they had
    read when that began (None: it has not).
    """

    paths: Sequence[str]
    directories: frozenset[str] = frozenset()
    since_items: int | None = None

    @classmethod
    def of_request(cls, value: Mapping[str, Any] | None) -> JobOpens | None:
        """As the service's question has it."""
        if value is None:
            return None
        return cls(value["paths"], frozenset(value["directories"]), value["since_items"])
