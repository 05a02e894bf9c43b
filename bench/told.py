# SPDX-License-Identifier: Apache-2.0
"""What runs told of their gain, beside the truth: for bench/truth.py and bench/harm.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: A sign is wrong only where the truth exceeds this.
SIGN_SECONDS = 0.2
#: The least that is told at all (report/gained.py, REPORTED_SECONDS), and what runs differ by.
TELLS_SECONDS = 0.1


def told_seconds(totals: Mapping[str, Any]) -> float:
    """What a run said: saved (more than 0) or cost; 0 where it did not say either."""
    seconds = {"saved": totals["saved_at_least_seconds"], "cost": -(totals["cost_seconds"] or 0.0)}
    told = seconds.get(totals["gain"]) or 0.0
    return told if abs(told) >= TELLS_SECONDS else 0.0


def beside(truth: float, told: Sequence[float]) -> dict[str, list[bool]]:
    """Of each run: whether its sign is wrong, it told at most the truth, and at least half of it.
    ``truth``: seconds saved."""
    return {
        "wrong_sign": [abs(truth) > SIGN_SECONDS and one * truth < 0 for one in told],
        "at_most": [one <= max(truth, 0) + TELLS_SECONDS for one in told],
        "half": [truth <= SIGN_SECONDS or one >= truth / 2 for one in told],
    }


def counted(rows: Iterable[tuple[str, Mapping[str, Sequence[bool]]]]) -> list[str]:
    """How often each held, in lines; ``rows``: (name, beside())."""
    rows, lines = list(rows), []
    for name, says in (("at_most", "at most the truth"), ("half", "at least half of it")):
        all_ = [(row, one) for row, each in rows for one in each[name]]
        not_held = list(dict.fromkeys(row for row, one in all_ if not one))
        more = f" (not {', '.join(not_held)})" if not_held else ""
        lines.append(f"{says}: {sum(one for _, one in all_)} of {len(all_)}{more}")
    wrong = [row for row, each in rows for one in each["wrong_sign"] if one]
    return [*lines, f"wrong sign: {', '.join(wrong) or 'none'}"]
