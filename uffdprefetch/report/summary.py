# SPDX-License-Identifier: Apache-2.0
"""The lines that end a run, three and one more of a pool and of known orders each, from the
summary's JSON (docs/summary-schema.md)."""

from __future__ import annotations

from uffdprefetch.base.units import format_duration, format_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_RUNG_NAMES = {1: "userfaultfd", 2: "page tables"}
#: Below this much a job's own read(2) traffic is headers and indices, not its records.
_WORTH_SAYING_BYTES = 16 << 20


def lines(summary: Mapping[str, Any], path: str | None = None) -> list[str]:
    """All that is said at the end: three_lines(), with the others before the last of them."""
    run, outcome, following = three_lines(summary, path)
    more = [line for line in (pool_line(summary), order_line(summary)) if line]
    return [run, outcome, *more, following]


def three_lines(summary: Mapping[str, Any], path: str | None = None) -> list[str]:
    """Three lines without prefix: how it ran, what came of it, what to run next.

    ``path`` is where the JSON was written, if it was. A figure that is null is shown as
    'n/a (reason)', never as 0. Pure; raises KeyError or TypeError for what is no summary.
    """
    return [_how_it_ran(summary), _what_came_of_it(summary), _what_next(summary, path)]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share * 100:.0f} %"


def _how_it_ran(summary: Mapping[str, Any]) -> str:
    rung = summary.get("rung")
    sensor = _RUNG_NAMES.get(rung, "no sensor") if rung is not None else "no sensor"
    files = summary.get("files") or []
    size_bytes = sum(file.get("size_bytes") or 0 for file in files)
    what = f"{_count(len(files), 'file')} ({format_size(size_bytes)})" if files else "no file"
    service = summary.get("service") or {}
    share = service.get("cpu_share")
    asked = summary.get("engine_asked") or summary["engine"]
    instead = "" if asked == summary["engine"] else f" ({asked} was asked for)"
    return (
        f"engine {summary['engine']}{instead}, policy {summary['policy']}, {sensor}"
        f"{f' (rung {rung})' if rung is not None else ''}: {what},"
        f" {_count(len(summary.get('ranks') or []), 'rank')},"
        f" {format_duration(summary['wall_seconds'])};"
        f" our CPU {'n/a' if share is None else f'{share * 100:.1f} % of a core'}"
    )


def _what_came_of_it(summary: Mapping[str, Any]) -> str:
    totals = summary["totals"]
    misses = totals.get("demand_misses")
    parts = [
        "demand misses n/a (" + (totals.get("demand_misses_sensor") or "no sensor") + ")"
        if misses is None
        else _count(misses, "demand miss").replace("misss", "misses")
    ]
    prefetched_bytes = totals.get("prefetched_bytes")
    if prefetched_bytes:
        parts.append(
            f"prefetched {format_size(prefetched_bytes)}"
            f" (accuracy {_percent(totals.get('accuracy'))},"
            f" coverage {_percent(totals.get('coverage'))},"
            f" on time {_percent(totals.get('timeliness'))})"
        )
    elif totals.get("untold_bytes"):
        parts.append(
            f"prefetched n/a ({format_size(totals['untold_bytes'])} read ahead;"
            " what of it was cached already is not told to this user)"
        )
    else:
        parts.append("nothing prefetched")
    wait = totals.get("fault_wait_ns") or {}
    if wait.get("count"):
        parts.append(
            f"checkpoint wait p50 {format_duration(wait['p50'] / 1e9)}"
            f" p99 {format_duration(wait['p99'] / 1e9)} of {wait['count']}"
        )
    read_bytes = totals.get("storage_read_bytes")
    if read_bytes is None:
        parts.append(f"read n/a ({totals.get('storage_read_reason') or 'no reason given'})")
    else:
        parts.append(f"read {format_size(read_bytes)}")
    return "; ".join(parts)


