# SPDX-License-Identifier: Apache-2.0
"""What a start of Python asks a Lustre client's servers, plain and under `--learn`: RPCs, faults.

Runs in the guest (tests/lustre/guest.py --starts TAR). TAR: an interpreter, its library and numpy,
below ``tree/``. Times mean nothing there; counts do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from lustre import client

#: The emulated service comes up long after the job: what is recorded is its start, all the same.
START = """
import sys; sys.path.insert(0, PACKAGES)
import asyncio, decimal, json, os, resource, sqlite3, time, unittest, urllib.request, numpy
majors = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
while socket := os.environ.get("UFFDPREFETCH_SOCKET"):
    if os.path.getsize(socket + ".lock"):
        time.sleep(3)
        break
    time.sleep(0.1)
print(json.dumps({"sum": int(numpy.arange(9).sum()), "majors": majors}))
"""
#: name: options (None: plainly), whether from cold
RUNS: dict[str, tuple[tuple[str, ...] | None, bool]] = {
    "plain": (None, True),
    "plain, again": (None, False),
    "record": (("--learn=start",), True),
    "learn": (("--learn=start",), True),
    "learn, again": (("--learn=start",), False),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="starts.py", description=__doc__)
    parser.add_argument("tar", type=Path)
    args = parser.parse_args()
    client.warm_up()
    tree = client.mount() / "tree"
    subprocess.run(["tar", "-C", str(client.mount()), "-xf", str(args.tar)], check=True)
    code = START.replace("PACKAGES", repr(str(tree / "site")))
    words = [str(tree / "bin" / "python3.11"), "-c", code]
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-starts-") as at:
        for name, (options, is_cold) in RUNS.items():
            more = {"XDG_CACHE_HOME": at, "PYTHONDONTWRITEBYTECODE": "1"}
            ran = client.run(Path(at), words, options, cold=is_cold, **more)
            line = {
                "run": name, "majors": ran.said["majors"], "sum": ran.said["sum"],
                "rpcs": ran.requests.by_kind, "reads": ran.rpcs.count,
                "mib": round(ran.rpcs.bytes / (1 << 20), 1), "programs": ran.requests.by_program,
                "learn": ran.summary["learn"] if ran.summary else None,
            }  # fmt: skip
            print(json.dumps(line), flush=True)
            print(ran.stderr, flush=True)
    shutil.rmtree(tree)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
