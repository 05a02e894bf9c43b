# SPDX-License-Identifier: Apache-2.0
"""pool_read.c's scan by py-lmdb: `pool_lmdb.py DATABASE EPOCHS GATE`, for bench/pool.py epochs.

Every byte of every record, in key order; `sum` is the CRC-32 over all of them.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from uffdprefetch.demo.job import open_database


def crc_of(database: str) -> tuple[int, int]:
    """(CRC-32 over all values in key order, their bytes), as a rank reads them."""
    crc = total = 0
    env = open_database(database)
    with env.begin(buffers=True) as txn:
        for value in txn.cursor().iternext(keys=False):
            crc = zlib.crc32(value, crc)
            total += len(value)
    env.close()
    return crc, total


def main(database: str, epochs: int, gate: str) -> int:
    """Say when it is ready and when an epoch is over, wait each time."""
    up = os.open(f"{gate}/up", os.O_WRONLY)
    down = os.open(f"{gate}/down.0", os.O_RDONLY)

    def say(line: dict[str, object]) -> None:
        os.write(up, (json.dumps({"rank": 0, **line}) + "\n").encode())
        if not os.read(down, 1):
            raise SystemExit("pool_lmdb: the bench is gone")

    env = open_database(database)
    say({"event": "ready"})
    for epoch in range(epochs):
        crc = total = 0
        before = resource.getrusage(resource.RUSAGE_SELF)
        begin_ns = time.monotonic_ns()
        with env.begin(buffers=True) as txn:
            for value in txn.cursor().iternext(keys=False):
                crc = zlib.crc32(value, crc)
                total += len(value)
        end_ns = time.monotonic_ns()
        after = resource.getrusage(resource.RUSAGE_SELF)
        say(
            {
                "event": "epoch",
                "epoch": epoch,
                "begin_ns": begin_ns,
                "end_ns": end_ns,
                "bytes": total,
                "sum": crc,
                "minflt": after.ru_minflt - before.ru_minflt,
                "majflt": after.ru_majflt - before.ru_majflt,
                "nvcsw": after.ru_nvcsw - before.ru_nvcsw,
                "nivcsw": after.ru_nivcsw - before.ru_nivcsw,
            }
        )
    env.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
