# SPDX-License-Identifier: Apache-2.0
"""The identity of this process in its parallel job, from the launchers' environment variables.

Pure functions of the environment: the rank of this process (`identify`), and the key of a job,
whose processes on a node share one service (`job_key`). Launchers nest (a batch system starts
mpirun, mpirun starts torchrun) and their variables accumulate; the innermost has started the
processes and has precedence.
"""

from __future__ import annotations

from uffdprefetch.base.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

#: Longer keys are cut and made distinct by a hash, since they are part of file names.
MAX_KEY_CHARS = 64
_SAFE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


@record(frozen=True)
class Identity:
    """Rank in the job, rank on the node, number of ranks; None where unknown."""

    rank: int | None
    local_rank: int | None
    world: int | None
    source: str


@record(frozen=True)
class JobKey:
    """``key``: safe in a file name; ``source``: where it is from, for people."""

    key: str
    source: str
    shared: bool  # False: unique to this wrap


#: (launcher, rank, local rank, world size), innermost launcher first.
_FAMILIES = (
    ("torchrun", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PALS", "PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_SIZE"),
    ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE"),
    ("Flux", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE"),
    ("PMIx", "PMIX_RANK", "PMIX_LOCAL_RANK", "PMIX_SIZE"),
    # MPICH's and Intel's hydra: the local rank has another prefix.
    ("PMI", "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    # Last: a batch script has SLURM_PROCID=0 too, and its children inherit it.
    ("Slurm", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """A non-negative number, or None where the variable is empty or no number."""
    text = environ.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def identify(environ: Mapping[str, str]) -> Identity:
    """The rank of a process with this environment.

    The first launcher with a rank decides. What it lacks (PMIx has no local rank) is taken from
    another launcher only if that has the same rank, as Slurm's PMIx plugin does; an outer
    launcher's numbers are of other processes.
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
    safe = "".join(c if c in _SAFE else "_" for c in text).lstrip(".")
    if text and safe == text and len(text) <= MAX_KEY_CHARS:
        return text
    import hashlib

    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return f"{safe[: MAX_KEY_CHARS - 13]}-{digest}"


def job_key(environ: Mapping[str, str], pid: int, ppid: int, unique: str) -> JobKey:
    """The key by which the processes of one job on this node find their service.

    ``pid`` and ``ppid`` are the wrap's own and its parent's; ``unique``: text that no other wrap of
    this node has (a start time), since pids are reused.
    """

    def have(*names: str) -> str | None:
        """The values joined, or None unless all are set."""
        values = [environ.get(name, "") for name in names]
        return "-".join(values) if all(values) else None

    def shared(kind: str, value: str, source: str) -> JobKey:
        return JobKey(file_name_safe(f"{kind}-{value}"), source, True)

    run = have("UFFDPREFETCH_RUN")  # explicit, or set by an outer wrap
    if run:
        return JobKey(file_name_safe(run), "UFFDPREFETCH_RUN", True)
    # The run id is "none" for each torchrun without a rendezvous: the port distinguishes them.
    elastic = have("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    if elastic:
        return shared("torch", elastic, "TORCHELASTIC_RUN_ID, MASTER_ADDR, MASTER_PORT")
    # Inside a Slurm or PBS allocation mpirun's own id has precedence, else two mpiruns of one batch
    # script would be one job.
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
        # hydra sets no job id, but its ranks of a node have one parent, the proxy.
        return shared("hydra", f"{ppid}", "PMI_RANK and the parent process")
    step = have("SLURM_JOB_ID", "SLURM_STEP_ID")
    if step:
        return shared("slurm", step, "SLURM_JOB_ID, SLURM_STEP_ID")
    # Hand-made launchers (a loop that exports RANK) have a rendezvous in common at least.
    rendezvous = have("MASTER_ADDR", "MASTER_PORT")
    if rendezvous and _number(environ, "RANK") is not None:
        return shared("rendezvous", rendezvous, "MASTER_ADDR, MASTER_PORT")
    for kind, name in (("pbs", "PBS_JOBID"), ("lsf", "LSB_JOBID"), ("slurm", "SLURM_JOB_ID")):
        value = have(name)
        # In a batch script without a launcher each wrap is its own job.
        if value and identify(environ).source not in ("no launcher", "Slurm"):
            return shared(kind, value, name)
    return JobKey(file_name_safe(f"wrap-{pid}-{unique}"), "this wrap alone", False)
