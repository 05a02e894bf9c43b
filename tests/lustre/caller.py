# SPDX-License-Identifier: Apache-2.0
"""A job that reads by calls on a Lustre client.

    caller.py files LIST              open, look at, read and close each file of a list
    caller.py gaps FILE BYTES EVERY   pread so many bytes of each EVERY

It begins when its service is up, if it has one, and when there is the file that GO names, if it
names one. One line of JSON: how many bytes it has read, and their SHA-256. Servers know it by its
name, ``caller``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

#: It does not wait longer for what is read ahead of it.
PATIENCE_SECONDS = 200


def of_files(paths: list[str]) -> Iterator[bytes]:
    """Each one's bytes."""
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            yield file.read()


def of_gaps(path: str, length: int, every: int) -> Iterator[bytes]:
    """Each piece."""
    with open(path, "rb", buffering=0) as file:
        for at in range(0, os.fstat(file.fileno()).st_size, every):
            yield os.pread(file.fileno(), length, at)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > end:
            sys.exit("waited in vain")
        time.sleep(0.02)


def service_is_up() -> bool:
    """Its lock file says so (protocol/leftovers.py)."""
    socket = os.environ.get("UFFDPREFETCH_SOCKET")
    return socket is None or os.stat(f"{socket}.lock").st_size > 0


def main() -> None:
    Path("/proc/self/comm").write_text("caller")
    what, *words = sys.argv[1:]
    pieces = (
        of_files(Path(words[0]).read_text().splitlines())
        if what == "files"
        else of_gaps(words[0], int(words[1]), int(words[2]))
    )
    wait_until(service_is_up)
    wait_until(lambda: "GO" not in os.environ or os.path.exists(os.environ["GO"]))
    whole, bytes_read = hashlib.sha256(), 0
    for piece in pieces:
        whole.update(piece)
        bytes_read += len(piece)
    print(json.dumps({"bytes": bytes_read, "digest": whole.hexdigest()}), flush=True)


if __name__ == "__main__":
    main()
