# SPDX-License-Identifier: Apache-2.0
"""How a run went, with -v: with what, what came of it, the pool, known orders, each file; from the
summary's JSON."""

from __future__ import annotations

from uffdprefetch.base.units import format_duration, format_rate, format_size, node_map
from uffdprefetch.report.left_out import calls_bytes
from uffdprefetch.report.line import count, percent, seconds_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

#: Most files of which -v says how they are served.
DECISIONS_MAX = 20
_SERVED_BY = {"page_tables": "page tables", "pool": "the pool's faults", "reads": "its calls"}
_RUNG_NAMES = {1: "userfaultfd", 2: "page tables"}
#: Why files of a start profile were left out, by the words of csrc/replay/replay.c.
_LEFT_OUT = {
    "changed": "changed since",
    "gone": "gone",
    "refused": "not permitted",
    "no_file": "no files",
    "failed": "failed",
    "budget": "beyond --learn-budget",
    "time": "came too late",
}


def how_it_ran(summary: Mapping[str, Any], path: str | None = None) -> list[str]:
    """With what, how that went, the pool and known orders where there were any, and where all
    figures are. One that is null is shown as 'n/a (reason)', never as 0."""
    more = [_with_what(summary), _what_came_of_it(summary), pool_line(summary), order_line(summary)]
    more += [
        spill_line(summary),
        start_line(summary),
        learned_line(summary),
        *cluster_lines(summary),
        *decision_lines(summary),
    ]
    where = f"all figures: {path}" if path is not None else None
    return [line for line in (*more, where) if line]


def _with_what(summary: Mapping[str, Any]) -> str:
    reads = summary.get("reads") or {}
    none = "watched from outside" if reads else "nobody was followed"
    sensor = _RUNG_NAMES.get(summary.get("rung") or 0, none)
    files = summary.get("files") or []
    size_bytes = sum(file.get("size_bytes") or 0 for file in files)
    what = f"{count(len(files), 'file')} ({format_size(size_bytes)})" if files else "no large file"
    who = [count(len(summary["ranks"]), "rank")] if summary.get("ranks") else []
    if not who and reads.get("processes"):
        who = [count(reads["processes"], "process").replace("processs", "processes")]
    service = summary.get("service") or {}
    share = service.get("cpu_share")
    asked = summary.get("engine_asked") or summary["engine"]
    instead = "" if asked == summary["engine"] else f" ({asked} was asked for)"
    return (
        f"engine {summary['engine']}{instead}, policy {summary['policy']}, {sensor}: "
        f"{', '.join([what, *who, format_duration(seconds_of(summary))])};"
        f" our CPU {'n/a' if share is None else f'{share * 100:.1f} % of a core'}"
    )


def _what_came_of_it(summary: Mapping[str, Any]) -> str:
    totals = summary["totals"]
    misses = totals.get("demand_misses")
    parts = []
    if misses is not None:
        parts.append(count(misses, "demand miss").replace("misss", "misses"))
    elif summary.get("files"):
        parts.append(f"demand misses n/a ({totals.get('demand_misses_sensor') or 'no sensor'})")
    prefetched_bytes = totals.get("prefetched_bytes")
    if prefetched_bytes:
        parts.append(
            f"prefetched {format_size(prefetched_bytes)}"
            f" (accuracy {percent(totals.get('accuracy'))},"
            f" coverage {percent(totals.get('coverage'))},"
            f" on time {percent(totals.get('timeliness'))})"
        )
    small = (summary.get("reads") or {}).get("small_files") or {}
    if small.get("read"):
        size, used = format_size(small["read_bytes"]), format_size(small["used_bytes"])
        parts.append(f"prefetched {count(small['read'], 'small file')} ({size}, {used} used)")
    elif not prefetched_bytes and not (summary.get("learn") or {}).get("bytes"):
        parts.append("nothing prefetched")
    if calls := calls_bytes(summary):
        parts.append(f"the job read {format_size(calls)} by calls")
    wait = totals.get("fault_wait_ns") or {}
    if wait.get("count"):
        parts.append(f"{count(wait['count'], 'checkpoint')} answered, {_within(wait)}")
    read_bytes = totals.get("storage_read_bytes")
    if read_bytes is None:
        why = totals.get("storage_read_reason") or "no reason given"
        parts.append(f"read n/a ({why})")
    else:
        parts.append(f"read {format_size(read_bytes)} by the kernel's count")
    return "; ".join(parts)


