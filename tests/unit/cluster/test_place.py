# SPDX-License-Identifier: Apache-2.0
"""launch/cluster.py: a node that cannot meet the others is told why, and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from uffdprefetch.base.config import Config
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.launch.cluster import alone, placed, why_not

SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_JOB_NUM_NODES": "2",
}  # fmt: skip
POOL = Config.of(engine="pool", cluster=0, meet="/shared")


def test_a_node_under_a_launcher_has_its_place(tmp_path: Path) -> None:
    asked = POOL.but(meet=str(tmp_path))
    assert why_not(asked, SRUN) is None
    found = placed(asked, SRUN)
    assert found.cluster.place is not None
    assert json.loads(found.cluster.place) == {
        "meet": str(tmp_path), "run": "slurm-7-0.0", "node": 1, "nodes": 2, "launcher": None,
    }  # fmt: skip
    assert Config.from_json(found.to_json()).cluster.place == found.cluster.place
    assert found.fingerprint() == asked.fingerprint(), "all nodes have the same options"


def test_where_nobody_can_meet_is_said_before_the_job_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UffdPrefetchError, match="--meet"):
        placed(POOL.but(meet=str(tmp_path / "file")), SRUN)
    no_launcher = POOL.but(launcher="/no/such/mpirun")
    assert "--launcher" in str(why_not(no_launcher, SRUN))


@pytest.mark.parametrize(
    ("config", "environ", "why"),
    [
        (Config.of(cluster=0), SRUN, "the engine is cache"),
        (POOL, {}, "GROUP_RANK"),
        (POOL, {"GROUP_RANK": "0", "PET_NNODES": "2"}, "UFFDPREFETCH_CLUSTER_RUN"),
        (POOL, {"JOB_COMPLETION_INDEX": "0", "UFFDPREFETCH_CLUSTER_RUN": "x"}, "--cluster=N"),
        (POOL, {**SRUN, "SLURM_JOB_NUM_NODES": "1"}, "one node"),
        (Config.of(engine="pool", cluster=1), SRUN, "one node"),
        (POOL, {**SRUN, "SLURM_NODEID": "5"}, "node 5 of 2"),
    ],
)
def test_who_cannot_meet_is_told_what_to_do(
    config: Config, environ: dict[str, str], why: str
) -> None:
    found = why_not(config, environ)
    assert found is not None and why in found
    assert alone(config).cluster.nodes is None
