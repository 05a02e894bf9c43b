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

from uffdprefetch.native.net import checksum


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


def test_the_wheel_is_for_every_python_and_has_all_that_is_compiled(wheel: Path) -> None:
    assert "-cp310-abi3-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        assert packed.getinfo("uffdprefetch/_replay").external_attr >> 16 & 0o111 == 0o111
    objects = sorted(name for name in names if name.endswith(".so"))
    assert objects == ["uffdprefetch/_preload.abi3.so", "uffdprefetch/_uffd.abi3.so"]
    for needed in ("trace/record/programs/faults.c", "report/page/main.js", "py.typed",
                   "job/site/sitecustomize.py"):  # fmt: skip
        assert f"uffdprefetch/{needed}" in names
    for needed in ("man/man1/uffdprefetch-wrap.1", "bash-completion/completions/uffdprefetch"):
        assert any(name.endswith(f".data/data/share/{needed}") for name in names)


def test_the_wheel_for_aarch64(sdist: Path, tmp_path: Path) -> None:
    """By a cross-compiler; what an emulator without userfaultfd can run of it. The rest of this
    architecture's is the preload object's (tests/kernel/test_preload_loads.py)."""
    for tool in ("aarch64-linux-gnu-gcc", "qemu-aarch64-static", "apt-get"):
        require(shutil.which(tool), f"no {tool}")
    tree, out, site = tmp_path / "tree", tmp_path / "out", tmp_path / "site"
    shutil.copytree(sdist, tree, symlinks=True)
    done = subprocess.run(
        [ROOT / "tools" / "wheel_aarch64.sh", tree, out],
        env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True,
    )  # fmt: skip
    packages = (ROOT / "build" / "aarch64" / "python").exists()  # made when all is there
    require(packages, f"no packages of that architecture from apt: {done.stderr}")
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    assert made.name.endswith("-cp310-abi3-linux_aarch64.whl")
    with zipfile.ZipFile(made) as packed:
        packed.extractall(site)
    for name in ("_preload.abi3.so", "_uffd.abi3.so", "_replay"):
        head = (site / "uffdprefetch" / name).read_bytes()[:20]
        assert head[:4] == b"\x7fELF" and int.from_bytes(head[18:], "little") == 183
    python = str(ROOT / "build" / "aarch64" / "python")
    version = subprocess.run(
        [python, "-c", "import sys; print('%d%d' % sys.version_info[:2])"], check=True,
        capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    platforms = [f"--platform=manylinux{tag}_aarch64" for tag in ("2014", "_2_27", "_2_28")]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", *platforms,
         f"--python-version={version}", f"--target={site}", "numpy", "cffi", "msgpack", "rich"],
        capture_output=True, text=True,
    )  # fmt: skip
    require(done.returncode == 0, f"no packages from the registry: {done.stderr}")

    def under_the_emulator(*words: str) -> str:
        ran = subprocess.run(
            [python, *words], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "HOME": str(tmp_path)},
        )  # fmt: skip
        assert ran.returncode in (0, 1), ran.stderr
        return ran.stdout

    replay = ["qemu-aarch64-static", "-L", ROOT / "build" / "aarch64" / "root"]
    replay.append(site / "uffdprefetch" / "_replay")
    replay[-1].chmod(0o755)
    told = subprocess.run(replay, capture_output=True, text=True)
    assert (told.returncode, told.stderr[:15]) == (2, "usage: _replay ")
    code = "import platform; from uffdprefetch.native.net import checksum as c;"
    code += "print(platform.machine(), c(b'uffdprefetch' * 9999))"
    there = checksum(b"uffdprefetch" * 9999)  # by this machine's instructions
    assert under_the_emulator("-c", code) == f"aarch64 {there}\n"
    assert under_the_emulator("-m", "uffdprefetch", "doctor").startswith("cannot: ")
    array = "\x93NUMPY\x01\x00v\x00{'descr': '<u4', 'fortran_order': False, 'shape': (9, 64), }"
    (tmp_path / "a.npy").write_bytes(array.encode("latin-1").ljust(127) + b"\n" + bytes(9 * 256))
    assert "records   9 in 2,304 B" in under_the_emulator("-m", "uffdprefetch", "index", "a.npy")


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
    (site / "uffdprefetch" / "_replay").chmod(0o755)  # zipfile sets no modes, pip does
    (files,) = site.glob("*.data/data")
    shutil.copytree(files, home, dirs_exist_ok=True)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    data = tmp_path / "data"
    data.write_bytes(os.urandom(48 << 20))
    reader = "import mmap, sys, time; f = open(sys.argv[1], 'rb');"
    reader += "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ);"
    reader += "print(sum(m[::4096])); time.sleep(0.5)"  # else it is over before a look
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
    told = subprocess.run(
        [python, "-c", "from uffdprefetch.launch import replay; print(replay.why_not())"],
        cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert told.stdout == "None\n"
    where = subprocess.run(
        [python, "-c", "import uffdprefetch; print(uffdprefetch.__file__)"], cwd=tmp_path,
        env={"PATH": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert where.stdout.startswith(str(site))
    helped = subprocess.run(
        [python, "-m", "uffdprefetch", "--help"], cwd=tmp_path, env={"PATH": ""},
        capture_output=True, text=True,
    )  # fmt: skip
    docs = Path(helped.stdout.splitlines()[-1].partition(": ")[2])
    assert docs == home / "share" / "doc" / "uffdprefetch"
    assert {path.name for path in docs.iterdir()} == {p.name for p in (ROOT / "docs").glob("*.md")}
