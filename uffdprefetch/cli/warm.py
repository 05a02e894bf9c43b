# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch warm KEY|FILE [--learn-depth N] [--learn-budget SIZE] [--max-rate RATE]``"""

from __future__ import annotations

import argparse
import os
import signal
from typing import TYPE_CHECKING

from uffdprefetch.base.errors import EXIT_CANNOT, UffdPrefetchError, usage_error

if TYPE_CHECKING:
    from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Command:
    """Read ahead what a program reads when it starts, on this node, by its start profile.

    For a prolog, before the program is there: KEY is one of `uffdprefetch profile list`, FILE any
    profile, a site's too. Files that were changed since, or are no regular files, are left out. It
    ends when all is read, or after 30 s. Exit status: 0; 1 when nothing can be read ahead here; 2
    when there is no such profile, or the file is none.
    """

    examples = (
        "uffdprefetch warm train",
        "uffdprefetch warm /sw/profiles/train.upl --max-rate 200MB/s",
    )

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        from uffdprefetch.base.options import BY_KEY

        for key in ("learn-depth", "learn-budget", "max-rate"):
            option = BY_KEY[key]
            parser.add_argument(f"--{key}", metavar=option.metavar, help=option.help)
        parser.add_argument("profile", metavar="KEY|FILE", help="which profile")
        parser.add_argument("--json", action="store_true", help="one JSON document on stdout")

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        if rest is not None:
            raise usage_error("warm starts nothing: nothing goes after --")
        from uffdprefetch.base.config import Config, validate
        from uffdprefetch.base.errors import named
        from uffdprefetch.base.options import BY_KEY
        from uffdprefetch.cli.profile import load, path_of
        from uffdprefetch.launch import replay as replays
        from uffdprefetch.report import start as report
        from uffdprefetch.report.columns import show

        options = {key: BY_KEY[key] for key in ("learn-depth", "learn-budget", "max-rate")}
        given = {key: getattr(args, key.replace("-", "_")) for key in options}
        values = {
            option.field: named(f"--{key}", option.parse, given[key])
            for key, option in options.items()
            if given[key] is not None
        }
        config = validate(Config().but(**values))
        path = path_of(args.profile)
        load(path)  # what is wrong with it is told here
        why = replays.why_not()
        if why is not None:
            raise UffdPrefetchError(why, EXIT_CANNOT)
        replay = replays.Replay(replays.key_in(path), "failed")
        for number in _ENDING:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, _end)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            replay.begin([path], config.learn, config.max_rate_bytes_per_second)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            replay.wait()
        except OSError as error:
            raise UffdPrefetchError(f"cannot read ahead: {error.strerror}", EXIT_CANNOT) from None
        except _Ended as ended:
            replay.end()  # whose lock stays nowhere
            os.kill(os.getpid(), ended.number)
        document = report.warm_document(replay.end())
        show(document, report.warm_text(document), args.json)
        return 0


class _Ended(BaseException):
    """By a signal."""

    def __init__(self, number: int) -> None:
        self.number = number


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # another one ends us at once
    raise _Ended(number)
