# SPDX-License-Identifier: Apache-2.0
"""When does it pay to stream the file of a random reader? `python bench/bulk_share.py [--json F]`.

A job touches a part of a file's pages (a byte of each, or of each run of --touch-kib), at random
and each once, on the slow bed: plainly, when all is cached, and under `wrap` with several values of
predict/bulk.RENT_SHARE, in turn. What the job does is what the reader has done when it ends: no
value is best for all of them. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from bulk import MIB, NAME, Run, add_bed_options, measure, report  # noqa: E402

from uffdprefetch.demo.bed import SlowBed  # noqa: E402

SCHEMA = "uffdprefetch.bench.bulk_share/1"
PLAIN, WARM = "plain", "warm"


def job(path: str, share: float, touch_bytes: int, seed: int) -> Run:
    """Touch so much of the file: seconds, and the sum of the bytes."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    count = len(data) // touch_bytes
    places = random.Random(seed).sample(range(count), max(1, round(share * count)))
    begin, total = time.perf_counter(), 0
    for place in places:
        start = place * touch_bytes
        total += sum(data[start : start + touch_bytes : mmap.PAGESIZE])
    return {"seconds": time.perf_counter() - begin, "total": total}


def run_all(options: argparse.Namespace, scratch: Path) -> list[Run]:
    """Every share under every value, --rounds times."""
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-bench-", dir=options.work) as name:
        with open(Path(name) / NAME, "wb") as file:
            for _ in range(options.size_mib):
                file.write(os.urandom(MIB))
        with SlowBed(name, bandwidth=options.bandwidth, latency_us=options.latency_us) as bed:
            for number in range(options.rounds):
                for share in options.shares:
                    words = [str(share), str(options.touch_kib << 10), str(number)]
                    totals = set()
                    ours = ["--min-size", "1MiB", *options.wrap.split()]
                    variants: dict[str, tuple[list[str], dict[str, str]]] = {WARM: ([], {})}
                    if share <= options.plain_most:
                        variants[PLAIN] = ([], {})
                    for rent in options.rents:
                        set_to = {"UFFDPREFETCH_TEST_RENT_SHARE": str(rent)}
                        variants[f"{rent:g}"] = (ours, set_to)
                    for variant, (wrap, set_to) in variants.items():
                        warm = variant == WARM
                        run = measure(bed, words, wrap, scratch, __file__, warm, **set_to)
                        totals.add(run.pop("total"))
                        runs.append({"share": share, "variant": variant, "round": number, **run})
                        print(
                            f"bench: {share:.1%} | round {number + 1}/{options.rounds} | {variant}:"
                            f" {run['seconds']:.3f} s, {run['read_bytes'] / 1e6:.0f} MB"
                            f" {(run.get('bulk') or {}).get('state', '')}",
                            file=sys.stderr, flush=True,
                        )  # fmt: skip
                    if len(totals) != 1:
                        raise SystemExit(f"bench: wrong bytes at {share}: {totals}")
    return runs


def rows(runs: list[Run], stream_seconds: float) -> list[dict[str, Any]]:
    """Per share and variant the medians: seconds, what they are to plain, and by how many times
    ``stream_seconds`` (all bytes / bandwidth) they are over warm. Pure."""
    found: dict[tuple[float, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run["share"], run["variant"]), []).append(run)

    def median(share: float, variant: str, field: str) -> float | None:
        values = [float(run[field]) for run in found.get((share, variant), [])]
        return statistics.median(values) if values else None

    made = []
    for share, variant in found:
        seconds, read = median(share, variant, "seconds"), median(share, variant, "read_bytes")
        plain, plain_read = median(share, PLAIN, "seconds"), median(share, PLAIN, "read_bytes")
        warm = median(share, WARM, "seconds")
        assert seconds is not None and read is not None and warm is not None
        mine = found[share, variant]
        made.append(
            {
                "share": share,
                "variant": variant,
                "runs": len(mine),
                "seconds": seconds,
                "to_plain": seconds / plain if plain else None,
                "over_warm": (seconds - warm) / stream_seconds,
                "read_bytes": read,
                "read_to_plain": read / plain_read if plain_read else None,
                "states": sorted({(run.get("bulk") or {}).get("state", "none") for run in mine}),
            }
        )
    return made


def table(summary: list[dict[str, Any]]) -> str:
    """The rows in Markdown. Pure."""
    lines = [
        "| touched | f | s | to plain | over warm (x stream) | read MB | to plain | bulk |",
        "|---:|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in summary:
        to_plain, read = (
            "-" if row[key] is None else f"{row[key]:.2f}" for key in ("to_plain", "read_to_plain")
        )
        ours = row["variant"] not in (PLAIN, WARM)
        lines.append(
            f"| {row['share']:.1%} | {row['variant']} | {row['seconds']:.2f} | {to_plain}"
            f" | {row['over_warm']:.2f} | {row['read_bytes'] / 1e6:.0f} | {read}"
            f" | {', '.join(row['states']) if ours else '-'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure all and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shares", type=float, nargs="+", default=[0.001, 0.01, 0.1, 0.5, 1.0])
    add("--rents", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4], help="values of f")
    add("--touch-kib", type=int, default=4, help="of the file are read at each place")
    add("--plain-most", type=float, default=0.1, help="greatest share that is also read plainly")
    add("--rounds", type=int, default=3)
    add("--size-mib", type=int, default=256, help="of the file")
    add("--wrap", default="", help="more options of wrap")
    add_bed_options(parser)
    options = parser.parse_args()
    stream_seconds = options.size_mib * MIB / options.bandwidth
    report(
        options, SCHEMA, lambda scratch: run_all(options, scratch),
        lambda runs: rows(runs, stream_seconds), table,
    )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        _, _, path, share, touch_bytes, seed = sys.argv
        print(json.dumps(job(path, float(share), int(touch_bytes), int(seed))))
    else:
        main()
