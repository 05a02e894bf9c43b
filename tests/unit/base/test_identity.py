# SPDX-License-Identifier: Apache-2.0
"""Rank and job key from the variables that real launchers set."""

from __future__ import annotations

import re

import pytest
from paths import ROOT

from uffdprefetch.base.identity import _FAMILIES, Identity, file_name_safe, identify, job_key

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_NAMESPACE": "2718171137", "PMIX_RANK": "3", "OMPI_MCA_ess_base_jobid": "2718171137",
}  # fmt: skip
BATCH = {
    "SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8",
}  # fmt: skip
SRUN = {**BATCH, "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
TORCHRUN = {
    "RANK": "6", "LOCAL_RANK": "2", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}
PBS = {"PBS_JOBID": "123.server"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Identity(None, None, None, "no launcher")),
        (MPIRUN, Identity(3, 1, 4, "Open MPI")),
        (SRUN, Identity(5, 1, 8, "Slurm")),
        (TORCHRUN, Identity(6, 2, 8, "torchrun")),
        (HYDRA, Identity(1, 1, 2, "PMI")),
        # The batch script's own SLURM_PROCID=0 must not beat what mpirun says inside it.
        ({**BATCH, **MPIRUN}, Identity(3, 1, 4, "Open MPI")),
        ({**SRUN, **TORCHRUN}, Identity(6, 2, 8, "torchrun")),
        # srun --mpi=pmix: PMIx has no local rank, Slurm counts the same ranks.
        ({**SRUN, "PMIX_RANK": "5"}, Identity(5, 1, 8, "PMIx")),
        # ... but a Slurm rank that differs is about another process.
        ({**BATCH, "PMIX_RANK": "5"}, Identity(5, None, None, "PMIx")),
        ({"RANK": "", "SLURM_PROCID": "4"}, Identity(4, None, None, "Slurm")),
        ({"RANK": "-1"}, Identity(None, None, None, "no launcher")),
        ({"RANK": "zero", "PMI_RANK": "99999999999"}, Identity(None, None, None, "no launcher")),
        ({"JSM_NAMESPACE_RANK": "2"}, Identity(2, None, None, "jsrun")),
        ({"FLUX_TASK_RANK": "2", "FLUX_TASK_LOCAL_ID": "1"}, Identity(2, 1, None, "Flux")),
    ],
)  # fmt: skip
def test_identify(environ: dict[str, str], expected: Identity) -> None:
    assert identify(environ) == expected


def test_the_preload_object_asks_the_same_launchers_in_the_same_order() -> None:
    source = (ROOT / "csrc" / "job" / "preload.c").read_text()
    table = re.search(r"family\[\] = \{(.*?)\n\t\};", source, re.DOTALL)
    assert table is not None
    names = [tuple(re.findall(r'"(\w+)"', line)) for line in table[1].strip().splitlines()]
    assert names == [tuple(family[1:]) for family in _FAMILIES]


def key(environ: dict[str, str], pid: int = 10, ppid: int = 9, unique: str = "t") -> str:
    return job_key(environ, pid, ppid, unique).key


@pytest.mark.parametrize("environ", [MPIRUN, SRUN, TORCHRUN, HYDRA, {**BATCH, **MPIRUN}])
def test_the_ranks_of_a_job_share_a_key(environ: dict[str, str]) -> None:
    """Two ranks of a node: other pid, other time, other rank variables, the same launcher."""
    ranks = ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID", "PMI_RANK")
    other = {name: ("0" if name in ranks else value) for name, value in environ.items()}
    assert job_key(environ, 10, 9, "a").shared
    assert key(environ, pid=10, unique="a") == key(other, pid=11, unique="b")


@pytest.mark.parametrize(
    ("one", "two"),
    [
        # two mpiruns side by side in one batch script
        ({**BATCH, **MPIRUN}, {**BATCH, **MPIRUN, "PMIX_NAMESPACE": "2718171138"}),
        (SRUN, {**SRUN, "SLURM_STEP_ID": "3"}),
        # two torchruns of one node, both with run id "none"
        (TORCHRUN, {**TORCHRUN, "MASTER_PORT": "29501"}),
        ({**PBS, **HYDRA}, {**PBS, **MPIRUN}),
        ({"UFFDPREFETCH_RUN": "a"}, {"UFFDPREFETCH_RUN": "b"}),
        (BATCH, SRUN),
    ],
)
def test_two_jobs_have_two_keys(one: dict[str, str], two: dict[str, str]) -> None:
    assert key(one) != key(two)


@pytest.mark.parametrize("environ", [{}, BATCH, PBS, {"LSB_JOBID": "1"}])
def test_without_a_launcher_each_wrap_is_alone(environ: dict[str, str]) -> None:
    """Two wraps in the background of one batch script are two jobs."""
    assert key(environ, pid=10, unique="a") != key(environ, pid=11, unique="a")
    assert key(environ, pid=10, unique="a") != key(environ, pid=10, unique="b")
    assert not job_key(environ, 10, 9, "a").shared


def test_hydra_names_no_job_so_its_proxy_does() -> None:
    assert key(HYDRA, ppid=5) == key({**HYDRA, "PMI_RANK": "0"}, pid=11, ppid=5)
    assert key(HYDRA, ppid=5) != key(HYDRA, ppid=6)


def test_the_explicit_key_wins_over_every_launcher() -> None:
    everything = {**SRUN, **MPIRUN, **TORCHRUN, **PBS, "UFFDPREFETCH_RUN": "mine"}
    assert key(everything) == "mine"
    assert job_key(everything, 1, 1, "").source == "UFFDPREFETCH_RUN"


def test_ranks_made_by_hand_meet_at_their_rendezvous() -> None:
    loop = {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}
    assert key(loop, pid=1) == key({**loop, "RANK": "1"}, pid=2)
    assert not job_key({"MASTER_ADDR": "x", "MASTER_PORT": "1"}, 1, 1, "").shared


@pytest.mark.parametrize(
    "text", ["../../etc/passwd", "/abs", "a b\nc", ".", "..", "", "x" * 300, "слово", "a\udcffb"]
)
def test_a_key_is_safe_in_a_file_name(text: str) -> None:
    safe = file_name_safe(text)
    assert safe and len(safe) <= 64 and safe.isascii()
    assert "/" not in safe and "\0" not in safe and not safe.startswith(".")
    assert safe != file_name_safe(text + "?")


def test_a_plain_key_is_kept_as_it_is() -> None:
    assert file_name_safe("run-7_b.2") == "run-7_b.2"
