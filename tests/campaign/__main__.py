# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.campaign --kills 200``: the full size (ten minutes)."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from .run import run
from .trial import ENGINES, TrialFailed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="services killed, counted ones")
    parser.add_argument("--exits", type=int, help="agents ended (default: as many)")
    parser.add_argument("--engine", choices=tuple(ENGINES), default="cache")
    parser.add_argument("--per-state", type=int, default=20, help="of each state at least")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--json", type=Path, help="write the report here")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the jobs end with us
    exits = args.kills if args.exits is None else args.exits
    print(f"seed {args.seed}", file=sys.stderr)

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="uffdprefetch-campaign-") as directory:
        try:
            report = run(
                Path(directory), args.kills, exits, args.per_state, args.seed, tell, args.engine
            )
        except TrialFailed as failure:
            print(f"FAILED (seed {args.seed}): {failure}", file=sys.stderr)
            return 1
    for line in report.table():
        print(line)
    if args.json:
        args.json.write_text(json.dumps({"seed": args.seed, **report.as_json()}, indent=2) + "\n")
    states = ENGINES[args.engine].states
    short = [
        f"{kind}: {state} {report.hits(kind)[state]}"
        for kind, total in (("kill", args.kills), ("exit", exits))
        for state in states
        if report.hits(kind)[state] < min(args.per_state, total // len(states))
    ]
    if short:
        print(f"too few of: {', '.join(short)}", file=sys.stderr)
    return bool(short)


if __name__ == "__main__":
    sys.exit(main())
