# SPDX-License-Identifier: Apache-2.0
"""What the benches of several nodes have in common: how a node's program is started, and marks by
which programs and bench wait for each other."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/support")]

from conftest import clean_environment  # noqa: E402

MIB = 1 << 20
#: A run that goes on longer hangs: eight nodes that read 512 MiB each at 20 MB/s take 215 s an
#: epoch.
PATIENCE_SECONDS = 600.0


def environment(directory: Path, node: int, path: str = str(ROOT)) -> dict[str, str]:
    """A node's, of the run that has this directory; ``path``: where its Python finds modules."""
    return {
        **clean_environment(), "PYTHONPATH": path, "GROUP_RANK": str(node),
        "UFFDPREFETCH_RUNDIR": str(directory / f"run{node}"),
        "UFFDPREFETCH_CLUSTER_RUN": directory.name,
    }  # fmt: skip


def wrapped(directory: Path, node: int, budget_bytes: int, *more: str) -> list[str]:
    """The words before a node's program; its summary is out<node>.summary.json there."""
    return [
        *(sys.executable, "-m", "uffdprefetch", "wrap", "-q", "--engine", "pool"),
        *("--budget", f"{budget_bytes >> 20}MiB", "--min-size", "1MiB"),
        *("-o", str(directory / f"out{node}"), *more, "--"),
    ]


def sharing(directory: Path, nodes: int, far: Path) -> list[str]:
    """More of them, for nodes that share what lies beside this file."""
    return [f"--cluster={nodes}", "--meet", str(directory), "--share", f"{far.parent}/*"]


def until(condition: Callable[[], object]) -> None:
    """Raises SystemExit."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("a run that hangs")
        time.sleep(0.005)


def meet(marks: Path, what: str, nodes: int) -> None:
    """Until all nodes' programs have come there. Raises SystemExit."""
    until(lambda: all((marks / f"{what}-{node}").exists() for node in range(nodes)))
