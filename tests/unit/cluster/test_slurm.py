# SPDX-License-Identifier: Apache-2.0
"""cluster/slurm.py: the words and the environment of a step with one task on each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from uffdprefetch.cluster import slurm

LISTS = {
    "MPI plugin types are...\n\tpmix\n\tnone\n\tcray_shasta\n\tpmi2\n"
    "specific pmix plugin versions available: pmix_v4\n": ["pmix", "cray_shasta", "pmi2"],
    "srun: MPI types are...\nsrun: cray_shasta\nsrun: none\nsrun: pmi2\n": ["cray_shasta", "pmi2"],
    "srun: fatal: Could not establish a configuration source\n": [],
    "": [],
}


@pytest.mark.parametrize("text", LISTS)
def test_the_kinds_of_pmi_that_can_make_a_world(text: str) -> None:
    assert slurm.mpi_types(text) == LISTS[text]


def test_of_a_step_s_environment_only_the_job_s_part_is_handed_on() -> None:
    step = {
        "SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_CPU_BIND": "x", "HOME": "/h",
        "PMIX_RANK": "1", "OMPI_MCA_btl": "tcp", "SLURM_PROCID": "1",
    }  # fmt: skip
    assert set(slurm.outside_of_a_step(step)) == {
        "SLURM_JOB_ID", "SLURM_CONF", "SLURM_JOB_NUM_NODES", "HOME"
    }  # fmt: skip
    settings = {"OMPI_MCA_btl": "tcp", "HOME": "/h"}
    assert slurm.outside_of_a_rank(settings) == settings, "a user's own, where it is no rank's"


@pytest.mark.parametrize("knows", [True, False])
def test_a_step_has_one_task_on_each_node(knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def output(argv: Sequence[str], environ: Mapping[str, str]) -> str:
        return "      --overlap     Force steps to overlap" if knows else ""

    monkeypatch.setattr(slurm, "output", output)
    words = slurm.step(
        3, ["program", "-x"], {}, mpi="pmix", hosts=["a", "b", "c"], own=["--mem=1G"]
    )
    assert words[:4] == ["srun", "-N3", "-n3", "--ntasks-per-node=1"]
    assert words[-5:] == ["-w", "a,b,c", "--mem=1G", "program", "-x"]
    assert ("--overlap" in words) == knows and "--mpi=pmix" in words
    assert not any(word.startswith("--cpus-per-task") for word in words), "one core for all threads"
    assert not any(word.startswith("--mpi") for word in slurm.step(3, [], {}))


@pytest.mark.parametrize(
    ("environ", "nothing"),
    [({}, False), ({"SLURM_EXPORT_ENV": "ALL"}, False), ({"SLURM_EXPORT_ENV": "NONE"}, True)],
)
def test_a_job_that_hands_nothing_on_is_noticed(environ: dict[str, str], nothing: bool) -> None:
    assert slurm.exports_nothing(environ) == nothing
