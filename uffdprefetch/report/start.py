# SPDX-License-Identifier: Apache-2.0
"""What `uffdprefetch profile` and `warm` show: documents, and how they read. Pure.

A profile may be a stranger's: what it says does nothing to a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from uffdprefetch.base import file_systems
from uffdprefetch.base.units import format_size
from uffdprefetch.native.profiles import EntryKind
from uffdprefetch.orders.learned_ranges import KeptOrders
from uffdprefetch.orders.start_profile import StartProfile
from uffdprefetch.report.columns import TextReport, TextTable
from uffdprefetch.report.how_it_ran import start_line
from uffdprefetch.report.text import printable

if TYPE_CHECKING:
    from uffdprefetch.orders.learned_plan import LearnedPlan
    from uffdprefetch.orders.profile_store import StoredProfile
    from uffdprefetch.orders.start_profile import StartEntry

LIST_SCHEMA, SHOW_SCHEMA, WARM_SCHEMA = (
    "uffdprefetch.profiles/1", "uffdprefetch.profile/1", "uffdprefetch.warm/1",
)  # fmt: skip


def _counts(profile: StartProfile) -> dict[str, Any]:
    kinds = Counter(entry.kind for entry in profile.entries)
    return {
        "runs": profile.runs,
        "files": kinds[EntryKind.FILE],
        "directories": kinds[EntryKind.DIRECTORY],
        "names": kinds[EntryKind.STAT],
        "wanted_bytes": profile.wanted_bytes,
    }


@dataclass(frozen=True)
class ShownOrder:
    """A learned order by its name, and the bytes that it takes; ``plan``: None where ``flaw`` says
    why it is none."""

    name: str
    bytes: int
    plan: LearnedPlan | None
    flaw: str = ""


def list_document(
    directory: str, found: Iterable[StoredProfile], orders: Mapping[str, KeptOrders], now_ns: int
) -> dict[str, Any]:
    """The profiles of a directory as JSON; what is none has a ``flaw`` instead of counts.
    ``orders``: by key; those of a key without a profile stand behind. ``now_ns``: since the
    epoch."""
    profiles = []
    for one in found:
        about = {"flaw": one.flaw} if one.profile is None else _counts(one.profile)
        profiles.append({
            "key": one.key, "path": one.path, "of": one.of, "bytes": one.bytes,
            "mtime_ns": one.mtime_ns, "used_ns": one.used_ns, **about,
        })  # fmt: skip
    there, none = {one["key"] for one in profiles}, _counts(StartProfile())
    profiles += [
        {
            "key": key, "path": None, "of": "", "bytes": 0, "mtime_ns": kept.written_ns,
            "used_ns": kept.written_ns, **none,
        }
        for key, kept in orders.items() if key not in there
    ]  # fmt: skip
    for told in profiles:
        kept = orders.get(told["key"], KeptOrders(0, 0, 0))
        told["orders"], told["orders_bytes"] = kept.orders, kept.bytes
    return {
        "schema": LIST_SCHEMA, "directory": directory, "now_ns": now_ns, "profiles": profiles
    }  # fmt: skip


def _age(seconds: float) -> str:
    """'5 min', '3 h', '12 d', in whole ones."""
    for unit, unit_seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= unit_seconds:
            return f"{int(seconds // unit_seconds)} {unit}"
    return f"{max(0, int(seconds))} s"


def list_text(document: Mapping[str, Any]) -> TextReport:
    """It for people."""
    rows, flaws = [], []
    for one in document["profiles"]:
        if "flaw" in one:
            flaws.append(printable(f"{one['path']}: {one['flaw']}"))
            continue
        paths = sum(one[name] for name in ("files", "directories", "names"))
        sizes = [format_size(one[name]) for name in ("wanted_bytes", "bytes")]
        ages = [_age((document["now_ns"] - one[name]) / 1e9) for name in ("mtime_ns", "used_ns")]
        of, orders = printable(one["of"]) or "?", f"{one['orders']:,}"
        key, runs = printable(one["key"]), str(one["runs"])
        rows.append([key, of, runs, f"{paths:,}", *sizes, orders, *ages])
    if not rows and not flaws:
        return TextReport(notes=[f"no start profile in {document['directory']}"])
    heads = ("key", "of", "runs", "paths", "to read", "size", "orders", "recorded", "used")
    least = ("size", "runs", "orders", "recorded", "paths")
    table = TextTable(rows, heads, left=2, least_wanted=least)
    return TextReport([table] if rows else [], flaws)


def show_document(
    path: str, of: str, profile: StartProfile, orders: Iterable[ShownOrder]
) -> dict[str, Any]:
    """A profile as JSON, with its entries, and the orders that were learned; ``of``: what starts
    so."""
    entries = [_entry(one) for one in profile.entries]
    return {
        "schema": SHOW_SCHEMA, "path": path, "of": of, **_counts(profile), "entries": entries,
        "orders": [_order(one) for one in orders],
    }  # fmt: skip


def _order(one: ShownOrder) -> dict[str, Any]:
    told: dict[str, Any] = {"name": one.name, "bytes": one.bytes}
    if one.plan is None:
        return {**told, "flaw": one.flaw}
    rank, world = one.plan.rank
    return {
        **told, "file": one.plan.file, "rank": rank, "ranks": world, "ranges": one.plan.spec.items,
    }  # fmt: skip


def _entry(one: StartEntry) -> dict[str, Any]:
    told: dict[str, Any] = {"kind": one.kind.name.lower(), "path": one.path, "seen": one.seen}
    if one.kind is EntryKind.FILE:
        told |= {
            "size_bytes": one.size_bytes,
            "mtime_ns": one.mtime_ns,
            "f_type": one.f_type,
            "wanted_bytes": one.wanted_bytes,
            "blocks": [list(run) for run in one.blocks],
        }
    return told


def show_text(document: Mapping[str, Any]) -> TextReport:
    """It for people."""
    rows = []
    for one in document["entries"]:
        is_file = one["kind"] == "file"
        wanted = format_size(one["wanted_bytes"]) if is_file else ""
        where = file_systems.known(one["f_type"]).name if is_file else ""
        rows.append([printable(one["path"]), one["kind"], where, wanted])
    of = printable(document["of"])
    facts = (
        f"{document['path']}: {f'of {of}, ' if of else ''}{document['runs']} runs,"
        f" {document['files']} files, {document['directories']} directories,"
        f" {document['names']} names, {format_size(document['wanted_bytes'])} to read"
    )
    tables = [TextTable(rows, ("path", "kind", "on", "to read"))] if rows else []
    orders = [one for one in document["orders"] if "flaw" not in one]
    if orders:
        rows = [
            [printable(one["file"]), f"{one['rank']} of {one['ranks'] or '?'}", str(one["ranges"]),
             format_size(one["bytes"])]
            for one in orders
        ]  # fmt: skip
        tables.append(TextTable(rows, ("read in a known order", "rank", "ranges", "takes")))
    flaws = [printable(one["flaw"]) for one in document["orders"] if "flaw" in one]
    return TextReport(tables, [facts, *flaws])


def warm_document(learn: Mapping[str, Any]) -> dict[str, Any]:
    """What came of a replay (the object ``learn`` of a summary) as JSON."""
    return {"schema": WARM_SCHEMA, **learn}


def warm_text(document: Mapping[str, Any]) -> TextReport:
    """It for people."""
    line = start_line({"learn": document}) or ""
    return TextReport(notes=[line])
