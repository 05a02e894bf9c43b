# SPDX-License-Identifier: Apache-2.0
"""The lines that end a run, from the summary's JSON (docs/summary-schema.md): what it gained, what
was not served and why, and what would change that; with -v how it ran, too."""

from __future__ import annotations

from uffdprefetch.base.messages import PREFIX
from uffdprefetch.report.endings import cut_off, short_of_memory, stood_still
from uffdprefetch.report.gained import gained_lines, moved_bytes, shared_lines, small_files_lines
from uffdprefetch.report.left_out import TELL_ORDER, less_well, not_served_lines, notes_of
from uffdprefetch.report.line import fitted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from uffdprefetch.report.line import Line


def lines(
    summary: Mapping[str, Any],
    path: str | None = None,
    verbose: bool = False,
    columns: int | None = None,
) -> list[str]:
    """The lines at a run's end, without prefix. ``path``: of the JSON, if it was written;
    ``verbose``: with how_it_ran(); ``columns``: of the terminal, None where there is none."""
    if not verbose:
        return short_lines(summary, columns)
    from uffdprefetch.report.how_it_ran import how_it_ran

    return [*short_lines(summary), *how_it_ran(summary, path)]


def short_lines(summary: Mapping[str, Any], columns: int | None = None) -> list[str]:
    """What was kept ahead of the job, and what that has saved or cost; what was read for nothing;
    small files; what nodes have shared, or why nothing; what was asked for and not done; what was
    not served, or not as well as it could be, and why; what to do about that; before them how job
    and service ended, where not well. A line each; all but the first of them only where there is
    something to say. Where a terminal has too few ``columns`` for one, the file
    that it names loses folders; what is said of it stays whole.

    Pure; raises KeyError or TypeError for what is no summary.
    """
    width = None if columns is None else columns - len(PREFIX)
    return [fitted(line, width) for line in _lines(summary)]


def not_served(summary: Mapping[str, Any]) -> list[str]:
    """The lines of short_lines() about what was not served, or less well than possible: why, and
    the remedy."""
    return [fitted(line, None) for line in not_served_lines(summary) or less_well(summary)]


def _lines(summary: Mapping[str, Any]) -> list[Line]:
    first = [*short_of_memory(summary), *stood_still(summary)]
    gained, shared = [*gained_lines(summary), *small_files_lines(summary)], shared_lines(summary)
    if summary.get("files") or small_files_lines(summary):  # else why nothing was served says it
        first += cut_off(summary)
    if moved_bytes(summary) and summary["totals"].get("gain") != "saved":
        gained = []  # the accounts are of one node's storage, not of what all nodes ask of it
    undone = [f"note: {one['text']}" for one in notes_of(summary) if one.get("asked")]
    more = not_served_lines(summary) or less_well(summary)
    if undone:  # what the user has tried already is no remedy
        more = [line for line in more if line != TELL_ORDER]
    return [*first, *gained, *shared, *undone, *more]