def decision_lines(summary: Mapping[str, Any]) -> list[str]:
    """For each served file how and why, and its readers' patterns; for each other one the
    reason."""
    patterns: dict[str, dict[str, list[int]]] = {}
    for (path, rank), pattern in _patterns(summary).items():
        patterns.setdefault(path, {}).setdefault(pattern, []).append(rank)
    found = []
    for file in summary.get("files") or []:
        path = file["path"]
        readers = [
            f"{'rank' if len(set(ranks)) == 1 else 'ranks'} {_numbers(ranks)}: {pattern}"
            for pattern, ranks in patterns.get(path, {}).items()
        ]
        by = file.get("served_by")
        how = "nobody" if by is None else _SERVED_BY.get(by, by)
        why = f", warmed by {file['warmed_by']}" if file.get("warmed_by") else ""
        found.append(f"{path}: followed by {how}{why}{''.join(f'; {one}' for one in readers)}")
    served = {file["path"] for file in summary.get("files") or []}
    for one in summary.get("unserved") or []:
        which = "another mapping of it is " if one["path"] in served else ""
        found.append(f"{one['path']}: {which}not served: {one['why']}")
    rest = len(found) - DECISIONS_MAX
    return found[:DECISIONS_MAX] + ([f"and {count(rest, 'file')} more"] if rest > 0 else [])


def _patterns(summary: Mapping[str, Any]) -> dict[tuple[str, int], str]:
    """(file, rank) -> how it went through it: by its longest stream. The first touches of a file
    are one, too, mostly forward, whichever way the reader goes then."""
    found: dict[tuple[str, int], str] = {}
    walked: dict[tuple[str, int], int] = {}
    for one in summary.get("streams") or []:
        key = one["file"], one["rank"]
        length = abs((one.get("position_bytes") or 0) - (one.get("start_bytes") or 0))
        if length > walked.get(key, -1):
            found[key], walked[key] = one["pattern"], length
    return found


def _numbers(values: Sequence[int]) -> str:
    """Numbers in order, those in a row as one range: 0-3, 8."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][-1] + 1:
            runs[-1][1:] = [value]
        else:
            runs.append([value])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _within(wait: Mapping[str, Any]) -> str:
    """How long waits were, from their quantiles in ns."""
    half, most = (format_duration(wait[name] / 1e9) for name in ("p50", "p99"))
    return f"half of them within {half}, 99 % within {most}"


def pool_line(summary: Mapping[str, Any]) -> str | None:
    """What the pool held, read and let go of; None for a run without one."""
    pool = summary.get("pool")
    if not pool:
        return None
    others = pool.get("others_bytes") or 0
    if not pool["read_bytes"] and not others and not pool["faults"]:
        return "pool: nothing was mapped from it"
    peak, budget = pool["resident_peak_bytes"], pool["budget_bytes"]
    bound = ""
    if pool.get("limited_by") and (pool["evicted_bytes"] or peak >= budget):
        bound = f" (bounded by {pool['limited_by']})"
    size = f"{format_size(peak)} of {format_size(budget)}{bound}"
    if peak > budget:  # which has become smaller
        size = f"{format_size(peak)} at the most, {format_size(budget)} at the end{bound}"
    again = pool["reread_bytes"]
    source = f" ({pool['source']})" if pool.get("source") else ""
    brought = f"read {format_size(pool['read_bytes'])}"
    if others:  # what came again came from either
        brought += f"{source} and {format_size(others)} from other nodes"
        source = ""
    parts = [
        size,
        brought + (f", {format_size(again)} of it again" if again else ", nothing twice") + source,
        f"evicted {format_size(pool['evicted_bytes'])} ({pool['evict']})"
        if pool["evicted_bytes"]
        else "",
    ]
    wait = pool["demand_wait_ns"]
    if wait["count"]:
        parts.append(
            f"{pool['missing_faults']} of {count(pool['faults'], 'fault')} waited, {_within(wait)}"
        )
    elif pool["faults"]:
        parts.append(f"nobody waited in {count(pool['faults'], 'fault')}")
    return "pool: " + "; ".join(part for part in parts if part)


def spill_line(summary: Mapping[str, Any]) -> str | None:
    """What the pool's disk tier held and brought; None for a run without one."""
    spill = (summary.get("pool") or {}).get("spill")
    if not spill:
        return None
    where = f"disk: {format_size(spill['used_bytes'])} on {spill['directory']}"
    parts = [where if spill["written_bytes"] else f"{where}: nothing was written"]
    if spill["read_bytes"]:
        rate = spill.get("read_bytes_per_second")
        at = f" at {format_rate(rate)} a thread" if rate else ""
        parts[0] += f": read {format_size(spill['read_bytes'])} of it{at}"
    if spill["written_bytes"]:
        parts.append(f"wrote {format_size(spill['written_bytes'])}")
    for name, what in (
        ("dropped_bytes", "left memory before they were written"),
        ("refused_bytes", "found no room there"),
    ):
        if spill[name]:
            parts.append(f"{format_size(spill[name])} {what}")
    parts += [f"{name} {times} times" for name, times in spill["errors"].items()]
    return "; ".join([*parts, *([spill["ended"]] if spill["ended"] else [])])


