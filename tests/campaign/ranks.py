# SPDX-License-Identifier: Apache-2.0
"""The job of a trial: a launcher that starts four ranks, as mpirun would, and the ranks.

    python ranks.py FILE [--stop|--all] [STATE:STEP|- ...]
                                                       launcher; where rank 0, 1, ... is to lose
                                                       the one of our threads that comes there,
                                                       both (--all), or to stand still with it
    python ranks.py FILE --rank                        one rank, told by RANK

Each rank says who it is, reads until the file "go" appears, then some passes more. Where there is a
plan.json (run with --plan), it reads in the order that this tells.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time

from inside import Mapping, agents, libc, say, until

RANKS = 4
#: After the event: enough that each page is read again as what it then is.
PASSES_AFTER = 3
#: Read in pieces with a pause after each: at full speed the service sees nothing but touches.
PIECE_BYTES = 1 << 20
PAUSE_SECONDS = 0.004
#: A second mapping lives this many passes, long enough to get checkpoints of its own; what the
#: pool serves it serves at once.
SECOND_PASSES = 1 if os.environ.get("UFFDPREFETCH_ENGINE") == "pool" else 4


def in_order(view: memoryview, order: list[list[int]]) -> str:
    """SHA-256 of the bytes in their places, read in the order of a plan."""
    read, due = bytearray(len(view)), PIECE_BYTES
    for start, end in order:
        read[start:end] = view[start:end]
        due -= end - start
        if due <= 0:
            time.sleep(PAUSE_SECONDS)
            due += PIECE_BYTES
    return hashlib.sha256(read).hexdigest()


def digest(view: memoryview) -> str:
    """SHA-256, at the pace of a job that computes."""
    sha = hashlib.sha256()
    for at in range(0, len(view), PIECE_BYTES):
        sha.update(view[at : at + PIECE_BYTES])
        time.sleep(PAUSE_SECONDS)
    return sha.hexdigest()


class Second:
    """A mapping of a part of the file that comes, is given back in part, and goes."""

    def __init__(self, path: str, rank: int) -> None:
        size = os.stat(path).st_size
        self._path = path
        self._length = size // 3 // 4096 * 4096
        self._offset = (rank * size // 5) // 4096 * 4096
        with open(path, "rb") as file:
            file.seek(self._offset)
            data = file.read(self._length)
        self._half = self._length // 2 // 4096 * 4096
        self._all = hashlib.sha256(data).hexdigest()
        self._rest = hashlib.sha256(data[self._half :]).hexdigest()
        self._mapping: Mapping | None = None
        self._age = 0
        self.wrong = 0

    def step(self) -> None:
        """One pass of its life."""
        if self._mapping is None:
            self._mapping, self._age = Mapping(self._path, self._length, self._offset), 0
        m = self._mapping
        self._age += 1
        if self._age <= SECOND_PASSES:
            self.wrong += digest(m.view) != self._all
            m.forget()
            return
        if self._age % 2:
            m.unmap(0, self._half)  # the rest is given back to the kernel
        else:
            libc.mprotect(m.address, self._half, 0)
        self.wrong += digest(m.view[self._half :]) != self._rest
        m.unmap()
        self._mapping = None


def read(path: str) -> None:
    """Be one rank."""
    say(rank=int(os.environ["RANK"]), pid=os.getpid())
    m = Mapping(path)
    second = Second(path, int(os.environ["RANK"]))
    log = os.open(f"passes-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    digests: set[str] = set()
    order = None
    if os.path.exists("plan.json"):
        with open("plan.json") as plan:
            (epoch,) = json.load(plan)["files"][0]["epochs"]
        order = epoch["ranks"][os.environ["RANK"]]

    # One rank (and whoever is to lose its agent at that) relies on the service to arm behind it
    # what it has touched; the others do it themselves, with every pass.
    rearming = os.environ.get("UFFDPREFETCH_TEST_AGENT_EXIT_STATE") == "3"
    relies = rearming or os.environ["RANK"] == str(RANKS - 1)

    def one_pass() -> None:
        if not relies:
            m.forget()
        digests.add(digest(m.view) if order is None else in_order(m.view, order))
        second.step()
        os.write(log, b".")

    while not os.path.exists("go"):
        one_pass()
    one_pass()  # whatever the agent does now
    if os.environ.get("UFFDPREFETCH_TEST_AGENT_EXIT_ALL", "1") == "1":
        until(lambda: not agents(), "the agent's end")
    for _ in range(PASSES_AFTER):
        one_pass()
    say(digests=sorted(digests), wrong=second.wrong, agents=len(agents()), left=m.checkpoints())


def launch(path: str, points: list[str]) -> int:
    """Start the ranks and wait for them: how many failed."""
    started = []
    for rank in range(RANKS):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        state, _, step = (points[rank:] or ["-"])[0].partition(":")
        if state != "-":
            env["UFFDPREFETCH_TEST_AGENT_EXIT"] = step
            env["UFFDPREFETCH_TEST_AGENT_EXIT_LOG"] = os.path.abspath(f"exit-{rank}")
            if state != "moment":
                env["UFFDPREFETCH_TEST_AGENT_EXIT_STATE"] = state
        words = [sys.executable, "-S", __file__, path, "--rank"]
        started.append(subprocess.Popen(words, env=env))
    return sum(process.wait() != 0 for process in started)


if __name__ == "__main__":
    path, *arguments = sys.argv[1:]
    if arguments == ["--rank"]:
        read(path)
    else:
        if arguments[:1] == ["--stop"]:
            os.environ["UFFDPREFETCH_TEST_AGENT_STOP"] = "1"
        else:
            os.environ["UFFDPREFETCH_TEST_AGENT_EXIT_ALL"] = str(int(arguments[:1] == ["--all"]))
        sys.exit(launch(path, [word for word in arguments if not word.startswith("--")]))
