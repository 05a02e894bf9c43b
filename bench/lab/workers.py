# SPDX-License-Identifier: Apache-2.0
"""Warm workers in C against Python threads: `python bench/lab/workers.py --json F`.

Both read a cold file on the slow bed through posix_fadvise/readahead(2) in extents of 2 MiB with
eight threads; once with an idle interpreter and once beside a Python thread that computes all the
time, as the service's planner may. Paired runs; compare their ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from reports import conditions, save

from uffdprefetch.demo.bed import SlowBed, drop_cache, resident_bytes
from uffdprefetch.native import uffd

MIB = 1 << 20
EXTENT_BYTES = 2 * MIB
CHUNK_BYTES = 256 << 10
THREADS = 8


def in_c(path: Path, size: int) -> None:
    """csrc/service/warm.c, as the service uses it."""
    event = os.eventfd(0, os.EFD_CLOEXEC)
    pool, fd = uffd.Workers(THREADS, event), os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    remaining = list(range(0, size, EXTENT_BYTES))[::-1]
    under_way = 0
    while remaining or under_way:
        while remaining and under_way < THREADS:
            at = remaining.pop()
            length = min(EXTENT_BYTES, size - at)
            pool.submit(at, fd, at, length, method=uffd.WARM_READAHEAD, chunk_bytes=CHUNK_BYTES)
            under_way += 1
        os.read(event, 8)
        under_way -= len(pool.reap())
    pool.close()
    os.close(fd)
    os.close(event)


def in_python(path: Path, size: int) -> None:
    """The same calls from Python threads, each of which releases the GIL in the call."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def warm(at: int) -> None:
        end = min(at + EXTENT_BYTES, size)
        for chunk in range(at, end, CHUNK_BYTES):
            os.posix_fadvise(fd, chunk, min(CHUNK_BYTES, end - chunk), os.POSIX_FADV_WILLNEED)
        for chunk in range(at, end, CHUNK_BYTES):
            os.pread(fd, 1, min(chunk + CHUNK_BYTES, end) - 1)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(warm, range(0, size, EXTENT_BYTES)))
    os.close(fd)


def main() -> int:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", required=True, metavar="F")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--bandwidth", type=int, default=1_000_000_000)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "schema": "uffdprefetch.bench/1",
        "suite": "workers",
        **conditions(),
        "bytes": args.mib * MIB,
        "bandwidth_bytes_per_second": args.bandwidth,
        "runs": [],
    }
    with tempfile.TemporaryDirectory(dir="/dev/shm") as source:
        with open(Path(source) / "data", "wb") as file:
            for _ in range(args.mib):
                file.write(os.urandom(MIB))
        with SlowBed(source, bandwidth=args.bandwidth, latency_us=1000) as bed:
            path = bed.path("data")
            for busy in (False, True):
                stop = threading.Event()

                def compute(stop: threading.Event = stop) -> None:
                    while not stop.is_set():
                        sum(range(1000))

                if busy:
                    threading.Thread(target=compute, daemon=True).start()
                for _ in range(args.pairs):
                    for name, function in (("C", in_c), ("Python", in_python)):
                        drop_cache(path)
                        cpu, began = time.process_time(), time.monotonic()
                        function(path, args.mib * MIB)
                        seconds = time.monotonic() - began
                        run = {"workers": name, "busy": busy, "seconds": seconds}
                        # the Python variant does not retry what readahead has dropped
                        run["resident_share"] = resident_bytes(path) / (args.mib * MIB)
                        run["cpu_seconds"] = time.process_time() - cpu
                        report["runs"].append(run)
                stop.set()
    for busy in (False, True):
        by_name = {
            name: [
                run["seconds"]
                for run in report["runs"]
                if run["workers"] == name and run["busy"] == busy
            ]
            for name in ("C", "Python")
        }
        ratio = statistics.median(
            p / c for c, p in zip(by_name["C"], by_name["Python"], strict=True)
        )
        print(
            f"{'beside a busy thread' if busy else 'alone':<22}"
            f" C {statistics.median(by_name['C']):.2f} s,"
            f" Python {statistics.median(by_name['Python']):.2f} s, Python/C {ratio:.2f}"
        )
    save(Path(args.json), report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
