# SPDX-License-Identifier: Apache-2.0
"""Whether what is read of a file stays in the page cache: else nothing is gained by reading it
ahead."""

from __future__ import annotations

from uffdprefetch.base.clock import Clock
from uffdprefetch.base.record import dataclass, field
from uffdprefetch.predict.bounds import ENTRIES_MAX
from uffdprefetch.predict.storage import BLOCK_BYTES
from uffdprefetch.sense.read_calls import Key, ReadSeen
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.reader import Region

#: A reader that waits so many times in a row where all was there gains nothing by it: memory is too
#: short to keep it, or nobody says what is kept.
VAIN = 8
#: So many looks in a row at which what had just been read was not kept: the job drops it
#: (POSIX_FADV_DONTNEED, RWF_DONTCACHE), or its file system keeps nothing (FUSE with direct_io).
DROPPED = 2
#: ... and of so many files of a file system it is the file system.
VAIN_FILES = 2


@dataclass
class _Looks:
    """At a reader of a file. ``come``: by thread, [start, end) of what was read ahead of it and had
    come by a time; ``vain``, ``dropped``: see VAIN, DROPPED."""

    come: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    vain: int = 0
    dropped: int = 0


class KeptReads:
    """Of all files that are read by calls."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger, self._clock = ledger, clock
        self._looks: dict[int, _Looks] = {}  # by region
        self._in_vain: dict[int, set[int]] = {}  # by device, inodes: see VAIN_FILES

    def gains_nothing(self, key: Key) -> bool:
        """Whether what is read ahead of a file is not there when it is needed."""
        inodes = self._in_vain.get(key[0], ())
        return key[1] in inodes or len(inodes) >= VAIN_FILES

    def keeps(self, region: Region, one: ReadSeen) -> bool:
        """Whether what is read ahead of a reader may be of use, by one more look at it. The first
        time that it is not is said."""
        looks = self._looks.setdefault(region.id, _Looks())
        dropped = self._is_dropped(looks, region.file, one)
        if not dropped and not (one.waiting and self._waits_in_vain(looks, region.file, one)):
            return True
        device, inode = one.key
        self._in_vain.setdefault(device, set()).add(inode)
        self._ledger.leave_alone(
            "left to the kernel: what is read of it is not kept (its job drops it, its file system"
            " keeps nothing, or memory is too short)", region.file.path,
        )  # fmt: skip
        return False

    def forget(self, region: Region) -> None:
        """It is not followed any more."""
        self._looks.pop(region.id, None)

    def _waits_in_vain(self, looks: _Looks, file: FileState, one: ReadSeen) -> bool:
        """Whether it waits for what was there already, again and again."""
        end = min(max(one.asked_end, one.position + 1), file.size_bytes)
        low, high, since_ns = looks.come.pop(one.tid, (0, 0, 0))
        until = _come(file, one.position)
        looks.come[one.tid] = one.position, until, self._clock.now_ns()
        if len(looks.come) > ENTRIES_MAX:
            del looks.come[next(iter(looks.come))]
        if one.asked_end <= one.position:
            return False  # of how much is not known: that may not have come
        if until < end:
            looks.vain = 0
        elif low <= one.position and end <= high and one.at_ns > since_ns:
            looks.vain += 1
        return looks.vain >= VAIN

    @staticmethod
    def _is_dropped(looks: _Looks, file: FileState, one: ReadSeen) -> bool:
        """Whether the end of what it has read since the last look, or the beginning of what was
        read ahead of it and has come, is not kept, again and again."""
        at = one.position
        low, high = max(one.start, at - BLOCK_BYTES), min(at + BLOCK_BYTES, _come(file, at))
        found = [file.resident_bytes(a, b - a) for a, b in ((low, at), (at, high)) if a < b]
        if found and None not in found:
            looks.dropped = 0 if all(found) else looks.dropped + 1
        return looks.dropped >= DROPPED


def _come(file: FileState, at: int) -> int:
    """Up to where what is read from ``at`` on was read ahead, and has come: lately, as what came in
    an earlier epoch may be gone again."""
    gaps = file.cache.recent.missing(at, file.size_bytes)
    return gaps[0][0] if gaps else file.size_bytes
