# SPDX-License-Identifier: Apache-2.0
"""The cost of a trace's HTML page: `python bench/lab/tracepage.py [--events 10000000] [--json F]`.

Makes a trace of that many events (tests/support/synthetic.py) in each pattern, renders its page,
opens it from disk in a headless Chromium, and says: MB of the page, seconds until it was made,
until its first picture stood on the screen (median of --rounds, each a new browser), and until a
place that was zoomed to showed its single accesses. Nothing is asserted. Wants chromium and
chromedriver.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import synthetic
from browser import Browser, why_none

from uffdprefetch.report.html import render
from uffdprefetch.trace.analyse.marks import collect
from uffdprefetch.trace.analyse.report import analyse

#: Events per record of a cold epoch of synthetic.make().
EVENTS_PER_RECORD = 6.5


def measure(pattern: str, events: int, rounds: int, keep: str | None) -> dict[str, Any]:
    """One row: the page of one trace."""
    trace = synthetic.make(pattern, records=int(events / EVENTS_PER_RECORD), epochs=1)
    clock = time.monotonic()
    report = analyse(trace)
    analysed = time.monotonic()
    page = render(trace, report)
    row: dict[str, Any] = {
        "pattern": pattern,
        "events": len(trace.events),
        "analyse_seconds": analysed - clock,
        "render_seconds": time.monotonic() - analysed,
        "page_megabytes": len(page) / 1e6,
    }
    major = max((s for s in collect(trace) if s.kind == "major"), key=len)
    middle = len(major) // 2
    t, offset = major.start_ns[middle] / 1e9, float(major.offset[middle])
    place = [t - 1e-4, t + 2e-3, offset - 16384, offset + 65536]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(keep or directory) / f"trace-{pattern}.html"
        path.write_text(page, "utf-8")
        firsts, zooms = [], []
        for _ in range(rounds):
            with Browser.start() as browser:
                browser.open(path.as_uri())
                browser.run("return uffdprefetch.idle()")
                firsts.append(browser.run("return uffdprefetch.firstPictureMs") / 1000)
                clock = time.monotonic()
                browser.run(
                    "return uffdprefetch.zoomTo({t0: arguments[0], t1: arguments[1],"
                    " o0: arguments[2], o1: arguments[3]})",
                    *place,
                )
                zooms.append(time.monotonic() - clock)
                drawn = browser.run("return uffdprefetch.drawn[0]")
                row["windows"] = browser.run(
                    "return [allWindows.list.filter(w => w.state !== 'absent').length,"
                    " allWindows.list.length]"
                )
                assert not browser.console()
    row["first_picture_seconds"] = statistics.median(firsts)
    row["zoom_seconds"] = statistics.median(zooms)
    row["zoomed"] = f"{drawn['mode']}, {drawn['marks']} marks"
    return row


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pattern", choices=synthetic.PATTERNS, action="append")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, too")
    parser.add_argument("--keep", metavar="DIRECTORY", help="leave the pages there")
    args = parser.parse_args()
    reason = why_none()
    if reason:
        sys.exit(f"tracepage: {reason}")
    rows = []
    print("pattern      events     MB  report s  page s  first picture s  zoom s  then")
    for pattern in args.pattern or synthetic.PATTERNS:
        row = measure(pattern, args.events, args.rounds, args.keep)
        rows.append(row)
        kept, of = row["windows"]
        print(
            f"{pattern:10} {row['events']:>9} {row['page_megabytes']:6.1f}"
            f" {row['analyse_seconds']:9.1f} {row['render_seconds']:7.1f}"
            f" {row['first_picture_seconds']:16.2f} {row['zoom_seconds']:7.2f}"
            f"  {row['zoomed']}; single accesses in {kept} of {of} windows",
            flush=True,
        )
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
