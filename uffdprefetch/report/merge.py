# SPDX-License-Identifier: Apache-2.0
"""The summaries of a run's nodes as one (docs/summary-schema.md). Pure."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

#: Figures summed over the nodes; null where one node's is.
_SUMS = (
    "demand_misses", "prefetched_bytes", "used_bytes", "wasted_bytes",
    "already_resident_bytes", "accuracy_denominator_bytes", "coverage_denominator_bytes",
    "timeliness_denominator_bytes", "waited_seconds", "storage_read_bytes",
    "unserved_read_bytes", "job_storage_bytes",
)  # fmt: skip
#: Ratios, each with its denominator.
_SHARES = {
    "accuracy": "accuracy_denominator_bytes", "coverage": "coverage_denominator_bytes",
    "timeliness": "timeliness_denominator_bytes",
}  # fmt: skip
_POOL_SUMS = (
    "budget_bytes", "resident_peak_bytes", "read_bytes", "reread_bytes", "others_bytes",
    "evicted_bytes", "faults", "missing_faults",
)  # fmt: skip
_FILE_SUMS = (
    "prefetched_bytes", "already_resident_bytes", "late_bytes",
    "prefetched_used_blocks_bytes", "prefetched_unused_blocks_bytes", "demand_used_blocks_bytes",
    "pool_read_bytes", "pool_unique_bytes", "pool_resident_bytes", "pool_others_bytes",
    "pool_given_bytes", "pool_disk_bytes", "pool_disk_read_bytes",
)  # fmt: skip
#: The merged gain: the first of these that a node reports.
_GAINS = ("cost", "saved", "even", "unknown", "just-read", "in-memory", "nothing-read")


def merged(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One document for the run, in which ``nodes`` are those that were given. At least one."""
    ordered = sorted(summaries, key=_number)
    first = ordered[0]
    if len(ordered) == 1:
        return dict(first)
    document = {
        **first,
        "wall_seconds": max(one["wall_seconds"] for one in ordered),
        "ranks": sorted(
            (rank for one in ordered for rank in one["ranks"]), key=lambda rank: rank["rank"]
        ),
        "files": _files(ordered),
        "totals": _totals([one["totals"] for one in ordered]),
        "pool": _pool(ordered),
        "cluster": _cluster(ordered),
        "reads": _reads([one["reads"] for one in ordered if one.get("reads")]),
        "service": _service([one.get("service") or {} for one in ordered]),
        "degradations": _degradations(ordered),
        "notes": _notes(ordered),
        "oom": _oom([one["oom"] for one in ordered if one.get("oom")]),
        "nodes": ordered,
    }
    for name in ("streams", "plans", "unserved"):
        document[name] = [entry for one in ordered for entry in one.get(name) or []]
    for name in ("refused", "coarse"):
        document[name] = {k: v for one in ordered for k, v in (one.get(name) or {}).items()}
    return document


def _number(summary: Mapping[str, Any]) -> int:
    return int((summary.get("cluster") or {}).get("node") or 0)


