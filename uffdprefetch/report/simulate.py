# SPDX-License-Identifier: Apache-2.0
"""What `uffdprefetch simulate` shows: a document, and how it reads. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from uffdprefetch.report.columns import TextReport, TextTable
from uffdprefetch.sim.model import Readings
from uffdprefetch.sim.outcome import PFS
from uffdprefetch.sim.policies import POLICIES
from uffdprefetch.sim.scenario import Scenario
from uffdprefetch.sim.simulate import Row
from uffdprefetch.sim.workload import Workload

SCHEMA = "uffdprefetch.simulation/1"
#: Whose storage a source of samples is: colours and legends are by it.
FILE_SYSTEM, OWN, OTHERS = "file system", "own", "others"
#: Published times closer than this share count as a tie: the sizes drawn here are others.
TIE = 0.001
#: Columns left out where a terminal is too narrow, in this order.
LEAST_WANTED = ("preload", "hits", "file system", "stall")


def document(
    scenario: Scenario, name: str, workload: Workload, rows: Sequence[Row], took_seconds: float
) -> dict[str, Any]:
    """All that was simulated, as JSON."""
    entries = [_entry(row, scenario) for row in rows]
    return {
        "schema": SCHEMA,
        "scenario": name,
        "title": scenario.title,
        "source": scenario.source or None,
        "samples": workload.F,
        "dataset_mb": workload.S,
        "epochs": scenario.training.E,
        "batch": scenario.training.B,
        "drop_last": scenario.training.drop_last,
        "scheme": scenario.training.scheme,
        "order": scenario.training.order,
        "seed": scenario.training.seed,
        "rates": scenario.system.rates,
        "policies": entries,
        "out_of_order": out_of_order(entries),
        "simulated_in_seconds": took_seconds,
    }


def _entry(row: Row, scenario: Scenario) -> dict[str, Any]:
    outcome, named = row.outcome, row.policy
    entry: dict[str, Any] = {
        "name": named.name,
        "policy": next(kind for kind, made in POLICIES.items() if made is type(named.policy)),
        "nodes": row.nodes,
        "options": asdict(named.policy),
        "write": (named.readings or scenario.readings).write,
        "published_seconds": named.published,
        "seconds": outcome and outcome.seconds,
        "why": row.why or None,
        "simulated_in_seconds": row.took_seconds,
    }
    if outcome is None:
        return entry | dict.fromkeys(_FIGURES)
    names = [one.name for one in (named.classes or scenario.system.classes)[1:]]
    sources = [
        "the file system",
        *(f"own {name}" for name in names),
        *(f"other nodes' {name}" for name in names),
    ]
    kinds = [FILE_SYSTEM, *([OWN] * len(names)), *([OTHERS] * len(names))]
    return entry | {
        "error": None if named.published is None else outcome.seconds / named.published - 1,
        "compute_seconds": outcome.compute_seconds,
        "preload_seconds": outcome.preload_seconds,
        "stall_seconds": outcome.stall,
        "source_kinds": dict(zip(sources, kinds, strict=True)),
        "stall_seconds_by_source": dict(zip(sources, outcome.stall_seconds.tolist(), strict=True)),
        "consumed_mb": outcome.consumed_mb,
        "read_mb_by_source": dict(zip(sources, outcome.read_mb.tolist(), strict=True)),
        "hits": None
        if not outcome.consumed_mb or not outcome.read_mb.any()
        else max(0.0, 1 - float(outcome.read_mb[PFS]) / outcome.consumed_mb),
        "file_system_mb": outcome.pfs_mb,
        "useless_mb": outcome.useless_mb,
    }


#: Figures of a policy that applies.
_FIGURES = (
    "compute_seconds",
    "preload_seconds",
    "stall_seconds",
    "source_kinds",
    "stall_seconds_by_source",
    "consumed_mb",
    "read_mb_by_source",
    "hits",
    "file_system_mb",
    "useless_mb",
    "error",
)


def out_of_order(entries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Pairs of policies of which the published times say the first is faster, and ours not."""
    known = [e for e in entries if e["published_seconds"] and e["seconds"]]
    return [
        [a["name"], b["name"]]
        for a in known
        for b in known
        if a["published_seconds"] < b["published_seconds"] * (1 - TIE)
        and a["seconds"] > b["seconds"]
    ]


# ---- for people ---------------------------------------------------------------------------------


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _size(mb: float) -> str:
    return f"{mb / 1000:,.1f} GB" if mb >= 10_000 else f"{mb:,.0f} MB"


def _heads(document: dict[str, Any]) -> list[str]:
    published = any(row["published_seconds"] for row in document["policies"])
    return [
        "policy",
        "nodes",
        "seconds",
        *(["published", "error"] if published else []),
        "stall",
        "preload",
        "hits",
        "file system",
    ]


def _cells(row: dict[str, Any], heads: Sequence[str]) -> list[str]:
    cells = {
        "policy": row["name"],
        "nodes": f"{row['nodes']:,}",
        "seconds": _seconds(row["seconds"]),
        "published": _seconds(row["published_seconds"]),
    }
    if row["seconds"] is None:
        cells["seconds"] = "n/a"
    else:
        hits, error = row["hits"], row["error"]
        cells |= {
            "error": "-" if error is None else f"{error:+.1%}",
            "stall": _seconds(row["stall_seconds"]),
            "preload": _seconds(row["preload_seconds"]),
            "hits": "-" if hits is None else f"{hits:.1%}",
            "file system": _size(row["file_system_mb"]),
        }
    return [cells.get(head, "-") for head in heads]


def _title(document: dict[str, Any]) -> str:
    return (
        f"{document['title']}: {document['samples']:,} samples, "
        f"{_size(document['dataset_mb'])}, {document['epochs']} epochs, "
        f"batches of {document['batch']}"
    )


def _notes(document: dict[str, Any]) -> list[str]:
    rows = document["policies"]
    whose: dict[tuple[str, str], list[int]] = {}  # (name, why) -> nodes
    for row in rows:
        if row["why"]:
            whose.setdefault((row["name"], row["why"]), []).append(row["nodes"])
    sweep = len({row["nodes"] for row in rows}) > 1
    notes = [
        f"{name}, nodes {', '.join(map(str, nodes))}: {why}" if sweep else f"{name}: {why}"
        for (name, why), nodes in whose.items()
    ]
    written = {row["write"] for row in rows}
    notes += [
        f"{row['name']}: write = {row['write']!r}"
        for row in rows
        if len(written) > 1 and row["write"] != Readings().write and not sweep
    ]
    notes += [
        f"published the other way round: {first} before {second}"
        for first, second in document["out_of_order"]
    ]
    notes.append(
        "hits: part of the bytes that came from storage of the nodes; file system: what "
        "it delivered, to all nodes"
    )
    notes.append(f"simulated in {document['simulated_in_seconds']:.1f} s")
    return notes


def text(document: dict[str, Any]) -> TextReport:
    """One table; then what is to be known of it."""
    heads, rows = _heads(document), document["policies"]
    table = TextTable(
        [_cells(row, heads) for row in rows],
        heads,
        _title(document),
        dim=[i for i, row in enumerate(rows) if row["seconds"] is None],
        least_wanted=LEAST_WANTED,
    )
    return TextReport([table], _notes(document))
