# SPDX-License-Identifier: Apache-2.0
"""A trace's report as plain text for a terminal or a pipe, about one screen of it. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from uffdprefetch.base.units import format_duration, format_size
from uffdprefetch.report import captions

WIDTH_MIN, WIDTH_MAX = 60, 140
#: Rows of a table and findings that a screen has room for; the rest is counted.
ROWS_MAX, FINDINGS_MAX, FILES_MAX, OTHERS_MAX = 16, 8, 10, 5
_SOURCES = {
    "bpf": "the kernel (BPF)",
    "service": "our service",
    "bpf+service": "the kernel (BPF) and our service",
}


def printable(text: object) -> str:
    """Text that does nothing to a terminal: control characters and the like as escapes."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in str(text)
    )


def lines(report: dict[str, Any], by: str = "file", width: int = 100) -> list[str]:
    """The report in lines of at most ``width`` columns (at least 60), without line ends.

    ``by``: what the readers are gathered under: file, rank or pid. A figure that is null is shown
    as n/a. Words that are longer than a line, such as paths, are broken.
    """
    width = max(WIDTH_MIN, min(WIDTH_MAX, width))
    out: list[str] = []
    for section in (
        _head(report),
        _findings(report),
        _readers(report, by, width),
        _others(report),
        _together(report),
        _missing(report),
    ):
        if section:
            if out:
                out.append("")
            for line in section:
                out += _wrapped(line, width)
    return out


def text(report: dict[str, Any], by: str = "file", width: int = 100) -> str:
    """lines() as one string that ends in a line end."""
    return "\n".join(lines(report, by, width)) + "\n"


def _wrapped(line: str, width: int) -> list[str]:
    """The line in pieces, each further one indented by two more."""
    line = printable(line)
    if len(line) <= width:
        return [line.rstrip()]
    indent = " " * (len(line) - len(line.lstrip(" ")))
    return textwrap.wrap(
        line.strip(), width, initial_indent=indent, subsequent_indent=indent + "  ",
        break_on_hyphens=False,
    )  # fmt: skip


# ---- figures ------------------------------------------------------------------------------------


def _size(value: float | None) -> str:
    return "n/a" if value is None else format_size(value)


def _time(value: float | None) -> str:
    return "n/a" if value is None else format_duration(value)


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share * 100:.3g} %"


def _count(value: int | None) -> str:
    return "n/a" if value is None else f"{value:,}".replace(",", " ")


def _plural(value: int, noun: str) -> str:
    return f"{_count(value)} {noun}" + ("" if value == 1 else "s")


def _touched(entry: dict[str, Any], page_bytes: int) -> str:
    """The bytes touched, as bounds: a fault may map more pages than are touched."""
    most, least = entry.get("touched_pages"), entry.get("touched_pages_least")
    if most is None:
        return "n/a"
    upper = format_size(most * page_bytes)
    if least is None or least == most:
        return upper
    return f"{format_size(least * page_bytes)} to {upper}"


def _least_to_most(least: float, most: float | None) -> str:
    """'0 B to 8 MiB', where a fault hides what of its pages was used."""
    if most is None or most <= least:
        return format_size(least)
    return f"{format_size(least)} to {format_size(most)}"


