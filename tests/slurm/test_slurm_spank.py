# SPDX-License-Identifier: Apache-2.0
"""`srun --uffdprefetch`: the SPANK plugin of packaging/spank in a Slurm of two nodes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bed import VARIABLE, Bed
from conftest import require, wait_until
from paths import ROOT

if not os.environ.get(VARIABLE):
    pytest.skip(f"no Slurm to test with ({VARIABLE} is not set)", allow_module_level=True)

pytestmark = [pytest.mark.root]

MIB = 1 << 20
READER = """
import hashlib, mmap, os, sys
with open(sys.argv[1], "rb") as file:
    found = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print(os.uname().nodename, hashlib.sha256(found).hexdigest(), flush=True)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    for name in ("srun", "slurmd", "munged", "cc"):
        require(shutil.which(name) is not None, f"{name} is not there")
    require(Path("/usr/include/slurm/spank.h").exists(), "no slurm/spank.h (libslurm-dev)")
    directory = tmp_path_factory.mktemp("spank")
    plugin = tmp_path_factory.mktemp("plugin") / "uffdprefetch.so"  # no module of its name here
    source = ROOT / "packaging" / "spank" / "uffdprefetch.c"
    words = ["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*words, "-o", plugin, source], check=True)
    program = directory / "program"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m uffdprefetch "$@"\n')
    program.chmod(0o755)
    bed = Bed(directory, "cgroup", [])
    bed.up(2)
    bed._call("plugin", str(plugin), f"program={program}")
    bed.environment["XDG_STATE_HOME"] = str(directory / "state")
    (directory / "data").write_bytes(os.urandom(48 * MIB))
    (directory / "reader.py").write_text(READER)
    yield bed
    bed.down()


def left() -> set[Path]:
    """Directories of the plugin's."""
    return set(Path("/tmp").glob("uffdprefetch-spank-*"))


def read(slurm: Bed, *options: str) -> subprocess.CompletedProcess[str]:
    """Both nodes' two tasks read all of the file."""
    reader = [sys.executable, str(slurm.directory / "reader.py"), str(slurm.directory / "data")]
    return slurm.slurm("srun", "-N2", "-n4", *options, *reader)


def test_the_tasks_of_each_node_are_served_by_one_service(slurm: Bed) -> None:
    out, before = slurm.directory / "served.%h", left()
    done = read(slurm, f"--uffdprefetch=--strict -o {out}")
    assert done.returncode == 0, done.stderr
    digest = hashlib.sha256((slurm.directory / "data").read_bytes()).hexdigest()
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 4 and {line[1] for line in lines} == {digest}
    names = list[Path]()

    def written() -> bool:  # the step's end comes after its tasks'
        names[:] = slurm.directory.glob("served.*.summary.json")
        return len(names) == 2 and all(name.stat().st_size for name in names)

    wait_until(written, "both summaries")
    found = [json.loads(name.read_text()) for name in names]
    for summary in found:
        assert [file["path"] for file in summary["files"]] == [str(slurm.directory / "data")]
    assert sorted(rank["rank"] for one in found for rank in one["ranks"]) == [0, 1, 2, 3]
    wait_until(lambda: not slurm.processes(), "nothing of ours to be left")
    wait_until(lambda: left() == before, "its directories to be gone")


def test_without_the_option_nothing_is_different(slurm: Bed) -> None:
    done = slurm.slurm("srun", "-N2", "-n2", "env")
    assert done.returncode == 0
    assert "LD_PRELOAD" not in done.stdout and "UFFDPREFETCH_SOCKET" not in done.stdout


def test_options_that_are_wrong_are_said_and_the_tasks_run(slurm: Bed) -> None:
    done = slurm.slurm("srun", "-N1", "--uffdprefetch=--engine warp", "echo", "ran")
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert "'warp' is none of cache, pool, off" in done.stderr
    done = slurm.slurm("srun", "-N1", "--uffdprefetch=--engine pool 8GiB", "echo", "ran")
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert "8GiB is no option of wrap, nor the value of one" in done.stderr


def test_the_status_of_the_tasks_is_their_own(slurm: Bed) -> None:
    done = slurm.slurm("srun", "-N2", "-n2", "--uffdprefetch", "sh", "-c", "exit 7")
    assert done.returncode == 7
