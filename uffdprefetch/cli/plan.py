# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch plan FILE [--rank R] [--epoch E] [--lookahead SIZE] [--json]``"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from uffdprefetch.base.errors import named, usage_error
from uffdprefetch.base.units import parse_duration, parse_rate, parse_size

if TYPE_CHECKING:
    from uffdprefetch.orders.check import ReadRates


class Command:
    """Check a plan file against its data files, and show what its orders amount to.

    FILE says who reads which records in which order (docs/plans.md). Per file, epoch and rank:
    items, their bytes, each byte of the file once (unique), items read again, bytes that another
    rank reads too (shared), and the requests that prefetching makes of it: how many, how large, and
    what they read for a byte of the order. With --bandwidth and --seconds-per-item also how long an
    epoch takes, and at best could. Exit status: 0; 2 when the plan is wrong (one line says where).
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", metavar="FILE", help="a plan file")
        parser.add_argument("--rank", type=int, metavar="R", help="only this rank's orders")
        parser.add_argument("--epoch", type=int, metavar="E", help="only this epoch's, from 0")
        parser.add_argument(
            "--lookahead", metavar="SIZE", default="64MiB",
            help="bytes of the order that are asked for ahead of a reader (default: 64MiB)",
        )  # fmt: skip
        parser.add_argument(
            "--bandwidth", metavar="RATE", help="of storage, for one rank (300MB/s)"
        )
        parser.add_argument(
            "--seconds-per-item", metavar="TIME", help="what a rank needs for an item (5ms)"
        )
        parser.add_argument("--json", action="store_true", help="one JSON document on stdout")

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        if rest is not None:
            raise usage_error("plan checks a plan, it starts nothing: nothing goes after --")
        for name in ("rank", "epoch"):
            if (getattr(args, name) or 0) < 0:
                raise usage_error(f"--{name} {getattr(args, name)}: they count from 0")
        lookahead_bytes = named("--lookahead", parse_size, args.lookahead)
        if lookahead_bytes < 1:
            raise usage_error("--lookahead: at least 1 byte")
        from uffdprefetch.orders import plan_file
        from uffdprefetch.report import plan as report
        from uffdprefetch.report.columns import show

        link = _link(args.bandwidth, args.seconds_per_item)
        plan = plan_file.load(args.file)
        document = report.document(plan, args.rank, args.epoch, lookahead_bytes, link)
        show(document, report.text(document), args.json)
        return 0


def _link(bandwidth: str | None, seconds: str | None) -> ReadRates | None:
    from uffdprefetch.orders.check import ReadRates

    if bandwidth is None and seconds is None:
        return None
    if bandwidth is None or seconds is None:
        raise usage_error("--bandwidth and --seconds-per-item: give both, or none")
    rate = named("--bandwidth", parse_rate, bandwidth)
    if rate < 1:
        raise usage_error(f"--bandwidth {bandwidth}: more than none")
    return ReadRates(rate, named("--seconds-per-item", parse_duration, seconds))
