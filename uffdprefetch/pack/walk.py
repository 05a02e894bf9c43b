# SPDX-License-Identifier: Apache-2.0
"""The files below a directory, in the order of their paths as bytes compare: that of LMDB's keys.

Directories are read one at a time as the walk comes to them, and no file is asked for anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from uffdprefetch.pack.found import Found, LeftOut


def walk(root: bytes, source: int, left_out: LeftOut, below: bytes = b"") -> Iterator[Found]:
    """``below``: a directory in ``root`` where the walk begins, b"" or ending with a slash."""
    here = os.path.join(root, below)
    try:
        with os.scandir(here) as listing:
            entries = sorted(listing, key=_place)
    except OSError as error:
        left_out.name(below or root, f"its files cannot be listed: {error.strerror}")
        return
    for entry in entries:
        path, kind = below + entry.name, _kind(entry)
        if kind == "directory":
            if left_out.takes(path):  # no path below it is shorter
                yield from walk(root, source, left_out, path + b"/")
        elif kind != "file":
            left_out.count(kind)
        elif left_out.takes(path):
            yield Found(path, source, os.path.join(root, path))


def _place(entry: os.DirEntry[bytes]) -> bytes:
    """Its name; of a directory with the slash that follows it in a path."""
    return entry.name + b"/" if _kind(entry) == "directory" else entry.name


def _kind(entry: os.DirEntry[bytes]) -> str:
    try:
        if entry.is_symlink():
            return "link"
        if entry.is_dir(follow_symlinks=False):
            return "directory"
        return "file" if entry.is_file(follow_symlinks=False) else "special file"
    except OSError:  # gone meanwhile: opening it says so
        return "file"
