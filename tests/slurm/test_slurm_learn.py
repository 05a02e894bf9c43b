# SPDX-License-Identifier: Apache-2.0
"""`srun uffdprefetch wrap --learn -- python ...`, two ranks on each of two nodes: their start is
one run of one profile, which one replay a node reads ahead, each byte of storage once."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bed import VARIABLE, Bed, running
from conftest import require, uffdprefetch, wait_until

from uffdprefetch.demo.bed import SlowBed, drop_cache, why_no_bed

if not os.environ.get(VARIABLE):
    pytest.skip(f"no Slurm to test with ({VARIABLE} is not set)", allow_module_level=True)

pytestmark = [pytest.mark.root, pytest.mark.mpi]

KEY, RANKS, FILES, FILE_BYTES = "ranks", 4, 40, 512 << 10
#: A start: files one after the other, then nothing new. The storage takes a second for them.
SCRIPT = """
import sys, time
for number in range(int(sys.argv[2])):
    with open(f"{sys.argv[1]}/part{number}", "rb") as file:
        file.read()
"""


class Starts:
    """A Slurm, and what a program reads when it starts, on storage that all nodes see."""

    def __init__(self, slurm: Bed, storage: SlowBed, directory: Path) -> None:
        self.slurm, self.storage, self.directory = slurm, storage, directory
        slurm.environment["XDG_CACHE_HOME"] = str(directory / "cache")
        (directory / "start.py").write_text(SCRIPT)

    def run(self) -> tuple[dict[str, Any], int]:
        """All ranks, from cold: the summary of each node, and the bytes that storage has given."""
        for old in self.directory.glob("out.*"):
            old.unlink()
        for number in range(FILES):
            drop_cache(self.storage.path(f"part{number}"))
        before = self.storage.counters()["bytes"]
        job = [sys.executable, str(self.directory / "start.py"), str(self.storage.mountpoint)]
        words = self.slurm.wrap(*job, str(FILES), options=(f"--learn={KEY}",))
        said = self.slurm.slurm("srun", "-N2", f"-n{RANKS}", "--ntasks-per-node=2", *words)
        assert said.returncode == 0, said.stderr
        wait_until(lambda: not self.slurm.processes(), "the end of all that is ours")
        nodes = {}
        for path in self.directory.glob("out.*.summary.json"):
            nodes[path.name.split(".")[1]] = json.loads(path.read_text())
        assert sorted(nodes) == ["node1", "node2"], said.stderr
        return nodes, self.storage.counters()["bytes"] - before

    def profile(self) -> dict[str, Any]:
        """As `profile show` has it."""
        words = uffdprefetch("profile", "show", "--json", KEY)
        found: dict[str, Any] = json.loads(self.slurm.slurm(*words).stdout)
        return found


@pytest.fixture
def starts(tmp_path: Path) -> Iterator[Starts]:
    require(why_no_bed() is None, str(why_no_bed()))
    source, directory = tmp_path / "source", tmp_path / "slurm"
    source.mkdir()
    directory.mkdir()
    for number in range(FILES):
        (source / f"part{number}").write_bytes(random.Random(number).randbytes(FILE_BYTES))
    with (
        SlowBed(source, bandwidth=20_000_000) as storage,  # before the nodes' mounts are copied
        running(directory, "cgroup", uffdprefetch()) as slurm,
    ):
        yield Starts(slurm, storage, directory)


def test_the_ranks_of_all_nodes_are_one_start(starts: Starts) -> None:
    nodes, size = starts.run()
    assert {one["learn"]["state"] for one in nodes.values()} == {"first run"}
    assert FILES * FILE_BYTES <= size < 1.2 * FILES * FILE_BYTES  # ranks that read side by side
    profile = starts.profile()
    ours = str(starts.storage.mountpoint / "part")
    whole = [one for one in profile["entries"] if one["path"].startswith(ours)]
    assert (profile["runs"], len(whole)) == (1, FILES)

    nodes, size = starts.run()
    assert FILES * FILE_BYTES <= size < 1.2 * FILES * FILE_BYTES
    for node, one in nodes.items():
        learn = one["learn"]
        # where the node is busy the job may end before the last path is read
        assert learn["state"] in ("done", "cut short"), (node, learn)
        assert 0 < learn["paths"] <= len(profile["entries"]), f"{node}: more than one replay"
        if learn["state"] == "done":
            assert learn["bytes"] >= FILES * FILE_BYTES and learn["used"] >= FILES
    assert starts.profile()["runs"] == 2
