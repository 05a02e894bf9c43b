# SPDX-License-Identifier: Apache-2.0
"""What reading by read(2), and many small files, takes: `python bench/reads.py --json F`, `show F`.

The jobs (bench/reads_cases.py) are programs that map nothing. Each variant is run in turn (A B C A
B C ...) and must read the same values: plain; under `wrap`, and with each of --ways' options; by
each other --build; and plain with all in memory, which tells the limit. Each run has a mount of its
own, so neither bytes nor names are in memory; that the bytes came over the link is checked.

A round that F has is not run again: a run may be cut off and goes on, and --minutes does so.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from apps_bench import Bench, Run
from harm_beds import EXT4, LINKS, named
from harm_cases import Case
from harm_table import WARM
from reads_cases import EVERY, Limit, ReadCase, chosen
from reads_table import SCHEMA, markdown
from reports import a_line_for_errors, save, show_or_measure
from rounds import (
    Rounds,
    Variant,
    become,
    chosen_or_told,
    deadline,
    opened,
    parser_of,
    scratch,
    source_of_beds,
    started,
)

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.demo.bed import SlowBed, resident_bytes

WRAP = "wrap"
#: Of what a job reads, that may have come in another way than over the link (metadata at a file's
#: end that a library leaves out), and that may be missing in memory where all is to be there.
SLACK = 0.01


def variants_of(args: argparse.Namespace) -> list[Variant]:
    """Plain, wrapped, with more options, by other builds, and plain with all in memory."""
    return [
        Variant(),
        Variant(WRAP),
        *(Variant(f"{WRAP} {way}", tuple(shlex.split(way))) for way in args.ways),
        *(Variant(WRAP, (), name, executable) for name, executable in args.build),
        Variant(WARM),
    ]


class Reads(Rounds):
    """Each run on a mount of its own."""

    every = EVERY

    def variants_of(self, case: Case) -> list[Variant]:
        """Where there is no limit, nothing tells it."""
        assert isinstance(case, ReadCase)
        limited = case.limit is not Limit.NONE
        return [variant for variant in self.variants if limited or variant.way != WARM]

    def once(self, bench: Bench, case: Case, variant: Variant, bed: str) -> Run:
        """A run, from cold, or with all in memory."""
        assert isinstance(case, ReadCase)
        link = {
            "bandwidth": bench.bandwidth,
            "latency_us": bench.latency_us,
            "lookup_us": bench.lookup_us,
        }
        reads = case.scaled(1, self.args.reads)[1]
        # Beside the bed: their names are not to be in memory on it.
        file_bytes = sum(path.stat().st_size for path in bench.sources(case.kind))
        warm = case.warm or variant.way == WARM
        with SlowBed(bench.source, **link, **case.bed) as mount:
            bench = replace(bench, bed=mount)
            self.report["settings"].setdefault(bed, mount.settings() | link)
            words = case.job(mount.path(bench.place(case.kind).name), reads)
            resident = made_warm(bench, case, words, file_bytes) if warm else 0
            mount.set(**link)
            words = [*words, *case.computing(bench.bandwidth)]
            run = started(bench, case, variant, words, file_bytes)
        least = file_bytes if case.whole else run["value_bytes"]
        if not warm and run["bytes_read"] < (1 - SLACK) * least:
            raise UffdPrefetchError(
                f"NOT COLD: {run['bytes_read']} bytes came over the link, of {least}"
            )
        return run | {"file_bytes": file_bytes, "resident_bytes_at_start": resident}


def made_warm(bench: Bench, case: Case, words: Sequence[str], file_bytes: int) -> int:
    """Bytes of the files that are in memory after the job has run once, on a link without limits.

    Raises UffdPrefetchError where some are missing.
    """
    bench.bed.set(bandwidth=0, latency_us=0, lookup_us=0)
    bench.start(words, file_bytes)
    resident = sum(map(resident_bytes, bench.files(case.kind)))
    if resident < (1 - SLACK) * file_bytes:
        raise UffdPrefetchError(f"NOT WARM: {resident} bytes are in memory, of {file_bytes}")
    return resident


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    beds = list(LINKS)
    parser = parser_of("reads.py", __doc__ or "", beds)
    parser.add_argument("--way", dest="ways", action="append", default=[], metavar="OPTIONS",
        help="of wrap, to be run in turn, such as --way=--reads=off (repeatable)")  # fmt: skip
    args = parser.parse_args(words)
    args.beds = named(args.bed)
    if EXT4 in args.beds:
        parser.error(f"no bed {EXT4!r}: {', '.join(beds)}")
    return args


def measure_all(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The rounds that are asked for and not there; whether some are left."""
    variants, cases = variants_of(args), chosen(args.cases)
    chosen_or_told(cases, args, EVERY)
    report = opened(args, variants, SCHEMA, "reads.py")
    reads = Reads(args, report, variants, cases, deadline(args))
    with scratch("reads", args.user) as directory:
        source, own = source_of_beds(args, directory), directory(None)
        bench = Bench(
            *(SlowBed(source), source, own, 0, 0, 0), columns=(),
            # Without --min-size, which tells small files from others.
            options=tuple(args.wrap), as_by_default=True, least_share=1,
            prefix=become(args.user, own),
        )  # fmt: skip
        reads.run_place(bench, args.beds, keep_files=args.work is not None)
    save(args.json, report)
    return report, reads.some_left(args.beds)


@a_line_for_errors
def main(words: Sequence[str]) -> int:
    """The command; 0, 1 if a run failed, 75 if some are left."""
    return show_or_measure(words, SCHEMA, lambda given: measure_all(parse(given)), markdown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
