# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch compare [--rounds N] [--engine E,E] [options of wrap] [--] CMD...``"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence

from uffdprefetch.base import options
from uffdprefetch.base.errors import (
    EXIT_CANNOT_EXECUTE,
    EXIT_NOT_FOUND,
    UffdPrefetchError,
    usage_error,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from uffdprefetch.compare.rounds import ComparisonPlan

#: Options of `wrap` that have no use here: this command directs the output, and compares on one
#: node.
LEFT_OUT = frozenset((
    "engine", "output", "force", "quiet", "verbose", "live", "interval", "trace", "strict",
    "cluster", "meet", "share", "launcher", "serve-cpu",
))  # fmt: skip
#: Options of this command that take the next word.
_TAKE = ("rounds", "engine", "drop")
ROUNDS, ROUNDS_MAX = 3, 1000
#: Signals that end a comparison early: of Ctrl-C, a batch system, a terminal that goes away.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Command:
    """Run CMD plainly and under `wrap` in turns, each time cold, and say what that made.

    Before each run the files that CMD reads are put out of the page cache, which needs no rights;
    a first run, which is not measured, tells which they are. Told are the time from start to exit,
    what the job waited for storage, bytes read, page faults and CPU: medians with their intervals,
    and whether the difference is more than that of the runs among each other. CMD's output is kept
    away and shown where it fails; it reads nothing. The options of `wrap` may be given as well.
    Exit status: 0; 1 when a run ends with another status than the others; 2 wrong usage; 126, 127
    if CMD cannot be executed.
    """

    examples = (
        "uffdprefetch compare -- python train.py --steps 500",
        "uffdprefetch compare --rounds 5 --engine cache,pool ./search data.bin query",
        "uffdprefetch compare --drop data/ --no-first-run --json ./small.sh > c.json",
    )

    rare = options.RARE

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = "uffdprefetch compare [options] [--] CMD..."
        add = parser.add_argument
        add("--rounds", type=int, default=ROUNDS, metavar="N",
            help=f"of each variant so many runs (default: {ROUNDS})")  # fmt: skip
        add("--engine", metavar="ENGINE,...",
            help="compared with plain: cache, pool, off (default: as wrap)")  # fmt: skip
        add("--drop", action="append", default=[], metavar="PATH",
            help="a file, or a folder of files, that is dropped before each run, whether or not"
            " the job is seen to read it (repeatable)")  # fmt: skip
        add("--no-first-run", action="store_true", dest="no_first_run",
            help="the files of --drop are all that the job reads: measure at once")  # fmt: skip
        add("--show-output", action="store_true", dest="show_output",
            help="leave the job's output where it goes")  # fmt: skip
        add("--json", action="store_true", help="one JSON document on stdout")
        options.add_options(parser, LEFT_OUT)

    def options_end(self, words: Sequence[str]) -> int:
        """See cli/__init__.py."""
        return options.options_end(words, _TAKE)

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        from uffdprefetch.compare import figures, show
        from uffdprefetch.compare.progress import Progress
        from uffdprefetch.compare.rounds import Runner

        plan = _plan(args, rest)
        total = plan.rounds * (1 + len(plan.engines))
        failed: UffdPrefetchError | Interrupted | None = None
        with Progress(total, plan.shows_output) as progress, Runner(plan, progress) as runner:
            try:
                for number in ENDING:
                    if signal.getsignal(number) != signal.SIG_IGN:
                        signal.signal(number, _interrupt)
                runner.go()
            except (UffdPrefetchError, Interrupted) as error:
                failed = error
        result = runner.result
        document = figures.document(
            plan.command, result.names, result.runs, plan.rounds, result.first_run,
            result.files_document(), result.remarks(), os.cpu_count() or 1,
        )  # fmt: skip
        if args.json:
            print(json.dumps(document, indent=2))
        elif result.runs:
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            text = "".join(f"{line}\n" for line in show.lines(document, width))
            # names that are no text are shown by their bytes
            sys.stdout.write(
                text.encode("utf-8", "surrogateescape").decode(errors="backslashreplace")
            )
        sys.stdout.flush()
        if isinstance(failed, Interrupted):
            signal.signal(failed.number, signal.SIG_DFL)
            os.kill(os.getpid(), failed.number)
        elif failed is not None:
            raise failed
        return 0


class Interrupted(Exception):
    """By a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _interrupt(number: int, _: object) -> None:
    """End the comparison; later signals do not interrupt its clean-up (`timeout` sends two)."""
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(number)


def _engines(text: str | None, args: argparse.Namespace) -> list[str]:
    """Those that are asked for; checks all options of `wrap` with each."""
    from uffdprefetch.base import sources

    given = vars(args).copy()
    given["engine"] = None
    names = [word.strip() for word in (text or sources.load(given).engine).split(",")]
    for name in names:
        sources.load({**given, "engine": name})
    return list(dict.fromkeys(names))


def _plan(args: argparse.Namespace, rest: list[str] | None) -> ComparisonPlan:
    """The plan of the command line. Raises UffdPrefetchError where it is impossible."""
    from uffdprefetch.base import spawn
    from uffdprefetch.compare.rounds import ComparisonPlan

    if not rest:
        raise usage_error("nothing to compare: uffdprefetch compare [options] [--] CMD...")
    if not 1 <= args.rounds <= ROUNDS_MAX:
        raise usage_error(f"--rounds {args.rounds}: from 1 to {ROUNDS_MAX}")
    if args.show_output and args.json:
        raise usage_error("--show-output and --json: both want stdout")
    if args.no_first_run and not args.drop:
        raise usage_error("--no-first-run: name by --drop the files that the job reads")
    missing = [path for path in args.drop if not os.path.exists(path)]
    if missing:
        raise usage_error(f"--drop {missing[0]}: there is no such file or folder")
    environment = spawn.inherited_environment()
    if environment.get("UFFDPREFETCH_DISABLE", "") not in ("", "0"):
        raise usage_error("UFFDPREFETCH_DISABLE is set: wrap would do nothing")
    if "UFFDPREFETCH_SOCKET" in environment:
        raise usage_error("compare runs under wrap here, so nothing would run plainly")
    engines = _engines(args.engine, args)
    if shutil.which(rest[0], path=environment.get("PATH", os.defpath)) is None:
        if not os.path.exists(rest[0]):
            raise UffdPrefetchError(f"cannot execute {rest[0]!r}: not found", EXIT_NOT_FOUND)
        why = "a directory" if os.path.isdir(rest[0]) else "no permission"
        raise UffdPrefetchError(f"cannot execute {rest[0]!r}: {why}", EXIT_CANNOT_EXECUTE)
    for key in LEFT_OUT - {"engine"}:
        environment.pop(options.BY_KEY[key].variable, None)
    return ComparisonPlan(
        command=rest, engines=engines, rounds=args.rounds, options=options.as_words(vars(args)),
        named=args.drop, learns=not args.no_first_run, shows_output=args.show_output,
        environment=environment,
    )  # fmt: skip
