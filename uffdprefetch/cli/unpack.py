# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch unpack DATA.lmdb -o DIR``"""

from __future__ import annotations

import argparse

from uffdprefetch.base.errors import EXIT_CANNOT, EXIT_USAGE, usage_error
from uffdprefetch.base.messages import say


class Command:
    """Make files again of what `uffdprefetch pack` has packed, with their times.

    Each is compared with its SHA-256 before it is written. Exit status: 0; 1 when a file could not
    be written; 2 for wrong usage, or when DATA.lmdb is damaged, be it in one file (each is named).
    """

    examples = ("uffdprefetch unpack train.lmdb -o /tmp/train",)

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("database", metavar="DATA.lmdb", help="what pack has made")
        parser.add_argument(
            "-o", "--output", metavar="DIR", required=True, help="where to, a new directory"
        )

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        if rest is not None:
            raise usage_error("unpack writes files, it starts nothing: nothing goes after --")
        from uffdprefetch.pack.unpacking import unpack

        written, wrong, damaged = unpack(args.database, args.output, say)
        print(f"{args.output}: {written:,} files written{f', {wrong:,} not' if wrong else ''}")
        if damaged:
            return EXIT_USAGE
        return EXIT_CANNOT if wrong else 0