def cluster_lines(summary: Mapping[str, Any]) -> list[str]:
    """Traffic between the run's nodes and its rates; for each shared file, which node keeps which
    part (a digit or letter each, '.' for none). None for a run without nodes that share."""
    cluster = summary.get("cluster")
    if not cluster or not cluster.get("generations"):
        return []
    moved = cluster.get("from_bytes") or 0
    used = cluster.get("transport_cpu_seconds")
    parts = [
        f"{len(cluster['present'])} nodes ({cluster['mpi']})",
        f"{format_size(moved)} from other nodes",
        f"{format_size(cluster.get('to_bytes') or 0)} to them",
    ]
    for what, name in (("network", "network"), ("file system", "file_system")):
        rate = cluster.get(f"{name}_bytes_per_second")
        if rate:
            parts.append(f"{what} {format_rate(rate)}")
    if used is not None and moved:
        parts.append(f"transport {used:.1f} s of CPU, {used / moved * 1e9:.1f} a GB")
    keepers = cluster.get("keepers") or {}
    maps = [
        f"kept by: {node_map(cells)} {path}"
        for path, cells in keepers.items()
        if any(n is not None for n in cells)
    ]
    return ["cluster: " + "; ".join(parts), *maps]


def start_line(summary: Mapping[str, Any]) -> str | None:
    """What was read ahead of the program's start; None without --learn."""
    learn = summary.get("learn")
    if not learn:
        return None
    paths, skipped = learn["paths"], learn["skipped"]
    if not paths and not skipped:
        why = "no profile yet" if learn["state"] == "first run" else learn["state"]
        return f"start {learn['key']}: nothing was read ahead of it ({why})"
    read = f"{count(paths, 'path')} ({format_size(learn['bytes'])})"
    parts = [f"{read} asked for ahead of it in {format_duration(learn['seconds'])}"]
    if learn["used"] is not None:
        parts.append(f"{learn['used']} opened")
    if skipped:
        parts.append(", ".join(f"{n} {_LEFT_OUT.get(why, why)}" for why, n in skipped.items()))
    end = "" if learn["state"] in ("done", "budget") else f" ({learn['state']})"
    return f"start {learn['key']}: {'; '.join(parts)}{end}"


def learned_line(summary: Mapping[str, Any]) -> str | None:
    """What was learned of mapped files; None where nothing was."""
    orders = (summary.get("learn") or {}).get("orders")
    if not orders:
        return None
    words = {
        "dropped": "wrong", "written": "written", "added": "added to", "put_off": "not learned",
        "failed": "not written",
    }  # fmt: skip
    parts = [f"{orders[name]} {text}" for name, text in words.items() if orders[name]]
    if orders["followed"]:
        parts.insert(0, f"{orders['followed']} followed")
    return f"learned orders: {', '.join(parts)}" if parts else None


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
            f"{count(len(dropped), 'order')} not followed to the end (rank {first['rank']},"
            f" {first['how']}: {first['dropped']})"
        )
    return "order: " + "; ".join(parts)
