# SPDX-License-Identifier: Apache-2.0
"""Figures of one summary that contradict each other."""

from __future__ import annotations

from typing import Any

RATIOS = ("accuracy", "coverage", "timeliness")


def contradictions(summary: dict[str, Any]) -> list[str]:
    """What cannot be of a summary, in words; none of one that is as docs/summary-schema.md says."""
    totals, found = summary["totals"], []

    def holds(what: str, condition: bool) -> None:
        if not condition:
            found.append(what)

    def known(*names: str) -> bool:
        return all(totals[name] is not None for name in names)

    for name in RATIOS:
        ratio = totals[name]
        holds(f"0 <= {name} <= 1", ratio is None or 0 <= ratio <= 1)
        holds(f"{name} has a base", ratio is None or totals[f"{name}_denominator_bytes"] > 0)
    if known("coverage", "demand_misses"):
        whole = totals["coverage"] == 1
        waited = any(  # by calls: no fault counts that
            file["served_by"] == "reads" and file["demand_used_blocks_bytes"]
            for file in summary["files"]
        )
        nobody = not totals["demand_misses"] and not waited
        holds("all is covered where nobody missed", whole == nobody)
    if known("prefetched_bytes", "used_bytes", "wasted_bytes"):
        parts = totals["used_bytes"] + totals["wasted_bytes"]
        holds("used + wasted = prefetched", parts == totals["prefetched_bytes"])
        holds("used >= 0, wasted >= 0", min(totals["used_bytes"], totals["wasted_bytes"]) >= 0)
    for name in ("prefetched_bytes", "already_resident_bytes"):
        if known(name):
            holds(f"{name} is the files'", totals[name] == sum(f[name] for f in summary["files"]))
    for file in summary["files"]:
        blocks = [
            file[f"{name}_blocks_bytes"]
            for name in ("prefetched_used", "prefetched_unused", "demand_used")
        ]
        holds(f"blocks of {file['path']} fit in it", 0 <= sum(blocks) <= file["size_bytes"])
        prefetched = file["prefetched_bytes"]
        holds("what was prefetched has blocks", not prefetched or blocks[0] + blocks[1] > 0)
        holds("what was late was prefetched", file["late_bytes"] <= prefetched)
        holds("a file is served somehow, or refused", file["served_by"] != "refuse")
    checkpoints = totals["checkpoints"]["laid"]
    by = {file["served_by"] for file in summary["files"]}
    holds("checkpoints were laid", "checkpoints" not in by or checkpoints > 0)
    saved, cost, waited = (
        totals[f"{name}_seconds"] for name in ("saved_at_least", "cost", "waited")
    )
    holds(
        "what is told is at least 0", all(one is None or one >= 0 for one in (saved, cost, waited))
    )
    holds("saved is more than 0", (totals["gain"] == "saved") == bool(saved))
    holds("cost is more than 0", (totals["gain"] == "cost") == bool(cost))
    in_seconds = totals["gain"] in ("saved", "cost", "even")
    holds("told in seconds, or not", in_seconds == (saved is not None) == (cost is not None))
    holds("saved by what was used", not saved or totals["used_bytes"] > 0)
    holds("cost by what was not", not cost or totals["wasted_bytes"] > 0)
    misses = [rank["demand_misses"] for rank in summary["ranks"]]
    holds("misses of the ranks", totals["demand_misses"] is None or len(misses) > 0)
    pool = summary["pool"]
    if pool is not None:
        read = pool["read_bytes"]
        parts = pool["unique_bytes"] + pool["reread_bytes"]
        holds("unique + again = read", parts == read + pool["others_bytes"])
        holds(
            "demand + ahead = read",
            pool["demand_read_bytes"] + pool["prefetch_read_bytes"] == read,
        )
        holds("resident <= peak", pool["resident_bytes"] <= pool["resident_peak_bytes"])
        holds("from memory <= read", pool["from_page_cache_bytes"] <= read)
        holds("faults", pool["present_faults"] + pool["missing_faults"] <= pool["faults"])
    refused = {one["path"] for one in summary["unserved"]}
    holds("refused are unserved", refused == set(summary["refused"]))
    return found
