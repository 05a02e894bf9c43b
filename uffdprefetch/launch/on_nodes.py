# SPDX-License-Identifier: Apache-2.0
"""`uffdprefetch cluster`: a service on each node of an allocation, then the command.

The services are a step of the batch system, or what an mpirun starts, with a `wrap` on each node
whose job holds it (cluster/hold.py). The command is a sibling of theirs, in the environment that we
were started in and the variables by which its programs find their node's service. The step's
standard input is a pipe of ours: its end, however we end, ends the services.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from uffdprefetch import __version__
from uffdprefetch.base import spawn
from uffdprefetch.base.config import Config
from uffdprefetch.base.errors import EXIT_OURS, UffdPrefetchError
from uffdprefetch.base.identity import file_name_safe
from uffdprefetch.base.messages import say
from uffdprefetch.base.options import as_variables
from uffdprefetch.cluster import hold, mpi_start, slurm
from uffdprefetch.cluster.meeting import FAILED, Meeting
from uffdprefetch.cluster.which_node import which_node
from uffdprefetch.launch import job_report
from uffdprefetch.launch.address import GROUP_VARIABLE, Address
from uffdprefetch.launch.environment import job_environment
from uffdprefetch.native.preload import preload_object
from uffdprefetch.report import output
from uffdprefetch.report.merge import merged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Time limit for all services to start; then the job begins without the others.
READY_SECONDS = 30.0
#: Time limit for the nodes to share; then the job begins, and its first readers read from storage.
#: With --strict it is READY_SECONDS: each way to start MPI that fails takes some seconds.
SHARING_SECONDS = 10.0
#: Time limit after the job for the services' summaries and end.
END_SECONDS = 15.0
LOOK_SECONDS = 0.02
GROUP = "cluster"
#: Prefix of the file in which a node leaves its summary for the launcher.
FOUND = "of-"


class NodeStart(NamedTuple):
    """How services are started: the command before what each node runs, its environment; how many
    nodes there are, None: the launcher knows."""

    name: str
    words: list[str]
    environ: dict[str, str]
    nodes: int | None


def plan(config: Config, environ: Mapping[str, str]) -> NodeStart:
    """By what the allocation offers, or --launcher. Raises UffdPrefetchError (125) where there is
    none."""
    try:
        own = mpi_start.words_of(config.cluster.launcher) if config.cluster.launcher else []
    except mpi_start.NoMpiError as error:
        raise UffdPrefetchError(str(error), EXIT_OURS) from None
    is_srun = mpi_start.is_srun(own)
    if (environ.get("SLURM_JOB_ID") and is_srun) or (not own and slurm.is_here(environ)):
        nodes = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
        inside = slurm.outside_of_a_step(environ)
        srun = own[0] if own else "srun"  # the options are the transports' step's
        return NodeStart(
            "srun", slurm.step(nodes, [], inside, mpi="none", srun=srun), inside, nodes
        )
    try:
        mpi = mpi_start.named(own) if own else mpi_start.find()
    except mpi_start.NoMpiError as error:
        raise UffdPrefetchError(f"no allocation of Slurm's, and {error}", EXIT_OURS) from None
    nodes_here = config.cluster.nodes or None
    words = mpi_start.in_an_allocation(mpi, nodes_here, [])
    return NodeStart(mpi.kind, words, slurm.outside_of_a_rank(environ), nodes_here)


def _name(environ: Mapping[str, str]) -> str:
    """Of this run: the same on all its nodes, and no other one's, also within one job."""
    for kind in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        if environ.get(kind):
            again = environ.get("SLURM_RESTART_COUNT", "0")
            return f"{environ[kind]}.{again}-{os.getpid()}"
    return f"{os.uname().nodename}-{os.getpid()}-{time.time_ns():x}"


