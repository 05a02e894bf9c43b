# SPDX-License-Identifier: Apache-2.0
"""The JSON files of the benches: under which conditions a report was made, saved, loaded."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.demo.bed import proactive_reclaim

ROOT = Path(__file__).resolve().parents[1]
#: Of sysexits.h: there are runs left.
TEMPFAIL = 75
Report = dict[str, Any]


def command(script: str, words: Sequence[str]) -> str:
    """How a user would run it."""
    return shlex.join(["python", f"bench/{script}", *words]).replace(f"{ROOT}/", "")


def commit_of(checkout: Path) -> str:
    """Which commit a checkout has, and whether it was changed since."""
    return subprocess.run(
        ["git", "-C", str(checkout), "describe", "--always", "--dirty"],
        stdout=subprocess.PIPE, text=True, check=False,
    ).stdout.strip()  # fmt: skip


def conditions() -> Report:
    """When, by which command and on what kind of machine a report is made, and how busy that is."""
    return {
        "command": command(Path(sys.argv[0]).name, sys.argv[1:]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "proactive_reclaim": proactive_reclaim(),
        "load_average": os.getloadavg()[0],
    }


def as_json(report: Report, places: Mapping[str, str] | None = None) -> str:
    """A report for the repository: without the paths of this checkout and of temporary
    directories. ``places``: what stands for other paths."""
    text = json.dumps(report, indent=1, default=str) + "\n"
    for path, word in (places or {}).items():
        text = text.replace(path, word)
    text = text.replace(f"{ROOT}/", "")
    temporary = "|".join(map(re.escape, {tempfile.gettempdir(), "/dev/shm"}))
    return re.sub(rf'(?:{temporary})/(?:[^/\s"]+/)*', "", text)


def save(path: Path | None, report: Report, places: Mapping[str, str] | None = None) -> None:
    """Write a report, whole or not at all; without a path nothing."""
    if path is None:
        return
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(as_json(report, places))
    partial.replace(path)


def load(path: Path, schema: str) -> Report:
    """A report. Raises UffdPrefetchError for another file."""
    report = json.loads(path.read_text())
    if not isinstance(report, dict) or report.get("schema") != schema:
        raise UffdPrefetchError(f"{path} is no report of this bench ({schema})")
    return report


def listed(text: str) -> list[str]:
    """The words of an option that takes some, with commas."""
    return [word for word in text.split(",") if word]


def among(known: Collection[str]) -> Callable[[str], list[str]]:
    """For an option that takes some of these words: as listed()."""

    def chosen(text: str) -> list[str]:
        words = listed(text)
        if unknown := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(f"no {unknown[0]!r}: {', '.join(known)}")
        return words

    return chosen


def options(program: str, doc: str | None) -> argparse.ArgumentParser:
    """Those of a bench of rounds that goes on where it was cut off. ``doc``: its module's."""
    parser = argparse.ArgumentParser(prog=program, description=(doc or "").splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="F", help="goes on where it was cut off")
    add("--rounds", type=int, default=3)
    add("--quiet", action="store_true", help="before a run wait until the machine is quiet")
    return parser


def show_or_measure(
    words: Sequence[str], schema: str, measure: Callable[[Sequence[str]], tuple[Report, bool]],
    markdown: Callable[[Report], str],
) -> int:  # fmt: skip
    """What a bench's command ends with: `show FILE`, or the report that ``measure`` makes, and
    whether runs of it are left. 0, 1 if a run failed, TEMPFAIL if some are left."""
    if words[:1] == ["show"]:
        report, left = load(Path(words[1]), schema), False
    else:
        report, left = measure(words)
    print(markdown(report))
    return 1 if report["failures"] else TEMPFAIL if left else 0


def a_line_for_errors(main: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """A bench's command with what it raises for its user as a line on stderr, and status 1."""

    @functools.wraps(main)
    def command(words: Sequence[str]) -> int:
        try:
            return main(words)
        except UffdPrefetchError as error:
            print(f"bench: {error.message}", file=sys.stderr)
        except (OSError, ValueError, IndexError) as error:
            print(f"bench: {error}", file=sys.stderr)
        return 1

    return command
