# SPDX-License-Identifier: Apache-2.0
"""The agent's thread is unknown to libc: its code calls nothing outside itself, and uses no TLS.

Checked on the objects that the build makes, by the build's own flags.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import require
from paths import ROOT

#: Of csrc/job/ all that knows the agent, and what both halves of the job have.
AGENT = (
    *(p.stem for p in sorted((ROOT / "csrc/job").glob("*.c")) if "job/agent.h" in p.read_text()),
    *("ambient", "vma"),
)
#: ... and what the compiler may call for copying and clearing memory.
MEMORY = "text"
#: The thread pointer of x86-64 and of aarch64.
THREAD_POINTER = re.compile(r"%fs|tpidr_el0")


def tool(*words: str | Path) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name of a C file -> its object."""
    require(shutil.which("nm") and shutil.which("objdump"), "no binutils")
    directory = tmp_path_factory.mktemp("build")
    tree = directory / "tree"  # cffi writes its C file beside the sources
    tree.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("csrc", "tools", "uffdprefetch"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so"))
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "-t", directory / "objects"],
        cwd=tree, check=True, capture_output=True,
    )  # fmt: skip
    return {path.stem: path for path in (directory / "objects").rglob("*.o")}


@pytest.mark.parametrize("name", AGENT)
def test_the_agent_calls_nothing_but_itself(objects: dict[str, Path], name: str) -> None:
    wanted = [line.split()[-1] for line in tool("nm", "-u", objects[name]).splitlines()]
    own = {"_GLOBAL_OFFSET_TABLE_"}
    for part in (*AGENT, MEMORY):
        defined = tool("nm", "--defined-only", objects[part]).splitlines()
        own |= {line.split()[-1] for line in defined}
    assert set(wanted) <= own
    assert wanted or name in ("ambient", "base", "thread", "vma")


@pytest.mark.parametrize("name", AGENT)
def test_the_agent_does_not_touch_the_thread_pointer(objects: dict[str, Path], name: str) -> None:
    assert not THREAD_POINTER.search(tool("objdump", "-d", objects[name]))


def test_the_job_s_side_does(objects: dict[str, Path]) -> None:
    """Else the search above would find nothing anywhere."""
    assert "__errno_location" in tool("nm", "-u", objects["mapping"])
    assert THREAD_POINTER.search(tool("objdump", "-d", objects["uffdprefetch._uffd"]))
