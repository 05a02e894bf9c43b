# SPDX-License-Identifier: Apache-2.0
"""`uffdprefetch demo`: before and after, on slow storage, with the proof of the bytes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from uffdprefetch.base.errors import EXIT_CANNOT, UffdPrefetchError, named, usage_error
from uffdprefetch.base.units import parse_duration, parse_rate, parse_size


class Command:
    """Show on this machine what prefetching gains: a job on slow storage, four ways.

    Makes an LMDB, puts it behind a slow link (a FUSE mount; without FUSE the local disk with its
    cache dropped), and runs a training-like job as it is, watched only, prefetched, and with a
    warm cache. Every run hashes what it read: the digests must be the data set's.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--size", default="1GiB", help="of the data set (default: 1GiB)")
        add("--bandwidth", default="300MB", metavar="RATE", help="of the link (default: 300MB/s)")
        add("--latency", default="1ms", metavar="TIME", help="of each read (default: 1ms)")
        add("--local", action="store_true", help="use the local disk, not the slow link")
        add("--work", type=Path, metavar="DIR", help="keep the data set here, and use it again")
        add("--json", type=Path, metavar="FILE", help="write everything that was measured")
        add(
            "--configurations",
            metavar="LIST",
            help="comma-separated, of: baseline, prefetch-off, prefetch-on, warm cache",
        )

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        if rest is not None:
            raise usage_error("demo runs its own job: nothing goes after --")
        from uffdprefetch.demo import run as demo
        from uffdprefetch.demo import table

        names = demo.CONFIGURATIONS
        if args.configurations is not None:
            names = tuple(name.strip() for name in args.configurations.split(","))
            unknown = [name for name in names if name not in demo.CONFIGURATIONS]
            if unknown:
                raise usage_error(
                    f"--configurations {unknown[0]}: one of {', '.join(demo.CONFIGURATIONS)}"
                )
        options = demo.DemoOptions(
            size_bytes=named("--size", parse_size, args.size),
            bandwidth=named("--bandwidth", parse_rate, args.bandwidth),
            latency_us=round(named("--latency", parse_duration, args.latency) * 1e6),
            local=args.local,
            work=args.work,
            configurations=names,
        )
        if options.size_bytes < 1 << 20 or options.bandwidth < 1 << 20:
            raise usage_error("--size and --bandwidth must be at least 1 MiB")

        from rich.console import Console

        begin = time.perf_counter()

        def say(text: str) -> None:
            seconds = time.perf_counter() - begin
            print(f"uffdprefetch: {seconds:5.1f} s  {text}", file=sys.stderr, flush=True)

        result = demo.run_demo(options, say)
        console = Console()
        console.print(table.render_table(result))
        for remark in table.remarks(result):
            console.print(remark, highlight=False)
        console.print(table.verdict(result), highlight=False)
        if args.json is not None:
            try:
                args.json.write_text(json.dumps(result.to_json(), indent=1) + "\n")
            except OSError as error:
                raise UffdPrefetchError(f"cannot write {args.json}: {error.strerror}") from error
        return 0 if result.digests_right else EXIT_CANNOT
