# SPDX-License-Identifier: Apache-2.0
"""`wrap --cluster` on two nodes: an unmodified program, a network file system, MPI between them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import HANG_SECONDS, clean_environment, require, wait_until
from nobody import UID, Nobody, with_open_device
from nodes_bed import Bed, nodes_bed, why_none
from paths import ROOT

from uffdprefetch.demo.bed import SlowBed, why_no_bed

pytestmark = [pytest.mark.root, pytest.mark.mpi]

MIB = 1 << 20
SIZE = 32 * MIB
#: Until both nodes have a transport, which shares its ring with the node's service; then these say
#: hello to each other.
SHARING = """
import glob, hashlib, mmap, os, sys, time
path, marks = sys.argv[1:3]
def sharing():
    found = 0
    for path in glob.glob("/proc/[0-9]*/maps"):
        try:
            found += "uffdprefetch-net" in open(path).read()
        except OSError:
            pass
    return found
while sharing() < 2:
    time.sleep(0.02)
open(os.path.join(marks, os.uname().nodename), "w").close()
while len(os.listdir(marks)) < 2:
    time.sleep(0.02)
time.sleep(1)
with open(path, "rb") as file:
    found = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
"""
READER = SHARING + "print(hashlib.sha256(found).hexdigest())"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "data.bin"
    path.parent.mkdir()
    path.write_bytes(random.Random(8).randbytes(SIZE))
    return path


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Where the nodes meet, and where their programs leave marks."""
    for reason in (why_none(), why_no_bed()):
        require(not reason, str(reason))
    require(shutil.which("mpirun") is not None, "mpirun is missing: install openmpi-bin")
    found = tmp_path / "meet", tmp_path / "marks"
    for path in found:
        path.mkdir()
    return found


def environment(number: int, directory: Path) -> dict[str, str]:
    """A node's."""
    return {
        **clean_environment(), "PYTHONPATH": str(ROOT), "GROUP_RANK": str(number),
        "UFFDPREFETCH_CLUSTER_RUN": f"test-{os.getpid()}",
        "UFFDPREFETCH_RUNDIR": str(directory / f"run{number}"),
    }  # fmt: skip


def wrapped(
    number: int, file: Path, meet: Path, directory: Path, *words: str, budget: str = "128MiB"
) -> list[str]:
    """A Python program on one of two nodes, of which both see the file."""
    return [
        *(sys.executable, "-m", "uffdprefetch", "wrap", "-q"),
        *("--budget", budget, "--min-size", "1MiB", "--cluster=2", "--meet", str(meet)),
        *("--share", f"{file.parent}/*", "-o", str(directory / f"out{number}"), "--"),
        *(sys.executable, *words),
    ]


def started(
    nodes: Bed,
    file: Path,
    meet: Path,
    marks: Path,
    directory: Path,
    program: str,
    budget: str = "128MiB",
) -> list[subprocess.Popen[str]]:
    """The same program on both nodes."""
    return [
        nodes.start(
            number,
            wrapped(
                *(number, file, meet, directory),
                *("-c", program, str(file), str(marks)),
                budget=budget,
            ),
            environment(number, directory),
            ROOT,
        )
        for number in range(2)
    ]


def test_two_nodes_read_a_file_once(data: Path, places: tuple[Path, Path], tmp_path: Path) -> None:
    meet, marks = places
    with SlowBed(data.parent, bandwidth=80_000_000) as bed, nodes_bed(2, tmp_path) as nodes:
        jobs = started(nodes, bed.path(data.name), meet, marks, tmp_path, READER)
        said = [job.communicate(timeout=HANG_SECONDS)[0] for job in jobs]
        read = bed.counters()["bytes"]
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    assert [job.returncode for job in jobs] == [0, 0] and said == [f"{digest}\n"] * 2
    run = json.loads((tmp_path / "out0.summary.json").read_text())
    assert not (tmp_path / "out1.summary.json").exists(), "one for both"
    for number, document in enumerate(run["nodes"]):
        cluster = document["cluster"]
        assert (cluster["node"], cluster["nodes"], cluster["present"]) == (number, 2, [0, 1])
        assert document["engine"] == "pool"
        assert not document["degradations"], document["degradations"]
    assert run["cluster"]["from_bytes"] > 0 and read < 2 * SIZE, "each would have read all of it"
    assert os.listdir(meet) == []