class Services:
    """Those of all nodes, from the start of their step to its end."""

    def __init__(self, config: Config, environ: Mapping[str, str], how: NodeStart) -> None:
        """Starts them. Raises UffdPrefetchError, OSError."""
        self._config, self._how = config, how
        name = _name(environ)
        run = str(which_node({**environ, "UFFDPREFETCH_CLUSTER_RUN": name}).run)
        key = file_name_safe(f"cluster-{name}")
        base = Path(config.cluster.meet or os.getcwd())
        self.meeting = Meeting(base, f"{run}.services", 0)
        directory = environ.get("UFFDPREFETCH_RUNDIR") or f"/tmp/uffdprefetch-{os.geteuid()}"
        self.place = Address(
            key, "this command", directory, os.path.join(directory, f"{key}@%h+{GROUP}.sock")
        )
        step = {
            **how.environ, **as_variables(config), "UFFDPREFETCH_CLUSTER_RUN": name,
            "UFFDPREFETCH_RUN": key, "UFFDPREFETCH_RUNDIR": directory,
            GROUP_VARIABLE: GROUP, "UFFDPREFETCH_VERBOSE": "0", "UFFDPREFETCH_LIVE": "0",
        }  # fmt: skip
        nodes = how.nodes or 0
        options = [
            *("--engine", "pool", f"--cluster={nodes}" if nodes else "--cluster", "-q", "-f"),
            *("--meet", str(base), "-o", str(self.meeting.path / f"{FOUND}%h")),
        ]
        self.meeting.post(hold.OWNER, hold.owner_here(os.getpid()))
        argv = [
            *how.words, *(sys.executable, "-m", "uffdprefetch.cluster.hold", "enter"),
            str(self.meeting.path), *options,
        ]  # fmt: skip
        self._step = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=2, env=step, start_new_session=True
        )
        self._others = Meeting(base, run, 0)

    def wait(self) -> list[str]:
        """Until all are up and share; what is missing, for people."""
        deadline = time.monotonic() + READY_SECONDS
        held: dict[int, dict[str, Any]] = {}
        nodes = self._how.nodes or 0
        while time.monotonic() < deadline and not (nodes and len(held) >= nodes):
            if self._step.poll() is not None:
                return [f"{self._how.name} ended with {self._step.returncode}"]
            for name in self.meeting.names():
                if name.startswith("held-") and (said := self.meeting.note(name)):
                    held[int(name.removeprefix("held-"))] = said
            nodes = max([nodes, *(said.get("nodes") or 0 for said in held.values())])
            time.sleep(LOOK_SECONDS)
        missing = [self._why_not(said) for said in held.values()]
        if len(held) < nodes or not held:
            where = self.meeting.path.parent
            missing.append(
                f"{len(held)} of {nodes or 'all'} services are up: do all nodes see {where}"
                " (--meet)?"
            )
        if not any(missing) and (why := self._why_they_do_not_share(nodes)):
            missing.append(why)
        return [text for text in missing if text]

    def _why_not(self, said: Mapping[str, Any]) -> str:
        host, expected = said["host"], self.place.socket.replace("%h", said["host"])
        if said.get("version") != __version__:
            return f"{host} has version {said.get('version')}"
        if said.get("socket") != expected:
            return f"{host} has no service"
        if said.get("engine") != "pool":
            return f"{host} has no pool"
        return ""

    def _why_they_do_not_share(self, nodes: int) -> str:
        """When they do, or do not in time. What is read before is read by each for itself."""
        seconds = READY_SECONDS if self._config.wrap.strict else SHARING_SECONDS
        deadline = time.monotonic() + seconds
        if nodes < 2:
            return "there is one node"
        while time.monotonic() < deadline:
            present = self._others.present()
            if len(present) >= nodes and all(said.get("joined") for said in present.values()):
                return ""
            if (failed := self._others.note(FAILED)) is not None:
                return f"nodes do not share: {failed.get('why')}"
            time.sleep(LOOK_SECONDS * 2)
        return f"nodes do not share yet, after {seconds:.0f} s"

    def child_changed(self) -> None:
        """Its status is taken."""
        self._step.poll()

    def end(self) -> list[dict[str, Any]]:
        """End them; their summaries."""
        with contextlib.suppress(OSError):
            self.meeting.post(hold.OVER, {"by": "command"})
        assert self._step.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._step.stdin.close()
        try:
            self._step.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._step.terminate()  # an srun then kills its tasks
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._step.wait(END_SECONDS)
        found = []
        for path in sorted(self.meeting.path.glob(f"{FOUND}*{output.SUFFIX}")):
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(path.read_text(encoding="utf-8")))
        shutil.rmtree(self.meeting.path, ignore_errors=True)
        if not self._others.numbers():
            self._others.clear()
        return found


def run(config: Config, argv: Sequence[str]) -> int:
    """Run ``argv`` beside services on all nodes and return its exit status, or die of its signal.

    Raises UffdPrefetchError: 126/127 if it cannot be executed, 125 with --strict if a node has no
    service, 2 for an output pattern with an unknown token.
    """
    environ = spawn.inherited_environment()
    output.expand(
        config.wrap.output or "", "", None, environ
    )  # errors are reported before the job runs
    config = config.but(engine="pool")
    services, environment = None, environ
    try:
        if slurm.exports_nothing(environ):
            raise UffdPrefetchError(
                "SLURM_EXPORT_ENV=NONE, so srun passes nothing on: unset it before this command",
                EXIT_OURS,
            )
        services = Services(config, environ, plan(config, environ))
        missing = services.wait()
        if missing and config.wrap.strict:
            services.end()
            raise UffdPrefetchError("; ".join(missing), EXIT_OURS)
        if missing:
            say(f"each node reads for itself: {'; '.join(missing)}")
        # a wrap within the command finds the service that is there
        inner = config.but(cluster=None)
        environment = job_environment(environ, inner, services.place, preload_object())
        environment[GROUP_VARIABLE] = GROUP
    except (UffdPrefetchError, OSError) as error:
        text = error.message if isinstance(error, UffdPrefetchError) else str(error)
        if config.wrap.strict:
            raise UffdPrefetchError(text, EXIT_OURS) from None
        say(f"running the job without prefetching: {text}")
    found: list[dict[str, Any]] = []
    try:
        status = spawn.run(
            argv, environment, lambda pid: None,
            services.child_changed if services is not None else lambda: None,
        )  # fmt: skip
    finally:
        if services is not None:
            found = services.end()
    if services is not None:
        if found:
            job_report.write_and_print(config, environ, services.place, merged(found))
        else:
            say("no summary: no node has left one")
    return spawn.end_like(status)
