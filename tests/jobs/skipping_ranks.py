# SPDX-License-Identifier: Apache-2.0
"""Four ranks that read an LMDB, as a launcher starts them.

    skipping_ranks.py DATABASE HOW

HOW: see order(). All go on together when they have mapped it (`mapped`), when each has read a third
(`third`), and when they have read all (`ended`): then the word is said, and a line from stdin
awaited. Before the last each rank says the digest of its values.
"""

import hashlib
import json
import os
import random
import sys
from collections.abc import Callable

import lmdb

RANKS = 4
MEETINGS = ("mapped", "third", "ended")


def order(how: str, rank: int, count: int) -> list[int]:
    """The records of a rank: `skip:N` (of each N one), or a quarter of all, `contiguous` or
    `random`."""
    name, _, number = how.partition(":")
    if name == "skip":
        return list(range(rank, count, int(number)))
    if name == "random":
        return random.Random(rank).sample(range(count), count // RANKS)
    return list(range(count * rank // RANKS, count * (rank + 1) // RANKS))


def digest(
    database: str, how: str, rank: int, meet: Callable[[str], object] = lambda name: None
) -> str:
    """Of a rank's values, in its order."""
    env = lmdb.open(database, readonly=True, lock=False)
    numbers, sha = order(how, rank, env.stat()["entries"]), hashlib.sha256()
    meet("mapped")
    with env.begin(buffers=True) as txn:
        for position, number in enumerate(numbers):
            if position == len(numbers) // 3:
                meet("third")
            sha.update(txn.get(b"%08d" % number))
    env.close()
    return sha.hexdigest()


def be_rank(database: str, how: str, fds: list[int]) -> None:
    """One of them; ``fds``: for each meeting where to say that it is there, and what then ends."""
    pairs = dict(zip(MEETINGS, zip(fds[::2], fds[1::2], strict=True), strict=True))

    def meet(name: str) -> None:
        there, others = pairs[name]
        os.write(there, b".")
        os.read(others, 1)

    rank = int(os.environ["RANK"])
    line = json.dumps({"rank": rank, "sha256": digest(database, how, rank, meet)}) + "\n"
    os.write(1, line.encode())
    meet("ended")


def main() -> int:
    """Start them; 1 if one failed."""
    database, how, *fds = sys.argv[1:]
    if fds:
        be_rank(database, how, [int(fd) for fd in fds])
        return 0
    pipes = [(os.pipe(), os.pipe()) for _ in MEETINGS]
    theirs = [fd for there, others in pipes for fd in (there[1], others[0])]
    for fd in theirs:
        os.set_inheritable(fd, True)
    for rank in range(RANKS):
        if os.fork() == 0:
            words = [sys.executable, *sys.argv, *map(str, theirs)]
            os.execve(sys.executable, words, {**os.environ, "RANK": str(rank)})
    for fd in theirs:
        os.close(fd)
    for name, (there, others) in zip(MEETINGS, pipes, strict=True):
        if sum(len(os.read(there[0], 1)) for _ in range(RANKS)) == RANKS:  # else one has failed
            os.write(1, json.dumps({"met": name}).encode() + b"\n")
            sys.stdin.readline()
        os.close(others[1])
    return int(any(os.wait()[1] for _ in range(RANKS)))


if __name__ == "__main__":
    sys.exit(main())
