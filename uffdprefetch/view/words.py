# SPDX-License-Identifier: Apache-2.0
"""Numbers and sentences that fit: never wrapped, and never cut within a word or a number."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from uffdprefetch.base.units import format_duration, format_size
from uffdprefetch.protocol.snapshot import ADDED_BY_WATCHER, PoolState, Snapshot
from uffdprefetch.view import model
from uffdprefetch.view.model import ENDED, LOST, SILENT, View

NA = "n/a"
#: Age from which a count of resident bytes is shown with its age: the service counts every two
#: seconds while it is watched, a large file over some more.
OLD_SECONDS = 5.0


def short_size(size_bytes: float | None) -> str:
    """'0', '512K', '2.3M', '1.25G': powers of 1024, at most five characters up to 999 P; 'n/a'."""
    if size_bytes is None:
        return NA
    value, unit = float(size_bytes), ""
    for prefix in "KMGTP":
        if value < 999.5:
            break
        value, unit = value / 1024, prefix
    digits = 0 if not unit or value >= 99.95 else 2 if unit in "GTP" and value < 9.995 else 1
    text = f"{value:.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + unit


def megabytes(bytes_per_second: float) -> str:
    """'284', '71.3', '0.52', '12345': MB/s (powers of 1000), at most five characters."""
    value = bytes_per_second / 1e6
    if value < 0.005:
        return "0"
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    text = f"{value:.{digits}f}"
    return text if len(text) <= 5 else f"{value / 1e3:.0f}k"


def percent(share: float | None) -> str:
    """'100%', '99.8%', '3%'; never '100%' for less than all, nor '0%' for more than nothing."""
    if share is None or math.isnan(share):
        return NA
    if 0.99 <= share < 1:
        return f"{min(99.9, share * 100):.1f}%"
    if 0 < share < 0.01:
        return f"{max(0.1, share * 100):.1f}%"
    return f"{share * 100:.0f}%"


def fit(text: str, width: int, more: str = "…") -> str:
    """``text``, or its beginning up to a whole word and ``more``; '' when no word fits."""
    if len(text) <= width:
        return text
    cut = text[: max(0, width - len(more)) + 1]
    head = cut[: cut.rfind(" ")].rstrip(" ,;:(") if " " in cut else ""
    return head + more if head and len(head) + len(more) <= width else ""


def join_fitting(parts: Sequence[str], width: int, separator: str = "  ") -> str:
    """The first parts that fit whole, joined."""
    line = ""
    for part in parts:
        longer = f"{line}{separator}{part}" if line else part
        if part and len(longer) <= width:
            line = longer
    return line


def short_path(path: str, width: int, more: str = "…") -> str:
    """The last part of a path with as much before it as fits; a name that is too long loses its
    beginning: endings tell files apart."""
    if len(path) <= width:
        return path
    name = os.path.basename(path)
    longer = f"{os.path.basename(os.path.dirname(path))}/{name}"
    if len(longer) <= width:
        return longer
    return name if len(name) <= width else more + name[len(name) - width + len(more) :]


def pattern(name: str, stride_bytes: int | None, width: int) -> str:
    """The pattern's words, the stride beside them where there is room; the direction is left to the
    bar's marker where there is none."""
    if stride_bytes:
        full = f"{name} {short_size(abs(stride_bytes))}"
        if len(full) <= width:
            return full
    return name if len(name) <= width else name.split()[0][:width]


def reading(snapshot: Snapshot) -> str:
    """The rate of all ranks' reading in the last second."""
    rate = snapshot.node.readers_bytes_per_second
    return NA if rate is None else f"{megabytes(rate)} MB/s"


def progress(snapshot: Snapshot) -> str:
    """'34 %', '12 to 40 %' of the ranks' files, or '' when no position is known."""
    shares = model.shares(snapshot)
    if shares is None:
        return ""
    low, high = (round(s * 100) for s in shares)
    return f"{high} %" if low == high else f"{low} to {high} %"


