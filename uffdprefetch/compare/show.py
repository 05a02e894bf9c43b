# SPDX-License-Identifier: Apache-2.0
"""A comparison (compare/figures.py) as text. Pure."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from uffdprefetch.base.units import format_duration, format_size
from uffdprefetch.compare.figures import CONFIDENCE, Remark, Verdict, Why, words_of_status
from uffdprefetch.report.columns import aligned

#: Difference up to which bytes read count as the same, as requests do not end with the records;
#: where they are estimated, three times the estimate's error (cold.PLACES_CACHED).
SAME_BYTES_SHARE, SAME_ESTIMATE_SHARE = 0.02, 0.1
#: Share of the bytes read from which unused ones are reported.
UNUSED_SHARE = 0.1
#: Most files that a remark names; most characters shown of the command.
NAMED_MAX, COMMAND_MAX = 3, 200


def seconds_text(seconds: float, of: float | None = None) -> str:
    """With as many digits as ``of``, by default the seconds themselves, deserve."""
    size = seconds if of is None else of
    digits = 3 if size < 0.1 else 2 if size < 10 else 1 if size < 100 else 0
    return f"{seconds:.{digits}f}"


def _span(figure: Mapping[str, Any]) -> str:
    """'3.61 s [3.52..3.70]', without an interval where there was one run."""
    median = figure["median"]
    text = f"{seconds_text(median)} s"
    if not figure["confidence"]:
        return text
    low, high = (seconds_text(figure[name], median) for name in ("low", "high"))
    return f"{text} [{low}..{high}]"


def _times(figure: Mapping[str, Any], name: str = "median") -> str:
    """One of a ratio's figures."""
    return f"{figure[name]:.{2 if figure['median'] < 10 else 0}f}"


def _ratio(figure: Mapping[str, Any]) -> str:
    text = f"{_times(figure)} of plain's time"
    if not figure["confidence"]:
        return text
    return f"{text} [{_times(figure, 'low')}..{_times(figure, 'high')}]"


def _median(row: Mapping[str, Any], name: str) -> float | None:
    figure = row[name]
    return None if figure is None else float(figure["median"])


def _cell(row: Mapping[str, Any], name: str, words: Callable[[float], str]) -> str:
    value = _median(row, name)
    return "n/a" if value is None else words(value)


def _is_estimated(row: Mapping[str, Any]) -> bool:
    return any(run["read_is_estimated"] for run in row["runs"])


def table(document: Mapping[str, Any]) -> list[str]:
    """A line a variant."""
    rows = [("", "start to exit", "waited", "read", "major faults", "CPU")]
    for row in document["variants"]:
        read = _cell(row, "read_bytes", format_size)
        rows.append(
            (
                row["name"],
                _span(row["seconds"]),
                _cell(row, "waited_seconds", lambda value: f"{seconds_text(value)} s"),
                f"about {read}" if _is_estimated(row) else read,
                _cell(row, "major_faults", lambda value: f"{value:,.0f}".replace(",", " ")),
                _cell(row, "cpu_seconds", lambda value: f"{seconds_text(value)} s"),
            )
        )  # fmt: skip
    return aligned(rows)


