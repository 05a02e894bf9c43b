# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch summary [FILE|DIR...] [--compare] [--json]``"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from uffdprefetch.base.errors import usage_error
from uffdprefetch.protocol.summary import SCHEMA
from uffdprefetch.report import output
from uffdprefetch.report.output import SUFFIX


class Command:
    """Show what runs left behind: what they gained, what was not served, how they ran.

    FILE: a summary; DIR: the newest one of each of its runs. Nothing given: the newest one of the
    user's state directory, where they go without -o, or of the current directory. The nodes of one
    run are shown as one. With --compare two runs, the plain one (`wrap --policy none` only watches)
    and the wrapped one, are put beside each other. Exit status: 0; 2 when a file is no summary.
    """

    examples = (
        "uffdprefetch summary",
        "uffdprefetch summary run.0.summary.json",
        "uffdprefetch summary --compare plain.summary.json wrapped.summary.json",
    )

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("paths", nargs="*", metavar="FILE|DIR", help="what runs have written")
        parser.add_argument(
            "--compare", action="store_true", help="of two runs: what got better, what got worse"
        )
        parser.add_argument("--json", action="store_true", help="one JSON document on stdout")

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        if rest is not None:
            raise usage_error("summary shows a run, it starts none: nothing goes after --")
        found = [_of_place(path) for path in args.paths] or [[_newest()]]
        runs = _by_run([one for some in found for one in some])
        if args.compare:
            return _compare(runs, args.json)
        for number, (names, document) in enumerate(runs):
            if args.json:
                print(json.dumps(document, indent=2))
                continue
            from uffdprefetch.report import summary

            if number:
                print()
            try:
                said = summary.lines(document, ", ".join(names), verbose=True)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise _no_summary(names[0], f"{type(error).__name__}: {error}") from None
            sys.stdout.write("".join(f"{line}\n" for line in said))
        return 0


def _no_summary(path: str, why: str) -> Exception:
    return usage_error(f"{path} is no summary of a run: {why}")


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8", errors="backslashreplace") as file:
            document = json.load(file)
    except OSError as error:
        raise usage_error(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise _no_summary(path, str(error)) from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise _no_summary(path, f"its schema is not {SCHEMA}")
    return document


def _of_place(path: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, document) of a file; of a directory, of all in it, the newest last."""
    if not os.path.isdir(path):
        return [(path, _read(path))]
    names = output.summaries(path)
    if not names:
        raise usage_error(f"there is no summary (*{SUFFIX}) in {os.path.abspath(path)}")
    return [(name, _read(name)) for name in names]


def _newest() -> tuple[str, dict[str, Any]]:
    places = [output.state_directory(os.environ), "."]
    last = [output.summaries(place)[-1:] for place in places if place is not None]
    names = [name for found in last for name in found]
    if not names:
        where = " or ".join(os.path.abspath(place) for place in places if place is not None)
        raise usage_error(f"there is no summary (*{SUFFIX}) in {where}")
    name = os.path.normpath(max(names, key=lambda name: os.stat(name).st_mtime_ns))
    return name, _read(name)


def _by_run(
    found: Sequence[tuple[str, dict[str, Any]]],
) -> list[tuple[list[str], dict[str, Any]]]:
    """(files, document) of each run. Of one node's several with the same key the last one counts:
    the others are of earlier runs."""
    from uffdprefetch.report.merge import merged

    runs: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {}
    for name, document in found:
        nodes = runs.setdefault(str(document.get("run")), {})
        nodes[str(document.get("host"))] = name, document
    return [
        ([name for name, _ in nodes.values()], merged([one for _, one in nodes.values()]))
        for nodes in runs.values()
    ]


def _compare(runs: Sequence[tuple[list[str], dict[str, Any]]], as_json: bool) -> int:
    if len(runs) != 2:
        raise usage_error(f"--compare wants the summaries of two runs, these are of {len(runs)}")
    from uffdprefetch.report import compare

    (names, before), (others, after) = runs
    document = compare.of_summaries(before, after, (", ".join(names), ", ".join(others)))
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        sys.stdout.write("".join(f"{line}\n" for line in compare.lines(document)))
    return 0
