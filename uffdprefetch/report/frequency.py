# SPDX-License-Identifier: Apache-2.0
"""How often nodes read samples: what is expected, what was drawn, as text and as a histogram."""

from __future__ import annotations

from typing import Any

import numpy as np

from uffdprefetch.report.columns import TextReport
from uffdprefetch.report.png import matplotlib_or_error
from uffdprefetch.report.simulate_png import save
from uffdprefetch.sim import frequency
from uffdprefetch.sim.workload import Workload

SCHEMA = "uffdprefetch.frequency/1"


def document(
    name: str, workload: Workload, nodes: int, delta: float, drawn: np.ndarray
) -> dict[str, Any]:
    """``drawn``: (N, F), see sim.frequency.drawn."""
    E = workload.training.E
    most = frequency.most(E, nodes, delta)
    counts = np.bincount(drawn[0])
    return {
        "schema": SCHEMA,
        "scenario": name,
        "nodes": nodes,
        "samples": workload.F,
        "epochs": E,
        "delta": delta,
        "more_than_reads": most,
        "expected_samples": frequency.expected(workload.F, E, nodes, delta),
        "drawn_samples": (drawn > most).sum(axis=1).tolist(),
        "mean_reads": float(drawn.mean()),
        "samples_by_reads_of_node_0": {
            str(reads): int(samples) for reads, samples in enumerate(counts) if samples
        },
    }


def text(document: dict[str, Any]) -> TextReport:
    """Two lines."""
    drawn = document["drawn_samples"]
    shown = ", ".join(map(str, drawn[:8])) + (", ..." if len(drawn) > 8 else "")
    return TextReport(notes=(
        f"{document['samples']:,} samples, {document['epochs']:,} epochs, {document['nodes']} "
        f"nodes: a node reads a sample {document['mean_reads']:.1f} times in the mean",
        f"more than {document['more_than_reads']} times (delta {document['delta']:g}): expected "
        f"{document['expected_samples']:,.1f} samples a node, drawn {shown}",
    ))  # fmt: skip


def draw(document: dict[str, Any], path: str) -> None:
    """The paper's figure 3.1, as PNG."""
    mpl = matplotlib_or_error("--png")
    figure = mpl.figure.Figure(figsize=(6.0, 3.4), dpi=200, layout="constrained")
    axes = figure.add_subplot()
    counts = {int(k): v for k, v in document["samples_by_reads_of_node_0"].items()}
    most = document["more_than_reads"]
    for part, colour, label in (
        ([k for k in counts if k <= most], "#4477aa", f"up to {most} times"),
        (
            [k for k in counts if k > most],
            "#cc6677",
            f"more than {most} times: "
            f"{document['drawn_samples'][0]} samples ({document['expected_samples']:.0f} expected)",
        ),
    ):
        axes.bar(part, [counts[k] for k in part], width=1.0, color=colour, label=label)
    axes.set_xlabel("times that node 0 reads a sample")
    axes.set_ylabel("samples")
    axes.set_title(
        f"{document['samples']:,} samples, {document['epochs']:,} epochs, "
        f"{document['nodes']} nodes",
        fontsize=9,
    )
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    save(figure, path)
