# SPDX-License-Identifier: Apache-2.0
"""`uffdprefetch cluster -- srun ...` in a batch job of a Slurm of two nodes: a byte is read once
for both, and nothing is left, however the job ends."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from bed import VARIABLE, Bed, running
from conftest import require, uffdprefetch, wait_until
from paths import ROOT

from uffdprefetch.demo.bed import SlowBed, why_no_bed

if not os.environ.get(VARIABLE):
    pytest.skip(f"no Slurm to test with ({VARIABLE} is not set)", allow_module_level=True)

pytestmark = [pytest.mark.root, pytest.mark.mpi]

MIB = 1 << 20
SIZE = 32 * MIB
#: Reads all of a file, a quarter of it at first, until it may go on.
READER = """
import hashlib, mmap, os, sys, time
path, marks = sys.argv[1:3]
with open(path, "rb") as file:
    found = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
sum(found[at] for at in range(0, len(found) // 4, 4096))
open(os.path.join(marks, os.uname().nodename), "w").close()
while not os.path.exists(os.path.join(marks, "go")):
    time.sleep(0.02)
print(os.uname().nodename, hashlib.sha256(found).hexdigest(), flush=True)
"""


class Cluster:
    """A Slurm, slow storage that both nodes see, and a place for what a job leaves."""

    def __init__(self, slurm: Bed, storage: SlowBed, data: Path, directory: Path) -> None:
        self.slurm, self.storage, self.data = slurm, storage, data
        self.directory = directory

    def submit(
        self, *options: str, sbatch: tuple[str, ...] = (), go: bool = True,
        by: Sequence[str] = (), reader: str = READER,
    ) -> Job:  # fmt: skip
        """`cluster options -- srun reader` as a batch job; with ``by``, `srun wrap options -- by
        reader`."""
        return Job(self, options, sbatch, go, by, reader)


class Job:
    def __init__(
        self, cluster: Cluster, options: tuple[str, ...], sbatch: tuple[str, ...], go: bool,
        by: Sequence[str], program: str,
    ) -> None:  # fmt: skip
        self.cluster = cluster
        self.directory = cluster.directory / f"job-{time.monotonic_ns()}"
        self.marks = self.directory / "marks"
        self.marks.mkdir(parents=True)
        reader = self.directory / "reader.py"
        reader.write_text(program)
        if go:
            self.go()
        far = cluster.storage.path(cluster.data.name)
        srun = ["srun", "-N2", "--ntasks-per-node=1"]
        first, then = (srun, by) if by else ([], srun)
        words = [
            *first, *uffdprefetch("wrap" if by else "cluster", *options),
            *("--budget", "128MiB", "--min-size", "1MiB"),
            *("--share", f"{far.parent}/*", "-o", "out", "--", *then),
            *([] if by else [uffdprefetch()[0]]), str(reader), str(far), str(self.marks),
        ]  # fmt: skip
        script = self.directory / "job.sh"
        script.write_text(f"#!/bin/sh\n{shlex.join(words)}\necho status $?\n")
        environ = cluster.slurm.environment
        before = dict(environ)
        environ |= {"PYTHONPATH": str(ROOT)}
        try:
            said = cluster.slurm.slurm(
                "sbatch", "--parsable", "-N2", f"-D{self.directory}", "-oout.txt", *sbatch,
                str(script),
            )  # fmt: skip
        finally:
            environ.clear()
            environ.update(before)
        assert said.returncode == 0, said.stderr
        self.number = said.stdout.strip()

    def go(self) -> None:
        (self.marks / "go").touch()

    def both_read(self) -> None:
        wait_until(lambda: len(os.listdir(self.marks)) >= 2, lambda: f"readers: {self.output()}")

    def output(self) -> str:
        path = self.directory / "out.txt"
        return path.read_text() if path.exists() else ""

    def ended(self) -> str:
        """What it has said, when it has left the queue."""
        wait_until(
            lambda: not self.cluster.slurm.slurm("squeue", "-h", "-j", self.number).stdout.strip(),
            lambda: f"the end of the job: {self.output()}",
        )
        return self.output()

    def leaves_nothing(self) -> None:
        slurm = self.cluster.slurm
        wait_until(lambda: not slurm.processes(), lambda: f"the end of {slurm.processes()}")
        wait_until(lambda: not slurm.left(), lambda: f"no names in {slurm.left()}")
        wait_until(
            lambda: not list(self.directory.glob("uffdprefetch-meet-*")), "nothing of the meeting"
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require(why_no_bed() is None, str(why_no_bed()))
    require(shutil.which("mpirun") is not None, "mpirun is missing: install openmpi-bin")
    source, directory = (tmp_path_factory.mktemp(name) for name in ("source", "slurm"))
    data = source / "data.bin"
    data.write_bytes(random.Random(9).randbytes(SIZE))
    with (
        SlowBed(source, bandwidth=80_000_000) as storage,  # before the nodes' mounts are copied
        running(directory, "cgroup", uffdprefetch()) as slurm,
    ):
        yield Cluster(slurm, storage, data, directory)


def test_a_batch_job_s_nodes_read_a_file_once(cluster: Cluster) -> None:
    before = cluster.storage.counters()["bytes"]
    job = cluster.submit()
    said = job.ended()
    digest = hashlib.sha256(cluster.data.read_bytes()).hexdigest()
    assert sorted(said.splitlines()[:2]) == [f"node1 {digest}", f"node2 {digest}"], said
    assert "status 0" in said
    assert cluster.storage.counters()["bytes"] - before < 1.5 * SIZE, "each would read all of it"
    run = json.loads((job.directory / "out.summary.json").read_text())
    assert len(run["nodes"]) == 2 and run["cluster"]["present"] == [0, 1]
    assert run["cluster"]["from_bytes"] > 0 and len(run["ranks"]) == 2
    assert run["cluster"]["mpi"].startswith("srun"), "a step, not an mpirun in it"
    (file,) = run["files"]
    assert file["pool_others_bytes"] == run["cluster"]["from_bytes"]
    job.leaves_nothing()


#: Each rank its part of an epoch that PyTorch's sampler has shuffled.
TRAINS = """
import hashlib, os, sys, numpy, torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler
class Records(Dataset):
    def __init__(self, path):
        self.all = numpy.memmap(path, dtype=numpy.uint8, mode="r").reshape(-1, 1 << 15)
    def __len__(self):
        return len(self.all)
    def __getitem__(self, i):
        return i, hashlib.sha256(self.all[i]).hexdigest()
dist.init_process_group("gloo")
data = Records(sys.argv[1])
sampler = DistributedSampler(data, shuffle=True, drop_last=False)
seen = {}
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in DataLoader(data, batch_size=16, sampler=sampler):
        seen.update(zip(batch[0].tolist(), batch[1]))
rank = dist.get_rank()
torch.save(seen, os.path.join(sys.argv[2], f"rank{rank}"))
dist.barrier()
print("rank", rank, "of", dist.get_world_size(), len(seen), flush=True)
"""


@pytest.mark.torch
def test_torchrun_on_each_node(cluster: Cluster) -> None:
    torch = pytest.importorskip("torch")
    torchrun = [
        *(uffdprefetch()[0], "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=node1:29517", "--rdzv-id=up"),
    ]
    job = cluster.submit(
        "--engine", "pool", "--cluster", by=torchrun, reader=TRAINS, sbatch=("--export=ALL",)
    )
    said = job.ended()
    assert sorted(line for line in said.splitlines() if line.startswith("rank ")) and (
        "status 0" in said
    ), said
    whole = cluster.data.read_bytes()
    for rank in range(4):
        seen = torch.load(job.marks / f"rank{rank}", weights_only=False)
        assert len(seen) > SIZE // (1 << 15) // 4
        for number, digest in seen.items():
            record = whole[number << 15 : (number + 1) << 15]
            assert digest == hashlib.sha256(record).hexdigest()
    run = json.loads((job.directory / "out.summary.json").read_text())
    assert len(run["nodes"]) == 2 and len(run["ranks"]) == 4
    assert run["cluster"]["present"] == [0, 1] and run["cluster"]["from_bytes"] > 0
    job.leaves_nothing()


def test_a_cancelled_job_leaves_nothing(cluster: Cluster) -> None:
    job = cluster.submit(go=False)
    job.both_read()
    cluster.slurm.slurm("scancel", job.number)
    job.ended()
    job.leaves_nothing()


def test_a_job_whose_command_is_killed_leaves_only_what_the_next_one_removes(
    cluster: Cluster,
) -> None:
    """Its batch script goes on to its end, at which Slurm kills the rest."""
    job = cluster.submit(go=False)
    job.both_read()
    commands = [
        pid for pid in cluster.slurm.processes()
        if b"\0cluster\0--budget" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]  # fmt: skip
    os.kill(min(commands), signal.SIGKILL)  # the other is its child
    job.ended()
    wait_until(lambda: not cluster.slurm.processes(), "the end of all processes")
    follows = cluster.submit()
    assert "status 0" in follows.ended()
    follows.leaves_nothing()


def test_a_job_that_hands_on_no_environment_runs_without(cluster: Cluster) -> None:
    job = cluster.submit(sbatch=("--export=NONE",))
    said = job.ended()
    assert "running the job without prefetching: SLURM_EXPORT_ENV=NONE" in said
    assert said.count(hashlib.sha256(cluster.data.read_bytes()).hexdigest()) == 2
    strict = cluster.submit("--strict", sbatch=("--export=NONE",))
    assert "status 125" in strict.ended()
    strict.leaves_nothing()


def test_where_mpi_makes_no_world_it_is_said_and_strict_runs_nothing(cluster: Cluster) -> None:
    job = cluster.submit("--launcher", "srun --mpi=none")
    said = job.ended()
    assert "each node reads for itself: nodes do not share: srun has brought up no MPI" in said
    assert said.count(hashlib.sha256(cluster.data.read_bytes()).hexdigest()) == 2
    assert "nodes shared nothing: srun has brought up no MPI" in said
    strict = cluster.submit("--strict", "--launcher", "srun --mpi=none")
    said = strict.ended()
    assert "status 125" in said and "brought up no MPI" in said
    assert hashlib.sha256(cluster.data.read_bytes()).hexdigest() not in said
    strict.leaves_nothing()
