# SPDX-License-Identifier: Apache-2.0
"""Memory of our own processes beside a job: `python bench/lab/own_memory.py --before DIR --json F`.

A job maps 256 MiB of the local disk, reads them in order and rests for 2.5 s; then it tells what
/proc/PID/status has as RssAnon of each process of ours. In the page cache by readahead(2); by
pread(2), as on Lustre (there by its file system's type, here as read_ahead_kb were 0); in a pool of
64 MiB. ``--before``: the same with another checkout, with its C objects built. Interpreters have
their bytecode, as in an installed package.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reports import ROOT, conditions, save

FILE_BYTES = 256 << 20
REST_SECONDS = 2.5
ENGINES: dict[str, tuple[list[str], dict[str, str]]] = {
    "page cache, readahead(2)": ([], {}),
    "page cache, pread(2)": ([], {"UFFDPREFETCH_TEST_READAHEAD": "0"}),
    "pool of 64 MiB": (["--engine", "pool", "--budget", "64MiB"], {}),
}
#: Its launcher is its parent; the launcher's children but itself are the service and a process that
#: sees it end.
JOB = """
import json, mmap, os, sys, time
def status(pid):
    with open(f"/proc/{pid}/status") as file:
        return dict(line.split(":", 1) for line in file)
def kind(pid):
    with open(f"/proc/{pid}/cmdline") as file:
        return "service" if "serve" in file.read().split("\\0") else "beside the launcher"
while not os.path.getsize(os.environ["UFFDPREFETCH_SOCKET"] + ".lock"):
    time.sleep(0.01)  # the service is not up yet
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
for at in range(0, len(mapped), 4096):
    mapped[at]
time.sleep(float(sys.argv[2]))
launcher, seen = os.getppid(), {}
seen["launcher"] = status(launcher)["RssAnon"]
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if int(status(pid)["PPid"]) == launcher and int(pid) != os.getpid():
            seen[kind(pid)] = status(pid)["RssAnon"]
    except (FileNotFoundError, ProcessLookupError):
        pass
print(json.dumps({name: int(text.split()[0]) for name, text in seen.items()}))
"""


def measured(checkout: Path, engine: str, data: Path, directory: Path) -> dict[str, int]:
    """RssAnon in KiB of each process of ours."""
    options, variables = ENGINES[engine]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["PYTHONPYCACHEPREFIX"] = str(directory / "bytecode")
    with data.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    ours = [sys.executable, "-m", "uffdprefetch", "wrap", "-q", "-f", "-o", str(directory / "run")]
    job = [sys.executable, "-c", JOB, str(data), str(REST_SECONDS)]
    done = subprocess.run(
        [*ours, *options, "--", *job], cwd=checkout, env={**environment, **variables}, check=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    found: dict[str, int] = json.loads(done.stdout)
    return found


def table(results: dict[str, dict[str, dict[str, int]]]) -> str:
    """A row for each engine and process, a column for each checkout."""
    lines = [f"| RssAnon, KiB | {' | '.join(results)} |", "|---|" + "---:|" * len(results)]
    for engine in ENGINES:
        for process in ("service", "launcher", "beside the launcher"):
            values = [str(found[engine].get(process, "")) for found in results.values()]
            lines.append(f"| {engine}: {process} | {' | '.join(values)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    checkouts = {"before": args.before} if args.before is not None else {}
    checkouts["now"] = ROOT
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        data = Path(name) / "data"
        with data.open("wb") as file:
            for _ in range(FILE_BYTES >> 20):
                file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
        for label, checkout in checkouts.items():
            for engine in 2 * list(ENGINES):  # the first makes the bytecode
                found = measured(checkout, engine, data, Path(name))
                results.setdefault(label, {})[engine] = found
    print(table(results))
    if args.json is not None:
        save(args.json, {**conditions(), "rss_anon_kib": results})


if __name__ == "__main__":
    main()
