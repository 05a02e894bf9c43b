# SPDX-License-Identifier: Apache-2.0
"""Real programs on the slow bed, under `wrap` and not: `python bench/apps.py [--json F]`, `show F`.

Each program of bench/programs/ is what a user of its library writes, and knows nothing of
uffdprefetch. Its files lie on the slow storage bed (bench/slowfs.c) and are made cold before each
run, which is checked. The columns take turns (A B C A B C ...): plain; under `wrap`; under `wrap
--engine pool`; after `cat FILE >/dev/null`, warm, both timed; and what users of that field do by
hand. Each tells the seconds in the program (what reads, without the interpreter's start and its
imports) and in all, and a digest of the values that it read, which must be that of the same program
on the files beside the bed.

limit = the larger of the program's seconds after `cat` and the files' bytes over the link's
bandwidth, in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from apps_bench import Bench
from apps_programs import EVERY, chosen
from apps_table import COLUMNS, SCHEMA, markdown
from reports import Report, a_line_for_errors, conditions, save, show_or_measure

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.units import parse_rate, parse_size
from uffdprefetch.demo.bed import (
    DEFAULT_BANDWIDTH,
    DEFAULT_LATENCY_US,
    SlowBed,
)

#: Of each program's files, in bytes.
SIZES = {"small": 32_000_000, "full": 400_000_000}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="bench/apps.py", description=description)
    add = parser.add_argument
    add("--pairs", type=int, default=1, help="rounds over all columns")
    add("--programs", default="*", metavar="GLOB", help="by name; several with commas")
    add("--columns", default=",".join(COLUMNS), help="with commas")
    add("--wrap", type=shlex.split, default=[], metavar="OPTIONS", help="of wrap, in one word")
    add("--json", type=Path, metavar="F")
    add("--size", default="full", help="of each program's files: small, full or a size")
    add("--bandwidth", type=parse_rate, default=DEFAULT_BANDWIDTH, help="of the link")
    add("--latency-us", type=int, default=DEFAULT_LATENCY_US)
    add("--slow", action="store_true", help="those too that take minutes")
    add("--work", type=Path, help="where the files lie, and stay (default: anew in /dev/shm)")
    args = parser.parse_args(words)
    args.columns = tuple(word.strip() for word in args.columns.split(","))
    unknown = [column for column in args.columns if column not in COLUMNS]
    if unknown:
        parser.error(f"no column {unknown[0]!r}: {', '.join(COLUMNS)}")
    args.size_bytes = SIZES[args.size] if args.size in SIZES else parse_size(args.size)
    return args


def report_of(
    bench: Bench, args: argparse.Namespace, settings: dict[str, int], found: dict[str, Any]
) -> dict[str, Any]:
    """The JSON: how it was measured, and every run."""
    return {
        "schema": SCHEMA,
        **found,
        "bed": settings,
        "size_bytes": args.size_bytes,
        "pairs": args.pairs,
        "programs": bench.programs,
        "skipped": bench.skipped,
        "failures": bench.failures,
        "runs": bench.runs,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all programs that were asked for; the report, which is saved after each."""
    found = conditions()
    with contextlib.ExitStack() as stack:

        def directory(where: str | None) -> Path:
            made = tempfile.TemporaryDirectory(prefix="uffdprefetch-apps-", dir=where)
            return Path(stack.enter_context(made))

        source = args.work or directory("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        source.mkdir(exist_ok=True)
        scratch = directory(None)
        # A service of its own, and caches of its own for those that keep some.
        os.environ["UFFDPREFETCH_RUNDIR"] = str(scratch / "run")
        os.environ["XDG_CONFIG_HOME"] = str(scratch / "no-config")
        os.environ["HF_HOME"] = str(scratch / "hf")
        bed = stack.enter_context(
            SlowBed(source, bandwidth=args.bandwidth, latency_us=args.latency_us)
        )
        settings = bed.settings()
        bench = Bench(
            *(bed, source, scratch, args.size_bytes, args.bandwidth, args.latency_us),
            columns=args.columns,
            options=tuple(args.wrap),
        )
        programs = chosen(args.programs)
        for number, program in enumerate(programs):
            reason = program.why_not(args.slow)
            if reason is not None:
                bench.skip(program.name, reason)
                continue
            bench.run(program, args.pairs)
            if args.work is None and all(
                later.kind != program.kind for later in programs[number + 1 :]
            ):
                shutil.rmtree(bench.place(program.kind))
            save(args.json, report_of(bench, args, settings, found))
        return report_of(bench, args, settings, found)


@a_line_for_errors
def main(words: Sequence[str]) -> int:
    """The command; 0, or 1 if a run failed."""
    return show_or_measure(words, SCHEMA, _measured, markdown)


def _measured(words: Sequence[str]) -> tuple[Report, bool]:
    args = parse(words)
    if not chosen(args.programs):
        names = "; ".join(program.name for program in EVERY)
        raise UffdPrefetchError(f"no program is called {args.programs}: {names}")
    return measure(args), False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
