# SPDX-License-Identifier: Apache-2.0
"""What `uffdprefetch plan` shows: a document, and how it reads. Pure but for what reads the
data files' indices."""

from __future__ import annotations

import os
from typing import Any

from uffdprefetch.base.errors import usage_error
from uffdprefetch.base.units import format_duration, format_rate, format_size
from uffdprefetch.orders import check
from uffdprefetch.orders.path_plan import PathPlan
from uffdprefetch.orders.plan_file import ParsedPlan
from uffdprefetch.orders.plan_of_file import FilePlan
from uffdprefetch.report.columns import TextReport, TextTable

SCHEMA = "uffdprefetch.plancheck/1"


def document(
    plan: ParsedPlan,
    rank: int | None,
    epoch: int | None,
    lookahead_bytes: int,
    link: check.ReadRates | None,
) -> dict[str, Any]:
    """The plan against its data files, as JSON; of one rank, one epoch, or all that it names.

    Raises UffdPrefetchError (exit 2) where it does not fit them, or has no such rank or epoch.
    """
    files = []
    for entry in plan.files:
        wanted = _wanted(entry, rank, epoch)
        if wanted:
            for path in entry.data_files():
                files.append(_file(plan, entry, path, wanted, lookahead_bytes, link))
    paths = None if plan.paths is None else _paths(plan.paths, rank, epoch)
    if not files and paths is None:
        what = [f"rank {rank}"] * (rank is not None) + [f"epoch {epoch}"] * (epoch is not None)
        raise usage_error(f"{plan.path}: nothing is said of {' in '.join(what)}")
    return {
        "schema": SCHEMA,
        "plan": plan.path,
        "lookahead_bytes": lookahead_bytes,
        "bandwidth_bytes_per_second": link.bandwidth_bytes_per_second if link else None,
        "seconds_per_item": link.seconds_per_item if link else None,
        "files": files,
        "paths": paths,
    }


def _wanted(
    entry: FilePlan | PathPlan, rank: int | None, epoch: int | None
) -> list[tuple[int, list[str]]]:
    """(epoch, its ranks as the plan names them), of those that were asked for."""
    found = []
    for number in range(len(entry.epochs)) if epoch is None else [epoch]:
        at = min(number, len(entry.epochs) - 1) if entry.repeat else number
        names = list(entry.epochs[at]) if at < len(entry.epochs) else []
        if rank is not None and names:
            names = [str(rank)] if str(rank) in names else [name for name in names if name == "*"]
        if names:
            found.append((number, names))
    return found


def _paths(entry: PathPlan, rank: int | None, epoch: int | None) -> dict[str, Any] | None:
    rows = []
    for number, ranks in _wanted(entry, rank, epoch):
        specs = entry.epochs[min(number, len(entry.epochs) - 1)]
        for name in ranks:
            order = entry.resolve(specs[name])
            unique = entry.unique_files(order)
            row = {"epoch": number, "rank": name, "items": order.items}
            rows.append({**row, "unique_files": unique, "repeated_items": order.items - unique})
    if not rows:
        return None
    missing, looked_for = entry.missing()
    return {
        "directory": entry.directory, "files": len(entry.names), "epochs": len(entry.epochs),
        "repeat": entry.repeat, "missing_files": missing, "looked_for_files": looked_for,
        "orders": rows,
    }  # fmt: skip


def _file(
    plan: ParsedPlan,
    entry: FilePlan,
    path: str,
    wanted: list[tuple[int, list[str]]],
    lookahead_bytes: int,
    link: check.ReadRates | None,
) -> dict[str, Any]:
    file_bytes = os.stat(path).st_size
    rows = []
    for epoch, ranks in wanted:
        specs = entry.epochs[min(epoch, len(entry.epochs) - 1)]
        orders = [plan.resolve(entry, specs[rank], path) for rank in ranks]
        shared = check.shared_bytes(orders)
        for rank, order, shared_bytes in zip(ranks, orders, shared, strict=True):
            row: dict[str, Any] = {"epoch": epoch, "rank": rank}
            row |= check.counts(order)
            row["shared_bytes"] = shared_bytes
            row |= check.simulated_epoch(order, file_bytes, lookahead_bytes, link)
            rows.append(row)
    return {
        "file": path,
        "file_bytes": file_bytes,
        "unit": entry.unit,
        "epochs": len(entry.epochs),
        "repeat": entry.repeat,
        "orders": rows,
    }


