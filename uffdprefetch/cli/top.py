# SPDX-License-Identifier: Apache-2.0
"""``uffdprefetch top [RUN] [--once] [--json] [--interval 1]``"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
import time
from typing import TYPE_CHECKING, TextIO

from uffdprefetch.base.errors import EXIT_CANNOT, UffdPrefetchError, named, usage_error
from uffdprefetch.base.units import format_duration, parse_duration

if TYPE_CHECKING:
    from uffdprefetch.view.fetch import Fetcher
    from uffdprefetch.view.glyphs import Glyphs
    from uffdprefetch.view.watch import WatchedService

INTERVAL_MIN_SECONDS = 0.1
#: With --once: interval between two snapshots, where a rate needs two.
ONCE_SECONDS = 0.6


class Command:
    """Watch a job that runs under `uffdprefetch wrap` on this node.

    On a terminal a dashboard (q or Ctrl-C leaves it), into a pipe one line per interval. RUN is a
    run's name or the beginning of it; it may be left out when there is only one. Watching changes
    nothing: the job does not notice, and it may be left at any time. Exit status: 0 when you left
    or the job ended; 1 when there is no such job, or its service died; 2 when RUN is not clear.
    """

    examples = (
        "uffdprefetch top",
        "uffdprefetch top --json",
    )

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("run", nargs="?", metavar="RUN", help="the name of a run")
        parser.add_argument("--once", action="store_true", help="one picture or line, then end")
        parser.add_argument(
            "--json", action="store_true", help="the snapshot as JSON, one document a line"
        )
        parser.add_argument(
            "--interval", default="1", metavar="TIME", help="time between looks (default: 1)"
        )

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int:
        if rest is not None:
            raise usage_error("top watches jobs, it starts none: nothing goes after --")
        interval_seconds = named("--interval", parse_duration, args.interval)
        if interval_seconds < INTERVAL_MIN_SECONDS:
            raise usage_error(f"--interval {args.interval}: at least 100ms")
        from uffdprefetch.view import watch
        from uffdprefetch.view.fetch import Fetcher

        chosen = watch.choose(os.environ, args.run)
        if args.once:
            return _once(chosen, args.json)
        dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown", "")
        if args.json or dumb or not sys.stdout.isatty():
            changes: queue.SimpleQueue[None] = queue.SimpleQueue()
            fetcher = Fetcher(
                chosen.client, chosen.snapshot, interval_seconds, lambda: changes.put(None)
            )
            return _lines(fetcher, changes, args.json)
        from uffdprefetch.view.screen import Screen

        screen = Screen(_glyphs())
        fetcher = Fetcher(chosen.client, chosen.snapshot, interval_seconds, screen.wake)
        began = time.monotonic()
        status = screen.run(fetcher)
        fetcher.stop()
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        return _farewell(fetcher, time.monotonic() - began)


def _glyphs() -> Glyphs:
    from uffdprefetch.base.spawn import inherited_environment
    from uffdprefetch.view import glyphs

    return glyphs.choose(sys.stdout.encoding, inherited_environment())


def _once(run: WatchedService, as_json: bool) -> int:
    """One document, line or picture; from two snapshots where rates are needed."""
    from uffdprefetch.protocol.document import encode
    from uffdprefetch.protocol.node import ServiceGone
    from uffdprefetch.view import render, words
    from uffdprefetch.view.model import View
    from uffdprefetch.view.screen import console
    from uffdprefetch.view.sensors import Sensors

    sensors = Sensors()
    try:
        snapshot = sensors.add(run.snapshot)
        if not snapshot.counted or sensors.watches_too_shortly:
            time.sleep(ONCE_SECONDS)
            snapshot = sensors.add(run.client.snapshot())
    except (ServiceGone, TimeoutError) as error:
        raise UffdPrefetchError(f"run {run.key}: the service has just gone: {error}") from None
    finally:
        sensors.close()
        run.client.close()
    if as_json:
        print(encode(snapshot))
        return 0
    if not sys.stdout.isatty():
        print(words.one_line(View(snapshot)))
        return 0
    screen = console()
    width, height = screen.size
    screen.print(render.renderable(View(snapshot), width, height - 1, _glyphs()))
    return 0


def _lines(fetcher: Fetcher, changes: queue.SimpleQueue[None], as_json: bool) -> int:
    """A line for each snapshot until the job ends."""
    from uffdprefetch.protocol.document import encode
    from uffdprefetch.view import model, words

    began = time.monotonic()
    fetcher.start()
    try:
        while True:
            changes.get()
            view = fetcher.latest
            if view.state in (model.ENDED, model.LOST):
                return _farewell(fetcher, time.monotonic() - began, sys.stderr if as_json else None)
            if not as_json:
                print(words.one_line(view), flush=True)
            elif view.state == model.LIVE:
                print(encode(view.snapshot), flush=True)
    finally:
        fetcher.stop()


def _farewell(fetcher: Fetcher, seconds: float, file: TextIO | None = None) -> int:
    """Say why it ended, unless the user left; returns the exit status."""
    from uffdprefetch.view import model, words

    view = fetcher.latest
    if view.state not in (model.ENDED, model.LOST):
        return 0
    watched = f"watched for {format_duration(seconds)}"
    print(f"uffdprefetch: {view.snapshot.run}: {words.state(view)} ({watched})", file=file)
    return 0 if view.state == model.ENDED else EXIT_CANNOT
