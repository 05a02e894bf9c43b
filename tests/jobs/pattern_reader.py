# SPDX-License-Identifier: Apache-2.0
"""Reads a file through a mapping in a known pattern, and prints what it did.

    pattern_reader.py FILE PATTERN RECORD_BYTES [--wait] [--resident]

PATTERN: consecutive, stride:N, random, backward, epochs:N, change (half consecutive, half random),
faults:N (N single pages, 1 MiB apart). With RANK and WORLD_SIZE each rank reads its share, a stride
pattern begins at record RANK. One line of JSON: the kernel's own counts of faults around the
reading, and how many different pages were read. --wait: begin when a line comes, after `ready`.
--resident: say how many bytes of the file are cached at the end, and when that was.
"""

import json
import mmap
import os
import random
import resource
import sys
import time


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
    before = resource.getrusage(resource.RUSAGE_SELF)
    for at in places:
        view[at]
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


main()
