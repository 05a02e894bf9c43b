# SPDX-License-Identifier: Apache-2.0
"""The job of the measurements and tests on a Lustre client: reads a file through a mapping.

    job.py FILE PATTERN [RECORD_BYTES] [--wait] [--known | --planned]
           [--compute MILLISECONDS] [--weights | --populated]

PATTERN: contiguous; skipping:N (N processes, each reads every N-th record); shuffled (by the seed
that plan_of() has). One line of JSON: the sum of the processes' faults by getrusage(2), the bytes
read, and the SHA-256 of the records in the order of the file, which has each record once.
--wait: what was mapped is read when a line comes, after `ready`. --known: it is read when the
service has the file, --planned: the order (a real job computes before its first batch; an emulated
machine's service is not that quick). --compute: sleep so long after each record, as a job that
computes elsewhere. --weights: mapped as torch maps them, private and writable; --populated: as
llama.cpp does, shared with MAP_POPULATE.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import resource
import sys
import time
from typing import BinaryIO

RECORD_BYTES = 128 << 10
SEED = 16


def order_of(pattern: str, count: int, rank: int) -> list[int]:
    """The numbers of the records that a process reads, in its order."""
    name, _, number = pattern.partition(":")
    if name == "skipping":
        return list(range(rank, count, int(number)))
    order = list(range(count))
    if name == "shuffled":
        random.Random(SEED).shuffle(order)
    if name == "places":  # so many of them, at random
        return random.Random(SEED).sample(order, int(number))
    if name == "parts":  # so many of each so many: a column of a table
        some, of = map(int, number.split(":"))
        return [n for n in order if n % of < some]
    return order


def plan_of(file: str, size_bytes: int, record_bytes: int = RECORD_BYTES) -> dict[str, object]:
    """The plan file of ``shuffled``."""
    count = -(-size_bytes // record_bytes)
    ranges = [
        [i * record_bytes, min(size_bytes, (i + 1) * record_bytes)]
        for i in order_of("shuffled", count, 0)
    ]
    entry = {"file": file, "unit": "bytes", "epochs": [{"ranks": {"*": ranges}}]}
    return {"schema": "uffdprefetch.plan/1", "files": [entry]}


def option(name: str) -> float:
    """The number after a word of the command line, 0 without it."""
    return float(sys.argv[sys.argv.index(name) + 1]) if name in sys.argv else 0.0


def await_service() -> None:
    """Return when the service knows the file that is mapped, or its order."""
    name = "plans" if "--planned" in sys.argv else "files" if "--known" in sys.argv else ""
    if not name:
        return
    from uffdprefetch.view import watch as watching

    watching.ANSWER_SECONDS = 100.0  # it may be starting, on an emulated machine
    watch = watching.WatchClient.open(os.environ["UFFDPREFETCH_SOCKET"])
    end = time.monotonic() + 200
    while not getattr(watch.snapshot(100.0), name):
        if time.monotonic() > end:
            sys.exit(f"waited in vain for the service's {name}")
        time.sleep(0.5)
    watch.hang_up()


def mapping(file: BinaryIO) -> mmap.mmap:
    """The file, mapped as the command line says."""
    flags, prot = mmap.MAP_SHARED, mmap.PROT_READ
    if "--weights" in sys.argv:
        flags, prot = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    if "--populated" in sys.argv:
        flags |= mmap.MAP_POPULATE
    return mmap.mmap(file.fileno(), 0, flags=flags, prot=prot)


def read(view: mmap.mmap, pattern: str, record_bytes: int, rank: int) -> dict[str, object]:
    """Read one process's records: faults, bytes, and the digest of each record by its number."""
    count = -(-len(view) // record_bytes)
    digests = {}
    bytes_read, pause = 0, option("--compute") / 1000
    before = resource.getrusage(resource.RUSAGE_SELF)
    for number in order_of(pattern, count, rank):
        record = view[number * record_bytes : (number + 1) * record_bytes]
        bytes_read += len(record)
        digests[number] = hashlib.sha256(record).hexdigest()
        time.sleep(pause)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "majors": after.ru_majflt - before.ru_majflt,
        "minors": after.ru_minflt - before.ru_minflt,
        "bytes": bytes_read,
        "digests": digests,
    }


def child(path: str, pattern: str, record_bytes: int, rank: int, out: int) -> None:
    """One of several ranks: says what it found as JSON."""
    os.environ["RANK"] = str(rank)
    with open(path, "rb") as file, mapping(file) as view:
        await_service()
        said = json.dumps(read(view, pattern, record_bytes, rank)).encode()
    with os.fdopen(out, "wb") as pipe:
        pipe.write(said)


def several(path: str, pattern: str, record_bytes: int, ranks: int) -> list[dict[str, object]]:
    """As many processes, at the same time."""
    pipes = []
    for rank in range(ranks):
        theirs, ours = os.pipe()
        if os.fork() == 0:
            os.close(theirs)
            child(path, pattern, record_bytes, rank, ours)
            os._exit(0)
        os.close(ours)
        pipes.append(theirs)
    found = []
    for pipe in pipes:
        with os.fdopen(pipe, "rb") as file:
            found.append(json.loads(file.read()))
    for _ in pipes:
        os.wait()
    return found


def main() -> None:
    path, pattern = sys.argv[1], sys.argv[2]
    given = sys.argv[3:4]
    record_bytes = int(given[0]) if given and given[0].isdigit() else RECORD_BYTES
    name, _, ranks = pattern.partition(":")
    if name == "skipping":
        found = several(path, pattern, record_bytes, int(ranks))
    else:
        with open(path, "rb") as file, mapping(file) as view:
            if "--wait" in sys.argv:
                print("ready", flush=True)
                sys.stdin.readline()
            await_service()
            found = [read(view, pattern, record_bytes, 0)]
    digests = {int(number): digest for one in found for number, digest in one["digests"].items()}
    whole = hashlib.sha256("".join(digests[n] for n in sorted(digests)).encode()).hexdigest()
    said = {name: sum(one[name] for one in found) for name in ("majors", "minors", "bytes")}
    print(json.dumps({**said, "records": len(digests), "digest": whole}), flush=True)


if __name__ == "__main__":
    main()
