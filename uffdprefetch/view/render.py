# SPDX-License-Identifier: Apache-2.0
"""A snapshot as a picture of width x height cells: pure, so that it is tested without a terminal.

What does not fit is left out whole: columns by their rank, lines by theirs, ranks beyond the height
are folded into one line that names the worst of them. No line is longer than the width.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.text import Text

from uffdprefetch.base.units import format_duration, format_rate, format_size, node_map
from uffdprefetch.protocol.document import Quantiles
from uffdprefetch.protocol.snapshot import PoolActivity, Snapshot, SpillState
from uffdprefetch.view import glyphs as draw
from uffdprefetch.view import model, words
from uffdprefetch.view.files import file_lines
from uffdprefetch.view.glyphs import UNICODE, Glyphs
from uffdprefetch.view.model import View
from uffdprefetch.view.ranks import rank_columns, rank_lines
from uffdprefetch.view.ranks import title_line as rank_titles
from uffdprefetch.view.small_files import rows_of, small_lines

WIDTH_MIN, HEIGHT_MIN = 40, 6
LABEL = 9
CHART_ROWS_MAX = 10
CAPTION = 18


# ---- title and node -----------------------------------------------------------------------------


def title_line(snapshot: Snapshot, width: int, hint: str, glyphs: Glyphs) -> Text:
    """Run, host and age; ``hint`` at the right edge where there is room."""
    count = len(snapshot.ranks) + snapshot.ranks_not_listed
    age = format_duration(round(snapshot.seconds))
    name = snapshot.run
    if len(name) > width - len(age) - 2:  # it may hold a pid, but there is no other way
        name = name[: width - len(age) - 2 - len(glyphs.more)] + glyphs.more
    parts = [age, f"{count} rank{'' if count == 1 else 's'}", hint]
    right = words.join_fitting(parts, width - len(name) - 2, f" {glyphs.dot} ")
    longer = f"{name} on {snapshot.host}"
    name = longer if len(longer) <= width - len(right) - 2 else name
    return Text().append(name.ljust(width - len(right)), "bold " + draw.READ).append(right)


def how_line(snapshot: Snapshot, width: int) -> Text:
    """Engine, policy, sensor, what we cost."""
    node = snapshot.node
    sensors = {1: "userfaultfd", 2: "page tables"}
    calls = snapshot.small_files or any(file.served_by == "reads" for file in snapshot.files)
    sensor = sensors.get(snapshot.rung or 0, "read calls" if calls else "no sensor")
    parts = [f"engine {snapshot.engine}, policy {snapshot.policy}, {sensor}"]
    parts.append(f"our CPU {node.service_cpu_share * 100:.1f} % of a core")
    wait = node.checkpoint_wait_ns
    if wait.count:
        parts.append(f"checkpoint wait {_quantiles(wait)} of {wait.count}")
    return Text(words.join_fitting(parts, width, "; "), draw.FAINT)


def _quantiles(times: Quantiles) -> str:
    p50, p99 = (format_duration((ns or 0) / 1e9) for ns in (times.p50, times.p99))
    return f"p50 {p50} p99 {p99}"


def _labelled(label: str, content: Text) -> Text:
    return Text().append(label.ljust(LABEL), "bold").append_text(content)


def storage_line(snapshot: Snapshot, width: int) -> Text:
    """What storage gives, where it was measured."""
    node = snapshot.node
    parts = ["bandwidth n/a (nothing large was read yet)"]
    if node.bandwidth_bytes_per_second is not None:
        parts = [f"{format_rate(node.bandwidth_bytes_per_second)} measured"]
    elif snapshot.pool and snapshot.pool.read_bytes_per_second is not None:
        parts = [f"the pool reads {rate_text(snapshot.pool.read_bytes_per_second)}"]
    if node.latency_seconds is not None:
        parts.append(f"latency {format_duration(node.latency_seconds)}")
    if node.readers_bytes_per_second is not None:
        parts.append(f"readers {format_rate(node.readers_bytes_per_second)}")
    if node.io_pressure.share is not None:
        parts.append(f"I/O pressure {words.percent(node.io_pressure.share)}")
    if node.max_rate_bytes_per_second:
        parts.append(f"capped at {format_rate(node.max_rate_bytes_per_second)}")
    return _labelled("storage", Text(words.join_fitting(parts, width - LABEL)))


def pool_line(pool: PoolActivity, width: int, glyphs: Glyphs) -> Text:
    """How full the pool is, and what leaves it."""
    bound = f" ({pool.limited_by})" if pool.limited_by else ""
    room = width - LABEL
    bar = 20 if room >= 90 else 12 if room >= 66 else 0
    parts = [
        f"{format_size(pool.resident_bytes)} of {format_size(pool.budget_bytes)}{bound}",
        f"hit {words.percent(pool.hit.share)} of {pool.hit.faults}{' faults' if bar > 12 else ''}",
    ]
    if pool.others_bytes:
        parts.append(f"from other nodes {format_size(pool.others_bytes)}")
    if pool.evicted_bytes:
        rate = pool.evicted_bytes_per_second
        parts.append(f"evicting {words.NA if rate is None else rate_text(rate)}")
        parts.append(f"read again {format_size(pool.reread_bytes)}")
        parts.append(f"evicted {format_size(pool.evicted_bytes)} ({pool.evict})")
    if pool.pinned_bytes:
        parts.append(f"held {format_size(pool.pinned_bytes)}")
    text = Text()
    if bar:
        share = pool.resident_bytes / max(1, pool.budget_bytes)
        text = draw.gauge(share, bar, glyphs, draw.READERS).append("  ")
    return _labelled("pool", text.append(words.join_fitting(parts, room - len(text))))


def nodes_line(cluster: Mapping[str, Any], width: int) -> Text:
    """Traffic with the run's other nodes, and which of them keep what of the first file."""
    parts = [f"{len(cluster['present'])} of {cluster['nodes']} here"]
    if cluster.get("generations"):
        came, went = (format_size(cluster.get(f"{way}_bytes") or 0) for way in ("from", "to"))
        parts.append(f"{came} came, {went} went")
    if rate := cluster.get("network_bytes_per_second"):
        parts.append(f"network {format_rate(rate)}")
    room = width - LABEL - len(words.join_fitting([*parts, "kept by "], width))
    for cells in list((cluster.get("keepers") or {}).values())[:1]:
        every = -(-len(cells) // max(1, room))  # of so many parts one is shown
        if any(node is not None for node in cells):
            parts.append(f"kept by {node_map(cells[::every])}")
    return _labelled("nodes", Text(words.join_fitting(parts, width - LABEL)))


def disk_line(spill: SpillState, width: int) -> Text:
    """The disk to which goes what leaves the pool's memory."""
    parts = [
        f"{format_size(spill.used_bytes)} of {format_size(spill.size_bytes)} on {spill.directory}",
        f"read {format_size(spill.read_bytes)}",
        f"wrote {format_size(spill.written_bytes)}",
    ]
    if spill.dropped_bytes:
        parts.append(f"not written in time {format_size(spill.dropped_bytes)}")
    if spill.ended:
        parts.insert(0, spill.ended)
    return _labelled("disk", Text(words.join_fitting(parts, width - LABEL)))


def waits_line(pool: PoolActivity, width: int) -> Text:
    """Who waits for the pool, and for how long."""
    parts = [f"{pool.waiters} now, {pool.waiters_peak} at most, {pool.missing_faults} so far"]
    for name, times in (("waited", pool.demand_wait_ns), ("a chunk takes", pool.fill_ns)):
        if times.count:
            parts.append(f"{name} {_quantiles(times)}")
    if pool.huge_pages:
        parts.append("huge pages")
    return _labelled("waiting", Text(words.join_fitting(parts, width - LABEL)))


def ahead_line(snapshot: Snapshot, width: int, glyphs: Glyphs) -> Text:
    """How much lies ahead of the readers, of what may."""
    node = snapshot.node
    ahead, allowed = format_size(node.ahead_bytes), format_size(node.allowed_bytes)
    under_way, target = (
        format_size(size) for size in (node.under_way_bytes, node.under_way_target_bytes)
    )
    parts = [
        f"{ahead} of {allowed} ({node.allowed_by})",
        f"under way {under_way}",
        f"target {target}",
    ]
    room = width - LABEL
    bar = 20 if room >= 90 else 12 if room >= 66 else 0
    text = Text()
    if bar:
        share = node.ahead_bytes / max(1, node.allowed_bytes)
        text = draw.gauge(share, bar, glyphs).append("  ")
    return _labelled("ahead", text.append(words.join_fitting(parts, room - len(text))))


def history_lines(
    label: str,
    values: Sequence[float],
    width: int,
    rows: int,
    unit: Callable[[float], str],
    glyphs: Glyphs,
    style: str,
) -> list[Text]:
    """A curve of the last minutes with its latest and its highest value beside it."""
    cells = max(1, width - LABEL - (CAPTION + 1 if width >= 60 else 0))
    lines = draw.chart(draw.resample(values, cells), cells, rows, glyphs, style)
    captions = [f"now {unit(values[-1]) if values else words.NA}"]
    captions.append(f"peak {unit(max(values, default=0.0))}")
    captions.append(f"in {format_duration(len(values))}")
    for i, line in enumerate(lines):
        caption = captions[i] if i < len(captions) and width >= 60 else ""
        style = "" if i == 0 else draw.FAINT
        lines[i] = _labelled(label if i == 0 else "", line).append(f" {caption}".rstrip(), style)
    return lines


def rate_text(value: float) -> str:
    """A rate for a curve's caption."""
    return format_rate(value) if value >= 500 else "0 B/s"


# ---- the whole ----------------------------------------------------------------------------------


def _folded(alert: str, width: int) -> list[str]:
    """An alert as lines; where one is too short the file that it begins with loses its folders."""
    path, colon, what = alert.partition(": ")
    if len(alert) > width - 2 and colon and path.startswith("/"):
        alert = f"{os.path.basename(path)}: {what}"
    return textwrap.wrap(f"! {alert}", width, subsequent_indent="  ")


def alert_lines(view: View, width: int, rows: int, glyphs: Glyphs) -> list[Text]:
    """The gravest first, each whole where there are rows for it; how many more there are stands at
    the end. Only what has no room even alone is cut."""
    found = words.alerts(view)
    if not found:
        return []
    for count in range(len(found), 0, -1):
        more = f" (and {len(found) - count} more)" if count < len(found) else ""
        shown = [*found[: count - 1], found[count - 1] + more]
        lines = [line for alert in shown for line in _folded(alert, width)]
        if len(lines) <= rows:
            break
    else:
        whole = _folded(found[0], width)
        last = words.fit(" ".join(whole[rows - 1 :]), width - len(more), glyphs.more) + more
        lines = [*whole[: rows - 1], last]
    return [Text(line, draw.ALERT) for line in lines]


@dataclass(frozen=True)
class LineBudget:
    """What a picture of some height has room for. ``shown``: names of its optional parts; lines of
    ranks, alerts, a curve, of files and of small ones but the first; ``loose``: a line between
    curves."""

    shown: frozenset[str]
    rank_rows: int
    alert_rows: int
    chart_rows: int
    more_files: int
    more_small: int
    loose: bool


def line_budget(view: View, width: int, height: int) -> LineBudget:
    """Gives lines to the parts in the order in which they would be missed; what is left goes to
    files, ranks and curves."""
    snapshot = view.snapshot
    folded = sum(len(_folded(alert, width)) for alert in words.alerts(view))
    alerts = min(folded, 1 if height < 20 else 3)
    count = len(snapshot.ranks) + bool(snapshot.ranks_not_listed) or 1
    least = min(count, max(4, height // 3))
    least = min(least, height - 1 - alerts)  # 1: the titles of the ranks
    left = height - 1 - alerts - least
    shown: set[str] = set()
    for name, needed in _optional(snapshot):
        if needed > left:
            break
        shown.add(name)
        left -= needed
    more_files = min(left, max(0, min(len(snapshot.files), 8) - 1)) if "files" in shown else 0
    left -= more_files
    small = min(left, max(0, min(len(rows_of(snapshot.small_files)), 8) - 1))
    more_small = small if "small" in shown else 0
    left -= more_small
    rows = min(count, least + left)
    left -= rows - least
    chart_rows = min(CHART_ROWS_MAX, 1 + left // 3) if "readers" in shown else 1
    left -= 3 * (chart_rows - 1)
    loose = chart_rows > 3 and left >= 3
    return LineBudget(frozenset(shown), rows, alerts, chart_rows, more_files, more_small, loose)


def _optional(snapshot: Snapshot) -> list[tuple[str, int]]:
    """Optional parts, the most important first: (name, lines that it needs)."""
    parts = [
        ("title", 1), ("storage", 1), ("prefetch", 1), ("files", 2), ("ahead", 1), ("how", 1),
        ("misses", 1), ("readers", 1), ("gaps", 3), ("notes", 2),
    ]  # fmt: skip
    if not snapshot.files and snapshot.small_files is not None:
        parts.remove(("files", 2))
    if snapshot.small_files is not None:
        parts[2:2] = [("small", 3)]
    if snapshot.cluster:
        parts[2:2] = [("nodes", 1)]
    if snapshot.pool:
        parts[1:1] = [("pool", 1)]
        if snapshot.pool.spill:
            parts[2:2] = [("disk", 1)]
        parts[parts.index(("how", 1)) : parts.index(("how", 1))] = [("waits", 1)]
    return parts


def picture(
    view: View, width: int, height: int, glyphs: Glyphs = UNICODE, hint: str = ""
) -> list[Text]:
    """The whole dashboard: at most ``height`` lines of at most ``width`` cells."""
    if width < WIDTH_MIN or height < HEIGHT_MIN:
        return [Text(words.fit(line, width)) for line in _tiny(view)[:height]]
    snapshot = view.snapshot
    has = line_budget(view, width, height)
    gap = [Text("")] if "gaps" in has.shown else []
    lines: list[Text] = []
    if "title" in has.shown:
        lines.append(title_line(snapshot, width, hint, glyphs))
    if "how" in has.shown:
        lines.append(how_line(snapshot, width))
    lines += gap
    lines.append(rank_titles(rank_columns(width)))
    lines += rank_lines(snapshot, width, has.rank_rows, glyphs)
    lines += gap
    lines += _node_lines(snapshot, width, has, glyphs)
    lines += _curves(snapshot, width, has, glyphs)
    if "files" in has.shown:
        lines += gap
        lines += file_lines(snapshot, width, 2 + has.more_files, glyphs)
    if "small" in has.shown and snapshot.small_files is not None:
        lines += gap
        lines += small_lines(snapshot.small_files, width, 3 + has.more_small, glyphs)
    if has.alert_rows:
        lines += alert_lines(view, width, has.alert_rows, glyphs)
    if "notes" in has.shown:
        notes = words.notes(snapshot)[:2]
        lines += [Text(words.fit(note, width, glyphs.more), draw.FAINT) for note in notes]
    for line in lines:
        line.no_wrap = True
    return lines[:height]


def _node_lines(snapshot: Snapshot, width: int, has: LineBudget, glyphs: Glyphs) -> list[Text]:
    """The node's storage, memory and neighbours."""
    lines: list[Text] = []
    if "storage" in has.shown:
        lines.append(storage_line(snapshot, width))
    if "ahead" in has.shown:
        lines.append(ahead_line(snapshot, width, glyphs))
    if snapshot.pool and "pool" in has.shown:
        lines.append(pool_line(snapshot.pool, width, glyphs))
    if snapshot.pool and snapshot.pool.spill and "disk" in has.shown:
        lines.append(disk_line(snapshot.pool.spill, width))
    if snapshot.cluster and "nodes" in has.shown:
        lines.append(nodes_line(snapshot.cluster, width))
    if snapshot.pool and "waits" in has.shown:
        lines.append(waits_line(snapshot.pool, width))
    return lines


def _curves(snapshot: Snapshot, width: int, has: LineBudget, glyphs: Glyphs) -> list[Text]:
    """The last minutes."""
    history = snapshot.history
    lines: list[Text] = []
    for name, values, unit, style in (
        ("prefetch", history.prefetch_bytes_per_second, rate_text, draw.READ),
        ("readers", history.reader_bytes_per_second, rate_text, draw.READERS),
        ("misses", history.misses_per_second, lambda v: f"{v:.0f}/s", draw.MISSES),
    ):
        if name in has.shown:
            lines += [Text("")] if has.loose else []
            lines += history_lines(name, values, width, has.chart_rows, unit, glyphs, style)
    return lines


def _tiny(view: View) -> list[str]:
    snapshot = view.snapshot
    return [
        words.progress(snapshot) or "no position yet",
        f"reading {words.reading(snapshot)}",
        f"hit {words.percent(model.hit_share(snapshot))}",
        *words.alerts(view),
        f"(needs {WIDTH_MIN}x{HEIGHT_MIN})",
    ]


def renderable(
    view: View, width: int, height: int, glyphs: Glyphs = UNICODE, hint: str = ""
) -> Group:
    """picture() as one thing for rich to print."""
    return Group(*picture(view, width, height, glyphs, hint))
