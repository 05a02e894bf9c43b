# SPDX-License-Identifier: Apache-2.0
"""Reads a file through a mapping in a known pattern, and prints what it did.

    pattern_reader.py FILE PATTERN RECORD_BYTES [--wait] [--resident] [--ahead]

PATTERN: consecutive, stride:N, random, backward, epochs:N, change (half consecutive, half random),
faults:N (N single pages, 1 MiB apart). With RANK and WORLD_SIZE each rank reads its share, a stride
pattern begins at record RANK. One line of JSON: the kernel's own counts of faults around the
reading, and how many different pages were read. --wait: begin when a line comes, after `ready`.
--resident: say how many bytes of the file are cached at the end, and when that was. --ahead: begin
when checkpoints lie over the mapping; after a quarter wait until somebody has read further ahead
than the kernel does. A rank ends when the recording that UPTEST_TRACE names knows it.
"""

import json
import mmap
import os
import random
import resource
import sys
import time
from collections.abc import Callable


def records(pattern: str, count: int, rank: int, ranks: int) -> list[int]:
    """The numbers of the records in the order of reading."""
    name, _, number = pattern.partition(":")
    share = range(count * rank // ranks, count * (rank + 1) // ranks)
    shuffled = list(share)
    random.Random(rank).shuffle(shuffled)
    if name == "stride":
        return list(range(rank, count, int(number)))
    if name == "random":
        return shuffled
    if name == "backward":
        return list(reversed(share))
    if name == "epochs":
        return list(share) * int(number)
    if name == "change":
        half = len(share) // 2
        return list(share[:half]) + [x for x in shuffled if x >= share[half]]
    return list(share)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a state; a hang ends us, loudly."""
    end = time.monotonic() + 140
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"waited in vain for {what}")
        time.sleep(0.002)


def has_checkpoints() -> bool:
    with open("/proc/self/maps") as maps:
        return "uffdprefetch-checkpoints" in maps.read()


def is_known(trace: str, rank: int) -> bool:
    """Whether a recorder has written who we are."""
    from uffdprefetch.trace.file import trace_file

    found = trace_file.read(trace).processes.get(os.getpid())
    return found is not None and found.rank == rank


def read(view: mmap.mmap, places: list[int]) -> None:
    """Touch a page after the other."""
    for at in places:
        view[at]


def main() -> None:
    path, pattern, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    fd = os.open(path, os.O_RDONLY)
    view = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    if pattern.startswith("faults:"):
        places = [i << 20 for i in range(int(pattern[7:]))]
    else:
        order = records(pattern, len(view) // size, rank, ranks)
        places = [at for i in order for at in range(i * size, (i + 1) * size, 4096)]
    if "--wait" in sys.argv:
        print("ready", flush=True)
        sys.stdin.readline()
    # what the loop itself touches first is no fault of the file's
    read(mmap.mmap(-1, 8192), [0, 4096])
    if "--ahead" in sys.argv:
        from uffdprefetch.demo.bed import resident_bytes

        until(has_checkpoints, "checkpoints")
        quarter, places = places[: len(places) // 4], places[len(places) // 4 :]
        read(view, quarter)
        further = len(set(quarter)) * 4096 + (1 << 20)
        until(lambda: resident_bytes(path) >= further, "bytes ahead of us")
    before = resource.getrusage(resource.RUSAGE_SELF)
    read(view, places)
    after = resource.getrusage(resource.RUSAGE_SELF)
    majors = after.ru_majflt - before.ru_majflt
    said = {
        "path": path,
        "pid": os.getpid(),
        "rank": rank,
        "faults": after.ru_minflt - before.ru_minflt + majors,
        "majors": majors,
        "pages": len(set(places)),
    }
    if "--resident" in sys.argv:
        from uffdprefetch.demo.bed import resident_bytes

        said["resident_ns"] = time.monotonic_ns()
        said["resident"] = resident_bytes(path)
    os.write(1, json.dumps(said).encode() + b"\n")  # in one piece: ranks share the pipe
    if "RANK" in os.environ and "UPTEST_TRACE" in os.environ:
        # it reads who we are when it comes to it, and while we are there; no real rank ends so soon
        until(lambda: is_known(os.environ["UPTEST_TRACE"], rank), "the recorder to know us")


main()