def test_two_nodes_of_a_user_without_privileges_read_a_file_once(
    data: Path, places: tuple[Path, Path], tmp_path: Path
) -> None:
    """Where every user may open /dev/userfaultfd. Nothing of theirs is the file's owner's."""
    with contextlib.ExitStack() as stack:
        nobody = Nobody(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        meet, marks = nobody.work / "meet", nobody.work / "marks"
        for path in (meet, marks):
            path.mkdir()
            os.chown(path, UID, UID)
        for module in ("numpy", "mpi4py"):
            nobody.bring(module)
        bed = stack.enter_context(SlowBed(data.parent, bandwidth=80_000_000))
        nodes = stack.enter_context(nodes_bed(2, tmp_path))
        file, jobs = bed.path(data.name), []
        for number in range(2):
            environ = nobody.environment(environment(number, tmp_path))
            environ["UFFDPREFETCH_RUNDIR"] = str(nobody.work / f"run{number}")
            words = [
                *nobody.wrap(nobody.work / f"out{number}"), nobody.python, "-c", READER, str(file),
                str(marks),
            ]  # fmt: skip
            words[words.index("-f") : words.index("-f")] = [
                *("--engine", "pool", "-q", "--budget", "128MiB", "--min-size", "1MiB"),
                *("--cluster=2", "--meet", str(meet), "--share", f"{file.parent}/*"),
            ]
            jobs.append(nodes.start(number, [*with_open_device(), *words], environ, ROOT))
        said = [job.communicate(timeout=HANG_SECONDS)[0] for job in jobs]
        run = json.loads((nobody.work / "out0.summary.json").read_text())
        read = bed.counters()["bytes"]
        assert not list(meet.iterdir())
    assert said == [f"{hashlib.sha256(data.read_bytes()).hexdigest()}\n"] * 2
    assert run["cluster"]["from_bytes"] > 0 and read < 2 * SIZE, run["degradations"]


#: Half of a file, in order.
HALF = (
    SHARING
    + """
half, digest = len(found) // 2, hashlib.sha256()
start = int(os.environ["GROUP_RANK"]) * half
for at in range(start, start + half, 1 << 20):
    digest.update(found[at : at + (1 << 20)])
print(digest.hexdigest())
"""
)


def test_shards_that_do_not_overlap_move_next_to_nothing(
    data: Path, places: tuple[Path, Path], tmp_path: Path
) -> None:
    meet, marks = places
    with SlowBed(data.parent, bandwidth=80_000_000) as bed, nodes_bed(2, tmp_path) as nodes:
        jobs = started(nodes, bed.path(data.name), meet, marks, tmp_path, HALF)
        said = [job.communicate(timeout=HANG_SECONDS)[0] for job in jobs]
        read_bytes = bed.counters()["bytes"]
    whole = data.read_bytes()
    halves = [hashlib.sha256(half).hexdigest() for half in (whole[: SIZE // 2], whole[SIZE // 2 :])]
    assert said == [f"{half}\n" for half in halves]
    run = json.loads((tmp_path / "out0.summary.json").read_text())
    assert run["cluster"]["present"] == [0, 1] and run["cluster"]["questions"] > 0
    # what is read ahead goes over the end of the first half, into what the other has there already
    assert run["cluster"]["from_bytes"] < SIZE // 2 and read_bytes < 1.1 * SIZE


#: Looks again and again which generation each 64 KiB of a file are of, until all are of the second;
#: then some times more.
WATCHER = (
    SHARING
    + """
seen, first = [], True
def look():
    return sorted({found[at] for at in range(0, len(found), 1 << 16)})
while seen != [2]:
    seen = look()
    if first:
        open(os.path.join(marks, os.uname().nodename + "-seen"), "w").close()
        print(seen, flush=True)
    first = False
print([look() for _ in range(3)], flush=True)
"""
)


@pytest.mark.parametrize("budget", ["128MiB", "12MiB"])
def test_a_file_that_is_rewritten_is_seen_so_on_every_node(
    budget: str, data: Path, places: tuple[Path, Path], tmp_path: Path
) -> None:
    """In place, while both have its pages, some of them from each other; or while most of it is
    passed on, and goes again."""
    meet, marks = places
    data.write_bytes(bytes([1]) * SIZE)
    with SlowBed(data.parent, bandwidth=80_000_000) as bed, nodes_bed(2, tmp_path) as nodes:
        jobs = started(nodes, bed.path(data.name), meet, marks, tmp_path, WATCHER, budget)
        wait_until(lambda: len(os.listdir(marks)) == 4, "both to have read it")
        with data.open("r+b") as writer:
            writer.write(bytes([2]) * SIZE)
        said = [job.communicate(timeout=HANG_SECONDS)[0] for job in jobs]
    assert said == ["[1]\n[[2], [2], [2]]\n"] * 2
    run = json.loads((tmp_path / "out0.summary.json").read_text())
    assert all(file["changed"] for file in run["files"]) and run["cluster"]["from_bytes"] > 0


#: Node 0 maps a file and reads it; node 1 opens it when that has been written since. First bytes of
#: its pages.
OPENED_LATER = (
    SHARING.rpartition("with open")[0]
    + """
def look():
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as found:
        return sorted({found[at] for at in range(0, len(found), 1 << 16)})
if os.environ["GROUP_RANK"] == "0":
    with open(path, "rb") as file:
        kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    print(sorted({kept[at] for at in range(0, len(kept), 1 << 16)}), flush=True)
    open(os.path.join(marks, "read"), "w").close()
    while not os.path.exists(os.path.join(marks, "seen")):
        time.sleep(0.02)
else:
    while not os.path.exists(os.path.join(marks, "written")):
        time.sleep(0.02)
    give_up = time.monotonic() + 20
    while (found := look()) != [2] and time.monotonic() < give_up:
        time.sleep(0.1)
    print(found, look(), flush=True)
    open(os.path.join(marks, "seen"), "w").close()
"""
)


def test_what_was_written_with_the_times_put_back_is_what_another_node_opens_then(
    data: Path, places: tuple[Path, Path], tmp_path: Path
) -> None:
    """As by `rsync --times --inplace` of a file of equal size: of FUSE only the bytes tell, which
    are sampled each second."""
    meet, marks = places
    data.write_bytes(bytes([1]) * SIZE)
    with (
        # one kernel has both nodes here: no page that one has left there is the other's
        SlowBed(data.parent, bandwidth=80_000_000, writers_behind=True, keep_cache=False) as bed,
        nodes_bed(2, tmp_path) as nodes,
    ):
        jobs = started(nodes, bed.path(data.name), meet, marks, tmp_path, OPENED_LATER)
        wait_until(lambda: (marks / "read").exists(), "node 0 to have read it")
        before = data.stat()
        with data.open("r+b") as writer:
            writer.write(bytes([2]) * SIZE)
        os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
        (marks / "written").touch()
        said = [job.communicate(timeout=HANG_SECONDS)[0] for job in jobs]
    assert said == ["[1]\n", "[2] [2]\n"]


def test_a_node_without_others_reads_for_itself(data: Path, tmp_path: Path) -> None:
    words = [
        *(sys.executable, "-m", "uffdprefetch", "wrap", "--cluster", "--engine", "pool"),
        *("-q", "-o", str(tmp_path / "out"), "--", sys.executable, "-c", "print('here')"),
    ]
    environ = {**clean_environment(), "PYTHONPATH": str(ROOT)}
    words.remove("-q")
    done = subprocess.run(words, env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "here\n")
    assert "each node reads for itself: no launcher says which node" in done.stderr
    strict = [*words[:4], "--strict", *words[4:]]
    done = subprocess.run(strict, env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 125 and "--cluster: no launcher" in done.stderr
