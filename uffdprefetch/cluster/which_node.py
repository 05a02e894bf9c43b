# SPDX-License-Identifier: Apache-2.0
"""Which node of a run this is, and of how many, from the launchers' environment variables."""

from __future__ import annotations

from uffdprefetch.base.identity import file_name_safe
from uffdprefetch.base.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

#: (launcher, this node's number, their count in one of these), innermost first.
_FAMILIES = (
    ("uffdprefetch", "UFFDPREFETCH_CLUSTER_NODE", ("UFFDPREFETCH_CLUSTER_NODES",)),
    ("torchrun", "GROUP_RANK", ("GROUP_WORLD_SIZE", "PET_NNODES")),
    ("torchrun", "PET_NODE_RANK", ("PET_NNODES",)),
    ("PALS", "PALS_NODEID", ("PALS_NNODES",)),
    ("Slurm", "SLURM_NODEID", ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")),
    ("Kubernetes", "JOB_COMPLETION_INDEX", ()),
)
#: (launcher, variables that name the run, the one that counts its starts). The first row is taken
#: of which all names are set; the count may be missing.
_RUNS = (
    ("uffdprefetch", ("UFFDPREFETCH_CLUSTER_RUN",), ""),
    ("pals", ("PALS_APID",), ""),
    ("slurm", ("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_RESTART_COUNT"),
    ("flux", ("FLUX_JOB_ID",), ""),
    ("torch", ("PET_RDZV_ID",), ""),
    ("pbs", ("PBS_JOBID",), ""),
    ("lsf", ("LSB_JOBID",), ""),
)


@record(frozen=True)
class WhichNode:
    """``number``: from 0; ``nodes``: how many there are; None: not told. ``run``: the same on all
    nodes of a run, and on none of another."""

    number: int | None
    nodes: int | None
    run: str | None
    source: str


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 7 else None


def which_node(environ: Mapping[str, str]) -> WhichNode:
    """The node and run that a process with this environment belongs to."""
    number, nodes, source = None, None, "no launcher"
    for launcher, name, counts in _FAMILIES:
        number = _number(environ, name)
        if number is not None:
            source = launcher
            found = [_number(environ, count) for count in counts]
            nodes = next((count for count in found if count), None)
            break
    for kind, names, restart in _RUNS:
        values = [environ.get(name, "") for name in names]
        if all(values):
            again = (_number(environ, restart) or 0) if restart else 0
            run = file_name_safe("-".join([kind, *values]) + f".{again}")
            return WhichNode(number, nodes, run, source)
    return WhichNode(number, nodes, None, source)
