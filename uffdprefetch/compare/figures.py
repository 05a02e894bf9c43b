# SPDX-License-Identifier: Apache-2.0
"""What the runs of a comparison say: medians, intervals, ratios, and whether a difference is one.
Pure.

The interval of n values goes from the k-th least to the k-th largest. It holds the median of their
distribution, whatever that is, with probability 1 - 2 P(Binomial(n, 1/2) < k) ([order statistics]).
k is the largest for which that is at least 95 %; below six values there is none, so it goes from
the least to the largest, with 75 % for three.

Two variants differ where their intervals have nothing in common, of at least three rounds: of two
that are alike three against three do so once in ten times by chance, five against five once in 126.
They differ, too, where the interval of the ratios within each round leaves out 1 with at least 95 %
(a machine that gets slower from round to round overlaps with itself). They do not where it holds 1.
Between these, more rounds will tell.
"""

from __future__ import annotations

import enum
import math
import signal
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

SCHEMA = "uffdprefetch.compare/1"
PLAIN = "plain"
#: Confidence level of the intervals, the conventional one.
CONFIDENCE = 0.95
#: Rounds below which no difference is told from chance, and from which the interval reaches 95 %.
ROUNDS_LEAST, ROUNDS_SURE = 3, 6
#: Share of its time that the plain run waits, below which little can be gained.
LITTLE_SHARE = 0.05
#: Shares of a run's CPU time from which a remark is made: stolen by the hypervisor; used by other
#: programs, of all CPUs. Both are counted in ticks of 10 ms by CPU and state: less than
#: DISTURBED_SECONDS may be rounding.
STOLEN_SHARE, OTHERS_SHARE, DISTURBED_SECONDS = 0.02, 0.1, 0.1
#: Bytes still cached, and their share of all files, up to which no figure changes.
LEFT_BYTES, LEFT_SHARE = 1 << 20, 0.01


class Verdict(enum.Enum):
    """A variant's result beside plain."""

    QUICKER = "quicker"
    SLOWER = "slower"
    SAME = "no difference"
    UNKNOWN = "not decided"


class Why(enum.Enum):
    """Why a file is not cold."""

    IN_MEMORY = "it lies in memory itself"
    HELD = "somebody has it mapped, or is writing it"
    REFUSED = "it cannot be opened"
    ELSEWHERE = "it is not here by the name that the job has for it"


@dataclass(frozen=True)
class MeasuredRun:
    """One run, from start to exit. ``round``: from 1; ``waited_seconds``: of the job's threads,
    added up; ``read_bytes``: from storage; ``unused_bytes``: read ahead and not used; None: not
    known. ``cpu_seconds``, ``major_faults``: of all processes, ours too. ``others_cpu_seconds``:
    of all other programs here meanwhile."""

    variant: str
    round: int
    seconds: float
    status: int
    waited_seconds: float | None
    read_bytes: int | None
    read_is_estimated: bool
    major_faults: int
    cpu_seconds: float
    unused_bytes: int | None
    others_cpu_seconds: float
    stolen_seconds: float
    late_bytes: int = 0  # of files that were seen for the first time: not dropped before it


