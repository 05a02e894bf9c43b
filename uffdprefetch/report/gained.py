# SPDX-License-Identifier: Apache-2.0
"""What was read ahead of a job, what that gained or cost, and what nodes shared; from the summary's
JSON."""

from __future__ import annotations

from uffdprefetch.base.units import format_duration, format_size
from uffdprefetch.report.endings import cut_off, death, how_it_failed
from uffdprefetch.report.left_out import why_nothing
from uffdprefetch.report.line import Named, count, part_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from uffdprefetch.report.line import Line

#: Least gain or cost that is reported: less is within the variation of runs.
REPORTED_SECONDS = 0.1
#: Unused bytes are reported where they are more than one in this many prefetched ones.
_WASTE_SHARE = 10


def gained_lines(summary: Mapping[str, Any]) -> list[Line]:
    """Bytes read ahead of the job, what they gained, and those that were not used."""
    totals = summary["totals"]
    gain, service = totals.get("gain"), summary.get("service") or {}
    if service.get("died") or service.get("silent"):
        return [f"what was gained is not known: {death(summary)}"]
    if summary["policy"] == "none":
        return ["read nothing ahead: --policy none only watches"]
    if not summary.get("files"):
        return _without_a_file(summary)
    unused = _unused(totals)
    if gain == "cost" and (totals.get("cost_seconds") or 0.0) >= REPORTED_SECONDS:
        cost = f"cost about {format_duration(totals['cost_seconds'])}"
        kept = _kept(totals)
        return [f"{cost}: {unused}" if unused else cost, *([kept] if kept else [])]
    there = "until then" if cut_off(summary) else "nothing to gain:"
    if gain == "in-memory":
        said: Line = f"{there} the data was in memory"
    elif gain == "nothing-read":
        said = f"{there} nothing of the mapped files was read"
    elif gain == "just-read":
        itself = format_size(totals.get("job_storage_bytes") or 0)
        said = f"the data was in memory when it was mapped: the job had read {itself} itself"
    else:
        said = _kept_and_saved(totals)
    wasted = totals.get("wasted_bytes") or 0
    much = wasted * _WASTE_SHARE > (totals.get("prefetched_bytes") or 0)
    return [said, *([f"read for nothing: {unused}"] if unused and much else [])]


def _without_a_file(summary: Mapping[str, Any]) -> list[Line]:
    """No large file was served: what was done all the same, or why nothing was."""
    started = _start_read(summary)
    if small_files_lines(summary) and not started:
        return []
    failed = bool(how_it_failed(summary))
    if started:
        return [f"{started}; {why_nothing(summary)}" if failed else started]
    return [f"served nothing: {why_nothing(summary)}"]


def _start_read(summary: Mapping[str, Any]) -> str | None:
    """What was read ahead of the program's start, or is to be the next time; None: nothing."""
    learn = summary.get("learn") or {}
    recorded = learn.get("recorded") or {}
    if not learn.get("bytes"):
        if recorded.get("record") != "written":
            return None
        return f"start recorded ({format_size(recorded['bytes'])}): the next one is read ahead"
    # Files that have changed since are no paths that were read, but are opened as well.
    used = learn["used"]
    opened = "" if used is None else f"; the job opened {used:,} of the profile's files"
    return f"start read ahead: {learn['paths']:,} paths ({format_size(learn['bytes'])}){opened}"


def small_files_lines(summary: Mapping[str, Any]) -> list[Line]:
    """Files that were read ahead whole, since the next ones were known by their names."""
    counts = (summary.get("reads") or {}).get("small_files") or {}
    read, used = counts.get("read") or 0, counts.get("used") or 0
    if not read:
        return []
    size = format_size(counts["used_bytes"])
    return [f"small files: {used:,} of {read:,} read ahead were opened ({size})"]


def _unused(totals: Mapping[str, Any]) -> str | None:
    wasted = totals.get("wasted_bytes")
    if not wasted:
        return None
    return f"{part_of(wasted, totals['prefetched_bytes'])} read ahead were not used"


def _kept(totals: Mapping[str, Any]) -> str | None:
    """How much of what the job came to had been read by then; None where nobody knows."""
    needed, share = totals.get("coverage_denominator_bytes"), totals.get("coverage")
    if not needed or share is None:
        return None
    kept, waited = round(needed * share), totals.get("waited_seconds")
    rest = [f"{format_size(needed - kept)} missed"] if needed > kept else []
    if waited is not None:
        rest.append(f"{format_duration(waited)} waited" if waited else "nobody was seen to wait")
    more = f" ({', '.join(rest)})" if rest else ""
    return f"kept ahead of the job: {part_of(kept, needed)}{more}"


def _kept_and_saved(totals: Mapping[str, Any]) -> Line:
    kept = _kept(totals) or f"read {format_size(totals.get('prefetched_bytes') or 0)} ahead"
    seconds = totals.get("saved_at_least_seconds") or 0.0
    if totals.get("gain") != "saved" or seconds < REPORTED_SECONDS:
        return kept
    saved = f"saved at least {format_duration(seconds)}"
    short = kept.partition(" (")[0].replace(" of the job", "")
    return f"{kept}; {saved}", f"{short}; {saved}", saved


def moved_bytes(summary: Mapping[str, Any]) -> int:
    """Bytes that came from other nodes."""
    return (summary.get("cluster") or {}).get("from_bytes") or 0


def shared_lines(summary: Mapping[str, Any]) -> list[Line]:
    cluster = summary.get("cluster")
    if not cluster or not summary.get("files"):
        return []
    if moved := moved_bytes(summary):
        read = (summary.get("pool") or {}).get("read_bytes") or 0
        return [
            f"{count(len(cluster['present']), 'node')} shared: {format_size(read)} from storage, "
            f"{format_size(moved)} from each other"
        ]
    first = next(iter(cluster.get("not_shared") or []), None)
    if cluster.get("why_not"):
        return [f"nodes shared nothing: {cluster['why_not']}"]
    if first is not None:
        return [Named("nodes shared nothing: ", first["path"], f": {first['why']}")]
    return ["nodes shared nothing: none had what another one read"]
