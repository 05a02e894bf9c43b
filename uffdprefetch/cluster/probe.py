# SPDX-License-Identifier: Apache-2.0
"""The program that `doctor --cluster` has an MPI start on each node: what a transport would find.

    python -m uffdprefetch.cluster.probe DIRECTORY

Each rank leaves rank-N.json in DIRECTORY, if its node sees that. Rank 0 exchanges messages with
each of the others, as a transport would: without blocking, looking again and again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from uffdprefetch.cluster.fabric import Fabric, MpiFabric

SMALL_BYTES, SMALL_TIMES = 8, 100
LARGE_BYTES, LARGE_TIMES, AT_ONCE = 1 << 20, 24, 4
SMALL, LARGE, BACK, BYE = 1, 2, 3, 4
#: Sleep between polls of a rank that answers: until it is asked, its core is free for others.
NAP_SECONDS = 20e-6
FINALIZE_SECONDS = 5.0
#: Time limit for a rank's answer: a network may carry nothing.
PATIENCE_SECONDS = 10.0
IDLE_SECONDS = 0.3
THREADS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


def link_bytes() -> int:
    """Sent and received by this node's network devices, but lo, since they are there."""
    total = 0
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, counts = line.partition(":")
        fields = counts.split()
        if name.strip() != "lo":
            total += int(fields[0]) + int(fields[8])
    for path in Path("/sys/class/infiniband").glob("*/ports/*/counters/port_*_data"):
        total += 4 * int(path.read_text())  # in words of 4 bytes
    return total


def idle_share() -> float:
    """Idle share of this node's CPUs, measured while this process sleeps."""

    def read() -> tuple[int, int]:
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
        return fields[3], sum(fields[:8])

    before = read()
    time.sleep(IDLE_SECONDS)
    now = read()
    return (now[0] - before[0]) / max(1, now[1] - before[1])


class Messages:
    """One rank's messages."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric

    def exchange(self, peer: int, tag: int, size: int, at_once: int) -> float:
        """Seconds for ``at_once`` messages of ``size`` bytes there and as many back. Raises
        TimeoutError where they do not come."""
        came: list[float] = []
        data, end = bytes(size), time.monotonic() + PATIENCE_SECONDS
        began = time.perf_counter()
        for _ in range(at_once):
            self.fabric.receive(
                peer, BACK, bytearray(size), lambda: came.append(time.perf_counter())
            )
            self.fabric.send(peer, tag, data)
        while len(came) < at_once:
            self.fabric.poll()
            if time.monotonic() > end:
                raise TimeoutError(f"rank {peer} does not answer within {PATIENCE_SECONDS:.0f} s")
        return came[-1] - began

    def answer(self) -> None:
        """Send back what rank 0 sends, until it has had enough."""
        over: list[bool] = []

        def listen(tag: int, size: int) -> None:
            into = bytearray(size)

            def came() -> None:
                listen(tag, size)
                self.fabric.send(0, BACK, into)

            self.fabric.receive(0, tag, into, came)

        self.fabric.receive(0, BYE, bytearray(1), lambda: over.append(True))
        listen(SMALL, SMALL_BYTES)
        for _ in range(AT_ONCE):
            listen(LARGE, LARGE_BYTES)
        while not over:
            if not self.fabric.poll():
                time.sleep(NAP_SECONDS)


def with_each(messages: Messages) -> list[dict[str, Any]]:
    """Rank 0's: half a round trip in seconds, bytes per second, for each other rank."""
    found = []
    for peer in range(1, messages.fabric.size):
        trips = sorted(messages.exchange(peer, SMALL, SMALL_BYTES, 1) for _ in range(SMALL_TIMES))
        before = link_bytes()
        took = [
            messages.exchange(peer, LARGE, LARGE_BYTES, AT_ONCE)
            for _ in range(LARGE_TIMES // AT_ONCE)
        ]
        found.append(
            {
                "rank": peer, "latency_seconds": trips[len(trips) // 2] / 2,
                "bytes_per_second": 2 * LARGE_BYTES * AT_ONCE / min(took),
                "sent_bytes": 2 * LARGE_BYTES * LARGE_TIMES, "link_bytes": link_bytes() - before,
            }
        )  # fmt: skip
        messages.fabric.send(peer, BYE, b"x")
    return found


def main(argv: list[str]) -> int:
    """See the module."""
    directory = Path(argv[0])
    idle = idle_share()
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    provided = MPI.Init_thread(MPI.THREAD_FUNNELED)
    world = MPI.COMM_WORLD
    messages = Messages(MpiFabric(MPI, world))
    found: dict[str, Any] = {
        "host": platform.node(), "size": messages.fabric.size, "idle_share": round(idle, 3),
        "library": MPI.Get_library_version().partition(",")[0].splitlines()[0].strip("\0 "),
        "mpi4py": mpi4py.__version__, "thread_level": THREADS[provided],
        "cpus": len(os.sched_getaffinity(0)), "python": sys.executable,
    }  # fmt: skip
    if messages.fabric.rank == 0:
        found["with"] = with_each(messages)
    else:
        messages.answer()
    path = directory / f"rank-{messages.fabric.rank}.json"
    beside = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        beside.write_text(json.dumps(found))
        beside.rename(path)
    # receives that nobody will send for may keep it for ever
    faulthandler.dump_traceback_later(FINALIZE_SECONDS, exit=True)
    MPI.Finalize()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
