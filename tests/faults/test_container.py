# SPDX-License-Identifier: Apache-2.0
"""In a container as Docker and Podman make it: their seccomp filter, with and without the device
that docs/containers.md asks for."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_SECONDS, require, uffdprefetch
from paths import ROOT

PROFILE = Path("/usr/share/containers/seccomp.json")
FILTER = ROOT / "tests" / "support" / "with_seccomp.py"
SIZE = 48 << 20


@pytest.fixture(scope="module")
def filtered() -> tuple[str, ...]:
    """The words before a command."""
    require(PROFILE.exists(), f"there is no {PROFILE} (golang-github-containers-common)")
    bindings = subprocess.run(["/usr/bin/python3", "-c", "import seccomp"], capture_output=True)
    require(bindings.returncode == 0, "python3-seccomp is not installed")
    return "/usr/bin/python3", str(FILTER), str(PROFILE)


@pytest.fixture
def hidden() -> tuple[str, ...]:
    """The words before a command that is to find no device, as without --device."""
    require(os.geteuid() == 0, "only root can hide a device")
    hide = 'mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && exec "$@"'
    return "unshare", "-m", "sh", "-c", hide, "sh"


def doctor(env: dict[str, str], *before: str) -> dict[str, Any]:
    done = subprocess.run(
        [*before, *uffdprefetch("doctor", "--json")], env=env, capture_output=True, text=True,
        timeout=HANG_SECONDS,
    )  # fmt: skip
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def read(
    env: dict[str, str], tmp_path: Path, engine: str, *before: str
) -> tuple[dict[str, Any], str]:
    """A file through a mapping, under `wrap`: (summary, stderr)."""
    data = tmp_path / "data"
    data.write_bytes(os.urandom(SIZE))
    code = (
        f"import hashlib, mmap; f = open({str(data)!r}, 'rb');"
        " print(hashlib.sha256(mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)).hexdigest())"
    )
    words = uffdprefetch("wrap", "--engine", engine, "-o", "run", "--", "python3", "-c", code)
    done = subprocess.run(
        [*before, *words], env=env, cwd=tmp_path, capture_output=True, text=True,
        timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == hashlib.sha256(data.read_bytes()).hexdigest()
    return json.loads((tmp_path / "run.summary.json").read_text()), done.stderr


def test_with_the_device_all_works(
    env: dict[str, str], tmp_path: Path, filtered: tuple[str, ...]
) -> None:
    require(os.access("/dev/userfaultfd", os.W_OK), "no /dev/userfaultfd for this user")
    found = doctor({**env, "UFFDPREFETCH_ENGINE": "pool"}, *filtered)
    by_name = {check["name"]: check for check in found["checks"]}
    assert "seccomp filter is on" in by_name["userfaultfd(2)"]["found"]
    assert (found["rung"], by_name["pool"]["status"]) == (1, "ok")
    summary, said = read(env, tmp_path, "pool", *filtered)
    assert summary["engine"] == "pool" and summary["files"][0]["served_by"] == "pool", said


def test_without_it_readers_are_followed_by_page_tables_and_the_pool_is_the_cache(
    env: dict[str, str], tmp_path: Path, filtered: tuple[str, ...], hidden: tuple[str, ...]
) -> None:
    found = doctor({**env, "UFFDPREFETCH_ENGINE": "pool"}, *hidden, *filtered)
    by_name = {check["name"]: check for check in found["checks"]}
    assert (found["rung"], found["exit_status"]) == (2, 2)
    unasked = doctor(env, *hidden, *filtered)
    assert (unasked["rung"], unasked["exit_status"]) == (2, 0)
    assert by_name["lay a checkpoint"]["lift"].startswith("docker run --device /dev/userfaultfd")
    summary, said = read(env, tmp_path, "pool", *hidden, *filtered)
    assert summary["engine"] == "cache"
    told = [line for line in said.splitlines() if "note: " not in line]  # which the end repeats
    assert sum("engine pool" in line for line in told) == 1, said
