# SPDX-License-Identifier: Apache-2.0
"""How much later than a plain mapping one of ours shows what another client has written.

Runs in the guest (tests/lustre/guest.py --writers). A plain and a wrapped process have the same
file of the same mount mapped and look for each word that a writer at the second mount has written;
the lag is the time from the one's finding it to the other's. ``--runs``: so many mappings, one
write each, at a random moment to a random page, every other time one over which a checkpoint lies.
``--writes``: then so many to one mapping.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

MIB, PAGE, WORD = 1 << 20, 4096, 8
#: Of the log that the readers share, in words: a head, the offsets, when each reader saw it.
ISSUED, ENDED, MAPPED, HEAD = 0, 1, 2, 8
#: Pages that are read between two looks, and when all have been: seconds.
STRIDE, REST_SECONDS = 64, 0.002
#: Writes a second of the long run; a word that is not seen for so long after plain is given up.
RATE, GIVEN_UP_SECONDS = 50.0, 60.0
#: A mapping lives so long before its write, at most.
LIFE_SECONDS = 3.0
PROMISED_SECONDS = 1.1
NS = 1_000_000_000


def log_words(writes: int) -> int:
    """The size of the log."""
    return HEAD + 3 * writes


def read(path: str, log_path: str, number: int) -> None:
    """Map the file, read it from its beginning to its end, and note when each word that was written
    is there. ``number``: 0 plain, 1 wrapped."""
    fd, log_fd = os.open(path, os.O_RDONLY), os.open(log_path, os.O_RDWR)
    log = memoryview(mmap.mmap(log_fd, 0)).cast("Q")
    words = memoryview(mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)).cast("Q")
    os.close(fd)
    writes = (len(log) - HEAD) // 3
    seen_at = HEAD + (1 + number) * writes
    log[MAPPED + number] = os.getpid()
    at, known, waiting = 0, 0, list[int]()
    while not log[ENDED] or waiting or known < log[ISSUED]:
        issued = log[ISSUED]
        waiting += range(known, issued)
        known = issued
        still = []
        for one in waiting:
            if words[log[HEAD + one] // WORD] == one + 1:
                log[seen_at + one] = time.monotonic_ns()
            else:
                still.append(one)
        waiting = still
        if at < len(words):
            for place in range(at, min(at + STRIDE * PAGE // WORD, len(words)), PAGE // WORD):
                words[place]
            at += STRIDE * PAGE // WORD
        else:
            time.sleep(REST_SECONDS)
        if log[ENDED] and time.monotonic_ns() - log[ENDED] > GIVEN_UP_SECONDS * NS:
            break


def serve(number: int) -> None:
    """Of each line "FILE LOG", a process that reads; a line when it has ended."""
    for line in sys.stdin:
        path, log_path = line.split()
        pid = os.fork()
        if not pid:
            read(path, log_path, number)
            os._exit(0)
        os.waitpid(pid, 0)
        print("ended", flush=True)


def served(pid: int) -> list[int]:
    """File offsets of what is ours in a reader's mapping, by its maps; the pool: from 0 on."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "uffdprefetch-checkpoints" in line:
            found.append(int(line.split()[2], 16))
    return sorted(set(found))