# ---- for people ---------------------------------------------------------------------------------

_HEADS = (
    "epoch", "rank", "items", "bytes", "unique", "again", "shared", "requests", "mean", "read",
)  # fmt: skip
_PREDICTED = ("takes", "stall", "at best")


def _cells(row: dict[str, Any]) -> list[str]:
    mean, factor = row["mean_request_bytes"], row["amplification"]
    cells = [
        str(row["epoch"]),
        row["rank"],
        f"{row['items']:,}",
        format_size(row["bytes"]),
        format_size(row["unique_bytes"]),
        f"{row['repeated_items']:,}",
        format_size(row["shared_bytes"]),
        f"{row['requests']:,}" + ("" if row["walked_items"] == row["items"] else "*"),
        "-" if mean is None else format_size(mean),
        "-" if factor is None else f"{factor:.2f}x",
    ]
    times = row.get("prediction")
    if times is not None:
        names = ("seconds", "stall_seconds", "lower_bound_seconds")
        cells += [format_duration(times[name]) for name in names]
    return cells


def _heads(document: dict[str, Any]) -> list[str]:
    predicted = document["seconds_per_item"] is not None
    return [*_HEADS, *(_PREDICTED if predicted else ())]


def _title(file: dict[str, Any]) -> str:
    return f"{_printable(file['file'])} ({format_size(file['file_bytes'])}): {_epochs(file)}"


def _epochs(entry: dict[str, Any]) -> str:
    epochs = f"{entry['epochs']} epoch{'s' if entry['epochs'] > 1 else ''}"
    return epochs + (", the last goes on" if entry["repeat"] else "")


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def _paths_table(paths: dict[str, Any]) -> TextTable:
    rows = [
        [
            str(row["epoch"]),
            row["rank"],
            f"{row['items']:,}",
            f"{row['unique_files']:,}",
            f"{row['repeated_items']:,}",
        ]
        for row in paths["orders"]
    ]
    missing = f"{paths['missing_files']:,} of {paths['looked_for_files']:,}"
    title = (
        f"{paths['files']:,} files of {_printable(paths['directory'])}, {missing} looked for are"
        f" missing: {_epochs(paths)}"
    )
    return TextTable(rows, ["epoch", "rank", "files", "unique", "again"], title, left=0)


def _notes(document: dict[str, Any]) -> list[str]:
    ahead = format_size(document["lookahead_bytes"])
    notes = [f"requests, mean and read (of a byte of the order): with {ahead} asked for ahead"]
    rows = [row for file in document["files"] for row in file["orders"]]
    partly = [row for row in rows if row["walked_items"] < row["items"]]
    if partly:
        notes.append("* of the beginning only (walked_items, walked_bytes in --json)")
    if document["seconds_per_item"] is not None:
        rate = format_rate(document["bandwidth_bytes_per_second"])
        each = format_duration(document["seconds_per_item"])
        notes.append(f"takes, stall, at best: a rank by itself at {rate} and {each} an item")
    return notes


def text(document: dict[str, Any]) -> TextReport:
    """A table a file; then what the columns mean."""
    heads = _heads(document)
    tables = [
        TextTable([_cells(row) for row in file["orders"]], heads, _title(file), left=0)
        for file in document["files"]
    ]
    if document["paths"] is not None:
        tables.append(_paths_table(document["paths"]))
    return TextReport(tables, _notes(document) if document["files"] else [])
