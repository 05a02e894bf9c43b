# SPDX-License-Identifier: Apache-2.0
"""cluster/which_node.py: the node's number, and a name that all nodes of a run have in common."""

from __future__ import annotations

import pytest

from uffdprefetch.cluster.which_node import WhichNode, which_node
from uffdprefetch.launch import job_report

SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2", "SLURM_NODEID": "3", "SLURM_JOB_NUM_NODES": "4",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (SLURM, WhichNode(3, 4, "slurm-77-2.0", "Slurm")),
        ({**SLURM, "SLURM_RESTART_COUNT": "5"}, WhichNode(3, 4, "slurm-77-2.5", "Slurm")),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "2"}, WhichNode(3, 2, "slurm-77-2.0", "Slurm")),
        (
            {**SLURM, "GROUP_RANK": "1", "PET_NNODES": "8"},
            WhichNode(1, 8, "slurm-77-2.0", "torchrun"),
        ),
        ({"JOB_COMPLETION_INDEX": "6"}, WhichNode(6, None, None, "Kubernetes")),
        (
            {"PALS_APID": "a-b", "PALS_NODEID": "0", "PALS_NNODES": "2"},
            WhichNode(0, 2, "pals-a-b.0", "PALS"),
        ),
        ({"PBS_JOBID": "9.host"}, WhichNode(None, None, "pbs-9.host.0", "no launcher")),
        ({}, WhichNode(None, None, None, "no launcher")),
        ({"SLURM_NODEID": "x", "SLURM_JOB_ID": "7"}, WhichNode(None, None, None, "no launcher")),
        (
            {**SLURM, "UFFDPREFETCH_CLUSTER_RUN": "mine"},
            WhichNode(3, 4, "uffdprefetch-mine.0", "Slurm"),
        ),
    ],
)
def test_launchers_tell_which_node_this_is(environ: dict[str, str], expected: WhichNode) -> None:
    assert which_node(environ) == expected


def test_a_run_is_a_name_of_a_file() -> None:
    run = which_node({"PBS_JOBID": "../../etc/" + "x" * 300}).run
    assert run is not None and "/" not in run and len(run) < 100


@pytest.mark.parametrize(
    ("environ", "speaks"),
    [
        ({}, True),
        ({"SLURM_NODEID": "0", "SLURM_NNODES": "4"}, True),
        ({"SLURM_NODEID": "3", "SLURM_NNODES": "4"}, False),
        ({"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "SLURM_NODEID": "0"}, False),
        ({"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "1"}, True),
        ({"JOB_COMPLETION_INDEX": "2"}, True),  # of how many, nobody says: each for itself
    ],
)
def test_the_first_node_of_a_run_speaks_for_all(environ: dict[str, str], speaks: bool) -> None:
    """`srun -N4 uffdprefetch wrap` printed four times three lines."""
    assert job_report.speaks(environ) == speaks
