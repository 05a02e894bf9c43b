# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch index FILE [--format F] [--record-size N] [--key K | --record N] [--json]``"""

from __future__ import annotations

import argparse
import os
import time

from uffdprefetch.base.errors import named, usage_error
from uffdprefetch.base.units import parse_size


class Command:
    """Show which bytes of a record file hold which record.

    FILE is an LMDB (its directory, too), a .npy file, a TFRecord file, an Arrow IPC file or stream,
    a safetensors file (its records are tensors, their keys the tensors' names), or raw records of
    one size. Its data are not read, only what says where records are. With --record or --key: where
    these lie. Exit status: 0; 2 when the file is not what it should be (one line says at which
    byte), or there is no such record.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        from uffdprefetch.formats.detect import FORMATS

        parser.add_argument("file", metavar="FILE", help="a record file, or an LMDB's directory")
        parser.add_argument("--format", metavar="F", help=f"do not detect it: {', '.join(FORMATS)}")
        parser.add_argument(
            "--record-size", metavar="SIZE[,HEADER]", help="raw records of SIZE bytes each"
        )
        parser.add_argument(
            "--header-size", metavar="SIZE", help="bytes before the first raw record (default: 0)"
        )
        which = parser.add_mutually_exclusive_group()
        which.add_argument("--record", type=int, metavar="N", help="where record N lies, from 0")
        which.add_argument(
            "--key", metavar="K", help="where the records with this key lie (hex:6b6579 for bytes)"
        )
        parser.add_argument(
            "--verify",
            action="store_true",
            help="read the data too and check their CRCs (TFRecord)",
        )
        parser.add_argument("--json", action="store_true", help="one JSON document on stdout")

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        if rest is not None:
            raise usage_error("index shows a file, it starts nothing: nothing goes after --")
        record_bytes, header_bytes = _sizes(args.record_size, args.header_size)
        key = None if args.key is None else _key(args.key)
        from uffdprefetch.formats.detect import data_file, open_index
        from uffdprefetch.formats.index import FormatOptions
        from uffdprefetch.report import index as report
        from uffdprefetch.report.columns import show

        began = time.perf_counter()
        options = FormatOptions(record_bytes, header_bytes, args.verify)
        index = open_index(args.file, args.format, options)
        seconds = time.perf_counter() - began
        name = data_file(args.file)
        if args.record is not None or key is not None:
            records = report.chosen(index, name, args.record, key)
            document = report.records_document(index, name, records)
            text = report.records_text(document)
        else:
            document = report.document(index, name, seconds)
            text = report.text(document)
        show(document, text, args.json)
        return 0


def _sizes(record: str | None, header: str | None) -> tuple[int | None, int]:
    """Bytes of a record (None: not given) and of the header, from --record-size and
    --header-size."""
    if record is None:
        if header is not None:
            raise usage_error("--header-size is of raw records: give --record-size too")
        return None, 0
    size, comma, after = record.partition(",")
    if comma and header is not None:
        raise usage_error("--header-size is given twice: it stands in --record-size too")
    if comma:
        header = after
    of_header = "--record-size" if comma else "--header-size"
    record_bytes = named("--record-size", parse_size, size)
    return record_bytes, 0 if header is None else named(of_header, parse_size, header)


def _key(text: str) -> bytes:
    if not text.startswith("hex:"):
        return os.fsencode(text)
    try:
        return bytes.fromhex(text[4:])
    except ValueError:
        raise usage_error(f"--key {text}: not hexadecimal") from None
