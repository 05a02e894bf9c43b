# SPDX-License-Identifier: Apache-2.0
"""The programs that `uffdprefetch cluster` starts on each node, in the place of a job.

    python -m uffdprefetch.cluster.hold enter DIRECTORY WORD...
    python -m uffdprefetch.cluster.hold DIRECTORY

The first one finds out which node it is, and becomes `uffdprefetch wrap WORD... -- ` the second
one. That tells in DIRECTORY what a program on this node needs in order to be served, and ends with
the run: when its standard input does, and when it is said there.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import sys
from pathlib import Path

from uffdprefetch import __version__
from uffdprefetch.base.errors import EXIT_OURS, EXIT_USAGE
from uffdprefetch.cluster import slurm
from uffdprefetch.cluster.meeting import Meeting
from uffdprefetch.cluster.which_node import which_node

NUMBER, COUNT = "UFFDPREFETCH_CLUSTER_NODE", "UFFDPREFETCH_CLUSTER_NODES"
#: A launcher that starts one process on each node says of each which it is, and of how many.
_RANKS = (
    ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PALS_RANKID", "PALS_SIZE"), ("PMIX_RANK", "PMIX_SIZE"), ("PMI_RANK", "PMI_SIZE"),
)  # fmt: skip
LOOK_SECONDS = 1.0
#: They are for the job, which may well go on.
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def note_of(node: int) -> str:
    """The name of what a node tells."""
    return f"held-{node}"


def enter(directory: str, words: list[str]) -> int:
    """Becomes the node's `wrap`."""
    environ = dict(os.environ)
    for rank, size in _RANKS:
        if environ.get(rank, "").isdigit() and environ.get(size, "").isdigit():
            environ[NUMBER], environ[COUNT] = environ[rank], environ[size]
            break
    # its convener starts a launcher, which takes a rank's variables for its own
    environ = slurm.outside_of_a_rank(environ)
    program = [sys.executable, "-m", "uffdprefetch", "wrap", *words, "--"]
    argv = [*program, sys.executable, "-m", "uffdprefetch.cluster.hold", directory]
    os.execve(sys.executable, argv, environ)


def hold(directory: Path) -> int:
    """Until the run ends."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
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
    # a launcher may give all but the first one no input at all, which is no end
    kind = os.fstat(0).st_mode
    waits = [0] if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) else []
    while directory.exists() and meeting.note("over") is None:
        if select.select(waits, [], [], LOOK_SECONDS)[0] and not os.read(0, 4096):
            break
    if node == 0:
        with contextlib.suppress(OSError):  # the directory has gone
            meeting.post("over", {})
    return 0


def main(argv: list[str]) -> int:
    """See the module."""
    if len(argv) > 1 and argv[0] == "enter":
        return enter(argv[1], argv[2:])
    if len(argv) != 1:
        print("uffdprefetch hold: [enter] DIRECTORY", file=sys.stderr)
        return EXIT_USAGE
    return hold(Path(argv[0])) if os.path.isdir(argv[0]) else EXIT_OURS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
