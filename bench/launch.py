# SPDX-License-Identifier: Apache-2.0
"""What `wrap` adds to a short job: `python bench/launch.py --before DIR --json F`.

In turn, ``--rounds`` times: `true` plainly, a bare interpreter (`python3 -I -c pass`), `true`
under `wrap`, and under the `wrap` of another checkout (``--before``, with its C objects built). Of
each the time from start to exit; of `wrap` the time to the job's start, too, which the job tells
itself, being `date`. ``--early``: a C program maps 512 MiB of the slow bed at once and reads them,
cold and warm, to its exit: what it costs that the service is not up yet.

Interpreters have their bytecode, as in an installed package, and no PYTHON* variable of ours.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from reports import ROOT, conditions, save
from runs import bootstrap_interval
from slides import build

from uffdprefetch.demo.storage import Wanted, open_storage

EARLY_BYTES = 512 << 20
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}


def wrap(checkout: Path, *words: str) -> tuple[list[str], Path]:
    """`wrap` of a checkout around a command, and the directory to run it in."""
    summary = Path(tempfile.gettempdir()) / "run"
    ours = [sys.executable, "-m", "uffdprefetch", "wrap", "-q", "-f", "-o", str(summary)]
    return [*ours, "--", *words], checkout


def seconds(command: list[str], directory: Path) -> float:
    """From start to exit."""
    start = time.perf_counter()
    subprocess.run(command, cwd=directory, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def seconds_to_the_job(command: list[str], directory: Path) -> float:
    """From start to what `date` says."""
    start = time.time_ns()
    done = subprocess.run(
        command, cwd=directory, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE
    )
    return (int(done.stdout) - start) / 1e9


def in_turn(
    rounds: int, variants: dict[str, Callable[[], float]], before: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Median and 95 % interval of each variant, in milliseconds."""
    measured: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, measure in variants.items():
            if before is not None:
                before()
            value = measure()
            if number:  # the first one brings everything into the page cache
                measured[name].append(1e3 * value)
    return {
        name: {
            "median_ms": round(statistics.median(values), 1),
            "interval_95_ms": [round(each, 1) for each in bootstrap_interval(values)],
            "rounds": rounds,
        }
        for name, values in measured.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--before", type=Path, metavar="DIR")
    parser.add_argument("--early", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    checkouts = {"wrap": ROOT, **({"wrap before": options.before} if options.before else {})}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-launch-") as name:
        work = Path(name)
        tempfile.tempdir = name

        def each(measure: Callable[..., float], *words: str) -> dict[str, Callable[[], float]]:
            made = {"plain": (list(words), work)}
            made |= {which: wrap(checkout, *words) for which, checkout in checkouts.items()}
            return {which: lambda run=run: measure(*run) for which, run in made.items()}  # type: ignore[misc]

        bare = ([sys.executable, "-I", "-c", "pass"], work)
        results["true"] = in_turn(
            options.rounds, {"bare interpreter": lambda: seconds(*bare), **each(seconds, "true")}
        )
        results["to the job's start"] = in_turn(
            options.rounds, each(seconds_to_the_job, "date", "+%s%N")
        )
        if options.early:
            with open_storage(
                Wanted(EARLY_BYTES), lambda line: print(line, file=sys.stderr)
            ) as storage:
                runs = each(seconds, str(build("scan", work)), str(storage.data), "1", "8")
                rounds = max(5, options.rounds // 8)
                results["early, cold"] = in_turn(rounds, runs, storage.make_cold)
                storage.make_warm()
                results["early, warm"] = in_turn(options.rounds, runs)
    for case, variants in results.items():
        for which, one in variants.items():
            low, high = one["interval_95_ms"]
            print(f"{case:<20} {which:<18} {one['median_ms']:8.1f} ms [{low:.1f}, {high:.1f}]")
    document = {"schema": "uffdprefetch.bench.launch/1", **conditions(), "results": results}
    save(options.json, document)


if __name__ == "__main__":
    main()
