# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch summary [FILE|DIR...] [--compare] [--json]``"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from uffdprefetch.base.errors import UffdPrefetchError, usage_error
from uffdprefetch.base.messages import say
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
        parser.add_argument(
            "--json",
            action="store_true",
            help="one JSON document on stdout; of several runs a list",
        )

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        if rest is not None:
            raise usage_error("summary shows a run, it starts none: nothing goes after --")
        places = args.paths or _default_places()
        runs = [run for path in places for run in _runs_of(path)]
        if not args.paths:
            runs = runs[-1:]
        if args.compare:
            if len(args.paths) != 2:
                raise usage_error(f"--compare wants two runs, these are {len(args.paths)}")
            return _compare([_runs_of(path)[-1] for path in args.paths], args.json)
        if not all(os.path.isdir(path) for path in places):
            runs = _grouped([one for run in runs for one in run])
        shown = [(_names(run), _merged(run)) for run in runs]
        if args.json:
            documents = [document for _, document in shown]
            print(json.dumps(documents[0] if len(documents) == 1 else documents, indent=2))
            return 0
        for number, (names, document) in enumerate(shown):
            if number:
                print()
            _print(_lines(names, document))
        return 0


class _Left(NamedTuple):
    """A summary that lies on disk; ``end``: when it was written, seconds since the epoch."""

    path: str
    end: float
    document: dict[str, Any]

    @property
    def begin(self) -> float:
        return self.end - float(self.document.get("wall_seconds") or 0.0)


#: Bound on the difference of nodes' wall clocks and file servers' timestamps.
CLOCKS_SECONDS = 5.0


def _no_summary(path: str, why: str) -> UffdPrefetchError:
    return usage_error(f"{path} is no summary of a run: {why}")


def _read(path: str) -> _Left:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            document = json.load(file)
            end = os.fstat(file.fileno()).st_mtime
    except OSError as error:
        raise usage_error(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        what = (
            "it is a recording (uffdprefetch trace)"
            if path.endswith(".uptrace")
            else "it is no JSON"
        )
        raise _no_summary(path, what) from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise _no_summary(path, f"its schema is not {SCHEMA}")
    return _Left(path, end, document)


def _default_places() -> list[str]:
    """Where a run's summary lies of which nobody has said where: the place of the newest one."""
    state = output.state_directory(os.environ)
    places = [place for place in (state, ".") if place is not None and os.path.isdir(place)]
    newest = [(os.stat(names[-1]).st_mtime_ns, place) for place in places
              if (names := _list(place))]  # fmt: skip
    if not newest:
        where = " or ".join(os.path.abspath(place) for place in (state, ".") if place is not None)
        raise usage_error(f"there is no summary (*{SUFFIX}) in {where}")
    return [max(newest)[1]]


def _list(directory: str) -> list[str]:
    try:
        return output.summaries(directory)
    except OSError as error:
        raise usage_error(f"cannot read {directory}: {error.strerror}") from None


def _runs_of(path: str) -> list[list[_Left]]:
    """The runs that a file is of, or that lie in a directory, the newest last; of runs with the
    same key the last one. What is no summary there is left out, with a line."""
    if not os.path.isdir(path):
        return [[_read(path)]]
    found = []
    for name in _list(path):
        try:
            found.append(_read(os.path.normpath(name)))
        except UffdPrefetchError as error:
            say(f"{error.message}; left out")
    if not found:
        raise usage_error(f"there is no summary (*{SUFFIX}) in {os.path.abspath(path)}")
    last = {str(run[-1].document.get("run")): run for run in _grouped(found)}
    return sorted(last.values(), key=lambda run: run[-1].end)


def _grouped(found: Sequence[_Left]) -> list[list[_Left]]:
    """By runs: what has the same key, is of different nodes and of the same time."""
    runs: list[list[_Left]] = []
    for one in sorted(found, key=lambda one: one.end):
        key, host = one.document.get("run"), one.document.get("host")
        for run in runs:
            apart = one.begin - max(other.end for other in run)
            if (
                run[0].document.get("run") == key
                and all(other.document.get("host") != host for other in run)
                and apart < CLOCKS_SECONDS
            ):
                run.append(one)
                break
        else:
            runs.append([one])
    return runs


def _names(run: Sequence[_Left]) -> str:
    return ", ".join(one.path for one in run)


def _merged(run: Sequence[_Left]) -> dict[str, Any]:
    from uffdprefetch.report.merge import merged

    try:
        return merged([one.document for one in run])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no_summary(_names(run), f"{type(error).__name__}: {error}") from None


def _lines(names: str, document: dict[str, Any]) -> list[str]:
    from uffdprefetch.report import summary

    try:
        return summary.lines(document, names, verbose=True)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no_summary(names, f"{type(error).__name__}: {error}") from None


def _print(lines: Sequence[str]) -> None:
    """Names that are no text are shown by their bytes."""
    text = "".join(f"{line}\n" for line in lines)
    sys.stdout.write(text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))


def _compare(runs: Sequence[Sequence[_Left]], as_json: bool) -> int:
    from uffdprefetch.report import compare

    names = [_names(run) for run in runs]
    before, after = map(_merged, runs)
    try:
        document = compare.of_summaries(before, after, names)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no_summary(" or ".join(names), f"{type(error).__name__}: {error}") from None
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        _print(compare.lines(document))
    return 0
