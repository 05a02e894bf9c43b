# SPDX-License-Identifier: Apache-2.0
"""What is published: a complete sdist, and a wheel that works where there is no compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from conftest import HANG_SECONDS, require
from paths import ROOT


def git_files() -> set[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    require(done.returncode == 0, "this is no checkout: nobody says which files belong to it")
    return set(filter(None, done.stdout.split("\0")))


def build(what: str, tree: Path, out: Path) -> None:
    """As pip does it, with the setuptools that is here."""
    code = f"import setuptools.build_meta as b; b.build_{what}({str(out)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, capture_output=True, text=True,
        timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist of what is checked in."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("sdist")
    for name in git_files():
        if not (ROOT / name).exists():
            continue
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    build("sdist", tree, out)
    (archive,) = out.iterdir()
    subprocess.run(["tar", "xzf", archive, "-C", out], check=True)
    (made,) = (path for path in out.iterdir() if path.is_dir())
    return made


def test_the_sdist_has_every_file(sdist: Path) -> None:
    links = {name for name in git_files() if (ROOT / name).is_symlink()}
    wanted = git_files() - {".gitignore"} - links
    assert wanted - {str(path.relative_to(sdist)) for path in sdist.rglob("*")} == set()


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist."""
    out = tmp_path_factory.mktemp("wheel")
    build("wheel", sdist, out)
    (made,) = out.iterdir()
    return made


def test_the_wheel_is_for_every_python_and_has_both_objects(wheel: Path) -> None:
    assert "-cp310-abi3-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    objects = sorted(name for name in names if name.endswith(".so"))
    assert objects == ["uffdprefetch/_preload.abi3.so", "uffdprefetch/_uffd.abi3.so"]
    for needed in ("trace/record/programs/faults.c", "report/page/main.js", "py.typed",
                   "job/site/sitecustomize.py"):  # fmt: skip
        assert f"uffdprefetch/{needed}" in names
    for needed in ("man/man1/uffdprefetch-wrap.1", "bash-completion/completions/uffdprefetch"):
        assert any(name.endswith(f".data/data/share/{needed}") for name in names)


def test_installed_without_a_compiler_it_serves_a_job(
    wheel: Path, tmp_path: Path, env: dict[str, str]
) -> None:
    """In a virtual environment of its own, which has our dependencies and nothing of this
    checkout, and with nothing on PATH but the interpreter."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (site,) = home.glob("lib/python3*/site-packages")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    data = tmp_path / "data"
    data.write_bytes(os.urandom(48 << 20))
    reader = "import mmap, sys; f = open(sys.argv[1], 'rb');"
    reader += "print(sum(mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)[::4096]))"
    python = str(home / "bin" / "python")
    words = [python, "-m", "uffdprefetch", "wrap", "--strict", "-o", "run", "--",
             python, "-c", reader, str(data)]  # fmt: skip
    done = subprocess.run(
        words, env={**env, "PATH": str(home / "bin"), "PYTHONPATH": ""}, cwd=tmp_path,
        capture_output=True, text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == sum(data.read_bytes()[::4096])
    run = json.loads((tmp_path / "run.summary.json").read_text())
    assert [file["path"] for file in run["files"]] == [str(data)], done.stderr
    where = subprocess.run(
        [python, "-c", "import uffdprefetch; print(uffdprefetch.__file__)"], cwd=tmp_path,
        env={"PATH": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert where.stdout.startswith(str(site))
