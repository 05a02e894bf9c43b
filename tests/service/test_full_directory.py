# SPDX-License-Identifier: Apache-2.0
"""A run directory that is full: of blocks it is one that works; of files, the reason is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANG_SECONDS, require, uffdprefetch

MIB = 1 << 20
#: Maps a file, waits until the service has laid something over it, and reads it.
JOB = """
import mmap, sys, time
def served():
    with open("/proc/self/maps") as maps:
        return "/memfd:uffdprefetch" in maps.read()
with open(sys.argv[1], "rb") as file:
    m = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
while not served():
    time.sleep(0.01)
print(sum(m[at] for at in range(0, len(m), 4096)))
"""

pytestmark = pytest.mark.root


def within(
    tmp_path: Path, full: str, env: dict[str, str], *words: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of ours in a mount namespace in which the run directory is full, of blocks or
    of files."""
    require(os.geteuid() == 0, "only root can mount")
    where = tmp_path / "small"
    where.mkdir(exist_ok=True)
    size = "size=16k" if full == "blocks" else "size=1m,nr_inodes=2"
    fill = f"head -c 64k /dev/zero > {where}/fill" if full == "blocks" else "true"
    script = (
        f"mount -t tmpfs -o mode=700,{size} none {where} && mkdir -m 700 {where}/run &&"
        f' {{ {fill} 2> /dev/null || true; }} && exec "$@"'
    )
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", *uffdprefetch(*words)],
        env={**env, "UFFDPREFETCH_RUNDIR": f"{where}/run"}, cwd=tmp_path, capture_output=True,
        text=True, timeout=HANG_SECONDS,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "policy"), [("cache", "auto"), ("cache", "fixed"), ("pool", "auto")]
)
def test_without_a_free_block_a_job_is_served(
    tmp_path: Path, env: dict[str, str], engine: str, policy: str
) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(range(256)) * (4 * MIB // 256))
    done = within(
        tmp_path, "blocks", env, "wrap", "--strict", "--engine", engine, "--min-size", "1MiB",
        "--budget", "64MiB", "--policy", policy, "--size", "1MiB", "--distance", "1MiB",
        "-o", str(tmp_path / "out"), "--trace", str(tmp_path / "trace"),
        "--", sys.executable, "-S", "-c", JOB, str(data),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert "Traceback" not in done.stderr and (tmp_path / "trace.uptrace").exists()
    summary = json.loads((tmp_path / "out.summary.json").read_text())
    assert not summary["service"]["died"]
    assert [file["path"] for file in summary["files"]] == [str(data)]


@pytest.mark.parametrize("options", [(), ("--trace", "t"), ("--ownlock",), ("--strict",)])
def test_without_a_free_file_a_job_runs_and_the_reason_is_named(
    tmp_path: Path, env: dict[str, str], options: tuple[str, ...]
) -> None:
    words = ("wrap", *options, "-o", "/dev/null", "--", "echo", "ran")
    done = within(tmp_path, "files", env, *words)
    strict = "--strict" in options
    assert (done.returncode, done.stdout) == ((125, "") if strict else (0, "ran\n")), done.stderr
    assert f"the runtime directory {tmp_path}/small/run is full (ENOSPC: " in done.stderr
    assert "set UFFDPREFETCH_RUNDIR to another" in done.stderr and "Traceback" not in done.stderr


def test_doctor_tries_whether_it_has_room(tmp_path: Path, env: dict[str, str]) -> None:
    done = within(tmp_path, "files", env, "doctor", "--json")
    (check,) = [one for one in json.loads(done.stdout)["checks"]
                if one["name"] == "runtime directory"]  # fmt: skip
    assert (done.returncode, check["status"]) == (1, "cannot")
    assert "is full (ENOSPC: " in check["found"] and "UFFDPREFETCH_RUNDIR" in check["lift"]
    done = within(tmp_path, "blocks", env, "doctor", "--json")
    assert done.returncode != 1, done.stdout
