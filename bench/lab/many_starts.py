# SPDX-License-Identifier: Apache-2.0
"""Starts of many nodes on one storage, each alone and with its replay: `many_starts.py [ROUNDS]`.

A start is `cat` of 60 files of its own, as each node has its own page cache; all begin at once. The
storage (300 MB/s, 1 ms a read, 0.5 ms a name) is eight beds, each with an eighth of the rate, as
no node has two thousand requests under way on its one mount. Told are the seconds until the last
has ended, and what the beds were asked for.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from uffdprefetch.base.config import LearnOptions
from uffdprefetch.base.file_systems import type_of
from uffdprefetch.demo.bed import SlowBed
from uffdprefetch.launch.replay import Replay
from uffdprefetch.native.profiles import EntryKind
from uffdprefetch.orders import profile_store
from uffdprefetch.orders.start_profile import StartEntry, StartProfile

NODES, BEDS, FILES, LEAST_BYTES, MOST_BYTES = 64, 8, 60, 4 << 10, 96 << 10


def make(source: Path) -> None:
    """The files of all nodes."""
    draw = random.Random(1)
    for node in range(NODES):
        paths(source, node)[0].parent.mkdir(parents=True)
        for path in paths(source, node):
            size = draw.randrange(LEAST_BYTES, MOST_BYTES)
            path.write_bytes(draw.randbytes(size))


def paths(above: Path, node: int) -> list[Path]:
    """Those of one."""
    of_bed = above / f"bed{node % BEDS}" / f"node{node}"
    return [of_bed / f"part{number}" for number in range(FILES)]


def keep(above: Path, profiles: Path, f_type: int) -> None:
    """Their profiles."""
    for node in range(NODES):
        entries = []
        for path in paths(above, node):
            status = path.stat()
            entries.append(
                StartEntry(EntryKind.FILE, str(path), f_type, status.st_size, status.st_mtime_ns)
            )
        profile = StartProfile(tuple(entries), 1)
        profile_store.store(str(profiles / f"node{node}.upl"), profile)


def once(source: Path, above: Path, profiles: Path, replays: bool) -> str:
    """All starts, from cold."""
    with contextlib.ExitStack() as stack:
        beds = []
        for name in sorted(path.name for path in source.iterdir()):
            bed = SlowBed(
                source / name, above / name, bandwidth=300_000_000 // BEDS, latency_us=1000,
                lookup_us=500, entry_seconds=3600.0,
            )  # fmt: skip
            beds.append(stack.enter_context(bed))
        if not any(profiles.iterdir()):
            for bed in beds:
                bed.set(bandwidth=0, latency_us=0, lookup_us=0)
            keep(above, profiles, type_of(str(above / "bed0")))
            return "made"
        for bed in beds:
            bed.reset()
        began = time.perf_counter()
        jobs, beside = [], []
        for node in range(NODES):
            if replays:
                beside.append(Replay(f"node{node}", ""))
                path = str(profiles / f"node{node}.upl")
                beside[-1].begin([path], LearnOptions(f"node{node}"), None)
            words = ["cat", *map(str, paths(above, node))]
            jobs.append(subprocess.Popen(words, stdout=subprocess.DEVNULL))
        for job in jobs:
            job.wait()
        whole, counted = time.perf_counter() - began, Counter[str]()
        for bed in beds:
            counted.update(bed.counters())
        ends = [one.end() for one in beside]
    told = f"{whole:.2f} s"
    if ends:
        spent = sum(end["cpu_seconds"] for end in ends)
        told += (
            f" ({spent:.2f} s of cores for replays: {', '.join({end['state'] for end in ends})})"
        )
    asked = ", ".join(f"{counted[name]} {name}" for name in ("requests", "opens", "lookups"))
    return f"{told}, {counted['bytes'] / (1 << 20):.1f} MiB, {asked}"


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as source,
        tempfile.TemporaryDirectory(prefix="uffdprefetch-starts-") as own,
    ):
        above, profiles = Path(own, "beds"), Path(own, "profiles")
        profiles.mkdir()
        make(Path(source))
        for path in Path(source).iterdir():
            (above / path.name).mkdir(parents=True)
        os.environ["UFFDPREFETCH_RUNDIR"] = str(Path(own, "run"))
        once(Path(source), above, profiles, replays=False)
        for _ in range(rounds):
            for replays in (False, True):
                said = once(Path(source), above, profiles, replays)
                print(f"{'with replays' if replays else 'alone'}: {said}", flush=True)


if __name__ == "__main__":
    main()
