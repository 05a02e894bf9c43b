# SPDX-License-Identifier: Apache-2.0
"""What a cluster leaves behind when a node dies, and that the next run there removes it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import losses
import pytest
from conftest import require
from nodes_bed import Bed, nodes_bed, why_none

from uffdprefetch.cluster.brood import MARK
from uffdprefetch.demo.bed import why_no_bed

pytestmark = [pytest.mark.root, pytest.mark.mpi]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[losses.Data]:
    for reason in (why_none(), why_no_bed()):
        require(not reason, str(reason))
    require(shutil.which("mpirun") is not None, "mpirun is missing: install openmpi-bin")
    with losses.data(tmp_path_factory.mktemp("far")) as found:
        yield found


def started(bed: Bed, node: int, generation: int) -> list[int]:
    """What a node has of a generation's MPI."""
    found = []
    for pid in bed.processes(node):
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if f"{MARK}={generation} ".encode() in words:
            found.append(pid)
    return found


def test_what_nodes_leave_that_die_ends_and_the_next_run_removes_it(
    data: losses.Data, tmp_path: Path
) -> None:
    def run(bed: Bed) -> losses.Run:
        return losses.Run(bed, data.far, tmp_path, losses.How(), losses.MEANS[0])

    def of_mpi(node: int) -> list[Path]:
        return list((tmp_path / f"run{node}").glob("*.mpi"))

    with nodes_bed(losses.NODES, tmp_path) as bed:
        one = run(bed)
        try:
            one.until_it_shares()
            assert all(list(path.iterdir()) for n in range(3) for path in of_mpi(n)), "not in /tmp"
            assert [len(of_mpi(node)) for node in range(3)] == [1, 1, 1]
            assert all(started(bed, node, 1) for node in range(3))
            bed.kill(0)
            one.until(lambda: set(one.joined().values()) >= {2}, "sharing again")
            one.until(lambda: not started(bed, 1, 1) + started(bed, 2, 1), "its daemons to end")
            for node in range(1, losses.NODES):
                bed.kill(node)
        finally:
            one.end()
        left = [path.name for path in one.meeting.path.iterdir()]
        assert left and not [name for name in left if "key" in name]
        assert all(of_mpi(node) for node in range(losses.NODES))
        two = run(bed)
        try:
            two.until_it_shares()
            assert [len(of_mpi(node)) for node in range(3)] == [1, 1, 1], "its own"
            two.until(lambda: not one.meeting.path.exists(), "what the first one left to go")
        finally:
            two.end()
        assert not list(tmp_path.glob("uffdprefetch-meet-*"))
        assert not [path for node in range(3) for path in (tmp_path / f"run{node}").iterdir()]


DAEMON = """
import os, signal, sys, time
def cleans(*_):
    os.unlink(sys.argv[1])
    os._exit(0)
if os.fork():
    os._exit(0)
os.setsid()
if sys.argv[2] == "cleans":
    signal.signal(signal.SIGTERM, cleans)
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(20)
"""
PARENT = """
import os, subprocess, sys
from uffdprefetch.cluster.brood import Brood, adopt
adopt()
brood = Brood("/run/x")
path, kind = sys.argv[1:3]
other = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
for generation in (1, 2):
    words = [sys.executable, "-c", sys.argv[3], f"{path}{generation}", kind]
    no, environ = subprocess.DEVNULL, {**os.environ, **brood.mark(generation)}
    subprocess.run(words, env=environ, stdout=no, stderr=no)
    while not os.path.exists(f"{path}{generation}"):
        pass
brood.reap([other.pid])
assert len(brood.alive()) == 2 and len(brood.alive(1)) == 1 and not Brood("/run/y").alive()
brood.end(0.1, 10.0 if kind == "cleans" else 0.1)
brood.reap([other.pid])
assert not brood.alive() and other.poll() is None, "that one is nothing of a generation's"
other.kill()
other.wait()
"""


@pytest.mark.parametrize("kind", ["cleans", "stays"])
def test_a_daemon_is_asked_to_end_and_then_killed(kind: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", PARENT, str(tmp_path / "mark"), kind, DAEMON]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(tmp_path.iterdir())) == (0 if kind == "cleans" else 2)
