# SPDX-License-Identifier: Apache-2.0
"""One touch's trip, counted: `python -m tests.net.trip [NAME...] [--json]`.

A tape is played (replay.py). A *turn* is what the service does between two waits: its inputs up to
``pump``. A *trip* is what is entered from the turn in which something of a reader was seen to the
turn in which a request goes out for it. Of each tape: how many source files of ours a trip enters,
nothing left out, where a touch was told by a checkpoint or by the pool and where page tables were
read as a timer said; and of one reader, in a turn, how many times its touches are gone through, and
how many times the window of one of its streams is computed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tests.net import seams, tape
from tests.net.replay import Core, Replay, putting, without_kernel
from uffdprefetch.base.config import Config

#: The tape of the demonstration's sequential reader, and that of one in the pool.
PLAIN = ("demo-on", "pool")
#: What the replay stands in the place of, by the question that is asked there: the files that the
#: service enters.
SERVICE = ("service/turn.py",)  # its take() calls what the replay calls
BEHIND = {
    "runs": ("sense/pagetables.py", "state/reader.py", "native/uffd.py"),
    "on_events": ("native/uffd.py",), "submit": ("native/uffd.py",), "reap": ("native/uffd.py",),
    "resident": ("native/uffd.py",),
    "pool_submit": ("native/pool.py",), "pool_reap": ("native/pool.py",),
    "drain": ("native/pool.py",), "used_bytes": ("native/pool.py",),
    "victims_left": ("native/pool.py",),
}  # fmt: skip
#: Where what a reader has touched is handed to whoever predicts ...
PASSES = {("readers/arbiter.py", "observe"), ("readers/arbiter.py", "scanned")}
#: ... and where how far ahead of a walk to be is computed: its function, and the walk's argument.
WINDOWS = {
    ("readers/ahead.py", "_window"): "front", ("predict/window.py", "lookahead_bytes"): "stream",
    ("predict/window.py", "auto"): "stream", ("warm/windows.py", "_make"): "walk",
}  # fmt: skip


@dataclass
class Turn:
    """What was entered in one turn."""

    told: bool = False  # a checkpoint or the pool has told of a touch
    files: dict[str, None] = field(default_factory=dict)  # from the first touch on, if any
    asked: bool = False  # a request goes out
    passes: Counter[int] = field(default_factory=Counter)  # by reader
    windows: Counter[int] = field(default_factory=Counter)  # by process


#: Makes and copies instances of dataclasses, as the standard library does for others.
METHODS = "base/record.py"


@dataclass
class Trip:
    """Of a touch, up to the request that comes of it."""

    told: bool
    files: dict[str, None] = field(default_factory=dict)
    turns: int = 0


def turns(name: str) -> Iterator[Turn]:
    """Play a tape."""
    lines = tape.load(tape.TAPES / f"{name}.tape.gz")
    config = Config.from_json(next(lines)["config"])
    world, turn = Replay(), Turn()

    def entered(frame: Any, event: str, _: Any) -> None:
        _, ours, file = frame.f_code.co_filename.rpartition("/uffdprefetch/")
        if event != "call" or not ours or file == METHODS:
            return
        turn.files.setdefault(file)
        where, local = (file, frame.f_code.co_name), frame.f_locals
        if where in PASSES:
            region = local["batch"].region if "batch" in local else local["region"]
            turn.passes[id(region.reader)] += 1
        if where in WINDOWS:
            walk = local.get(WINDOWS[where])  # no walk's in what has the name now
            if walk is not None:
                turn.windows[walk.pid if hasattr(walk, "pid") else walk.reader] += 1

    def ask(self: Replay, question: list[Any], real: Any) -> Any:
        for file in BEHIND.get(question[0], ()):
            turn.files.setdefault(file)
        return asked(self, question, real)

    with tempfile.TemporaryDirectory() as directory, putting() as put:
        asked = Replay.ask
        put(Replay, "ask", ask)
        seams.install(world, put)
        without_kernel(put)
        core = Core(config, world, directory)
        for kind, now, args, answers in lines:
            world.begin(now, answers)
            before = len(world.decisions)
            for file in (*SERVICE, *BEHIND.get(kind, ())):
                turn.files.setdefault(file)
            drained = kind == "on_pool_events" and any(a for q, a in answers if q[0] == "drain")
            turn.told |= drained or (kind == "on_events" and bool(args[1]))
            sys.setprofile(entered)
            core.take(kind, args)
            sys.setprofile(None)
            turn.asked |= any(d[1] in ("read", "fill") for d in world.decisions[before:])
            if kind == "pump":
                yield turn
                turn = Turn()
            elif not (turn.passes or turn.told):  # what has come to an end before: another's trip
                turn.files.clear()


def trips(played: list[Turn]) -> list[Trip]:
    """Those that led to a request."""
    found, trip = list[Trip](), Trip(False)
    for turn in played:
        if turn.passes:
            trip = Trip(turn.told)
        elif not trip.turns:
            continue
        trip.turns += 1
        trip.files.update(turn.files)
        if turn.asked:
            found.append(trip)
            trip = Trip(False)
    return found


def count(name: str) -> dict[str, Any]:
    """Of a tape, by whether a touch was told or found by a timer: how many trips; [least, median,
    most] files that one enters; [median, most] passes, and computations of a window, in a turn."""
    played = list(turns(name))
    result: dict[str, Any] = {"name": name, "turns": len(played)}
    for kind, told in (("timer", False), ("told", True)):
        files = sorted(len(trip.files) for trip in trips(played) if trip.told == told)
        seen = [turn for turn in played if turn.passes and turn.told == told]
        if not files:
            continue
        result[kind] = {"trips": len(files), "files": [files[0], int(median(files)), files[-1]]}
        for what in ("passes", "windows"):
            times = [max(getattr(turn, what).values(), default=0) for turn in seen]
            result[kind][what] = [int(median(times)), max(times)]
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of tapes; {' and '.join(PLAIN)}")
    parser.add_argument("--files", action="store_true", help="of each kind, the median trip's")
    args = parser.parse_args()
    for name in args.names or PLAIN:
        print(json.dumps(count(name)))
        made = trips(list(turns(name))) if args.files else []
        for told in (False, True):
            some = sorted((t for t in made if t.told == told), key=lambda trip: len(trip.files))
            if some:
                files = some[len(some) // 2].files
                print(f"{'told' if told else 'timer'}: {len(files)}", *files, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
