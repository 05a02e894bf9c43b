# SPDX-License-Identifier: Apache-2.0
"""The job of bench/pool.py lookups, by py-lmdb: `pool_lookups_job.py DATABASE ROUNDS LOOKUPS`.

Each round looks records up, nine in ten of a tenth of them, and then reads all in order.
"""

from __future__ import annotations

import json
import random
import sys
import time
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from uffdprefetch.demo.job import get_record, open_database

HOT_RECORDS, HOT_LOOKUPS = 0.1, 0.9


def job(database: str, rounds: int, lookups: int) -> dict[str, Any]:
    """Seconds of look-ups and of scans, by round, and the CRC-32 over all that was read."""
    env = open_database(database)
    records: int = env.stat()["entries"]
    rng = random.Random(7)
    hot = rng.sample(range(records), max(1, int(records * HOT_RECORDS)))
    crc, seconds = 0, {"lookups": list[float](), "scans": list[float]()}
    with env.begin(buffers=True) as txn:
        for _ in range(rounds):
            begin = time.perf_counter()
            for _ in range(lookups):
                is_hot = rng.random() < HOT_LOOKUPS
                crc = zlib.crc32(
                    get_record(txn, rng.choice(hot) if is_hot else rng.randrange(records)), crc
                )
            middle = time.perf_counter()
            for value in txn.cursor().iternext(keys=False):
                crc = zlib.crc32(value, crc)
            seconds["lookups"].append(middle - begin)
            seconds["scans"].append(time.perf_counter() - middle)
    env.close()
    return {**seconds, "crc": crc}


if __name__ == "__main__":
    print(json.dumps(job(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