def _sum(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _totals(all_: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    totals = {**all_[0], **{name: _sum([one.get(name) for one in all_]) for name in _SUMS}}
    for name, of in _SHARES.items():
        parts = [(one.get(name), one[of]) for one in all_ if one.get(of)]
        weighted = _sum([None if share is None else share * part for share, part in parts])
        totals[name] = weighted / sum(part for _, part in parts) if parts and weighted else weighted
    gains = [one.get("gain") for one in all_]
    totals["gain"] = next((gain for gain in _GAINS if gain in gains), gains[0])
    # nodes wait side by side, and for each other
    for name, gain in (("saved_at_least_seconds", "saved"), ("cost_seconds", "cost")):
        known = [one[name] for one in all_ if one.get(name) is not None]
        told = len(known) == len(all_)
        totals[name] = (max(known) if totals["gain"] == gain else 0.0) if told else None
    return totals


def _oom(all_: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Kills for want of memory on any node; None of older summaries."""
    if not all_:
        return None
    counts = {name: _sum([one[name] for one in all_]) for name in ("kills", "group_kills")}
    whom = {name: _any([one[name] for one in all_]) for name in ("job", "service")}
    why_not = next((one["why_not"] for one in all_ if one["why_not"]), None)
    return {**all_[0], **counts, **whom, "why_not": why_not}


def _service(all_: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first node's, but for how long any stood still."""
    longest = max(one.get("stood_still_seconds") or 0.0 for one in all_)
    return {**all_[0], "stood_still_seconds": longest}


def _any(values: Sequence[bool | None]) -> bool | None:
    return True if True in values else None if None in values else False


def _reads(all_: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What was read by calls, where somebody followed it; of summaries before ``small_files`` the
    rest."""
    if not all_:
        return None
    small = [one["small_files"] for one in all_ if one.get("small_files")]
    left = {one["path"]: one for each in all_ for one in each.get("left_alone") or []}
    uncounted = sorted({name for one in small for name in one.get("uncounted") or []})
    return {
        **_added(all_),
        "small_files": {**_added(small), "uncounted": uncounted} if small else None,
        "left_alone": list(left.values()),
    }


def _added(all_: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of what are numbers."""
    names = [name for name, value in all_[0].items() if isinstance(value, int)]
    return {name: sum(one.get(name) or 0 for one in all_) for name in names}


def _files(summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_path: dict[str, list[Mapping[str, Any]]] = {}
    for one in summaries:
        for file in one.get("files") or []:
            by_path.setdefault(file["path"], []).append(file)
    return [
        {**files[0], **{name: _sum([f.get(name) for f in files]) for name in _FILE_SUMS}}
        for files in by_path.values()
    ]


def _pool(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    pools = [one["pool"] for one in summaries if one.get("pool")]
    if not pools:
        return None
    longest = max(pools, key=lambda pool: pool["demand_wait_ns"].get("max") or 0)
    wait = {**longest["demand_wait_ns"], "count": sum(p["demand_wait_ns"]["count"] for p in pools)}
    sums = {name: _sum([pool.get(name) for pool in pools]) for name in _POOL_SUMS}
    return {**pools[0], **sums, "demand_wait_ns": wait, "spill": _spill(summaries)}


def _spill(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The nodes' disk tiers as one: ``directory`` names all, ``ended`` says which have."""
    pools = [(one["host"], one["pool"]) for one in summaries if one.get("pool")]
    tiers = [(host, pool["spill"]) for host, pool in pools if pool.get("spill")]
    if not tiers:
        return None
    parts = [part for _, part in tiers]
    errors: dict[str, int] = {}
    for part in parts:
        for name, times in part["errors"].items():
            errors[name] = errors.get(name, 0) + times
    rates = {
        f"{what}_bytes_per_second": _mean_rate(
            [(part[f"{bytes_}_bytes"], part[f"{what}_bytes_per_second"]) for part in parts]
        )
        for what, bytes_ in (("read", "read"), ("write", "written"))
    }
    ended = [f"{host}: {part['ended']}" for host, part in tiers if part["ended"]]
    return {
        **_added(parts), "directory": ", ".join(sorted({part["directory"] for part in parts})),
        "errors": errors, **rates, "ended": "; ".join(ended) or None,
    }  # fmt: skip


def _mean_rate(parts: Sequence[tuple[int, float | None]]) -> float | None:
    """Of (bytes, their rate): all bytes over all of the time; None where none has one."""
    known = [(size, rate) for size, rate in parts if rate]
    seconds = sum(size / rate for size, rate in known)
    return sum(size for size, _ in known) / seconds if seconds else None


#: Of a node's part of the cluster: the same for all, or said of it alone.
_NO_SUMS = (
    "node", "nodes", "present", "mpi", "generations", "network_bytes_per_second",
    "file_system_bytes_per_second",
)  # fmt: skip


def _cluster(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    parts = [one["cluster"] for one in summaries if one.get("cluster")]
    if not parts:
        return None
    names = [name for name, value in parts[0].items() if isinstance(value, int | float)]
    sums = {
        name: _sum([part.get(name) for part in parts]) for name in names if name not in _NO_SUMS
    }
    links = [{"at": part["node"], **link} for part in parts for link in part.get("links") or []]
    not_shared = {one["path"]: one for part in parts for one in part.get("not_shared") or []}
    return {
        **parts[0],
        **sums,
        "node": None,
        "present": sorted({node for part in parts for node in part.get("present") or []}),
        "generations": max(part.get("generations") or 0 for part in parts),
        "links": links,
        "keepers": _keepers(parts),
        "why_not": next((part["why_not"] for part in parts if part.get("why_not")), None),
        "not_shared": list(not_shared.values()),
    }


def _keepers(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """By path, who keeps each part of the file, as far as one node knows."""
    found: dict[str, list[Any]] = {}
    for part in parts:
        for path, cells in (part.get("keepers") or {}).items():
            before = found.get(path, cells)
            found[path] = [b if a is None else a for a, b in zip(before, cells, strict=True)]
    return found


def _degradations(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each degradation once; with the node's name where only one has it."""
    said: dict[str, list[str]] = {}
    for one in summaries:
        for text in one.get("degradations") or []:
            said.setdefault(text, []).append(one["host"])
    return [text if len(hosts) > 1 else f"{hosts[0]}: {text}" for text, hosts in said.items()]


def _notes(summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same of those that could be mended."""
    said: dict[tuple[str, str, bool], list[str]] = {}
    for one in summaries:
        for note in one.get("notes") or []:
            key = note["path"], note["text"], note.get("asked", False)
            said.setdefault(key, []).append(one["host"])
    return [
        {"path": path, "text": text if len(hosts) > 1 else f"on {hosts[0]}: {text}", "asked": asked}
        for (path, text, asked), hosts in said.items()
    ]
