# SPDX-License-Identifier: Apache-2.0
"""What looking who reads takes (csrc/service/reads.c): `python bench/lab/read_looks.py`.

Processes with threads that sleep, read what is in memory (two threads at a time, be they of
whatever process), or wait on the slow bed. Of the thread that looks: what it takes of a core, how
often each process is looked at, and how long after a process has begun to read on the bed, which
has slept so far, it is seen.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reports import conditions

from uffdprefetch.demo.bed import SlowBed
from uffdprefetch.sense.read_calls import ReadCalls

CROWDS = ((1, 1), (32, 1), (128, 8))
SETTLE_SECONDS, SECONDS = 1.5, 2.0
FILE_BYTES, PIECE_BYTES = 256 << 20, 64 << 10
#: Of the bed; all that is read meanwhile is a part of the file.
BANDWIDTH = 30_000_000


def sleep() -> None:
    time.sleep(1000)


def read(path: Path, start: int) -> Callable[[], None]:
    """In order, from there on, and from the beginning again."""

    def go_on() -> None:
        at, fd = start, os.open(path, os.O_RDONLY)
        size = os.fstat(fd).st_size
        while True:
            at = (at + len(os.pread(fd, PIECE_BYTES, at))) % size

    return go_on


def start(threads: int, does: Callable[[int], Callable[[], None]]) -> tuple[int, int]:
    """A process; a byte into the pipe that is returned with it begins it. ``does``: each thread."""
    there, here = os.pipe()
    pid = os.fork()
    if not pid:
        for number in range(1, threads):
            threading.Thread(target=does(number), daemon=True).start()
        os.read(there, 1)
        does(0)()
    os.close(there)
    return pid, here


def looked_at(
    processes: int, threads: int, does: Callable[[int, int], Callable[[], None]], cold: Path
) -> str:
    """The cells of a row. ``does``: what a thread of a process does, by the numbers of both."""
    jobs = [
        start(threads, lambda thread, process=process: does(process, thread))  # type: ignore[misc]
        for process in range(processes - 1)
    ]
    last, begin = start(threads, lambda thread: sleep if thread else read(cold, FILE_BYTES // 2))
    calls = ReadCalls(lambda key: False)
    try:
        for pid, pipe in jobs:
            calls.add(pid)
            os.write(pipe, b"x")
        calls.add(last)
        end = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < end:
            select.select([calls], [], [], 0.02)
            calls.reap()
        then, then_s = calls.counts(), time.monotonic()
        looks = calls._reads.process(jobs[0][0] if jobs else last).looks
        while time.monotonic() < then_s + SECONDS:
            select.select([calls], [], [], 0.02)
            calls.reap()
        now, took = calls.counts(), time.monotonic() - then_s
        looks = calls._reads.process(jobs[0][0] if jobs else last).looks - looks
        os.write(begin, b"x")
        began = time.monotonic()
        while not any(one.pid == last for one in calls.reap()):
            select.select([calls], [], [], 0.001)
        seen_ms = (time.monotonic() - began) * 1e3
        core = (now.cpu_ns - then.cpu_ns) / took / 1e9
        each_ms = took * 1e3 / max(1, looks)
        return f"{core:.1%} | {each_ms:.0f} | {seen_ms:.0f} | {now.descriptors}"
    finally:
        calls.close()
        for pid, pipe in (*jobs, (last, begin)):
            os.close(pipe)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def main() -> None:
    """As a program."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        cold, warm = Path(name) / "cold", Path(name) / "warm"
        cold.write_bytes(os.urandom(1 << 20) * (FILE_BYTES >> 20))
        warm.write_bytes(os.urandom(1 << 20) * 64)
        with SlowBed(name, bandwidth=BANDWIDTH) as bed:
            path = bed.path("cold")
            kinds: dict[str, Callable[[int, int], Callable[[], None]]] = {
                "sleep": lambda process, thread: sleep,
                "two read what is in memory": lambda process, thread: (
                    sleep if thread or process > 1 else read(warm, 0)
                ),
                "one of each waits": lambda process, thread: (
                    sleep if thread else read(path, process * FILE_BYTES // 256)
                ),
            }
            print(conditions())
            print(
                "| processes x threads | others | of a core | each is looked at after ms "
                "| one that begins is seen after ms | descriptors |"
            )
            print("|---|---|---:|---:|---:|---:|")
            for processes, threads in CROWDS:
                for what, does in kinds.items():
                    if processes > 1 or what == "sleep":
                        row = looked_at(processes, threads, does, path)
                        print(f"| {processes} x {threads} | {what} | {row} |", flush=True)


if __name__ == "__main__":
    main()