def state(view: View) -> str:
    """The state of a service that does not answer as usual; '' while all is well."""
    if view.state == ENDED:
        return "the job has ended"
    if view.state == LOST:
        return "the service died; the job goes on without prefetching"
    if view.state == SILENT:
        return f"the service has not answered for {format_duration(view.silent_seconds)}"
    return ""


def pool(pool: PoolState) -> str:
    """'pool 1.2G of 4G': how full it is."""
    return f"pool {short_size(pool.resident_bytes)} of {short_size(pool.budget_bytes)}"


def alerts(view: View) -> list[str]:
    """Problems and degradations, the gravest first."""
    snapshot = view.snapshot
    found = [state(view)] if state(view) else []
    found += [f"{os.path.basename(f.path)}: {f.changed}" for f in snapshot.files if f.changed]
    found += snapshot.degradations
    others = model.not_managed(snapshot)
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        first = others[0]
        found.append(f"not managed: {first.pid} {first.command} ({first.why}){more}")
    return list(dict.fromkeys(found))


def notes(snapshot: Snapshot) -> list[str]:
    """What is recorded of the start, why columns say n/a, and what the shares are made of."""
    found = []
    if snapshot.start is not None:
        paths, size = snapshot.start["paths"], format_size(snapshot.start["bytes"])
        found.append(f"start {snapshot.start['record']}: {paths:,} paths ({size})")
    missing = [r.stall.why for r in snapshot.ranks if r.stall.share is None and r.stall.why]
    if missing and missing[0] != ADDED_BY_WATCHER:  # else: not looked at yet
        found.append(f"stall n/a: {missing[0]}")
    if snapshot.pool:
        found.append("hit: 1 - misses / 64 KiB blocks, 10 s; of the pool: of faults, not of pages")
    else:
        calls = any(file.served_by == "reads" for file in snapshot.files)
        found.append(
            "hit: 1 - misses / 64 KiB blocks, 10 s; of read calls: not read ahead in time"
            if calls
            else "hit: 1 - misses (exact: majflt) / 64 KiB blocks (sampled: page tables), 10 s"
        )
    return found


def _age(snapshot: Snapshot) -> str:
    """How old the counts of what is cached are, where they are not of now."""
    ages = [f.counted_seconds_ago for f in snapshot.files if f.counted_seconds_ago is not None]
    oldest = max(ages, default=0.0)
    return f" ({format_duration(round(oldest))} ago)" if oldest >= OLD_SECONDS else ""


def one_line(view: View) -> str:
    """The whole run in one line of text, for a pipe or a log."""
    snapshot, node = view.snapshot, view.snapshot.node
    count = len(snapshot.ranks) + snapshot.ranks_not_listed
    parts = [f"{count} rank{'' if count == 1 else 's'}"]
    if progress(snapshot):
        parts.append(f"at {progress(snapshot)}")
    parts.append(f"reading {reading(snapshot)}")
    bandwidth = node.bandwidth_bytes_per_second
    parts.append(f"storage {NA if bandwidth is None else megabytes(bandwidth) + ' MB/s'}")
    parts.append(f"hit {percent(model.hit_share(snapshot))}")
    parts.append(f"stall {percent(model.stall_share(snapshot))}")
    parts.append(f"ahead {short_size(node.ahead_bytes)} of {short_size(node.allowed_bytes)}")
    parts.append(f"under way {short_size(node.under_way_bytes)}")
    parts.append(f"wasted {short_size(model.wasted_bytes(snapshot))}")
    resident = [f.resident_bytes for f in snapshot.files if f.resident_bytes is not None]
    size = sum(f.size_bytes for f in snapshot.files if f.resident_bytes is not None)
    parts.append(f"cached {percent(sum(resident) / size) if size else NA}{_age(snapshot)}")
    if snapshot.pool:
        parts[-1] = pool(snapshot.pool)
    small = snapshot.small_files
    if small is not None and small.read:
        parts.append(f"small files read ahead {small.read}, of these opened {small.used}")
    first = alerts(view)[:1]
    line = f"{snapshot.run} {format_duration(snapshot.seconds)}: {', '.join(parts)}"
    return line + (f"; {first[0]}" if first else "")
