# SPDX-License-Identifier: Apache-2.0
"""Steps of a Slurm job with one task on each of its nodes.

What srun does with such a step was measured (Slurm 22.05): `--ntasks-per-node` alone starts all
tasks of the job; a step without `--overlap` makes the job's next srun wait; `--cpus-per-task` binds
all of a task's threads to one core. A step whose PMI is not that of its MPI is as many worlds of
one process, without an error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

#: Time limit of a question to Slurm's controller, which answers late when it is busy.
LOOK_SECONDS = 20.0
#: Slurm's variables of a job, which hold in each of its steps. Others that begin with SLURM_ are of
#: the current step, and srun would take them for options.
_OF_THE_JOB = re.compile(r"SLURM_(JOB_.*|JOBID|CONF|CLUSTER_NAME|RESTART_COUNT)$")
#: Variables by which MPI launchers tell a process its rank. A job's own settings of these prefixes
#: (OMPI_MCA_btl) are dropped with them; --launcher can set them again.
_OF_A_RANK = re.compile(r"(PMI|PMIX|OMPI|ORTE|OPAL|PRTE|PRRTE|HYDRA|HYDI|MPI|MPIR|MPIEXEC|I_MPI)_")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def is_here(environ: Mapping[str, str]) -> bool:
    """Whether this is a job of Slurm's in which steps can be started."""
    return bool(environ.get("SLURM_JOB_ID")) and shutil.which("srun") is not None


def exports_nothing(environ: Mapping[str, str]) -> bool:
    """Whether the job's steps do not get the environment (`#SBATCH --export=NONE`)."""
    return environ.get("SLURM_EXPORT_ENV", "").upper() in ("NONE", "NIL")


def outside_of_a_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a launcher that is started from within a rank of another one's."""
    if not any(name in environ for name in _RANKS):
        return dict(environ)
    return {name: value for name, value in environ.items() if not _OF_A_RANK.match(name)}


def outside_of_a_step(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for an srun that is started from within a step."""
    return {
        name: value
        for name, value in outside_of_a_rank(environ).items()
        if not name.startswith("SLURM_") or _OF_THE_JOB.match(name)
    }


def output(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    """A command's output; empty where it cannot be run. ``environ``: None: ours."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=LOOK_SECONDS, stdin=subprocess.DEVNULL,
            env=None if environ is None else dict(environ),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def mpi_types(text: str) -> list[str]:
    """The types that `srun --mpi=list` names, in its order, but "none"."""
    words = re.findall(r"^(?:srun:\s*)?\s*([a-z0-9_]+)\s*$", text, re.MULTILINE)
    inline = re.search(r"(?:types are|plugin types are)[. ]*:?[ ]+([a-z0-9_, ]+)$", text, re.M)
    if inline:
        words += re.split(r"[, ]+", inline[1])
    return [word for word in dict.fromkeys(words) if word and word not in ("none", "openmpi")]


def known_types(environ: Mapping[str, str]) -> list[str]:
    """The kinds of PMI that this Slurm offers."""
    return mpi_types(output(["srun", "--mpi=list"], environ))


def step(
    nodes: int, words: Sequence[str], environ: Mapping[str, str], *,
    mpi: str | None = None, hosts: Sequence[str] = (), own: Sequence[str] = (), srun: str = "srun",
) -> list[str]:  # fmt: skip
    """``words`` once on each of ``nodes`` nodes, beside whatever else the job runs there. ``mpi``:
    the kind of PMI, None: the site's default; ``hosts``: which nodes, all of the job's where it is
    empty; ``own``: options of the user's, which come last; ``srun``: the command."""
    overlap = ["--overlap"] if "--overlap" in output([srun, "--help"], environ) else []
    return [
        *(srun, f"-N{nodes}", f"-n{nodes}", "--ntasks-per-node=1", "--mem=0", *overlap),
        *("--export=ALL", "--kill-on-bad-exit=0", "--no-kill", "--wait=0"),
        *([f"--mpi={mpi}"] if mpi else []),
        *(["-w", ",".join(hosts)] if hosts else []),
        *own, *words,
    ]  # fmt: skip
