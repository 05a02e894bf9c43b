# SPDX-License-Identifier: Apache-2.0
"""Who this process is in its parallel job, read from what launchers put into the environment.

Two questions are answered, both by pure functions of the environment: which rank is this process
(`identify`), and which processes of the node belong to one job and share one service (`job_key`).
Launchers nest (a batch system starts mpirun, mpirun starts torchrun), each leaves its variables
behind, and the innermost is the one that made the processes: it is asked first.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

#: A key longer than this is cut and told apart by a hash: it becomes part of file names.
MAX_KEY_CHARS = 64


@dataclass(frozen=True)
class Identity:
    """Rank in the job, rank on the node, number of ranks; None where no launcher tells."""

    rank: int | None
    local_rank: int | None
    world: int | None
    source: str


@dataclass(frozen=True)
class JobKey:
    """``key`` is safe in a file name; ``source`` says in words where it is from."""

    key: str
    source: str
    shared: bool  # False: unique to this wrap, no other process can have it


#: (launcher, rank, local rank, world size), innermost launcher first.
_FAMILIES = (
    ("torchrun", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PALS", "PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_SIZE"),
    ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE"),
    ("Flux", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE"),
    ("PMIx", "PMIX_RANK", "PMIX_LOCAL_RANK", "PMIX_SIZE"),
    # MPICH's and Intel's hydra: the local rank has a name of its own.
    ("PMI", "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    # Last: a batch script has SLURM_PROCID=0 too, and so has everything that it starts.
    ("Slurm", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """A non-negative number, or None: a variable that is empty or no number tells nothing."""
    text = environ.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def identify(environ: Mapping[str, str]) -> Identity:
    """The rank of a process with this environment.

    The first launcher that gives a rank decides. What it leaves out (PMIx has no local rank) is
    taken from another launcher only if that one counts the same rank: Slurm's PMIx plugin, for
    one; the numbers of an outer launcher are about other processes.
    """
    found: Identity | None = None
    for launcher, rank_name, local_name, world_name in _FAMILIES:
        rank = _number(environ, rank_name)
        if rank is None:
            continue
        local_rank, world = _number(environ, local_name), _number(environ, world_name)
        if found is None:
            found = Identity(rank, local_rank, world, launcher)
        elif rank == found.rank and (found.world is None or found.world == world):
            found = Identity(
                found.rank,
                local_rank if found.local_rank is None else found.local_rank,
                world if found.world is None else found.world,
                found.source,
            )
    return found or Identity(None, None, None, "no launcher")


def file_name_safe(text: str) -> str:
    """``text`` with only letters, digits, '.', '_', '-', at most MAX_KEY_CHARS, still distinct."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip(".")
    if text and safe == text and len(text) <= MAX_KEY_CHARS:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return f"{safe[: MAX_KEY_CHARS - 13]}-{digest}"


def job_key(environ: Mapping[str, str], pid: int, ppid: int, unique: str) -> JobKey:
    """The key under which this node's processes of one job find each other.

    ``pid`` and ``ppid`` are the wrap's own and its parent's; ``unique`` is text that no other wrap
    of this node has (a start time), since pids come again.
    """

    def have(*names: str) -> str | None:
        """The values joined, or None unless every one is there."""
        values = [environ.get(name, "") for name in names]
        return "-".join(values) if all(values) else None

    def shared(kind: str, value: str, source: str) -> JobKey:
        return JobKey(file_name_safe(f"{kind}-{value}"), source, True)

    run = have("UFFDPREFETCH_RUN")  # explicit, or set by the wrap that we are nested in
    if run:
        return JobKey(file_name_safe(run), "UFFDPREFETCH_RUN", True)
    # The run id alone is "none" for every torchrun without a rendezvous: the port tells them apart.
    elastic = have("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    if elastic:
        return shared("torch", elastic, "TORCHELASTIC_RUN_ID, MASTER_ADDR, MASTER_PORT")
    # mpirun inside a Slurm or PBS allocation: its own id comes before the allocation's, else two
    # mpiruns of one batch script would be taken for one job.
    for kind, name in (
        ("pmix", "PMIX_NAMESPACE"),
        ("ompi", "OMPI_MCA_ess_base_jobid"),
        ("ompi", "OMPI_MCA_orte_ess_jobid"),
        ("pals", "PALS_APID"),
    ):
        value = have(name)
        if value:
            return shared(kind, value, name)
    hydra = _number(environ, "PMI_RANK") is not None
    flux = have("FLUX_JOB_ID", "FLUX_TASK_RANK")
    if flux:
        return shared("flux", environ["FLUX_JOB_ID"], "FLUX_JOB_ID")
    if hydra and not have("SLURM_STEP_ID"):
        # hydra names no job. Its ranks of a node have one parent, the proxy.
        return shared("hydra", f"{ppid}", "PMI_RANK and the parent process")
    step = have("SLURM_JOB_ID", "SLURM_STEP_ID")
    if step:
        return shared("slurm", step, "SLURM_JOB_ID, SLURM_STEP_ID")
    # Hand-made launchers (a loop in a script that exports RANK) agree on a rendezvous at least.
    rendezvous = have("MASTER_ADDR", "MASTER_PORT")
    if rendezvous and _number(environ, "RANK") is not None:
        return shared("rendezvous", rendezvous, "MASTER_ADDR, MASTER_PORT")
    for kind, name in (("pbs", "PBS_JOBID"), ("lsf", "LSB_JOBID"), ("slurm", "SLURM_JOB_ID")):
        value = have(name)
        # In a batch script without a launcher, each wrap is a job: only ranks share.
        if value and identify(environ).source not in ("no launcher", "Slurm"):
            return shared(kind, value, name)
    return JobKey(file_name_safe(f"wrap-{pid}-{unique}"), "this wrap alone", False)
