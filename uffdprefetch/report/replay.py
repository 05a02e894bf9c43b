# SPDX-License-Identifier: Apache-2.0
"""What `uffdprefetch simulate --replay` shows: a document, and how it reads. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from uffdprefetch.base.units import format_rate, format_size
from uffdprefetch.report.columns import TextReport, TextTable
from uffdprefetch.report.simulate import FILE_SYSTEM
from uffdprefetch.sim.replay.choices import (
    AGREES,
    Predicted,
    RecordingCheck,
    RunConfiguration,
    command_line,
)
from uffdprefetch.sim.replay.demand import Demand
from uffdprefetch.sim.replay.link import StorageModel

SCHEMA = "uffdprefetch.replay/1"
#: Ratio to the shortest predicted time up to which predictions are a tie: the simplest is advised.
ALIKE = 1.05


def document(
    path: str,
    demand: Demand,
    storage: StorageModel,
    predicted: Sequence[Predicted],
    checked: RecordingCheck,
) -> dict[str, Any]:
    """The choices, the quickest first; none is best where the replay does not show this job."""
    rows = []
    useful = predicted if checked.holds else ()
    for each in sorted(predicted, key=lambda one: one.outcome.seconds):
        found = each.outcome
        rows.append(
            {
                "name": each.choice.name,
                "command": command_line(each.choice, demand.command),
                "needs_order": each.choice.needs_order,
                "memory_bytes": each.choice.memory_bytes,
                "seconds": found.seconds,
                "stall_seconds": found.stall_seconds,
                "hits": found.hits,
                "demand_misses": found.misses,
                "touched_bytes": found.touched_bytes,
                "read_bytes": found.read_bytes,
                "requests": found.requests,
            }
        )
    return {
        "schema": SCHEMA,
        "trace": path,
        "command": demand.command,
        "recorded_seconds": demand.seconds,
        "recorded_stall_seconds": demand.stall_seconds,
        "recorded_misses": demand.misses,
        "recorded_miss_seconds": demand.miss_seconds,
        "replayed_miss_seconds": storage.latency + demand.miss_bytes / storage.bandwidth,
        "recorded_under_wrap": demand.wrapped,
        "read_call_share": demand.read_call_share,
        "replayed_seconds": checked.outcome.seconds,
        "replayed_stall_seconds": checked.outcome.stall_seconds,
        "replayed_misses": checked.outcome.misses,
        "agrees": checked.agrees,
        "is_mapped": checked.is_mapped,
        "files": [{"path": f.path, "size_bytes": f.size_bytes} for f in demand.files],
        "threads": len(demand.streams),
        "accesses": sum(map(len, demand.streams)),
        "wanted_bytes": demand.wanted_bytes,
        "bandwidth_bytes_per_second": storage.bandwidth,
        "latency_seconds": storage.latency,
        "choices": rows,
        "best": best(useful, demand, needs_order=True),
        "best_without_order": best(useful, demand, needs_order=False),
    }


def best(predicted: Sequence[Predicted], demand: Demand, needs_order: bool) -> str | None:
    """The command line to take; None when there is none without ``needs_order``."""
    allowed = [one for one in predicted if needs_order or not one.choice.needs_order]
    quickest = min((one.outcome.seconds for one in allowed), default=0.0)
    alike = [one.choice for one in allowed if one.outcome.seconds <= ALIKE * quickest]
    return command_line(min(alike, key=effort), demand.command) if alike else None


def effort(choice: RunConfiguration) -> tuple[bool, int]:
    """The user's effort for a configuration: an order to write down, then the number of options."""
    return choice.needs_order, -1 if choice.options is None else len(choice.options)


def picture(document: dict[str, Any]) -> dict[str, Any]:
    """The choices as simulate_png draws them: computing, and waiting for storage."""
    rows = [
        {
            "name": row["name"],
            "nodes": 1,
            "seconds": row["seconds"],
            "preload_seconds": 0.0,
            "compute_seconds": row["seconds"] - row["stall_seconds"],
            "source_kinds": {"storage": FILE_SYSTEM},
            "stall_seconds_by_source": {"storage": row["stall_seconds"]},
            "published_seconds": None,
        }
        for row in document["choices"]
    ]
    return {"title": _title(document), "policies": rows}


#: One share is told of a row, of what its accesses wanted; what is not replayed is in none.
_HITS = "hits: of the bytes that are touched, those that are in memory by then"
_HEADS = ("run as", "seconds", "stall", "hits", "misses", "read", "requests")


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        f"{row['seconds']:.2f}",
        f"{row['stall_seconds']:.2f}",
        f"{row['hits']:.1%}",
        f"{row['demand_misses']:,}",
        format_size(row["read_bytes"]),
        f"{row['requests']:,}",
    ]


def _title(document: dict[str, Any]) -> str:
    latency = document["latency_seconds"] * 1000
    threads = "1 thread" if document["threads"] == 1 else f"{document['threads']} threads"
    return (
        f"{document['accesses']:,} accesses of {threads} to "
        f"{format_size(document['wanted_bytes'])}, recorded in "
        f"{document['recorded_seconds']:.2f} s (stall {document['recorded_stall_seconds']:.2f}"
        f" s); storage of {format_rate(document['bandwidth_bytes_per_second'])}, "
        f"{latency:.2f} ms"
    )


def _doubts(document: dict[str, Any]) -> list[str]:
    """Why nothing is recommended."""
    doubts = []
    if not document["agrees"]:
        doubts.append(
            f"the recorded run took {document['recorded_seconds']:.2f} s"
            f" ({document['recorded_misses']:,} misses), its replay as it was takes"
            f" {document['replayed_seconds']:.2f} s ({document['replayed_misses']:,} misses): they"
            f" differ by more than {AGREES:.0%}, so nothing is recommended"
        )
        if document["recorded_under_wrap"]:
            doubts.append(
                "it was recorded under wrap: `uffdprefetch trace -- CMD` records it plain"
            )
        elif document["recorded_misses"] < document["replayed_misses"] / 2:
            doubts.append("where its data was in memory already, record a run that finds it cold")
        else:
            doubts.append(
                f"a miss took {document['recorded_miss_seconds'] * 1000:.2f} ms, of this storage"
                f" {document['replayed_miss_seconds'] * 1000:.2f} ms: give the storage that it was"
                " recorded on (`uffdprefetch calibrate`)"
            )
    if not document["is_mapped"]:
        doubts.append(
            f"of the pages that it reads {document['read_call_share']:.0%} come by read(2), which"
            " is not replayed: nothing is recommended"
        )
    return doubts


def _notes(document: dict[str, Any]) -> list[str]:
    doubts = _doubts(document)
    if doubts:
        return doubts
    best, rest = document["best"], document["best_without_order"]
    notes = [f"best: {best}"]
    if best != rest:
        notes.append(
            "PLAN says the order (docs/plans.md); of a PyTorch DataLoader wrap knows it without"
        )
        notes += [f"best without an order: {rest}"] if rest else []
    if best != document["choices"][0]["command"]:
        notes.append(f"(of what is within {ALIKE - 1:.0%} of the quickest, what takes least)")
    return notes


def text(document: dict[str, Any]) -> TextReport:
    """One table; then the best choice's command line."""
    table = TextTable(list(map(_cells, document["choices"])), _HEADS, _title(document))
    return TextReport([table], [_HITS, *_notes(document)], to_copy=True)
