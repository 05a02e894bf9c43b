# SPDX-License-Identifier: Apache-2.0
"""The cost of record indices: `python bench/index.py [--records 1000000] [--json F]`.

For each format a file of that many records whose data are holes (bench/index_files.py), indexed in
a separate process with the file's pages in the page cache: seconds (median of --rounds), bytes read
of the file, bytes of the index a record, the process's peak memory, and the time to map it from the
cache of a runtime directory. --latency-ms adds a delay to every read, as on a remote file system:
shows the gain of several threads (against --threads 1). Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

ROOT = Path(__file__).resolve().parents[1]
#: Format, bytes a record; the last is a file of small records, which is read whole.
CASES = (
    ("raw", 12288), ("npy", 12288), ("lmdb", 12288), ("tfrecord", 12288), ("arrow", 12288),
    ("lmdb", 131072), ("tfrecord", 131072), ("tfrecord", 100),
)  # fmt: skip


def one(path: str, wanted: str, record_bytes: int, latency_seconds: float, threads: int) -> None:
    """Index one file and print its cost as JSON; runs in the child."""
    from uffdprefetch.formats import arrow, cache, reader, tfrecord
    from uffdprefetch.formats.detect import load, read_index
    from uffdprefetch.formats.index import FormatOptions

    load(wanted)
    if wanted == "arrow":
        arrow._pyarrow()
    for module in (arrow, reader, tfrecord):
        if threads:
            module.THREADS = threads

    class Counting(reader.FileReader):
        reads = 0
        read_bytes = 0
        lock = threading.Lock()

        def read(self, offset: int, length: int) -> bytes:
            with self.lock:
                self.reads += 1
                self.read_bytes += length
            if latency_seconds:
                time.sleep(latency_seconds)
            return super().read(offset, length)

    options = FormatOptions(record_bytes if wanted == "raw" else None)
    before = memory_bytes("VmRSS")
    with Counting(path) as file:
        began = time.perf_counter()
        index = read_index(file, path, wanted, options)
        seconds = time.perf_counter() - began
    peak = memory_bytes("VmHWM") - before
    result: dict[str, Any] = {
        "records": len(index),
        "seconds": seconds,
        "reads": file.reads,
        "read_bytes": file.read_bytes,
        "index_bytes": index.index_bytes(),
        "peak_bytes": peak,
    }
    if not latency_seconds:
        os.utime(path, (1, 1))  # a recently written file is not cached
        cache.open_cached(path, wanted, options)
        began = time.perf_counter()
        cache.open_cached(path, wanted, options)
        result["cached_seconds"] = time.perf_counter() - began
    print(json.dumps(result))


def memory_bytes(what: str) -> int:
    """A line of /proc/self/status. (getrusage's maximum includes the parent's.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {what} in /proc/self/status")


def measure(
    wanted: str, records: int, record_bytes: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One row."""
    from index_files import MAKERS

    with tempfile.TemporaryDirectory(prefix="uffdprefetch-index-", dir=options.directory) as name:
        path = Path(name) / "data"
        MAKERS[wanted](path, records, record_bytes)
        words = [sys.executable, __file__, "--one", str(path), wanted, str(record_bytes)]
        words += [str(options.latency_ms / 1e3), str(options.threads)]
        environment = {**os.environ, "UFFDPREFETCH_RUNDIR": f"{name}/run", "PYTHONPATH": str(ROOT)}
        runs = [
            json.loads(
                subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True).stdout
            )
            for _ in range(options.rounds)
        ]
        row = dict(runs[0])
        for quantity in ("seconds", "peak_bytes", "cached_seconds"):
            if quantity in row:
                row[quantity] = statistics.median(run[quantity] for run in runs)
        assert row["records"] == records
        return {
            "format": wanted,
            "record_bytes": record_bytes,
            "file_bytes": path.stat().st_size,
            **row,
        }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| format | records | of bytes | seconds | reads | read MB | index B/record | peak MB"
        " | from the cache, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cached = row.get("cached_seconds")
        lines.append(
            f"| {row['format']} | {row['records']:,} | {row['record_bytes']:,}"
            f" | {row['seconds']:.3g} | {row['reads']:,} | {row['read_bytes'] / 1e6:.3g}"
            f" | {row['index_bytes'] / row['records']:.3g} | {row['peak_bytes'] / 1e6:.3g}"
            f" | {'n/a' if cached is None else f'{cached * 1e3:.3g}'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure all cases and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=0, help="not the program's own number")
    parser.add_argument("--only", action="append", metavar="FORMAT[:BYTES]")
    parser.add_argument("--directory", help="where the files are made (default: TMPDIR)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for wanted, record_bytes in CASES:
        if options.only and not {wanted, f"{wanted}:{record_bytes}"} & set(options.only):
            continue
        print(f"{wanted}, {record_bytes} bytes a record ...", file=sys.stderr)
        rows.append(measure(wanted, options.records, record_bytes, options))
    print(table(rows))
    if options.json:
        document = {
            "schema": "uffdprefetch.bench.index/1",
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "rounds": options.rounds,
            "latency_ms": options.latency_ms,
            "threads": options.threads or None,
            "results": rows,
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _, _, path, wanted, record_bytes, latency, threads = sys.argv
        one(path, wanted, int(record_bytes), float(latency), int(threads))
    else:
        main()
