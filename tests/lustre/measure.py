# SPDX-License-Identifier: Apache-2.0
"""RPCs, faults and bytes of whole runs on a Lustre client: the table of docs/lustre.md.

Runs in the guest (tests/lustre/guest.py --measure). Times mean nothing there; counts do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from lustre import client, job

MIB = 1 << 20
PLACES, PARTS = "places:300/4096", "parts:12:120"
#: name: (pattern, options of wrap; None: plainly); behind a / its record's bytes
CASES: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "plain": ("contiguous", None),
    "plain, 4 ranks skip": ("skipping:4", None),
    "plain, shuffled": ("shuffled", None),
    "contiguous": ("contiguous", ()),
    "contiguous, --policy fixed": ("contiguous", ("--policy", "fixed")),
    "contiguous, --policy stride": ("contiguous", ("--policy", "stride")),
    "4 ranks skip": ("skipping:4", ()),
    "4 ranks skip, --policy stride": ("skipping:4", ("--policy", "stride")),
    "shuffled": ("shuffled", ()),
    "shuffled, --plan": ("shuffled", ("--plan", "PLAN")),
    "pool, contiguous": ("contiguous", ("--engine", "pool")),
    "pool, 4 ranks skip": ("skipping:4", ("--engine", "pool")),
    "pool, shuffled, --plan": ("shuffled", ("--engine", "pool", "--plan", "PLAN")),
    "--engine off": ("contiguous", ("--engine", "off")),
    "plain, 300 pages": (PLACES, None),
    "300 pages": (PLACES, ()),
    "300 pages, --policy fixed": (PLACES, ("--policy", "fixed")),
    "pool, 300 pages": (PLACES, ("--engine", "pool")),
    "plain, 1.5 MiB of each 15": (PARTS, None),
    "1.5 MiB of each 15": (PARTS, ()),
    "1.5 MiB of each 15, --policy fixed": (PARTS, ("--policy", "fixed")),
    "pool, 1.5 MiB of each 15": (PARTS, ("--engine", "pool")),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="measure.py", description=__doc__)
    parser.add_argument("--size-mib", type=int, default=256)
    parser.add_argument("--only", help="names of cases, separated by ;")
    parser.add_argument("--compute-ms", type=float, default=5.0, help="after each record")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="summaries and logs are left here")
    args = parser.parse_args()
    client.warm_up()
    path = client.mount() / "measured.bin"
    size = args.size_mib * MIB + 1234
    client.write_file(path, size)
    least = -(-size // client.RPC_BYTES)
    print(f"file: {size} bytes, at least {least} RPCs of 4 MiB", flush=True)
    names = args.only.split(";") if args.only else list(CASES)
    failed = 0
    for name in [n for n in names for _ in range(args.times)]:
        (pattern, _, each), options = CASES[name][0].partition("/"), CASES[name][1]
        record_bytes = int(each or job.RECORD_BYTES)
        numbers = None
        if not pattern.startswith("skipping"):
            numbers = job.order_of(pattern, -(-size // record_bytes), 0)
        want = client.digest_of(path, record_bytes, numbers)
        with tempfile.TemporaryDirectory(prefix="uffdprefetch-measure-") as at:
            directory = args.keep / name.replace(" ", "_") if args.keep else Path(at)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "plan.json").write_text(json.dumps(job.plan_of(str(path), size)))
            if options is not None:
                options = tuple(
                    str(directory / "plan.json") if word == "PLAN" else word for word in options
                )
            try:
                more = str(record_bytes), "--compute", str(args.compute_ms)
                if options is not None:
                    more = *more, "--planned" if "--plan" in options else "--known"
                ran = client.run_job(directory, path, pattern, options, more=more)
            except (RuntimeError, OSError) as error:
                print(f"{name}: FAILED: {error}", flush=True)
                failed = 1
                continue
            right = ran.said["digest"] == want
            failed |= not right
            files = ran.summary["files"] if ran.summary else []
            by = files[0]["warmed_by"] if files else "-"
            line = {
                "case": name, "rpcs": ran.rpcs.count, "one_page": ran.rpcs.of_one_page,
                "mib": round(ran.rpcs.bytes / MIB, 1), "majors": ran.said["majors"],
                "right": right, "warmed_by": by, "by_pages": ran.rpcs.by_pages,
            }  # fmt: skip
            print(json.dumps(line), flush=True)
    os.unlink(path)
    return failed


if __name__ == "__main__":
    sys.exit(main())
