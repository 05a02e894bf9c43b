# SPDX-License-Identifier: Apache-2.0
"""What may happen to the nodes of a run while they read from each other, and what becomes of it.

    python -m tests.support.losses [--times N] [--seed S] [--python INTERPRETER]
        [--launcher COMMAND] [--disk] [KIND...]

Nodes of a bed (tests/support/nodes_bed.py) run `wrap --cluster` over a program that reads a file
again and again, more than one node's pool holds, so that each epoch moves bytes between nodes; in
two turns of six more than all of them hold, in two others (``--disk``: in each) each node's disk
has the rest (`--spill`). At a random moment, or, every second time, when a node
has asked another one for something and has no answer yet, one thing happens. Each node that is left
must read two more epochs, every one with the file's SHA-256. ``--python``: one whose mpi4py is
another MPI's; ``--launcher``: as for wrap. Prints
one line each, and a table; exit status 1 if any was not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from conftest import clean_environment
from nodes_bed import Bed, nodes_bed
from paths import ROOT

from uffdprefetch.cluster.meeting import Meeting
from uffdprefetch.demo.bed import SlowBed
from uffdprefetch.native.net import NetRing

MIB = 1 << 20
SIZE, NODES = 24 * MIB, 3


class Means(NamedTuple):
    """Bytes of memory and of disk that each node has."""

    budget: int
    disk: int = 0


#: All together keep all of the file; or three of its six blocks, and the rest is passed on by those
#: that have just read it; or is on their disks.
MEANS = Means(20 * MIB), Means(8 * MIB), Means(8 * MIB, 16 * MIB)
#: A node that comes back does so within that: before and after the others have missed it.
AWAY_SECONDS = 6.0
AGAIN_SECONDS = 60.0
#: A test that is not done by then hangs.
PATIENCE_SECONDS = 120.0
#: Requests are out most of the time.
OUT_SECONDS = 5.0
READER = """
import hashlib, mmap, os, sys, time
path, stop = sys.argv[1:3]
epoch = 0
while not os.path.exists(stop):
    began, longest = time.monotonic(), 0.0
    digest = hashlib.sha256()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as found:
        for at in range(0, len(found), 1 << 18):
            before = time.monotonic()
            digest.update(found[at : at + (1 << 18)])
            longest = max(longest, time.monotonic() - before)
    epoch += 1
    print(epoch, digest.hexdigest(), round(time.monotonic() - began, 3), round(longest, 3),
          flush=True)
"""


@dataclass
class Reader:
    """One node's: the epochs that it has read, (hash, seconds, longest wait)."""

    job: subprocess.Popen[str]
    epochs: list[tuple[str, float, float]] = field(default_factory=list)

    def follow(self) -> None:
        """Until it ends."""
        assert self.job.stdout is not None
        for line in self.job.stdout:
            _, digest, seconds, longest = line.split()
            self.epochs.append((digest, float(seconds), float(longest)))


class Run:
    """A run that reads, and shares what it reads."""

    def __init__(
        self, bed: Bed, far: Path, directory: Path, how: How, means: Means, spoils: int = -1
    ) -> None:
        """``means``: of each; ``spoils``: the node that sends other bytes than it has; -1:
        none does."""
        self.bed, self.directory = bed, directory
        name = f"losses-{time.monotonic_ns()}"
        self.stop, self.spoiled = directory / f"stop-{name}", directory / "spoiled"
        self.meeting = Meeting(directory, f"uffdprefetch-{name}.0", 99)
        self.readers = []
        for node in range(NODES):
            environ = {
                **clean_environment(), "PYTHONPATH": str(ROOT), "GROUP_RANK": str(node),
                "UFFDPREFETCH_CLUSTER_RUN": name,
                "UFFDPREFETCH_RUNDIR": str(directory / f"run{node}"),
            }  # fmt: skip
            if spoils >= 0:  # all have it: some launchers hand one node's environment to all ranks
                environ["PYTHONPATH"] = f"{Path(__file__).parent / 'spoil'}:{ROOT}"
                environ |= {"SPOILED": str(self.spoiled), "SPOILS": bed.names[spoils]}
            words = [
                *(how.python, "-m", "uffdprefetch", "wrap", "--engine", "pool", "-q"),
                *(("--spill", f"{directory}:{means.disk >> 20}MiB") if means.disk else ()),
                *("--budget", f"{means.budget >> 20}MiB", "--min-size", "1MiB"),
                f"--cluster={NODES}",
                *("--meet", str(directory), "--share", f"{far.parent}/*"),
                *(("--launcher", how.launcher) if how.launcher else ()),
                *("-o", str(directory / f"out{node}"), "--"),
                *(sys.executable, "-c", READER, str(far), str(self.stop)),
            ]
            self.readers.append(Reader(bed.start(node, words, environ, ROOT)))
        self._threads = [threading.Thread(target=one.follow, daemon=True) for one in self.readers]
        for thread in self._threads:
            thread.start()

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Raises AssertionError."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < end, f"waited in vain for {what}"
            time.sleep(0.02)

    def joined(self) -> dict[int, int]:
        """The generation of each node that shares."""
        said = self.meeting.present()
        return {node: one["joined"] for node, one in said.items() if one.get("joined")}

    def out(self) -> int:
        """Requests of all nodes that have no answer at this moment."""
        return sum(ring.out for ring in self._rings())

    def _rings(self) -> Iterator[NetRing]:
        """What the transports share with their services."""
        for node in range(NODES):
            for pid in self.bed.find(node, "uffdprefetch.cluster.carry"):
                with contextlib.suppress(OSError):
                    for number in os.listdir(f"/proc/{pid}/fd"):
                        path = f"/proc/{pid}/fd/{number}"
                        if "uffdprefetch-net" in os.readlink(path):
                            fd = os.open(path, os.O_RDWR)
                            ring = NetRing.open(fd)
                            os.close(fd)
                            yield ring
                            ring.close()

    def until_it_shares(self) -> None:
        """All do, and each has read an epoch since."""
        self.until(lambda: len(self.joined()) == NODES, "sharing")
        self.until_more(range(NODES), 1)

    def until_more(self, nodes: range | list[int], epochs: int) -> None:
        """Each of these reads so many more."""
        before = [len(one.epochs) for one in self.readers]
        self.until(
            lambda: all(len(self.readers[n].epochs) >= before[n] + epochs for n in nodes),
            f"{epochs} more epochs on {list(nodes)}: {[len(r.epochs) for r in self.readers]}",
        )

    def end(self) -> None:
        """All that is left of it."""
        self.stop.touch()
        for node, one in enumerate(self.readers):
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.job.wait(20)
            self.bed.link(node, True)
        for thread in self._threads:
            thread.join(5)


