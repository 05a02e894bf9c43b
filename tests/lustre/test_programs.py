# SPDX-License-Identifier: Apache-2.0
"""Programs that nobody here wrote, on a Lustre client: the bytes, once, in whole requests.

The programs are those of bench/apps.py, where their packages are (make apps). What they import is
read through the host's share, and takes a minute on an emulated machine.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lustre import client

BENCH = client.TREE / "bench"
SIZE_BYTES = 96_000_000
SECONDS = 600
#: What a program's kind of files is made with, and its command.
PROGRAMS = {
    "safetensors, 4 shards": ("checkpoint", ["weights.py", "--reader=load_file"]),
    "datasets, shuffled": ("dataset", ["hf_loader.py"]),
}


def words_of(program: str, directory: Path) -> list[str]:
    script, *options = PROGRAMS[program][1]
    return [sys.executable, str(BENCH / "programs" / script), str(directory), *options]


@pytest.fixture(params=PROGRAMS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path, Path]]:
    """(a program, its files on the client, the same beside it)."""
    program: str = request.param
    for package in ("torch", "safetensors", "datasets", "yaml"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the Python package {package} is missing: make apps")
    beside, here = tmp_path / "files", client.mount() / "files"
    beside.mkdir()
    make = [sys.executable, str(BENCH / "apps_files.py"), PROGRAMS[program][0], str(beside)]
    subprocess.run([*make, str(SIZE_BYTES)], check=True, timeout=SECONDS)
    for path in (path for path in sorted(beside.rglob("*")) if path.is_file()):
        to = here / path.relative_to(beside)
        to.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "rb") as file, open(to, "wb") as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
    yield program, here, beside
    shutil.rmtree(here)


@pytest.mark.long_form
def test_a_program_reads_its_files_once_in_whole_requests(
    case: tuple[str, Path, Path], tmp_path: Path
) -> None:
    program, here, beside = case
    variables = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}

    def run(directory: Path, options: tuple[str, ...] | None) -> client.Ran:
        words = words_of(program, directory)
        return client.run(tmp_path / "ran", words, options, timeout_seconds=SECONDS, **variables)

    expected = run(beside, None).said
    plain, ran = run(here, None), run(here, ())
    print(f"{program}: plain {plain.rpcs}, {plain.said}; wrap {ran.rpcs}, {ran.said}")
    assert ran.said["digest"] == plain.said["digest"] == expected["digest"]
    size_bytes = sum(path.stat().st_size for path in here.rglob("*") if path.is_file())
    assert ran.rpcs.bytes <= 1.02 * size_bytes, str(ran.rpcs)
    whole = sum(n for pages, n in ran.rpcs.by_pages.items() if pages * 4096 >= client.RPC_BYTES)
    assert whole * client.RPC_BYTES >= 0.75 * size_bytes, str(ran.rpcs)
    assert ran.rpcs.count < plain.rpcs.count, (str(ran.rpcs), str(plain.rpcs))
    assert ran.said["major_faults"] < plain.said["major_faults"], (ran.said, plain.said)
