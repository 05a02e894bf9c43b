# SPDX-License-Identifier: Apache-2.0
"""Renders the demonstration's result: a table, a sentence, remarks. Pure."""

from __future__ import annotations

from rich import box
from rich.table import Table

from uffdprefetch.base.units import format_size
from uffdprefetch.demo.bed import proactive_reclaim
from uffdprefetch.demo.run import COMPUTE_SHARE, DemoResult


def render_table(result: DemoResult) -> Table:
    """The table of a result."""
    epochs = max((len(row.epoch_seconds) for row in result.configurations), default=0)
    table = Table(
        title=f"One job, {format_size(result.size_bytes)} of LMDB, {epochs} epoch"
        + "s" * (epochs != 1),
        caption=(
            f"Storage: {result.storage}. Compute {COMPUTE_SHARE:g} x transfer time. "
            "Ratio to warm, and times as fast as baseline: epoch 1. Stall and major faults: all "
            "epochs; a wait for kernel readahead that is under way is stall but no major fault. "
            "sha256: of all that was read, checked. Cold or warm was counted before each run."
        ),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("configuration", no_wrap=True)
    for epoch in range(epochs):
        table.add_column(f"epoch {epoch + 1} s", justify="right")
    for title in ("stall s", "ratio to warm", "times as fast", "major faults"):
        table.add_column(title, justify="right")
    table.add_column("sha256", no_wrap=True)
    warm, baseline = result.row("warm cache"), result.row("baseline")
    for row in result.configurations:
        first = row.epoch_seconds[0]
        table.add_row(
            row.name,
            *(f"{seconds:.2f}" for seconds in row.epoch_seconds),
            f"{row.stall_seconds:.2f}",
            "n/a" if warm is None else f"{first / warm.epoch_seconds[0]:.2f}",
            "n/a" if baseline is None else f"{baseline.epoch_seconds[0] / first:.2f}",
            str(row.major_faults),
            f"{row.sha256[:12]} {'✓' if row.digest_right else '✗'}",
        )
    return table


def verdict(result: DemoResult) -> str:
    """The result in one sentence."""
    if not result.digests_right:
        wrong = [row.name for row in result.configurations if not row.digest_right]
        return f"WRONG BYTES in {', '.join(wrong)}: the digest is not the data set's."
    on, baseline, warm = (result.row(name) for name in ("prefetch-on", "baseline", "warm cache"))
    if on is None or baseline is None or warm is None:
        return "All digests are the data set's; run all configurations to compare them."
    before, after = baseline.epoch_seconds[0], on.epoch_seconds[0]
    if after >= before:
        return (
            f"Prefetching gained nothing on this storage: the first epoch took {after:.2f} s "
            f"instead of {before:.2f} s ({warm.epoch_seconds[0]:.2f} s with a warm cache); every "
            "run read exactly the data set's bytes."
        )
    return (
        f"Prefetching took the first epoch from {before:.1f} s to {after:.1f} s "
        f"({before / after:.2f} times as fast, {after / warm.epoch_seconds[0]:.2f} x the time "
        "with a warm cache), and every run read exactly the data set's bytes."
    )


def remarks(result: DemoResult) -> list[str]:
    """Caveats on the times; usually none."""
    found = []
    for row in result.configurations:
        late, total = row.digest_beyond_compute_seconds, sum(row.epoch_seconds)
        if late > 0.01 * total:
            found.append(
                f"{row.name}: hashing took {late:.2f} s more than the compute time hides; "
                "they are in its epochs"
            )
        counters = row.storage_counters
        if row.name == "warm cache" and counters is not None and counters["bytes"] > 0:
            why = proactive_reclaim() or "no cause is known"
            found.append(
                f"{row.name}: {format_size(counters['bytes'])} had left the cache again before "
                f"they were read ({why})"
            )
        steal = row.run["steal_seconds"]
        if steal > 0.02 * row.run["wall_seconds"]:
            found.append(f"{row.name}: the hypervisor took {steal:.2f} s of CPU time meanwhile")
    return found
