# SPDX-License-Identifier: Apache-2.0
"""Which disks of this node answer so quickly that the pool would only copy what they deliver."""

from __future__ import annotations

import errno
import mmap
import os

from uffdprefetch.base.clock import CLOCK
from uffdprefetch.native import uffd
from uffdprefetch.predict.bounds import ENTRIES_MAX

#: A page is there within this: twice what SSDs take (40 to 150 us), a tenth of what a disk's seek
#: does, half of what a block device behind a network does. The pool adds 100 us to a miss.
QUICK_NS = 300_000
#: Where a file is read, in eighths of it: the first read may look up where the file lies, and any
#: may wait for one of the job's, or for a processor.
PLACES = (0, 4, 2, 6, 1, 3, 5, 7)
#: A disk that takes ten times QUICK_NS so often seeks, and is asked no more.
SEEKS = 2
#: Of so many of its files one that was not seen to be quick is asked.
ASKED_FILES = 3
#: Tests: QUICK_NS, in ns.
_OVERRIDE = "UFFDPREFETCH_TEST_QUICK_DISK"

#: Of devices: how many files may still be asked for; QUICK: it is.
_found: dict[int, int] = {}
_QUICK = -1


def is_on_one(fd: int, status: os.stat_result) -> bool:
    """Whether a file's disk is one. Each device is asked by few of its files; may block on it."""
    device = status.st_dev
    if os.major(device) == 0 or not status.st_size:  # no block device: a network's, or unknown
        return False
    left = _found.get(device, ASKED_FILES)
    if left > 0:
        if len(_found) >= ENTRIES_MAX:
            _found.clear()
        left = _found[device] = _ask(fd, status.st_size, left)
    return left == _QUICK


def _ask(fd: int, size_bytes: int, left: int) -> int:
    """By reads of a page past the page cache: how many files may be asked for after this one."""
    quick_ns, seeks, own = int(os.environ.get(_OVERRIDE) or QUICK_NS), 0, -1
    try:
        # O_NONBLOCK: another's write lease would block us
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECT
        own = os.open(f"/proc/self/fd/{fd}", flags)
        with mmap.mmap(-1, mmap.PAGESIZE) as page:  # aligned, as O_DIRECT wants it
            for eighths in PLACES:
                # what is a hole comes from no disk
                at = os.lseek(own, size_bytes * eighths // 8, os.SEEK_DATA) & -mmap.PAGESIZE
                began = CLOCK.now_ns()
                os.preadv(own, [page], at)
                took_ns = CLOCK.now_ns() - began
                seeks += took_ns > 10 * quick_ns
                if took_ns <= quick_ns:
                    return _QUICK
                if seeks >= SEEKS:
                    return 0
    except OSError as error:
        # another file may be had: descriptors are short, it is a hole, or written by somebody
        return left if error.errno in (errno.EMFILE, errno.ENFILE) else left - 1
    finally:
        uffd.close_file(own)
    return left - 1