def words_of_status(status: int) -> str:
    """As subprocess has it, for people."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


class Interval(NamedTuple):
    """Interval of a median; ``confidence``: the probability that it contains it, 0 for one
    value."""

    median: float
    low: float
    high: float
    confidence: float


def interval(values: Sequence[float]) -> Interval:
    """Of at least one value."""
    ordered, n = sorted(values), len(values)

    def confidence(k: int) -> float:
        return max(0.0, 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n)

    k = max((k for k in range(1, n // 2 + 1) if confidence(k) >= CONFIDENCE), default=1)
    return Interval(statistics.median(ordered), ordered[k - 1], ordered[-k], confidence(k))


def verdict(plain: Interval, ours: Interval, ratio: Interval, rounds: int) -> Verdict:
    """Of times from start to exit, and of their ratios."""
    if rounds < ROUNDS_LEAST:
        return Verdict.UNKNOWN
    is_sure = ratio.confidence >= CONFIDENCE
    if ours.high < plain.low or (is_sure and ratio.high < 1):
        return Verdict.QUICKER
    if plain.high < ours.low or (is_sure and ratio.low > 1):
        return Verdict.SLOWER
    return Verdict.SAME if ratio.low <= 1 <= ratio.high else Verdict.UNKNOWN


#: Figures of a run of which a summary is made.
FIGURES = (
    "seconds", "waited_seconds", "read_bytes", "major_faults", "cpu_seconds", "unused_bytes",
)  # fmt: skip


def whole_rounds(runs: Iterable[MeasuredRun], names: Sequence[str]) -> list[dict[str, MeasuredRun]]:
    """By name, the runs of the rounds in which all of these ran."""
    rounds: dict[int, dict[str, MeasuredRun]] = {}
    for run in runs:
        rounds.setdefault(run.round, {})[run.variant] = run
    return [one for _, one in sorted(rounds.items()) if all(name in one for name in names)]


def _of(runs: Sequence[MeasuredRun], name: str) -> dict[str, float] | None:
    """A figure's interval; None where one run's is not known, or there is none."""
    values = [getattr(run, name) for run in runs]
    if not values or any(value is None for value in values):
        return None
    return interval(values)._asdict()


def _bytes_ratio(rounds: Sequence[Mapping[str, MeasuredRun]], name: str) -> dict[str, float] | None:
    """Of this variant's and plain's, within each round; None where one is not known or nothing."""
    pairs = [(one[name].read_bytes, one[PLAIN].read_bytes) for one in rounds]
    known = [ours / plain for ours, plain in pairs if ours is not None and plain]
    return interval(known)._asdict() if len(known) == len(pairs) else None


def variants(runs: Sequence[MeasuredRun], names: Sequence[str]) -> list[dict[str, Any]]:
    """One object a variant, ``plain`` first; figures of whole rounds only."""
    rounds = whole_rounds(runs, names)
    found = []
    for name in names:
        mine = [one[name] for one in rounds]
        row: dict[str, Any] = {"name": name, **{figure: _of(mine, figure) for figure in FIGURES}}
        row |= {"verdict": None, "ratio": None, "bytes_ratio": None}
        if name != PLAIN and rounds:
            plain = interval([one[PLAIN].seconds for one in rounds])
            ours = interval([one[name].seconds for one in rounds])
            ratio = interval([one[name].seconds / one[PLAIN].seconds for one in rounds])
            row["verdict"] = verdict(plain, ours, ratio, len(rounds)).value
            row["ratio"] = ratio._asdict()
            row["bytes_ratio"] = _bytes_ratio(rounds, name)
        row["runs"] = [asdict(run) for run in runs if run.variant == name]
        found.append(row)
    return found


def quickest(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of ``variants()``, which to take: those that are quicker than plain, and than which no other
    one is; the first is the quickest by its median."""
    found = [row for row in rows if row["verdict"] == Verdict.QUICKER.value]
    found.sort(key=lambda row: float(row["seconds"]["median"]))
    return [r["name"] for r in found if r["seconds"]["low"] <= found[0]["seconds"]["high"]]


class Remark(enum.Enum):
    """Kinds of remarks about the figures; each has values of its own."""

    FEW_ROUNDS = "few-rounds"
    INTERRUPTED = "interrupted"
    NOT_DROPPED = "not-dropped"
    SEEN_LATE = "seen-late"
    NO_FILES = "no-files"
    LITTLE_WAITED = "little-waited"
    STOLEN = "stolen"
    OTHERS = "others"
    STATUS = "status"
    LEFT_OUT = "left-out"
    NOT_SERVED = "not-served"


def remark(kind: Remark, **values: Any) -> dict[str, Any]:
    """A remark as in the document."""
    return {"kind": kind.value, **values}