@dataclass(frozen=True)
class How:
    """With which MPI: the interpreter that has it, and what is to start it (None: as it is)."""

    python: str = sys.executable
    launcher: str | None = None


Happens = Callable[[Run, random.Random], list[int]]


def _kill_one_of(word: str, nodes: range) -> Happens:
    def happens(run: Run, chance: random.Random) -> list[int]:
        node = chance.choice(nodes)
        pids = run.bed.find(node, word)
        assert pids, f"no {word} on node {node}"
        os.kill(pids[0], signal.SIGKILL)
        return list(range(NODES))

    return happens


def _lose_a_node(nodes: range, silent: bool) -> Happens:
    def happens(run: Run, chance: random.Random) -> list[int]:
        node = chance.choice(nodes)
        run.bed.kill(node, silent)
        return [n for n in range(NODES) if n != node]

    return happens


def _kill_a_job(run: Run, chance: random.Random) -> list[int]:
    """Its program alone, of which others may be waiting for the answers of its node."""
    node = chance.randrange(NODES)
    os.kill(run.bed.find(node, str(run.stop))[-1], signal.SIGKILL)
    return [n for n in range(NODES) if n != node]


def _freeze(run: Run, chance: random.Random) -> list[int]:
    node = chance.randrange(NODES)
    run.bed.freeze(node)
    time.sleep(AWAY_SECONDS * chance.random())
    run.until_more([n for n in range(NODES) if n != node], 2)
    run.bed.freeze(node, stop=False)
    return list(range(NODES))


def _spoil(run: Run, chance: random.Random) -> list[int]:
    """A node has been doing that from the beginning, and does it at last."""
    run.until(run.spoiled.exists, "an answer that is spoiled")
    run.until_more(range(NODES), 2)
    return list(range(NODES))


def _pull_the_cable(run: Run, chance: random.Random) -> list[int]:
    node = chance.randrange(NODES)
    run.bed.link(node, False)
    time.sleep(AWAY_SECONDS * chance.random())
    run.until_more(range(NODES), 2)
    run.bed.link(node, True)
    return list(range(NODES))


KINDS: dict[str, Happens] = {
    "transport": _kill_one_of("uffdprefetch.cluster.carry", range(NODES)),
    "service": _kill_one_of("serve\0--socket", range(NODES)),
    "convener": _kill_one_of("uffdprefetch.cluster.convene", range(NODES)),
    "job": _kill_a_job,
    "node": _lose_a_node(range(1, NODES), silent=False),
    "silent": _lose_a_node(range(1, NODES), silent=True),
    "leader": _lose_a_node(range(1), silent=False),
    "freeze": _freeze,
    "cable": _pull_the_cable,
    "spoiled": _spoil,
}


@dataclass(frozen=True)
class Outcome:
    """``means``: of each node; ``out``: requests without an answer when it happened;
    ``longest``: what a program waited for 256 KiB, in seconds, and ``before`` it happened;
    ``corrupt``: answers that were refused; ``again``: seconds until those that were left shared
    again in another generation, None: they need not, or did not within AGAIN_SECONDS;
    ``storage``: of what they read then, how much came from the file system."""

    kind: str
    means: Means
    out: int
    epochs: int
    wrong: int
    corrupt: int
    before: float
    longest: float
    again: float | None
    storage: float