class Pair:
    """The two processes of an engine."""

    def __init__(self, directory: Path, engine: str) -> None:
        from lustre import client

        words = [sys.executable, "-S", __file__, "--reader"]
        laid = ("--policy", "fixed", "--size", "1MiB", "--distance", "1MiB")
        wrap = [
            *client.wrapped(
                "--engine", engine, "--min-size", "1MiB", *laid * (engine == "cache")
            ),
            "--",
        ]  # fmt: skip
        self.log_path = directory / "log"
        env = client.environment(directory)
        self.readers = [
            subprocess.Popen(
                [*before, *words, str(number)], cwd=directory, env=env,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for number, before in enumerate(([], wrap))
        ]  # fmt: skip

    def tell(self, line: str) -> None:
        for reader in self.readers:
            assert reader.stdin is not None
            reader.stdin.write(line + "\n")
            reader.stdin.flush()

    @contextlib.contextmanager
    def mapped(self, path: Path, writes: int) -> Iterator[memoryview]:
        """The log, while both have the file mapped."""
        with open(self.log_path, "w+b") as file:
            file.truncate(WORD * log_words(writes))
            log = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        self.tell(f"{path} {self.log_path}")
        end = time.monotonic() + 120
        while not (log[MAPPED] and log[MAPPED + 1]):
            if time.monotonic() > end:
                raise RuntimeError("the readers do not map")
            time.sleep(0.01)
        yield log
        log[ENDED] = time.monotonic_ns()
        for reader in self.readers:
            assert reader.stdout is not None
            if reader.stdout.readline() != "ended\n":
                raise RuntimeError("a reader has died")

    def close(self) -> None:
        for reader in self.readers:
            reader.communicate(timeout=300)


def issue(log: memoryview, fd: int, number: int, at: int) -> None:
    """Write a word at the second mount."""
    writes = (len(log) - HEAD) // 3
    log[HEAD + number] = at
    assert writes > number
    os.pwrite(fd, (number + 1).to_bytes(WORD, "little"), at)
    log[ISSUED] = number + 1


def lags(log: memoryview) -> list[float | None]:
    """Seconds from plain's finding to ours, of each word; None: given up."""
    writes = (len(log) - HEAD) // 3
    found: list[float | None] = []
    for one in range(writes):
        plain, ours = log[HEAD + writes + one], log[HEAD + 2 * writes + one]
        if plain:
            found.append(max(0.0, (ours - plain) / NS) if ours else None)
    return found


def tell(what: str, engine: str, all_lags: list[float | None], more: str) -> None:
    """A line of the table."""
    seen = sorted(lag for lag in all_lags if lag is not None)
    late = sum(lag > PROMISED_SECONDS for lag in seen) + len(all_lags) - len(seen)
    places = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99)]
    text = ", ".join(f"{name} {seen[int((len(seen) - 1) * q)]:.3f}" for name, q in places)
    print(
        f"{engine}, {what}: {len(all_lags)} writes, lag s {text}, max {seen[-1]:.3f}; "
        f"later than {PROMISED_SECONDS} s: {late}; never: {len(all_lags) - len(seen)}; {more}",
        flush=True,
    )


def measure(engine: str, runs: int, writes: int, mib: int, source: random.Random) -> None:
    """Both parts with one engine."""
    from lustre import client

    second = Path(os.environ[client.SECOND_VARIABLE])
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-writers-") as at:
        pair = Pair(Path(at), engine)
        found, unserved, over = list[float | None](), 0, 0
        for run in range(runs):
            path = client.mount() / f"run-{run}"
            client.write_file(path, mib * MIB)
            client.make_cold()
            with pair.mapped(path, 1) as log:
                time.sleep(source.uniform(0, LIFE_SECONDS))
                ours = served(log[MAPPED + 1])
                unserved += not ours
                page = source.randrange(mib * MIB // PAGE) * PAGE
                if engine == "cache" and run % 2 and ours:
                    page, over = source.choice(ours), over + 1
                with open(second / path.name, "r+b", buffering=0) as other:
                    issue(log, other.fileno(), 0, page)
            found += lags(log)
            path.unlink()
            if (run + 1) % 20 == 0:
                more = f"{over} to checkpoint pages; not served then: {unserved}"
                tell(f"{run + 1} runs", engine, found, more)
        if writes:
            path = client.mount() / "long"
            client.write_file(path, 64 * MIB)
            client.make_cold()
            pages = source.sample(range(64 * MIB // PAGE), writes)
            with (
                pair.mapped(path, writes) as log,
                open(second / path.name, "r+b", buffering=0) as other,
            ):
                time.sleep(LIFE_SECONDS)
                ours = served(log[MAPPED + 1])
                began = time.monotonic()
                for number, page in enumerate(pages):
                    issue(log, other.fileno(), number, page * PAGE)
                    time.sleep(max(0.0, began + (number + 1) / RATE - time.monotonic()))
            hit = sum(page * PAGE in ours for page in pages)
            tell("one run", engine, lags(log), f"{hit} to the {len(ours)} checkpoint pages")
            path.unlink()
        pair.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="writers.py", description=__doc__)
    parser.add_argument("--reader", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--writes", type=int, default=10_000)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--engine", action="append", choices=("cache", "pool"))
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    args = parser.parse_args()
    if args.reader is not None:
        serve(args.reader)
        return 0
    from lustre import client

    client.warm_up()
    print(f"seed {args.seed}", flush=True)
    for engine in args.engine or ("cache", "pool"):
        measure(engine, args.runs, args.writes, args.mib, random.Random(args.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