def _page_bytes(report: dict[str, Any]) -> int:
    """Bytes of a page, from the files; 4096 where they do not tell."""
    for file in report.get("files") or []:
        if file.get("pages") and file.get("size_bytes"):
            # The last page may not be full: the next power of two.
            return 1 << max(12, (-(-file["size_bytes"] // file["pages"]) - 1).bit_length())
    return 4096


# ---- sections -----------------------------------------------------------------------------------


def _head(report: dict[str, Any]) -> list[str]:
    about = report.get("trace") or {}
    command = " ".join(map(str, about.get("command") or []))
    ranks = [entry["rank"] for entry in report.get("ranks") or []]
    parts = [_plural(len(ranks), "rank"), f"{_time(about.get('seconds'))}"]
    if about.get("host"):
        parts.append(f"on {about['host']}")
    if about.get("started_utc"):
        parts.append(f"from {about['started_utc']}")
    parts.append(f"seen by {_SOURCES.get(about.get('source') or '', about.get('source') or 'n/a')}")
    lost = about.get("lost_events")
    parts.append(
        f"{_plural(about.get('events') or 0, 'event')}, "
        + ("none lost" if lost == 0 else f"{_count(lost)} lost")
    )
    cost = about.get("recorder_cpu_seconds")
    if cost is not None:
        parts.append(f"recording took {_time(cost)} of CPU")
    return [f"trace of: {command or about.get('path') or 'n/a'}", "; ".join(parts)]


def _missing(report: dict[str, Any]) -> list[str]:
    lacks = captions.lacks_of_trace(report)
    if not lacks:
        return []
    out = ["not in this trace"]
    for lack in lacks:
        line = f"  {lack['what']}" + (f": {lack['why']}" if lack["why"] else "")
        out.append(line + (f"; to have it: {lack['lift']}" if lack["lift"] else ""))
    return out


def _of_the_disk(pool: dict[str, Any]) -> list[str]:
    """Of a file in the pool, if something of it went to the disk tier."""
    if not pool.get("disk_written_bytes"):
        return []
    off = ", which is off now" if pool["disk_is_off"] else ""
    return [
        f"{_size(pool['disk_written_bytes'])} went to the disk tier{off},"
        f" {_size(pool['disk_read_bytes'])} came back,"
        f" {_size(pool['disk_dropped_bytes'])} left before they could"
    ]


def _file_lines(file: dict[str, Any], page_bytes: int) -> list[str]:
    """The facts of a file, for all its readers."""
    about = _size(file.get("size_bytes"))
    if file.get("file_system"):
        about += f" on {file['file_system']}"
    if file.get("read_ahead_bytes") is not None:
        about += f", readahead {format_size(file['read_ahead_bytes'])}"
    if file.get("stripe_bytes"):
        count = file.get("stripe_count")
        about += f", stripes of {format_size(file['stripe_bytes'])}" + (
            f" on {count} targets" if count else ""
        )
    figures = [f"touched {_touched(file, page_bytes)}"]
    pool = file.get("pool")
    if pool:
        figures.append(
            f"in our pool: {_plural(pool['touches'], 'touch').replace('touchs', 'touches')} reached"
            f" it, {_count(pool['missed'])} had to wait"
        )
        if pool.get("from_nodes_bytes") is not None:
            figures.append(
                f"{_size(pool['from_nodes_bytes'])} from other nodes,"
                f" {_size(pool['to_nodes_bytes'])} to them, {_size(pool['storage_bytes'])} read"
            )
        figures += _of_the_disk(pool)
        if pool["punched_bytes"]:
            figures.append(
                f"{_size(pool['punched_bytes'])} left it, at least"
                f" {_size(pool['warm_again_bytes'])} of that brought back"
            )
    if pool and not file.get("fill_bytes"):
        pass  # past the page cache
    elif file.get("fill_bytes") is None:
        figures.append("brought in n/a")
    else:
        by = file.get("fill_by") or {}
        who = ", ".join(f"{name} {format_size(n)}" for name, n in by.items() if n)
        figures.append(f"brought in {_size(file['fill_bytes'])}" + (f" ({who})" if who else ""))
    if pool and not file.get("fill_bytes"):
        pass
    elif file.get("useless_bytes") is None:
        figures.append("never used n/a")
    else:
        figures.append(
            f"never used {_least_to_most(file['useless_bytes'], file.get('useless_most_bytes'))}"
            f" of {_size(file.get('useless_denominator_bytes'))}"
        )
    calls = file.get("read_calls")
    if calls:
        figures.append(
            f"read(2): {_plural(calls['count'], 'call')}, {_size(calls['bytes'])},"
            f" {_time(calls['seconds'])}"
        )
    if file.get("refilled_bytes"):
        figures.append(f"brought in more than once {_size(file['refilled_bytes'])}")
    if file.get("evicted_bytes"):
        figures.append(f"evicted {_size(file['evicted_bytes'])}")
    index = file.get("lmdb") or file.get("records") or {}
    if index.get("records"):
        figures.append(
            f"{_count(index.get('records_touched'))} to {_count(index.get('records_mapped'))}"
            f" of {_count(index['records'])} records touched"
        )
    return [f"{file.get('path', '?')}: {about}", "  " + "; ".join(figures)]


_COLUMNS = ("pattern", "fits", "faults", "major", "stall", "of run", "epochs", "hits")


def _cells(reader: dict[str, Any]) -> list[str]:
    faults, pattern = reader.get("faults") or {}, reader.get("pattern") or {}
    epochs = reader.get("epochs")
    return [
        captions.pattern_text(pattern),
        _percent(pattern.get("share")),
        _count(faults.get("total")),
        _count(faults.get("major")),
        _time(reader.get("stall_seconds")),
        _percent(reader.get("stall_share")),
        "n/a" if epochs is None else f"{len(epochs)}{'+' * bool(reader.get('epochs_at_least'))}",
        _percent((reader.get("hit") or {}).get("share")),
    ]


def _table(first: str, rows: Sequence[tuple[str, dict[str, Any]]], width: int) -> list[str]:
    """Readers as a table; the first two columns to the left, figures to the right."""
    table = [[first, *_COLUMNS], *([printable(n), *_cells(r)] for n, r in rows[:ROWS_MAX])]
    if not rows:
        return []
    columns = list(zip(*table, strict=True))

    def excess() -> int:
        return sum(wide) + 2 * len(wide) - width

    wide = [max(map(len, column)) for column in columns]
    # Where it is narrow: names to 20, then two columns go that others tell nearly as well, then
    # names to 10.
    for step in (20, "of run", "fits", 10):
        if isinstance(step, str):
            if excess() > 0:
                at = [column[0] for column in columns].index(step)
                del columns[at], wide[at]
            continue
        for i in (0, 1):
            wide[i] -= max(0, min(excess(), wide[i] - step))

    def line(row: Sequence[str]) -> str:
        fit = [(c if len(c) <= w else c[: w - 1] + "…") for c, w in zip(row, wide, strict=True)]
        left = [c.ljust(w) for c, w in zip(fit[:2], wide[:2], strict=True)]
        right = [c.rjust(w) for c, w in zip(fit[2:], wide[2:], strict=True)]
        return "  " + "  ".join(left + right)

    out = [line(row) for row in zip(*columns, strict=True)]
    if len(rows) > ROWS_MAX:
        out.append(f"  and {len(rows) - ROWS_MAX} more (--format json has all)")
    return [one[:width] for one in out]


def _readers(report: dict[str, Any], by: str, width: int) -> list[str]:
    readers = report.get("readers") or []
    files = {file.get("id"): file for file in report.get("files") or []}
    page_bytes = _page_bytes(report)
    if not readers and not files:
        return ["no file of 1 MiB or more, or of --include, was seen being read"]
    if by == "file":
        return _by_file(list(files.values()), readers, page_bytes, width)
    names = _file_names(files.values())
    if by == "rank":
        rows = [
            (f"{r.get('rank')} {names.get(r.get('file'), '?')}", r)
            for r in sorted(readers, key=_rank_of)
        ]
        return _table("rank, file", rows, width)
    commands = {
        pid: ", ".join(dict.fromkeys(map(str, entry.get("commands") or [])))
        for entry in report.get("ranks") or []
        for pid in entry.get("pids") or []
    }
    rows = [
        (f"{pid} {commands.get(pid, '')} {names.get(r.get('file'), '?')}".replace("  ", " "), one)
        for r in sorted(readers, key=_rank_of)
        for pid, one in _processes(r)
    ]
    return _table("pid, command, file", rows, width)


def _processes(reader: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """(process, its own figures) of a reader."""
    several = [(one["pid"], one) for one in reader.get("processes") or []]
    return several or [(pid, reader) for pid in (reader.get("pids") or [])[:1]]


def _by_file(
    files: list[dict[str, Any]], readers: list[dict[str, Any]], page_bytes: int, width: int
) -> list[str]:
    """The files that cost their readers most, the most costly first, each with its readers."""
    of: dict[Any, list[dict[str, Any]]] = {}
    for reader in readers:
        of.setdefault(reader.get("file"), []).append(reader)

    def cost(file: dict[str, Any]) -> tuple[float, int]:
        stalled = sum(one.get("stall_seconds") or 0.0 for one in of.get(file.get("id"), []))
        return stalled, file.get("touched_pages") or 0

    ordered = sorted(files, key=cost, reverse=True)
    out: list[str] = []
    for file in ordered[:FILES_MAX]:
        mine = sorted(of.get(file.get("id"), []), key=_rank_of)
        out += _file_lines(file, page_bytes)
        out += _table("rank", [(str(r.get("rank")), r) for r in mine], width)
    rest = ordered[FILES_MAX:]
    if rest:
        stalled = sum(cost(file)[0] for file in rest)
        touched = sum(file.get("touched_pages") or 0 for file in rest) * page_bytes
        out.append(
            f"and {_plural(len(rest), 'file')} more: touched {format_size(touched)}, stall"
            f" {_time(stalled)} (--format json has all)"
        )
    return out


def _rank_of(reader: dict[str, Any]) -> int:
    return int(reader.get("rank") or 0)


def _file_names(files: Iterable[dict[str, Any]]) -> dict[Any, str]:
    """By id: the path's last part, or two where the last one is LMDB's data.mdb."""
    names = {}
    for file in files:
        parts = str(file.get("path", "?")).split("/")
        names[file.get("id")] = "/".join(parts[-2:] if parts[-1] == "data.mdb" else parts[-1:])
    return names


def _others(report: dict[str, Any]) -> list[str]:
    """Programs, libraries and small files, by package or directory."""
    groups = report.get("others") or []
    if not groups:
        return []
    out = ["programs, libraries and small files, what was waited for longest first"]
    for one in groups[:OTHERS_MAX]:
        opens, reads = one.get("opens"), one["read_calls"]
        parts = [_plural(one["files"], "file")]
        if opens:
            parts.append(f"{_plural(opens['count'], 'open')} ({_time(opens['seconds'])})")
        if reads:
            calls = f"{_plural(reads['count'], 'read call')}"
            parts.append(f"{calls} of {_size(reads['bytes'])} ({_time(reads['seconds'])})")
        parts.append(
            f"{_plural(one['requests'], 'request')}, {_size(one['fill_bytes'])} brought in"
        )
        out.append(f"  {one['name']}: {', '.join(parts)}, waited {_time(one['wait_seconds'])}")
    rest = groups[OTHERS_MAX:]
    if rest:
        out.append(
            f"  and {len(rest)} more: {_size(sum(one['fill_bytes'] for one in rest))} brought in,"
            f" waited {_time(sum(one['wait_seconds'] for one in rest))}"
        )
    return out


def _together(report: dict[str, Any]) -> list[str]:
    """Sections of no single reader: phases, our service, the block devices."""
    out = []
    phases = report.get("phases") or []
    if phases:
        named = [
            f"{p.get('name')} {_time(p['end_seconds'] - p['start_seconds'])}" for p in phases[:12]
        ]
        more = f" and {len(phases) - 12} more" if len(phases) > 12 else ""
        out.append("phases: " + ", ".join(named) + more)
    service = report.get("service")
    if service:
        used = service.get("warm_used_share")
        out.append(
            f"our service: asked for {_size(service.get('warm_bytes'))} ahead,"
            f" {_size(service.get('warm_cached_bytes'))} of it cached already"
            f" ({'used' if used is not None else 'use'} {_percent(used)}),"
            f" {_count(service.get('touches'))} checkpoints touched"
            + (f", {_count(service['pool_touches'])} touches of the pool"
               if service.get("pool_touches") else "")
        )  # fmt: skip
    block = report.get("block")
    if block and (block.get("requests") or block.get("others_requests")):
        line = f"block devices: {_plural(block['requests'], 'request')} of the job"
        if block["requests"]:
            line += (
                f", {_size(block.get('bytes'))}, p50 {_time(block.get('latency_p50_seconds'))},"
                f" p99 {_time(block.get('latency_p99_seconds'))}"
            )
        if block.get("others_requests"):
            line += (
                f"; of others on this machine {_count(block['others_requests'])},"
                f" {_size(block.get('others_bytes'))}"
            )
        out.append(line)
    return out


def _findings(report: dict[str, Any]) -> list[str]:
    findings = report.get("findings") or []
    if not findings:
        return ["findings: none"]
    out = ["findings, most costly first"]
    for i, one in enumerate(findings[:FINDINGS_MAX], 1):
        cost = f" ({one['cost_text']})" if one.get("cost_text") else ""
        out.append(f"  {i}. {one.get('severity', '?')}: {one.get('title', '?')}{cost}")
        if one.get("detail"):
            out.append(f"     {one['detail']}")
        if one.get("remedy"):
            source = f" [{one['source']}]" if one.get("source") else ""
            out.append(f"     remedy: {one['remedy']}{source}")
    if len(findings) > FINDINGS_MAX:
        out.append(f"  and {len(findings) - FINDINGS_MAX} more (--format json has all)")
    return out
