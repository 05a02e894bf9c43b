# SPDX-License-Identifier: Apache-2.0
"""What wrong guesses cost: `python bench/harm.py --json F`, `show F`, `draw F PNG`.

The jobs (bench/harm_cases.py) read a part of what they map: some columns, images, records, pages.
Each variant is run in turn (A B C A B C ...), from cold, which is checked, and must read the same
values: plain; under `wrap` by the page cache and by the pool, with each --policy, and by each other
--build. What is told: the seconds in the program and from start to exit, the bytes over the link as
the bed counts them, and what the run's summary said.

A round that F has is not run again: a run may be cut off and goes on, and --minutes does so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from apps_bench import Bench, Run
from harm_beds import BEDS, EXT4, LINKS, loop_disk, named, why_no_loop
from harm_cases import EVERY, Case, chosen
from harm_table import SCHEMA, markdown
from reports import a_line_for_errors, load, save, show_or_measure
from rounds import (
    Rounds,
    Variant,
    become,
    chosen_or_told,
    deadline,
    opened,
    options_of,
    parser_of,
    scratch,
    source_of_beds,
    started,
)

from uffdprefetch.demo.bed import SlowBed, drop_cache, resident_bytes

ENGINES = ("cache", "pool")


def variants_of(args: argparse.Namespace) -> list[Variant]:
    """Plain, the engines with each policy, and each other build's with what is its default."""
    engines = [engine for engine in ENGINES if engine in args.engines]
    ours = [
        Variant(f"{engine}:{policy}", (f"--engine={engine}", f"--policy={policy}"))
        if policy
        else Variant(engine, (f"--engine={engine}",))
        for policy in args.policies
        for engine in engines
    ]
    others = [
        Variant(engine, (f"--engine={engine}",), name, executable)
        for name, executable in args.build
        for engine in engines
    ]
    return [Variant(), *ours, *others]


# ---- one run -----------------------------------------------------------------------------------


def read_source(paths: Sequence[Path]) -> None:
    """What lies below the bed, into memory: no disk of this machine is to be measured."""
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            at, end = 0, os.fstat(file.fileno()).st_size
            while at < end:
                try:
                    first = os.lseek(file.fileno(), at, os.SEEK_DATA)
                except OSError:
                    break  # a hole to the end
                at = os.lseek(file.fileno(), first, os.SEEK_HOLE)
                for place in range(first, at, 1 << 20):
                    os.pread(file.fileno(), min(1 << 20, at - place), place)


def measure(
    bench: Bench, case: Case, variant: Variant, files: Sequence[Path], words: Sequence[str]
) -> Run:
    """One run, from cold."""
    for path in files:
        drop_cache(path)
    bench.bed.set(bandwidth=bench.bandwidth, latency_us=bench.latency_us, lookup_us=bench.lookup_us)
    file_bytes = sum(path.stat().st_size for path in files)
    resident = sum(map(resident_bytes, files))
    run = started(bench, case, variant, words, file_bytes)
    return run | {"resident_bytes_at_start": resident}


# ---- all of them -------------------------------------------------------------------------------


class Harm(Rounds):
    """On beds that stay mounted."""

    every = EVERY

    def once(self, bench: Bench, case: Case, variant: Variant, bed: str) -> Run:
        """A run, from cold."""
        if self.args.work is not None and bed != EXT4:
            read_source(bench.sources(case.kind))
        words = case.job(
            bench.bed.path(bench.place(case.kind).name), case.scaled(1, self.args.reads)[1]
        )
        return measure(bench, case, variant, bench.files(case.kind), words)


@contextlib.contextmanager
def places(args: argparse.Namespace) -> Iterator[list[tuple[Bench, list[str]]]]:
    """Where files are shown, and on which beds: the slow one with each link, the loop device."""
    with scratch("harm", args.user) as directory, contextlib.ExitStack() as stack:
        own = directory(None)
        rest = dict(
            columns=(), options=options_of(args), as_by_default=True,
            prefix=become(args.user, own),
        )  # fmt: skip
        found: list[tuple[Bench, list[str]]] = []
        links = [bed for bed in args.beds if bed in LINKS]
        if links:
            source = source_of_beds(args, directory)
            bed = stack.enter_context(SlowBed(source))
            found.append((Bench(bed, source, own, 0, 0, 0, **rest), links))
        if EXT4 in args.beds:
            disk = stack.enter_context(loop_disk(directory(str(args.disk) if args.disk else None)))
            place = disk.mountpoint
            found.append((Bench(disk, place, own, 0, 0, 0, **rest), [EXT4]))  # type: ignore[arg-type]
        yield found


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = parser_of("harm.py", __doc__ or "", BEDS)
    add = parser.add_argument
    add("--engines", default=",".join(ENGINES), help="beside plain, with commas")
    add("--policy", default="", help="with commas (default: what is the default)")
    add("--disk", type=Path, help="where the image of ext4 does (default: in /tmp)")
    args = parser.parse_args(words)
    args.beds = named(args.bed)
    args.policies = args.policy.split(",")
    args.engines = [word for word in args.engines.split(",") if word]
    unknown = [engine for engine in args.engines if engine not in ENGINES]
    if unknown:
        parser.error(f"no engine {unknown[0]!r}: {', '.join(ENGINES)}")
    return args


def measure_all(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The rounds that are asked for and not there; whether some are left."""
    variants, cases = variants_of(args), chosen(args.cases)
    chosen_or_told(cases, args, EVERY)
    report = opened(args, variants, SCHEMA, "harm.py")
    harm = Harm(args, report, variants, cases, deadline(args))
    report["skipped"].pop(EXT4, None)
    if EXT4 in args.beds and (reason := why_no_loop()) is not None:
        report["skipped"][EXT4] = reason
        args.beds.remove(EXT4)
    with places(args) as found:
        for bench, beds in found:
            report["settings"] |= {bed: bench.bed.settings() for bed in beds}
            harm.run_place(bench, beds, keep_files=args.work is not None and EXT4 not in beds)
    save(args.json, report)
    return report, harm.some_left(args.beds)


@a_line_for_errors
def main(words: Sequence[str]) -> int:
    """The command; 0, 1 if a run failed, 75 if some are left."""
    if words[:1] == ["draw"]:
        from harm_picture import draw

        draw(load(Path(words[1]), SCHEMA), Path(words[2]))
        return 0
    return show_or_measure(words, SCHEMA, lambda given: measure_all(parse(given)), markdown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
