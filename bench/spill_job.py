# SPDX-License-Identifier: Apache-2.0
"""The job of bench/spill.py: a mapped file, read in epochs by records, each of which has a known
checksum. One line of JSON an epoch."""

from __future__ import annotations

import argparse
import json
import mmap
import random
import time
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path

from uffdprefetch.plan import announce


def records_in_order(count: int, epoch: int, order: str) -> list[int]:
    """Those of one epoch."""
    found = list(range(count))
    if order != "in order":
        random.Random(epoch).shuffle(found)
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Raises SystemExit for a wrong byte."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("file", type=Path)
    add("sums", type=Path, help="CRC-32 of each record, as C's uint32")
    add("--record", type=int, required=True)
    add("--epochs", type=int, required=True)
    add("--compute", type=float, default=0.0, help="seconds on each record")
    add("--order", choices=("in order", "known", "unknown"), required=True)
    args = parser.parse_args(words)
    sums = array("I", args.sums.read_bytes())
    with open(args.file, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    view = memoryview(data)
    for epoch in range(args.epochs):
        order = records_in_order(len(sums), epoch, args.order)
        if args.order == "known":
            ranges = [(i * args.record, (i + 1) * args.record) for i in order]
            announce(args.file, ranges=ranges)
        began, waited = time.monotonic(), []
        for i in order:
            at = time.monotonic()
            found = zlib.crc32(view[i * args.record : (i + 1) * args.record])
            waited.append(time.monotonic() - at)
            if args.compute:
                time.sleep(args.compute)
            if found != sums[i]:
                raise SystemExit(f"WRONG BYTES in record {i} of epoch {epoch}")
        waited.sort()
        print(json.dumps({
            "seconds": time.monotonic() - began, "most_ms": waited[-1] * 1e3,
            "p99_ms": waited[len(waited) * 99 // 100] * 1e3,
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
