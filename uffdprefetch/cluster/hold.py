# SPDX-License-Identifier: Apache-2.0
"""The programs that `uffdprefetch cluster` starts on each node, in the place of a job.

    python -m uffdprefetch.cluster.hold enter DIRECTORY WORD...
    python -m uffdprefetch.cluster.hold DIRECTORY

The first one finds out which node it is, and runs `uffdprefetch wrap WORD... -- ` the second one.
That tells in DIRECTORY what a program on this node needs in order to be served, and ends with the
run: when it is said there; when its standard input ends; and when the process ends that has started
all this, where that is on this node: a job manager that cancels a job may kill it, and the srun
through which an end of input would come, and leaves a step alone until its time has run out. Where
nobody has said so, he who would have taken the summaries, and DIRECTORY, is dead: then the last
node removes it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import subprocess
import sys
from pathlib import Path

from uffdprefetch import __version__
from uffdprefetch.base.errors import EXIT_OURS, EXIT_USAGE
from uffdprefetch.cluster import slurm
from uffdprefetch.cluster.meeting import OVER, Meeting
from uffdprefetch.cluster.which_node import which_node

NUMBER, COUNT = "UFFDPREFETCH_CLUSTER_NODE", "UFFDPREFETCH_CLUSTER_NODES"
#: A launcher that starts one process on each node says of each which it is, and of how many.
_RANKS = (
    ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PALS_RANKID", "PALS_SIZE"), ("PMIX_RANK", "PMIX_SIZE"), ("PMI_RANK", "PMI_SIZE"),
)  # fmt: skip
LOOK_SECONDS = 1.0
OWNER = "owner"
#: They are for the job, which may well go on.
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def note_of(node: int) -> str:
    """The name of what a node tells."""
    return f"held-{node}"


def let_pass() -> None:
    """Signals of IGNORED do nothing here, and what they would in what is started from here."""
    for number in IGNORED:
        signal.signal(number, lambda *_: None)


def enter(directory: Path, words: list[str]) -> int:
    """The node's `wrap`, and what is left when it has ended."""
    let_pass()
    environ = dict(os.environ)
    for rank, size in _RANKS:
        if environ.get(rank, "").isdigit() and environ.get(size, "").isdigit():
            environ[NUMBER], environ[COUNT] = environ[rank], environ[size]
            break
    # its convener starts a launcher, which takes a rank's variables for its own
    environ = slurm.outside_of_a_rank(environ)
    program = [sys.executable, "-m", "uffdprefetch", "wrap", *words, "--"]
    argv = [*program, sys.executable, "-m", "uffdprefetch.cluster.hold", str(directory)]
    status = subprocess.run(argv, env=environ).returncode
    meeting = Meeting.at(directory)
    if (meeting.note(OVER) or {}).get("by") != "command":
        _remove(meeting, int(environ.get(NUMBER, 0)))
    return status


def _remove(meeting: Meeting, node: int) -> None:
    (meeting.path / f"{note_of(node)}.json").unlink(missing_ok=True)
    if not any(name.startswith(note_of(0)[:-1]) for name in meeting.names()):
        meeting.clear()


def hold(directory: Path) -> int:
    """Until the run ends."""
    let_pass()
    environ = os.environ
    told = which_node(environ)
    meeting, node = Meeting.at(directory, told.number or 0), told.number or 0
    with contextlib.suppress(OSError):  # who waits for it waits in vain
        meeting.post(
            note_of(node),
            {
                "host": os.uname().nodename, "nodes": told.nodes, "version": __version__,
                "socket": environ.get("UFFDPREFETCH_SOCKET"),
                "engine": environ.get("UFFDPREFETCH_ENGINE"),
            },
        )  # fmt: skip
    if _until_over(meeting) and meeting.note(OVER) is None:
        with contextlib.suppress(OSError):  # the directory has gone
            meeting.post(OVER, {"by": "its end"})
    return 0


def _until_over(meeting: Meeting) -> bool:
    """Whether that was seen here, and not said by another node."""
    # a launcher may give all but the first one no input at all, which is no end
    kind = os.fstat(0).st_mode
    waits = [0] if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) else []
    owner = None
    said = meeting.note(OWNER) or {}
    if said == owner_here(said.get("pid", 0)):
        try:
            owner = os.pidfd_open(said["pid"])
        except ProcessLookupError:
            return True
        waits.append(owner)
    while meeting.path.exists() and meeting.note(OVER) is None:
        meeting.is_asked(meeting.names())
        ready = select.select(waits, [], [], LOOK_SECONDS)[0]
        if owner in ready or (0 in ready and not os.read(0, 4096)):
            return True
    return False


def owner_here(pid: int) -> dict[str, object]:
    """Identity of a process of this node: its number counts in its PID namespace only."""
    space = os.readlink("/proc/self/ns/pid")
    return {"host": os.uname().nodename, "space": space, "pid": pid}


def main(argv: list[str]) -> int:
    """See the module."""
    if len(argv) > 1 and argv[0] == "enter":
        return enter(Path(argv[1]), argv[2:])
    if len(argv) != 1:
        print("uffdprefetch hold: [enter] DIRECTORY", file=sys.stderr)
        return EXIT_USAGE
    return hold(Path(argv[0])) if os.path.isdir(argv[0]) else EXIT_OURS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
