# SPDX-License-Identifier: Apache-2.0
"""A directory that is watched: what lies in it, and a mark by which opens in it are told."""

from __future__ import annotations

import os
from typing import NamedTuple

from uffdprefetch.native.listing import ListedNames, read
from uffdprefetch.predict.bounds import LIST_MAX
from uffdprefetch.sense.opens import Opens


class WatchedDirectory(NamedTuple):
    """``key``: of its mark in Opens. Names are as they were before it was marked."""

    key: int
    files: ListedNames
    subdirectories: ListedNames


def watch(opens: Opens, directory: int | str) -> WatchedDirectory:
    """List a directory and mark it. It waits for storage: for a thread of its own (Opener.run()).

    ``directory``: a path (/proc/PID/root/... of a process whose mounts are others), or a descriptor
    of any kind, which is left open. Raises OSError, whose strerror is for people: those of
    Opens.mark(), and E2BIG of more than LIST_MAX names.
    """
    path = f"/proc/self/fd/{directory}" if isinstance(directory, int) else directory
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        files, subdirectories = read(fd, LIST_MAX)
    finally:
        os.close(fd)
    key = opens.mark(directory, subdirectories=len(subdirectories) > 0)
    return WatchedDirectory(key, files, subdirectories)
