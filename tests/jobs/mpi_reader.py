# SPDX-License-Identifier: Apache-2.0
"""Ranks that read one LMDB together. argv: the LMDB, contiguous|skipping.

The ranks meet before and after they read; rank 0 then prints one line of JSON: the SHA-256 of
each rank's records, and how many services of this node's run there are. Under mpirun it is MPI that
they meet by, else (torchrun) each rank prints a line of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import lmdb


def services() -> list[int]:
    """The pids of the services that serve from this run's directory."""
    directory = os.fsencode(os.environ.get("UFFDPREFETCH_RUNDIR", "nowhere"))
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in words and any(word.startswith(directory + b"/") for word in words):
            found.append(int(entry.name))
    return found


def read(path: str, pattern: str, rank: int, ranks: int) -> str:
    """SHA-256 over this rank's records, in two epochs."""
    digest = hashlib.sha256()
    with lmdb.open(path, readonly=True, lock=False) as env, env.begin(buffers=True) as txn:
        count = txn.stat()["entries"]
        order = range(count * rank // ranks, count * (rank + 1) // ranks)
        if pattern == "skipping":
            order = range(rank, count, ranks)
        for record in [*order, *order]:
            digest.update(txn.get(b"%08d" % record))
    return digest.hexdigest()


def main() -> None:
    path, pattern = sys.argv[1:]
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        line = {"rank": rank, "sha256": read(path, pattern, rank, ranks)}
        sys.stdout.write(json.dumps(line) + "\n")
        return
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    world.Barrier()
    digest = read(path, pattern, world.rank, world.size)
    digests = world.gather(digest)
    if world.rank == 0:
        print(json.dumps({"sha256": digests, "services": len(services())}))
    world.Barrier()  # nobody leaves before rank 0 has counted


if __name__ == "__main__":
    main()
