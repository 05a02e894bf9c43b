# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch pack SOURCE... -o DATA.lmdb [--shuffle SEED] [--resume] [--compress zstd[:LEVEL]]
[--verify] [--list]``"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from uffdprefetch.base.errors import EXIT_CANNOT, EXIT_USAGE, usage_error
from uffdprefetch.base.messages import say
from uffdprefetch.base.units import format_size

if TYPE_CHECKING:
    from uffdprefetch.data.layout import Entry


class Command:
    """Pack directories of small files, or tars, into one LMDB: a file is a record, its path below
    SOURCE the key.

    Each file is read once, by many threads, and is in the database as it was at one moment. Links
    and special files are counted, not packed. `uffdprefetch.data.Packed` reads the database in a
    program, `uffdprefetch unpack` makes files of it again. Exit status: 0; 1 when something could
    not be read or written, or differs (each file is named); 2 for wrong usage, or when DATA.lmdb is
    damaged, be it in one file.
    """

    examples = (
        "uffdprefetch pack /scratch/train -o train.lmdb",
        "uffdprefetch pack shards/*.tar -o train.lmdb --compress zstd",
        "uffdprefetch pack -o train.lmdb --verify",
    )

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("source", nargs="*", metavar="SOURCE", help="a directory or a tar, compressed or not")
        add("-o", "--output", metavar="DATA.lmdb", required=True, help="the database, a directory")
        add(
            "--shuffle",
            type=int,
            metavar="SEED",
            help="store the files in an order drawn with this seed (default: that of their paths)",
        )
        add(
            "--resume",
            action="store_true",
            help="go on with DATA.lmdb where an earlier run was ended, and take what is new",
        )
        add(
            "--compress",
            metavar="zstd[:LEVEL]",
            help="compress each file by itself, if a sample says that it pays (default: not)",
        )
        which = parser.add_mutually_exclusive_group()
        which.add_argument(
            "--verify",
            action="store_true",
            help="pack nothing: compare DATA.lmdb with SOURCE (default: what it was packed of)",
        )
        which.add_argument(
            "--list",
            action="store_true",
            help="pack nothing: show SHA-256, size, time and path of each file of DATA.lmdb",
        )

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        if rest is not None:
            raise usage_error("pack reads files, it starts nothing: nothing goes after --")
        packs = args.shuffle is not None or args.resume or args.compress is not None
        if (args.verify or args.list) and packs:
            raise usage_error(
                "--verify and --list pack nothing: no --shuffle, --resume or --compress with them"
            )
        if args.list:
            return _list(args)
        if args.verify:
            return _verify(args)
        return _pack(args)


def _pack(args: argparse.Namespace) -> int:
    from uffdprefetch.pack import compress, packing
    from uffdprefetch.pack.writer import data_file

    if not args.source:
        raise usage_error("pack: which SOURCE? a directory or tars")
    level = None if args.compress is None else compress.level_of(args.compress)
    options = packing.PackOptions(tuple(args.source), args.output, args.shuffle, level, args.resume)
    began = time.perf_counter()
    result = packing.pack(options, say)
    seconds = time.perf_counter() - began
    all_bytes = format_size(result.description.size_bytes)
    if result.description.level is not None:
        all_bytes += f" in {format_size(os.path.getsize(data_file(args.output)))}"
    print(
        f"{args.output}: {result.description.count:,} files, {all_bytes};"
        f" {result.written:,} packed in {seconds:.1f} s"
    )
    if result.left_out.counted:
        print(f"not packed: {result.left_out.summary()}")
    if result.gone:
        files = "1 file of it is" if result.gone == 1 else f"{result.gone:,} files of it are"
        say(f"{files} in no source any more: --verify names what differs")
    return packing.status(result)


def _verify(args: argparse.Namespace) -> int:
    from uffdprefetch.pack.verifying import verify

    same, other, damaged = verify(args.output, args.source, say)
    print(f"{args.output}: {same:,} files as they were packed, {other:,} not")
    if damaged:
        return EXIT_USAGE
    return EXIT_CANNOT if other else 0


def _list(args: argparse.Namespace) -> int:
    from uffdprefetch.pack.stored import Stored

    if args.source:
        raise usage_error("--list shows DATA.lmdb: no SOURCE with it")
    with Stored(args.output) as stored:
        for entry in stored.in_order():
            sys.stdout.write(_line(entry))
    return 0


def _line(entry: Entry) -> str:
    from uffdprefetch.data.layout import shown

    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.mtime_ns // 10**9))
    return f"{entry.sha256.hex()}  {entry.size_bytes:>12}  {moment}  {shown(entry.path)}\n"
