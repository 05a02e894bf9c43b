# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch calibrate PATH [-o F] [--seconds S] [--bytes SIZE] ...``"""

from __future__ import annotations

import argparse
import os
import sys

from uffdprefetch.base.errors import EXIT_CANNOT, UffdPrefetchError, named, usage_error
from uffdprefetch.base.units import parse_duration, parse_rate, parse_size


class Command:
    """Measure the bandwidths that `simulate` needs, and write them as a scenario file.

    PATH is a large file on the storage in question, or a directory there, in which a test file is
    made and removed. Measured are random reads by threads and request size, memory, with --local
    the node's own disk, and, started by mpirun or srun with one rank a node, the file system by
    nodes and the network. Each figure is a median with its 95 % interval. What is read is put out
    of the page cache of this node; what a server caches is not known. Exit status: 0; 1 when
    nothing could be measured; 2 for a wrong option.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("path", metavar="PATH", help="a file or directory on the storage")
        parser.add_argument(
            "-o",
            "--output",
            metavar="F",
            default="scenario.toml",
            help="the scenario file (default: scenario.toml; - for stdout)",
        )
        parser.add_argument("-f", "--force", action="store_true", help="overwrite it")
        parser.add_argument(
            "--seconds", metavar="TIME", default="60s", help="for all measurements (default: 60s)"
        )
        parser.add_argument(
            "--bytes", metavar="SIZE", default="8GiB", help="most bytes to read (default: 8GiB)"
        )
        parser.add_argument(
            "--file-size",
            metavar="SIZE",
            default="256MiB",
            help="of the test file in a directory (default: 256MiB); a "
            "quarter of --seconds at most goes into writing it",
        )
        parser.add_argument(
            "--threads",
            metavar="N,N,...",
            default="1,2,4,8,16",
            help="that read at the same time, each number by itself (default: 1,2,4,8,16)",
        )
        parser.add_argument(
            "--requests",
            metavar="SIZE,...",
            default="4KiB,64KiB,1MiB",
            help="sizes of requests; the largest is prefetching's",
        )
        parser.add_argument(
            "--prefetchers",
            metavar="N",
            type=int,
            default=8,
            help="threads that prefetch on a node (p_0; default: 8)",
        )
        parser.add_argument(
            "--local", metavar="DIR", help="also this directory's disk (left out where it is tmpfs)"
        )
        parser.add_argument("--direct", action="store_true", help="read with O_DIRECT")
        parser.add_argument(
            "--compute",
            metavar="RATE",
            default="100MB/s",
            help="c of the scenario: what a node trains on (default: 100MB/s)",
        )
        parser.add_argument(
            "--preprocess",
            metavar="RATE",
            default="200MB/s",
            help="beta of the scenario (default: 200MB/s)",
        )
        parser.add_argument(
            "--data",
            metavar="PATH",
            help="the scenario's data set: a record file, or a directory of files",
        )

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        if rest is not None:
            raise usage_error("calibrate starts nothing: nothing goes after --")
        from uffdprefetch.sim.measure import calibrate as measure
        from uffdprefetch.sim.measure import scenario_file

        wishes = measure.Wishes(
            args.path,
            named("--seconds", parse_duration, args.seconds),
            named("--bytes", parse_size, args.bytes),
            named("--file-size", parse_size, args.file_size),
            _counts(args.threads),
            _sizes(args.requests),
            args.prefetchers,
            args.local,
            args.direct,
        )
        if not 1 <= args.prefetchers <= 1024 or wishes.seconds <= 0:
            raise usage_error("--prefetchers: from 1 to 1024; --seconds: more than 0")
        job = scenario_file.Job(
            c=_rate("--compute", args.compute),
            beta=_rate("--preprocess", args.preprocess),
            dataset={"path": os.path.abspath(args.data)} if args.data else None,
        )
        _refuse_what_cannot_be_used(args)
        measured = measure.calibrate(
            wishes, os.environ, lambda text: print(f"uffdprefetch: {text}", file=sys.stderr)
        )
        if measured is None:
            return 0  # another rank writes it
        if not measured.together:
            raise UffdPrefetchError(
                "calibrate: the file system could not be measured within --seconds and --bytes: "
                "give it more",
                EXIT_CANNOT,
            )
        text = scenario_file.text(wishes, measured, job, f"measured: {args.path}")
        _write(args.output, text)
        return 0


def _refuse_what_cannot_be_used(args: argparse.Namespace) -> None:
    """Check the options before measuring for minutes."""
    if args.local is not None and not os.access(args.local, os.R_OK):
        raise usage_error(f"--local {args.local}: cannot be read: give a directory")
    if args.local is not None and not os.path.isdir(args.local):
        raise usage_error(f"--local {args.local}: is no directory")
    if args.data is not None and not os.access(args.data, os.R_OK):
        raise usage_error(f"--data {args.data}: cannot be read: give a record file, or a directory")
    if args.output == "-":
        return
    if not args.force and os.path.lexists(args.output):
        raise usage_error(f"{args.output} exists: -o another name, or -f to overwrite it")
    there = os.path.lexists(args.output)
    if not os.access(args.output if there else os.path.dirname(args.output) or ".", os.W_OK):
        what = "it" if there else "its directory"
        raise usage_error(f"-o {args.output}: {what} cannot be written: -o another name")


def _write(name: str, text: str) -> None:
    if name == "-":
        sys.stdout.write(text)
        return
    try:
        with open(name, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise UffdPrefetchError(f"cannot write {name}: {error.strerror}") from None
    print(f"uffdprefetch: {name} written: uffdprefetch simulate {name}", file=sys.stderr)


def _rate(option: str, text: str) -> str:
    rate = named(option, parse_rate, text)
    if rate < 1:
        raise usage_error(f"{option} {text}: more than none")
    return f"{rate / 1e6:.6g}MB/s"


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        counts = (0,)
    if counts[0] < 1 or counts[-1] > 1024:
        raise usage_error(f"--threads {text}: numbers from 1 to 1024 with commas")
    return counts


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(sorted({named("--requests", parse_size, part) for part in text.split(",")}))
    if sizes[0] < 4096 or any(size % 4096 for size in sizes):
        raise usage_error(f"--requests {text}: multiples of 4KiB")
    return sizes