def verdict(row: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """A variant beside plain, in a line: 'cache 3.61 s, plain 9.93 s: 0.36 of plain's time
    [0.35..0.38], the same bytes'."""
    both = [f"{one['name']} {seconds_text(_median(one, 'seconds') or 0)} s" for one in (row, plain)]
    ratio = _ratio(row["ratio"])
    if row["verdict"] == Verdict.UNKNOWN.value:
        ratio = f"{ratio}, not decided"
    elif row["verdict"] == Verdict.SAME.value:
        ratio = f"no difference beyond the runs' own spread ({ratio})"
    return f"{', '.join(both)}: {', '.join([ratio, *_bytes(row, plain)])}"


def _bytes(row: Mapping[str, Any], plain: Mapping[str, Any]) -> list[str]:
    read, without = _median(row, "read_bytes"), _median(plain, "read_bytes")
    if read is None or without is None:
        return ["bytes not known"]
    if read == without == 0:
        return ["nothing read from storage"]
    share = SAME_ESTIMATE_SHARE if _is_estimated(row) else SAME_BYTES_SHARE
    if abs(read - without) <= share * max(read, without):
        parts = ["the same bytes"]
    elif without == 0 or row["bytes_ratio"] is None:
        parts = [f"{format_size(read)} read, plainly {format_size(without)}"]
    else:
        parts = [f"{_times(row['bytes_ratio'])} times the bytes"]
    unused = _median(row, "unused_bytes") or 0
    if unused > UNUSED_SHARE * read:
        parts.append(f"{format_size(unused)} read ahead and not used")
    return parts


# ---- remarks -------------------------------------------------------------------------------------


def _rounds(count: int) -> str:
    return f"{count} round{'s' * (count != 1)}"


def _files(count: int) -> str:
    return f"{count} file{'s' * (count != 1)}"


def _named(files: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for one in files[:NAMED_MAX]:
        left = one["left_bytes"]
        much = f"{format_size(left)} of " if left is not None else ""
        pids = ", ".join(map(str, one["holders"]))
        why = Why[one["why"].upper()].value + (f" (process {pids})" if pids else "")
        parts.append(f"{much}{one['path']}: {why}")
    more = len(files) - NAMED_MAX
    return "; ".join(parts) + (f"; and {_files(more)} more" if more > 0 else "")


_WORDS: dict[Remark, Callable[[Mapping[str, Any]], str]] = {
    Remark.INTERRUPTED: lambda one: f"ended early, after {one['rounds']} of {one['asked']} rounds",
    Remark.FEW_ROUNDS: lambda one: (
        f"{' and '.join(one['variants'])}: {_rounds(one['rounds'])} cannot tell the difference"
        f" from chance: --rounds {one['least']} or more"
    ),
    Remark.NOT_DROPPED: lambda one: f"not cold: {_named(one['files'])}",
    Remark.SEEN_LATE: lambda one: (
        f"files of {format_size(one['bytes'])} were seen for the first time in round"
        f" {one['round']} ({one['variant']}), so not dropped before it: --drop names files that"
        " are open for moments only"
    ),
    Remark.NO_FILES: lambda one: (
        "no file of the job's was seen, so none was dropped: --drop names them"
    ),
    Remark.LITTLE_WAITED: lambda one: (
        f"plainly the job waits for {seconds_text(one['waited_seconds'], one['seconds'])} s of"
        f" {seconds_text(one['seconds'])} s: there is little to gain"
    ),
    Remark.STOLEN: lambda one: _disturbed(one, "the hypervisor took"),
    Remark.OTHERS: lambda one: _disturbed(one, "other programs took"),
    Remark.STATUS: lambda one: f"each run ended with {words_of_status(one['status'])}",
    Remark.LEFT_OUT: lambda one: f"{one['variant']} left out: {one['why']}",
    Remark.NOT_SERVED: lambda one: f"{one['variant']}: {'; '.join(one['lines'])}",
}


def _advice(quickest: Sequence[str]) -> list[str]:
    """Of several engines, which one to take."""
    if not quickest:
        return []
    first, *alike = quickest
    if not alike:
        return [f"quickest: --engine {first}"]
    return [f"quickest: --engine {' or '.join(quickest)}, alike within the runs' own spread"]


def _disturbed(one: Mapping[str, Any], who: str) -> str:
    return (
        f"disturbed: {who} CPU in {one['runs']} run{'s' * (one['runs'] != 1)}, at the most"
        f" {format_duration(one['seconds'])} of it in {format_duration(one['of_seconds'])}"
        f" (round {one['round']}, {one['variant']})"
    )


def remark_text(one: Mapping[str, Any]) -> str:
    """A remark, for people."""
    return _WORDS[Remark(one["kind"])](one)


# ---- all of it -----------------------------------------------------------------------------------


def _head(document: Mapping[str, Any]) -> str:
    files, rounds = document["files"], document["rounds"]
    plain = document["variants"][0]["seconds"]
    head = f"{_rounds(rounds)} in turns, "
    if files["count"]:
        head += f"each cold ({_files(files['count'])}, {format_size(files['bytes'])})"
    else:
        head += "no file dropped"
    if rounds > 1:
        bracket = "95 % interval" if plain["confidence"] >= CONFIDENCE else "least..most"
        head += f"; medians [{bracket}]"
    return head


def _command(words: Sequence[str]) -> str:
    """In one line, the end of a long one left out (as that of `python -c` with its program)."""
    text = " ".join(shlex.join(words).split())
    return text if len(text) <= COMMAND_MAX else f"{text[: COMMAND_MAX - 3]}..."


def lines(document: Mapping[str, Any], width: int | None = None) -> list[str]:
    """The lines of a comparison. ``width``: of a terminal, where long lines are wrapped; None:
    whole."""
    out = [f"compared: {_command(document['command'])}"]
    said = []
    if document["rounds"]:
        plain, *others = document["variants"]
        out += [_head(document), "", *table(document), ""]
        said = [verdict(row, plain) for row in others]
        said += _advice(document["quickest"]) if len(others) > 1 else []
    else:
        times = [
            f"{row['name']} {seconds_text(run['seconds'])} s"
            for row in document["variants"]
            for run in row["runs"]
        ]
        said = [f"no round is whole: {', '.join(times)}"] if times else []
    said += [f"note: {remark_text(one)}" for one in document["remarks"]]
    return _fitted(out[:1], width) + out[1:] + _fitted(said, width)


def _fitted(texts: Sequence[str], width: int | None) -> list[str]:
    if width is None:
        return list(texts)
    return [
        line
        for text in texts
        for line in textwrap.wrap(
            text, max(width, 40), subsequent_indent="    ", break_long_words=False,
            break_on_hyphens=False,
        )
    ]  # fmt: skip


def so_far(medians: Mapping[str, float], left_seconds: float | None) -> str:
    """While it goes on: 'plain 9.93 s, cache 3.61 s so far; about 27 s left'."""
    parts = [f"{name} {seconds_text(seconds)} s" for name, seconds in medians.items()]
    text = f"{', '.join(parts)} so far" if parts else ""
    if left_seconds is not None:
        text += f"; about {format_duration(max(1, round(left_seconds)))} left"
    return text