def happen(
    kind: str, bed: Bed, data: Data, directory: Path, how: How, chance: random.Random,
    asking: bool = False, means: Means = MEANS[0],
) -> Outcome:  # fmt: skip
    """One of a kind; ``asking``: when something was asked and not answered. Raises AssertionError
    where a node that is left does not go on."""
    spoils = chance.randrange(NODES) if kind == "spoiled" else -1
    run = Run(bed, data.far, directory, how, means, spoils)
    try:
        run.until_it_shares()
        generation = max(run.joined().values())
        time.sleep(chance.random())
        waited = max(longest for one in run.readers for _, _, longest in one.epochs)
        end = time.monotonic() + OUT_SECONDS
        while not (out := run.out()) and asking and time.monotonic() < end:
            pass
        began = time.monotonic()
        left = KINDS[kind](run, chance)
        run.until_more(left, 2)
        again = None
        while again is None and time.monotonic() - began < AGAIN_SECONDS:
            now = run.joined()
            if sum(g > generation for g in now.values()) >= min(2, len(left)):
                again = time.monotonic() - began
            elif kind in ("freeze", "cable", "silent", "convener", "service", "job", "spoiled"):
                break  # those go on in the generation that they have, if at all
            time.sleep(0.05)
        run.until_more(left, 1)
        read, before = data.read_bytes(), sum(len(one.epochs) for one in run.readers)
        run.until_more(left, 2)
        read = data.read_bytes() - read
        since = sum(len(one.epochs) for one in run.readers) - before
    finally:
        run.end()
    epochs = [epoch for one in run.readers for epoch in one.epochs]
    wrong = sum(found != data.digest for found, _, _ in epochs)
    longest = max(longest for _, _, longest in epochs)
    corrupt = 0
    if kind == "spoiled":
        said = [json.loads(one.read_text()) for one in directory.glob("out?.summary.json")]
        corrupt = max(one["cluster"]["corrupt"] for one in said)
        noted = [text for one in said for text in one["degradations"]]
        assert corrupt, f"of {len(said)} nodes none was sent what is spoiled"
        assert any(f"node {spoils} has sent" in text for text in noted), f"it is not named: {noted}"
    storage = round(read / (since * SIZE), 3)
    return Outcome(kind, means, out, len(epochs), wrong, corrupt, waited, longest, again, storage)


@dataclass(frozen=True)
class Data:
    """A file on slow storage that all nodes see, its SHA-256, and what has been read of it."""

    far: Path
    digest: str
    read_bytes: Callable[[], int]


@contextlib.contextmanager
def data(directory: Path) -> Iterator[Data]:
    """One that is new."""
    source = directory / "source"
    source.mkdir()
    path = source / "data.bin"
    path.write_bytes(random.Random(4).randbytes(SIZE))
    with SlowBed(source, bandwidth=60_000_000) as storage:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        yield Data(storage.path(path.name), digest, lambda: int(storage.counters()["bytes"]))


def main(argv: list[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--launcher")
    parser.add_argument("--disk", action="store_true", help="always with a disk tier")
    args = parser.parse_args(argv)
    found: dict[str, list[Outcome]] = {}
    how, bad = How(args.python, args.launcher), 0
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as text, data(Path(text)) as file:
        for turn in range(args.times):
            for kind in args.kinds or KINDS:
                directory = Path(text) / f"{kind}-{turn}"
                directory.mkdir()
                chance = random.Random(f"{args.seed} {kind} {turn}")
                try:
                    with nodes_bed(NODES, directory) as bed:
                        one = happen(
                            kind, bed, file, directory, how, chance, turn % 2 == 0,
                            MEANS[2 if args.disk else turn // 2 % len(MEANS)],
                        )  # fmt: skip
                except AssertionError as error:
                    bad += 1
                    print(f"{kind} {turn}: {error}", flush=True)
                    continue
                bad += one.wrong > 0
                found.setdefault(kind, []).append(one)
                print(f"{kind} {turn}: {json.dumps(one.__dict__)}", flush=True)
    print("kind, times (while something was asked), epochs, wrong, longest wait s, sharing again s,"
          " from storage then where much is kept, little, and the rest on disks")  # fmt: skip
    for kind, all_ in found.items():
        again = [one.again for one in all_ if one.again is not None]
        print(
            f"{kind}, {len(all_)} ({sum(o.out > 0 for o in all_)}),"
            f" {sum(o.epochs for o in all_)}, {sum(o.wrong for o in all_)},"
            f" {max(o.longest for o in all_)}, {max(again, default=0):.1f} of {len(again)},"
            f" {[max((o.storage for o in all_ if o.means == m), default=None) for m in MEANS]}"
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