def pool_line(summary: Mapping[str, Any]) -> str | None:
    """What the pool held, read and let go of; None for a run without one."""
    pool = summary.get("pool")
    if not pool:
        return None
    if not pool["read_bytes"] and not pool["faults"]:
        return "pool: nothing was mapped from it"
    bound = f" (bounded by {pool['limited_by']})" if pool.get("limited_by") else ""
    again = pool["reread_bytes"]
    parts = [
        f"{format_size(pool['resident_peak_bytes'])} of {format_size(pool['budget_bytes'])}{bound}",
        f"read {format_size(pool['read_bytes'])}"
        + (f", {format_size(again)} of it again" if again else ", nothing twice")
        + (f" ({pool['source']})" if pool.get("source") else ""),
        f"evicted {format_size(pool['evicted_bytes'])} ({pool['evict']})"
        if pool["evicted_bytes"]
        else "",
    ]
    wait = pool["demand_wait_ns"]
    if wait["count"]:
        parts.append(
            f"waits p50 {format_duration(wait['p50'] / 1e9)}"
            f" p99 {format_duration(wait['p99'] / 1e9)}"
            f" of {pool['missing_faults']} in {_count(pool['faults'], 'fault')}"
        )
    elif pool["faults"]:
        parts.append(f"nobody waited in {_count(pool['faults'], 'fault')}")
    return "pool: " + "; ".join(part for part in parts if part)


def order_line(summary: Mapping[str, Any]) -> str | None:
    """Which orders were known and followed; None for a run without any."""
    plans = summary.get("plans") or []
    if not plans:
        return None
    dropped = [plan for plan in plans if plan.get("dropped")]
    followed = [plan for plan in plans if not plan.get("dropped")]
    parts = []
    if followed:
        items = sum(plan["read_items"] for plan in followed)
        ways = list(dict.fromkeys(plan["how"] for plan in followed))
        more = f" and {len(ways) - 1} more" if len(ways) > 1 else ""
        parts.append(f"{items} items read in a known order ({ways[0]}{more})")
    if dropped:
        first = dropped[0]
        parts.append(
            f"{_count(len(dropped), 'order')} not followed to the end (rank {first['rank']},"
            f" {first['how']}: {first['dropped']})"
        )
    return "order: " + "; ".join(parts)


def _largest_unserved(
    summary: Mapping[str, Any], files: list[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """Of the mappings that were not served the largest, where it is larger than all that was."""
    largest = max((file.get("size_bytes") or 0 for file in files), default=0)
    unserved = (summary.get("unserved") or [None])[0]
    return unserved if unserved and (not files or unserved["mapped_bytes"] > largest) else None


def _not_served(unserved: Mapping[str, Any]) -> str:
    size = f" ({format_size(unserved['mapped_bytes'])})" if unserved["mapped_bytes"] else ""
    return f"{unserved['path']}{size} is not served: {unserved['why']}"


def _by_read(totals: Mapping[str, Any]) -> str:
    files = totals.get("unserved_read_files") or []
    of = f", {format_size(files[0]['bytes'])} of {files[0]['path']}" if files else ""
    return f"{format_size(totals['unserved_read_bytes'])} came by read(2){of}"


def _what_next(summary: Mapping[str, Any], path: str | None) -> str:
    """The most useful next command, the gravest finding first."""
    totals = summary["totals"]
    files = summary.get("files") or []
    unserved = _largest_unserved(summary, files)
    if unserved is not None and unserved["remedy"]:
        return f"next: {unserved['remedy']}: {_not_served(unserved)}"
    if not files:
        if unserved is not None:
            why = f"no mapping was served; {_not_served(unserved)}"
        elif (totals.get("unserved_read_bytes") or 0) >= _WORTH_SAYING_BYTES:
            why = f"no mapping was served, {_by_read(totals)}, which this engine does not see"
        else:
            why = "no mapping was served (of a regular file that is read, at least --min-size)"
        return f"next: uffdprefetch wrap -v -- CMD: {why}"
    import shlex

    largest = max(files, key=lambda file: file.get("size_bytes") or 0)
    where = shlex.quote(str(largest["path"]))
    if summary.get("rung") != 1:
        reason = summary.get("rung_reason") or "see there"
        if not summary.get("rung_lifts", True):
            return f"next: uffdprefetch wrap -- CMD: page tables only ({reason})"
        return f"next: uffdprefetch doctor {where}: what lifts the rung ({reason})"
    degradations = summary.get("degradations") or []
    if degradations:
        more = f" and {len(degradations) - 1} more" if len(degradations) > 1 else ""
        return f"next: uffdprefetch doctor {where}: {degradations[0]}{more}"
    if summary["policy"] == "none":
        return "next: uffdprefetch wrap --policy auto -- CMD: this run only watched"
    if path is None:
        return f"next: uffdprefetch doctor {where}"
    return f"next: python3 -m json.tool {shlex.quote(path)}: all figures, with their sensors"
