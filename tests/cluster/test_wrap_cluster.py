# SPDX-License-Identifier: Apache-2.0
"""`wrap --cluster` on two nodes: an unmodified program, a network file system, MPI between them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANG_SECONDS, clean_environment, require
from nodes_bed import nodes_bed, why_none
from paths import ROOT

from uffdprefetch.demo.bed import SlowBed, why_no_bed

pytestmark = [pytest.mark.root, pytest.mark.mpi]

MIB = 1 << 20
SIZE = 32 * MIB
#: Reads when both nodes have a transport, which shares its ring with the node's service; then these
#: say hello to each other.
READER = """
import glob, hashlib, mmap, os, sys, time
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
marks = sys.argv[2]
open(f"{marks}/{os.uname().nodename}", "w").close()
while len(os.listdir(marks)) < 2:
    time.sleep(0.02)
time.sleep(1)
with open(sys.argv[1], "rb") as file:
    found = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print(hashlib.sha256(found).hexdigest())
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "data.bin"
    path.parent.mkdir()
    path.write_bytes(random.Random(8).randbytes(SIZE))
    return path


def test_two_nodes_read_a_file_once(data: Path, tmp_path: Path) -> None:
    for reason in (why_none(), why_no_bed()):
        require(not reason, str(reason))
    require(shutil.which("mpirun") is not None, "mpirun is missing: install openmpi-bin")
    meet, marks = tmp_path / "meet", tmp_path / "marks"
    meet.mkdir()
    marks.mkdir()
    with SlowBed(data.parent, bandwidth=80_000_000) as bed, nodes_bed(2, tmp_path) as nodes:
        file, jobs = bed.path(data.name), []
        for number in range(2):
            environ = {
                **clean_environment(), "PYTHONPATH": str(ROOT), "GROUP_RANK": str(number),
                "UFFDPREFETCH_CLUSTER_RUN": f"test-{os.getpid()}",
                "UFFDPREFETCH_RUNDIR": str(tmp_path / f"run{number}"),
            }  # fmt: skip
            words = [
                *(sys.executable, "-m", "uffdprefetch", "wrap", "--engine", "pool"),
                *("--budget", "128MiB", "--min-size", "1MiB", "--cluster=2", "--meet", str(meet)),
                *("--share", f"{file.parent}/*", "-o", str(tmp_path / f"out{number}"), "--"),
                *(sys.executable, "-c", READER, str(file), str(marks)),
            ]
            jobs.append(nodes.start(number, words, environ, ROOT))
        said = [job.communicate(timeout=HANG_SECONDS)[0] for job in jobs]
        read = bed.counters()["bytes"]
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    assert [job.returncode for job in jobs] == [0, 0] and said == [f"{digest}\n"] * 2
    for number in range(2):
        document = json.loads((tmp_path / f"out{number}.summary.json").read_text())
        cluster = document["cluster"]
        assert (cluster["node"], cluster["nodes"], cluster["present"]) == (number, 2, [0, 1])
        assert document["engine"] == "pool" and cluster["from_bytes"] > 0
        assert not document["degradations"], document["degradations"]
    assert read < 2 * SIZE, "each would have read all of it"
    assert os.listdir(meet) == []


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
