# SPDX-License-Identifier: Apache-2.0
"""Nodes with an MPI between them: what one has read the others get from it, and whatever becomes of
MPI every byte is right."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_SECONDS, clean_environment, require
from fake_net import CHUNK, FILE_ID, fake_net
from nodes_bed import nodes_bed, why_none
from paths import ROOT

from uffdprefetch.demo.bed import SlowBed, why_no_bed
from uffdprefetch.native import net

pytestmark = [pytest.mark.root, pytest.mark.mpi]

MIB = 1 << 20
SIZE = 24 * MIB
BLOCK = 1 * MIB
#: Less than a node that waits for others gives them: what was looked for too early is absent so
#: long, whatever the client itself changes (one of NFS would ask again).
KEPT_SECONDS = 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cluster") / "data.bin"
    path.write_bytes(random.Random(7).randbytes(SIZE))
    return path


class Node:
    """One cluster_node."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.heard: list[dict[str, Any]] = []
        self._rest = b""

    def tell(self, **values: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(values) + "\n")
        self._process.stdin.flush()

    def hear(self, key: str) -> Any:
        """The next that it says of this kind."""
        assert self._process.stdout is not None
        fd, end = self._process.stdout.fileno(), time.monotonic() + HANG_SECONDS
        while True:
            while b"\n" not in self._rest:
                ready, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
                assert ready, f"{key} was awaited in vain, after {self.heard}"
                more = os.read(fd, 1 << 16)
                assert more, f"it has ended, after {self.heard}"
                self._rest += more
            line, _, self._rest = self._rest.partition(b"\n")
            self.heard.append(json.loads(line))
            if key in self.heard[-1]:
                return self.heard[-1][key]

    def end(self) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        status = self._process.wait(HANG_SECONDS)
        self._process.stdout.close()
        return status


def together(nodes: list[Node], least: int) -> None:
    """Wait until all have joined the same generation, which is ``least`` or a later one: on a busy
    machine one that does not come together in time is followed by the next."""
    joined = [0] * len(nodes)
    while min(joined) < max(least, *joined):
        late = joined.index(min(joined))
        joined[late] = nodes[late].hear("joined")


@contextmanager
def clients(source: Path, directory: Path, count: int) -> Iterator[list[Path]]:
    """The same directory as so many clients have it that keep names, also absent ones, and
    attributes in mind for a while, as those of NFS do; theirs ask the server after a change of
    their own, these do not."""
    what = ("attr", "entry", "negative")
    seconds = ",".join(f"{name}_timeout={KEPT_SECONDS}" for name in what)
    found = [directory / f"client{number}" for number in range(count)]
    with contextlib.ExitStack() as undo:
        for place in found:
            place.mkdir()
            subprocess.run(["bindfs", "-o", seconds, str(source), str(place)], check=True)
            undo.callback(subprocess.run, ["umount", "-l", str(place)], check=True)
        yield found


@contextmanager
def cluster(
    count: int, data: Path, directory: Path, forgetful: bool = False
) -> Iterator[list[Node]]:
    """Nodes that have met, each with its transport. ``forgetful``: each by a client of its own."""
    reason = why_none()
    require(not reason, reason)
    require(shutil.which("mpirun") is not None, "mpirun is missing: install openmpi-bin")
    meet = directory / "meet"
    meet.mkdir()
    meets = [meet] * count
    stack = contextlib.ExitStack()
    if forgetful:
        require(shutil.which("bindfs") is not None, "bindfs is missing: install bindfs")
        meets = stack.enter_context(clients(meet, directory, count))
    environ = {**clean_environment(), "PYTHONPATH": str(ROOT)}
    with stack, nodes_bed(count, directory) as bed:
        nodes = [
            Node(
                bed.start(
                    number,
                    [
                        *(
                            sys.executable,
                            "-m",
                            "tests.support.cluster_node",
                            str(meets[number]),
                            "run.0",
                        ),
                        *(str(number), str(count), str(128 * MIB), str(BLOCK), str(data)),
                    ],
                    environ,
                    ROOT,
                )
            )
            for number in range(count)
        ]
        try:
            together(nodes, 1)
            yield nodes
        finally:
            statuses = [node.end() for node in nodes]
    assert statuses == [0] * count
    assert os.listdir(meet) == []


def test_nodes_meet_where_clients_keep_names_and_attributes_in_mind(
    data: Path, tmp_path: Path
) -> None:
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    with cluster(2, data, tmp_path, forgetful=True) as nodes:
        for node in nodes:
            node.tell(do="read", start=0, length=SIZE)
            assert node.hear("read") == digest
        nodes[1].tell(do="counts")
        assert nodes[1].hear("counts")["others_bytes"] > 0


def test_what_a_node_has_read_the_others_get_from_it(data: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    with cluster(3, data, tmp_path) as nodes:
        for node in nodes:
            node.tell(do="read", start=0, length=SIZE)
            assert node.hear("read") == digest
        counts = []
        for node in nodes:
            node.tell(do="counts")
            counts.append(node.hear("counts"))
    assert all(one["read_bytes"] + one["others_bytes"] == SIZE for one in counts)
    assert counts[0]["read_bytes"] >= SIZE // 2
    assert sum(one["others_bytes"] for one in counts[1:]) > 0


def test_when_its_transport_is_killed_a_node_reads_storage_and_the_next_one_shares_again(
    data: Path, tmp_path: Path
) -> None:
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    with cluster(2, data, tmp_path) as nodes:
        for node in nodes:
            node.tell(do="read", start=0, length=SIZE)
            assert node.hear("read") == digest
        nodes[1].tell(do="kill")
        generation = nodes[1].hear("killed")
        nodes[1].tell(do="drop")
        nodes[1].tell(do="read", start=0, length=SIZE)
        assert nodes[1].hear("read") == digest
        together(nodes, generation + 1)
        nodes[1].tell(do="drop")
        nodes[1].hear("dropped")
        nodes[1].tell(do="read", start=0, length=SIZE)
        assert nodes[1].hear("read") == digest


def test_a_network_that_ends_waits_for_no_storage(tmp_path: Path) -> None:
    """A thread that reads for another node may be in a read that does not end."""
    reason = why_no_bed()
    require(reason is None, str(reason))
    source = tmp_path / "source"
    source.mkdir()
    (source / "data.bin").write_bytes(random.Random(9).randbytes(2 * MIB))
    with (
        SlowBed(source, bandwidth=80_000_000, latency_us=2_000_000) as bed,
        fake_net(2) as nodes,
    ):
        holder, asker = nodes.nodes
        path = bed.path("data.bin")
        files = [node.add(path) for node in (holder, asker)]
        for node in nodes.nodes:
            node.home.told(FILE_ID[0], range(8), 0)
        assert asker.pool.submit(1, files[1], 0, CHUNK)
        end = time.monotonic() + HANG_SECONDS
        while not any(message.kind == net.READING for message in holder.seen):
            assert time.monotonic() < end
            time.sleep(0.001)
        holder.net.close()
        assert holder.pool.file_counts(files[0]).read_bytes == 0, "it is still being read"
        nodes.nodes.remove(holder)
        while not asker.pool.reap():
            assert time.monotonic() < end
            time.sleep(0.01)
        assert asker.bytes(files[1], 0, CHUNK) == (source / "data.bin").read_bytes()[:CHUNK]
        holder.pool.close()
        holder.ring.close()
