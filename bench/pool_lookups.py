# SPDX-License-Identifier: Apache-2.0
"""Show 5 of bench/pool.py: records looked up, most of them of a hot set, while scans go by."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any

from pool_bench import PLAIN, Bench, NotHere, Run, by_variant, median, paired
from pool_cgroup import memory_group
from pool_cgroup import why_not as why_no_cgroup
from pool_lookups_job import job
from render import markdown_table, number, ratio
from reports import ROOT

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.units import parse_size
from uffdprefetch.demo.dataset import DATABASE_NAME
from uffdprefetch.demo.jobrun import job_environment

TITLE = "Look-ups in a hot set, and scans"
POLICIES = ("lru", "cyclic")
MIB = 1 << 20


def add_options(parser: ArgumentParser) -> None:
    """The options of this measurement alone."""
    add = parser.add_argument
    add("--rounds", type=int, default=4)
    add("--lookups", type=int, default=20_000, help="of records, before each scan")
    add("--share", type=float, default=0.75, help="of the data set that the budget holds")
    add(
        "--slack", type=parse_size, default=parse_size("512MiB"),
        help="what wrap, the service and the job may use besides the budget",
    )  # fmt: skip
    add(
        "--job", type=parse_size, default=parse_size("14MiB"),
        help="what the plain job has for itself besides what the budget is",
    )  # fmt: skip


def _measure(bench: Bench, args: Namespace, wrap: Sequence[str], limit_bytes: int, crc: int) -> Run:
    reason = why_no_cgroup()
    if reason is not None:
        raise NotHere(reason)
    bench.prepare()
    words = [
        sys.executable,
        str(ROOT / "bench" / "pool_lookups_job.py"),
        str(bench.bed.path(DATABASE_NAME)),
    ]
    words += [str(args.rounds), str(args.lookups)]
    begin = time.perf_counter()
    with memory_group(limit_bytes) as group:
        done = subprocess.run(
            group.joined([*wrap, *words]), capture_output=True, text=True, check=False,
            cwd=bench.scratch, env=job_environment(),
        )  # fmt: skip
    if done.returncode:
        raise UffdPrefetchError(f"status {done.returncode}: {done.stderr[-300:]}")
    found = json.loads(done.stdout)
    if found["crc"] != crc:
        raise UffdPrefetchError(f"WRONG BYTES: {found['crc']:#x}, not {crc:#x}")
    return {
        "seconds": sum(found["lookups"]) + sum(found["scans"]),
        "wall_seconds": time.perf_counter() - begin,
        "lookup_seconds": sum(found["lookups"]),
        "scan_seconds": sum(found["scans"]),
        "rounds": found,
        "bytes_read": bench.bed.counters()["bytes"],
        "limit_bytes": limit_bytes,
    }


def measure(bench: Bench, args: Namespace, save: Callable[[], None]) -> None:
    """The only case."""
    budget_bytes = int(bench.file_bytes * args.share) // MIB * MIB
    crc = job(str(bench.source / DATABASE_NAME), args.rounds, args.lookups)["crc"]

    def pool(policy: str) -> Run:
        words = bench.wrapped("pool", ("--budget", str(budget_bytes), "--evict", policy))
        run = _measure(bench, args, words, budget_bytes + args.slack, crc)
        return {**run, "pool": bench.pool_summary()}

    variants: dict[str, Callable[[], Run]] = {
        PLAIN: lambda: _measure(bench, args, [], budget_bytes + args.job, crc)
    }
    variants |= {f"pool, {policy}": functools.partial(pool, policy) for policy in POLICIES}
    bench.rounds("py-lmdb", args.pairs, variants, save)


def tables(report: dict[str, Any]) -> list[str]:
    """One table."""
    rows = []
    for name, mine in by_variant(report["runs"], "py-lmdb").items():
        compared = paired(report["runs"], name, PLAIN)
        read = median(mine, "bytes_read")
        rows.append([
            name,
            number(median(mine, "lookup_seconds")),
            number(median(mine, "scan_seconds")),
            ratio(*compared) if compared else "n/a",
            number(None if read is None else read / 1e6, 0),
            str(len(mine)),
        ])  # fmt: skip
    head = ["py-lmdb", "look-ups, s", "scans, s", "ratio to plain", "read, MB", "runs"]
    return [markdown_table(head, rows)]


def notes(report: dict[str, Any]) -> Sequence[str]:
    """The table's legend."""
    options = report["options"]
    return (
        f"{options['rounds']} rounds of {options['lookups']} look-ups and a scan. The budget is "
        f"{100 * options['share']:.0f} % of the data set. *plain*: page cache and job in a memory "
        f"cgroup of the budget and {options['job'] / 1e6:.0f} MB. Every byte is checked.",
    )
