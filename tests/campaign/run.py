# SPDX-License-Identifier: Apache-2.0
"""Trials until every quota is filled, and the report."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import MIB, Records, write_records

from .trial import ENGINES, MOMENT, RANKS, Outcome, exit_trial, kill_trial

FILE_BYTES = 16 * MIB + 777


@dataclass
class Report:
    """All outcomes; what did not count is told, not hidden."""

    engine: str = "cache"
    outcomes: list[Outcome] = field(default_factory=list)

    def hits(self, kind: str) -> Counter[str]:
        """Counted faults by the state that they hit."""
        return Counter(o.state for o in self.outcomes if o.kind == kind and o.counted)

    def counted(self, kind: str) -> int:
        return sum(self.hits(kind).values())

    def as_json(self) -> dict[str, Any]:
        waits = sorted(
            o.since_fault_ns
            for o in self.outcomes
            if o.kind == "kill" and o.counted and o.since_fault_ns
        )
        return {
            "engine": self.engine,
            "ranks": RANKS,
            "kills": dict(self.hits("kill")),
            "kills_counted": self.counted("kill"),
            "kills_not_counted": sum(not o.counted for o in self.outcomes),
            "kills_at_a_random_moment": sum(
                o.wanted == MOMENT and o.counted for o in self.outcomes if o.kind == "kill"
            ),
            "exits": dict(self.hits("exit")),
            "exits_counted": self.counted("exit"),
            "since_last_fault_ns": {
                "p50": waits[len(waits) // 2] if waits else None,
                "max": waits[-1] if waits else None,
            },
            "wrong_bytes": 0,  # the first one ends the campaign
        }

    def table(self) -> Iterable[str]:
        """Lines for people."""
        kills, exits = self.hits("kill"), self.hits("exit")
        yield f"{'state of the agent':<20}{'service killed':>16}{'agent ended':>14}"
        for state in ENGINES[self.engine].states:
            name = "idle, all armed" if state == "idle" else state
            yield f"{name:<20}{kills[state]:>16}{exits[state]:>14}"
        yield f"{'all':<20}{self.counted('kill'):>16}{self.counted('exit'):>14}"
        told = self.as_json()
        since = told["since_last_fault_ns"]
        if since["p50"] is not None:
            yield (
                f"killed {since['p50'] / 1e6:.2f} ms after a fault (median; counted: 10 ms at "
                f"most); not counted: {told['kills_not_counted']}"
            )
        yield f"every SHA-256 of {RANKS} ranks, before and after, was that of the file"


def _wants(states: tuple[str, ...], total: int, per_state: int) -> list[str]:
    """Which states to aim at: ``per_state`` of each, the rest at random moments."""
    aimed = [state for state in states for _ in range(per_state)][:total]
    return aimed + [MOMENT] * (total - len(aimed))


def run(
    directory: Path,
    kills: int,
    exits: int,
    per_state: int,
    seed: int,
    tell: Callable[[str], None] = lambda _: None,
    engine: str = "cache",
) -> Report:
    """Raises TrialFailed at the first wrong byte, wrong status or hang."""
    source = random.Random(seed)
    path = directory / "records.bin"
    records = Records(path, write_records(path, FILE_BYTES, seed), FILE_BYTES)
    report, trial = Report(engine), ENGINES[engine]
    wanted = _wants(trial.states, kills, per_state)
    source.shuffle(wanted)
    while wanted:
        outcome = kill_trial(records, directory / "trial", trial, wanted[-1], source)
        report.outcomes.append(outcome)
        if outcome.counted:
            wanted.pop()
        tell(f"kill {report.counted('kill')}/{kills}: {outcome.wanted} -> {outcome.state}")
    wanted = _wants(trial.states, exits, per_state)
    source.shuffle(wanted)
    while wanted:
        some = [wanted.pop() if wanted else MOMENT for _ in range(RANKS)]
        report.outcomes += exit_trial(records, directory / "trial", trial, some, source)
        tell(f"exit {report.counted('exit')}/{exits}: {', '.join(some)}")
    return report
