#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the pictures of docs/traces.md: four ranks skipping, contiguous and shuffled on the slow
bed, each plainly and under wrap, recorded and drawn.

    .venv/bin/python tools/trace_pictures.py [--size 192MiB] [--keep DIRECTORY] [--only skipping]

As root (the kernel's own events); without it the pictures say what is missing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from uffdprefetch.base.units import parse_size  # noqa: E402
from uffdprefetch.demo.jobrun import job_command, job_environment  # noqa: E402
from uffdprefetch.demo.storage import DemoStorage, Wanted, open_storage  # noqa: E402

PATTERNS = ("skipping", "contiguous", "shuffled")
RANKS = 4
EPOCHS = 2
#: Compute time over the transfer time of the same bytes, as in docs/benchmarks.md.
COMPUTE_SHARE = 0.95


def record(storage: DemoStorage, pattern: str, wrapped: bool, path: Path, size_bytes: int) -> None:
    """Record one run, cold, into ``path``."""
    per_byte = COMPUTE_SHARE * RANKS / storage.bandwidth
    job = job_command(
        storage.database, "--pattern", pattern, "--ranks", str(RANKS), "--spawn",
        "--epochs", str(EPOCHS), "--batch", "16", "--compute-seconds-per-byte", repr(per_byte),
        "--barrier", "epoch",
    )  # fmt: skip
    ours = [sys.executable, "-m", "uffdprefetch"]
    if wrapped:
        command = [*ours, "wrap", "-q", "-f", "-o", str(path.with_suffix("")), "--trace", str(path)]
    else:
        command = [*ours, "trace", "-q", "-f", "-o", str(path)]
    storage.make_cold()
    subprocess.run(
        [*command, "--", *job], check=True, env=job_environment(), stdout=subprocess.DEVNULL
    )


def draw(path: Path, directory: Path, page: bool) -> None:
    """The PNG of a recording, and its page."""
    ours = [sys.executable, "-m", "uffdprefetch", "trace", str(path), "-f"]
    formats = [("png", directory / f"trace-{path.stem}.png")]
    if page:
        formats.append(("html", path.with_suffix(".html")))
    for name, target in formats:
        subprocess.run([*ours, "--format", name, "-o", str(target)], check=True, cwd=ROOT)


def main() -> None:
    """Record and draw what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="192MiB", help="of the data set")
    parser.add_argument("--keep", type=Path, help="leave recordings and pages here")
    parser.add_argument("--only", choices=PATTERNS, action="append")
    parser.add_argument("--no-draw", action="store_true", help="only record")
    options = parser.parse_args()
    size_bytes = parse_size(options.size)
    with tempfile.TemporaryDirectory() as temporary:
        kept = options.keep or Path(temporary)
        kept.mkdir(exist_ok=True, parents=True)
        with open_storage(Wanted(size_bytes), lambda line: print(line, file=sys.stderr)) as storage:
            for pattern in options.only or PATTERNS:
                for wrapped in (False, True):
                    path = kept / f"{pattern}{'-wrapped' if wrapped else ''}.uptrace"
                    record(storage, pattern, wrapped, path, size_bytes)
                    if not options.no_draw:
                        draw(path, ROOT / "docs" / "img", options.keep is not None)


if __name__ == "__main__":
    main()