def remarks_of_runs(
    runs: Sequence[MeasuredRun], names: Sequence[str], asked: int, cpus: int, all_bytes: int = 0
) -> list[dict[str, Any]]:
    """Remarks that follow from the runs. ``asked``: rounds; ``cpus``: of this machine;
    ``all_bytes``: of the files that are dropped."""
    rounds = whole_rounds(runs, names)
    found = []
    if len(rounds) < asked:
        found.append(remark(Remark.INTERRUPTED, rounds=len(rounds), asked=asked))
    late = [run for run in runs if run.late_bytes >= _matter(all_bytes)]
    if late:
        most = max(late, key=lambda run: run.late_bytes)
        found.append(
            remark(
                Remark.SEEN_LATE, bytes=most.late_bytes, variant=most.variant, round=most.round
            )
        )  # fmt: skip
    plain = [one[PLAIN] for one in rounds]
    waited = _of(plain, "waited_seconds")
    if waited is not None:
        seconds = statistics.median(run.seconds for run in plain)
        if waited["median"] < LITTLE_SHARE * seconds:
            found.append(
                remark(
                    Remark.LITTLE_WAITED, waited_seconds=waited["median"], seconds=seconds
                )
            )  # fmt: skip
    for kind, name, share in (
        (Remark.STOLEN, "stolen_seconds", STOLEN_SHARE),
        (Remark.OTHERS, "others_cpu_seconds", OTHERS_SHARE * cpus),
    ):
        found += _disturbed(kind, runs, name, share)
    if runs and runs[0].status:
        found.append(remark(Remark.STATUS, status=runs[0].status))
    return found


def _disturbed(
    kind: Remark, runs: Sequence[MeasuredRun], name: str, share: float
) -> list[dict[str, Any]]:
    """Where that took more than this share of a run's time."""

    def taken(run: MeasuredRun) -> float:
        return float(getattr(run, name))

    some = [run for run in runs if taken(run) > max(DISTURBED_SECONDS, share * run.seconds)]
    if not some:
        return []
    worst = max(some, key=lambda run: taken(run) / run.seconds)
    return [
        remark(
            kind, runs=len(some), variant=worst.variant, round=worst.round,
            seconds=taken(worst), of_seconds=worst.seconds,
        )
    ]  # fmt: skip


def _matter(all_bytes: int) -> float:
    """Cached bytes that change a figure."""
    return max(1.0, min(LEFT_BYTES, LEFT_SHARE * all_bytes))


def worth_naming(left: Sequence[Mapping[str, Any]], all_bytes: int) -> list[Mapping[str, Any]]:
    """Files that did not become cold and may change a figure, the largest first; also those of
    which it is unknown how much stayed."""

    def matters(left_bytes: int | None) -> bool:
        return left_bytes is None or left_bytes >= _matter(all_bytes)

    found = [one for one in left if matters(one["left_bytes"])]
    return sorted(found, key=lambda one: -one["size_bytes"])


def document(
    command: Sequence[str], names: Sequence[str], runs: Sequence[MeasuredRun], asked: int,
    first_run: Mapping[str, Any] | None, files: Mapping[str, Any],
    remarks: Sequence[Mapping[str, Any]], cpus: int,
) -> dict[str, Any]:  # fmt: skip
    """docs/summary-schema.md. ``first_run``: the one that is not measured; ``files``: what was
    dropped; ``remarks``: of what the runs do not tell."""
    rows, rounds = variants(runs, names), len(whole_rounds(runs, names))
    found = remarks_of_runs(runs, names, asked, cpus, files["bytes"])
    undecided = [row["name"] for row in rows if row["verdict"] == Verdict.UNKNOWN.value]
    if undecided:
        least = ROUNDS_LEAST if rounds < ROUNDS_LEAST else ROUNDS_SURE
        found.append(remark(Remark.FEW_ROUNDS, rounds=rounds, least=least, variants=undecided))
    warm = worth_naming(files["not_dropped"], files["bytes"])
    found += [remark(Remark.NOT_DROPPED, files=warm)] if warm else []
    return {
        "schema": SCHEMA,
        "command": list(command),
        "rounds_asked": asked,
        "rounds": rounds,
        "cpus": cpus,
        "variants": rows,
        "quickest": quickest(rows),
        "first_run": first_run,
        "files": files,
        "remarks": [*found, *remarks],
    }
