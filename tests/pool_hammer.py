# SPDX-License-Identifier: Apache-2.0
"""Verify every word that readers get from a pool that is much too small for their file.

    python -m tests.pool_hammer [--mwords 1500] [--size 256MiB] [--budget 64MiB] [--huge-pages]

The real thing: tests/programs/pool_hammer.c under ``wrap --engine pool``, several processes with
several threads each, which read a file of known words in order, backwards and at random, while the
pool evicts all the time. `make hammer` runs it with 4 KiB pages and with huge ones (as root: these
need shmem_enabled=advise, which is put back afterwards). Status 1 when a word was wrong, or when
the run proves nothing: no eviction, a mapping given back to the kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from uffdprefetch.node.pool import SHMEM_HUGE
from uffdprefetch.units import parse_size

PROCESSES, THREADS = 3, 3


def program(directory: Path) -> str:
    """Compile the reader: its path."""
    out = directory / "pool_hammer"
    source = Path(__file__).parent / "programs" / "pool_hammer.c"
    words = ["cc", "-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run([*words, str(source), "-o", str(out)], check=True)
    return str(out)


@contextlib.contextmanager
def huge_pages() -> Iterator[None]:
    """Let shared memory have huge pages where it asks for them. Raises OSError where we may not."""
    path = Path(SHMEM_HUGE)
    before = path.read_text().partition("[")[2].partition("]")[0]
    path.write_text("advise")
    try:
        yield
    finally:
        path.write_text(before)


def run(
    reader: str,
    directory: Path,
    env: dict[str, str],
    *,
    mwords: int,
    size_bytes: int,
    budget_bytes: int,
    seed: int = 1,
    options: tuple[str, ...] = (),
    timeout_seconds: float | None = None,
) -> dict[str, Any]:
    """What the readers found, and the summary's ``pool``, in one dict.

    Raises RuntimeError when the job failed, subprocess.TimeoutExpired when it hangs.
    """
    data = directory / "hammer.bin"
    subprocess.run([reader, str(data), "make", str(size_bytes)], check=True)
    began = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "uffdprefetch", "wrap", "-q", "-f", "-o", "hammer"),
            *("--engine", "pool", "--budget", f"{budget_bytes}B", "--min-size", "1MiB"),
            *options, "--", reader, str(data), "read",
            *map(str, (PROCESSES, THREADS, mwords, seed)),
        ],
        env=env, cwd=directory, capture_output=True, text=True, check=False,
        timeout=timeout_seconds,
    )  # fmt: skip
    seconds = time.monotonic() - began
    data.unlink()
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}: {done.stderr}")
    summary = json.loads((directory / "hammer.summary.json").read_text())
    return {**json.loads(done.stdout), **summary["pool"], "seconds": seconds, "said": done.stderr}


def why_nothing_is_shown(found: dict[str, Any], size_bytes: int) -> str:
    """'' when the words were read from a pool that evicted; else what was otherwise."""
    if found["mappings_given_back"]:
        return f"{found['mappings_given_back']} mappings were given back to the kernel"
    if found["evicted_bytes"] < 2 * size_bytes:
        return f"only {found['evicted_bytes'] >> 20} MiB were evicted"
    if found["resident_peak_bytes"] > found["budget_bytes"]:
        return "the pool was larger than its budget"
    return ""


def main() -> int:
    """The command line. Returns the status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mwords", type=int, default=1500, help="million words to verify")
    parser.add_argument("--size", type=parse_size, default=256 << 20, help="of the file")
    parser.add_argument("--budget", type=parse_size, default=64 << 20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--huge-pages", action="store_true", help="2 MiB pages, as root")
    args = parser.parse_args()
    bad = ""
    with contextlib.ExitStack() as stack:
        if args.huge_pages:
            stack.enter_context(huge_pages())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hammer-")))
        env = {**os.environ, "UFFDPREFETCH_RUNDIR": str(directory / "run")}
        found = run(
            program(directory), directory, env, mwords=args.mwords, size_bytes=args.size,
            budget_bytes=args.budget, seed=args.seed,
            options=("--huge-pages", "auto" if args.huge_pages else "off"),
        )  # fmt: skip
        bad = why_nothing_is_shown(found, args.size)
        if found["huge_pages"] != args.huge_pages:
            bad = f"huge pages: {found['huge_pages_reason']}"
        elif args.huge_pages and found["mapped_huge_bytes"] < args.size:
            bad = "page tables got no huge pages"
    gb = found["words"] * 8 / 1e9
    print(
        f"pages of {'2 MiB' if args.huge_pages else '4 KiB'}: {found['words'] / 1e6:.0f} million "
        f"words ({gb:.1f} GB) in {found['seconds']:.0f} s, wrong {found['wrong']}, of these zero "
        f"{found['zeros']}; evicted {found['evicted_bytes'] / 1e9:.1f} GB, read again "
        f"{found['reread_bytes'] / 1e9:.1f} GB, {found['faults']} faults, of which "
        f"{found['missing_faults']} waited; mapped {found['mapped_bytes'] / 1e9:.1f} GB, of it "
        f"{found['mapped_huge_bytes'] / 1e9:.1f} GB in huge pages"
    )
    if bad:
        print(f"this shows nothing: {bad}", file=sys.stderr)
    sys.stderr.write(found["said"])
    return 1 if bad or found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
