# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch record JSON``: the recorder's process; trace and wrap start it, not people."""

from __future__ import annotations

import argparse

from uffdprefetch.base.errors import usage_error


class Command:
    """Record a trace as the given JSON says (started by `trace` and `wrap --trace`)."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("spec", metavar="JSON")

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        from uffdprefetch.trace.record import program

        try:
            spec = program.Spec.read(args.spec)
        except (ValueError, TypeError, KeyError) as error:
            raise usage_error(f"not a recording: {error}") from None
        return program.main(spec)
