# SPDX-License-Identifier: Apache-2.0
"""What is known of how old a file's copies are (service/freshness.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uffdprefetch.base.record import dataclass, field
from uffdprefetch.native import compare as uffd_compare
from uffdprefetch.state.file_times import Times

if TYPE_CHECKING:
    from uffdprefetch.state.pool_file import PoolFile


@dataclass
class FileWatch:
    """What is known of a file's copies."""

    times: Times
    since_ns: int  # all of them were right at some time after this
    began_ns: int
    watch: uffd_compare.Watch | None = None
    pooled: PoolFile | None = None  # whose samples the round under way takes
    under_way: bool = False
    compared: bool = True  # nobody can have written since, but where no lease holds
    start: int = 0  # what was left out last time comes first
    pages: list[int] = field(default_factory=list)  # of the memfd
    loose: set[int] = field(default_factory=set)  # in the memfd, to be copied before they are laid
    loose_at: int = 0
    over: bool = False  # nobody has a copy, nor gets one

    def close(self) -> None:
        """Give back descriptors and mappings."""
        if self.watch is not None:
            self.watch.close()
            self.watch = None
