# SPDX-License-Identifier: Apache-2.0
"""A file that is rewritten in the middle of an epoch, through another mount: when who sees it.

    python bench/lab/cluster_writer.py [--times N]

Three nodes (tests/support/nodes_bed.py, root) read one file over and over: two with `wrap
--cluster`, which have it from each other, and one without anything. The storage is a FUSE file
system that caches no attributes; who writes is beside it, as another client of a file system would
be. The plain reader maps the file anew in each pass, since nobody tells a FUSE client of a write.
Prints, for each node, when after the last write it has seen only new bytes, in seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / one) for one in ("", "bench", "tests", "tests/support")]

from cluster_nodes import environment, sharing, until, wrapped  # noqa: E402
from nodes_bed import nodes_bed  # noqa: E402

from uffdprefetch.demo.bed import SlowBed  # noqa: E402

MIB = 1 << 20
SIZE = 64 * MIB
#: Keeps all of it.
BUDGET = 128 * MIB
#: path, directory of marks. Passes until all is of the second generation; the mapping is kept, or
#: made anew.
READER = """
import mmap, os, sys, time
path, marks, anew = sys.argv[1], sys.argv[2], sys.argv[3] == "anew"
name, passes = os.uname().nodename, 0
def mapped():
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
found = mapped()
while True:
    if anew:
        found = mapped()
    seen = {found[at] for at in range(0, len(found), 4096)}
    if seen == {2}:
        break
    passes += 1
    if passes == 2:
        open(f"{marks}/{name}", "w").close()
print(time.monotonic(), flush=True)
"""


def run(directory: Path) -> list[float]:
    """Seconds of the two nodes that share and of the plain one."""
    source, marks = directory / "source", directory / "marks"
    source.mkdir()
    marks.mkdir()
    path = source / "data.bin"
    path.write_bytes(bytes([1]) * SIZE)
    with (
        SlowBed(source, bandwidth=200_000_000, writers_behind=True) as bed,
        nodes_bed(3, directory) as nodes,
    ):
        far, jobs = bed.path(path.name), []
        for node in range(3):
            wrap = wrapped(directory, node, BUDGET, *sharing(directory, 2, far))
            program = [sys.executable, "-c", READER, str(far), str(marks)]
            words = [*program, "anew"] if node == 2 else [*wrap, *program, "kept"]
            jobs.append(nodes.start(node, words, environment(directory, node), ROOT))
        until(lambda: len(os.listdir(marks)) == 3)
        with path.open("r+b") as writer:
            writer.write(bytes([2]) * SIZE)
        written = time.monotonic()
        said = [float(job.communicate()[0]) for job in jobs]
    return [round(at - written, 2) for at in said]


def main(argv: list[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args(argv)
    for _ in range(args.times):
        with tempfile.TemporaryDirectory(dir="/var/tmp") as text:
            print("node 0, node 1, plain:", *run(Path(text)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
