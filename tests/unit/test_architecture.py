# SPDX-License-Identifier: Apache-2.0
"""The layers of the code are those of the drawing, and each package can be loaded alone.

import-linter (pyproject.toml, `make lint`) holds who imports whom. Here is what it does not see:
the drawing, and what is in memory at run time.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from conftest import HANG_SECONDS
from paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = ROOT / "uffdprefetch"
#: Packages of no layer: what the interpreter or a user names.
ALONE = {"plan", "torch", "ownlock"}


def layers() -> list[set[str]]:
    """From top to bottom, as import-linter has them."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = document["tool"]["importlinter"]["contracts"][0]
    assert contract["type"] == "layers"
    return [set(re.split(r" [|:] ", line)) for line in contract["layers"]]


def test_the_drawing_shows_the_layers_that_are_held() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    drawn = [
        set(re.findall(r"`([a-z]+)/?`", row.split("|")[1]))
        for row in text.split("<!-- layers -->")[1].splitlines()
        if row.startswith("| `")
    ]
    assert drawn == layers()


def modules() -> list[str]:
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(PACKAGE.rglob("*.py"))
        if "site" not in path.parts and path.name != "__main__.py"
    ]


#: Imports every module of a package and prints the packages that are in memory then.
LOADED = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sorted({m.split(".")[1] for m in sys.modules if m.startswith("uffdprefetch.")}))
"""


@pytest.mark.parametrize("package", sorted(set().union(*layers())))
def test_a_package_alone_loads_those_below_it_only(package: str) -> None:
    mine = [
        name for name in modules()
        if name == f"uffdprefetch.{package}" or name.startswith(f"uffdprefetch.{package}.")
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *mine], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    place = next(i for i, names in enumerate(layers()) if package in names)
    below = set().union(*layers()[place + 1 :])
    assert set(done.stdout.split()) - {"_uffd"} <= below | {package}


def test_each_module_alone_can_be_loaded_first() -> None:
    """A circle shows when one of its modules is the first."""
    code = (
        "import importlib, sys\n"
        "keep = set(sys.modules)\n"
        "for name in sys.argv[1:]:\n"
        "    for old in [m for m in sys.modules if m.startswith('uffdprefetch')]:\n"
        "        del sys.modules[old]\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *modules()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("entry", ["uffdprefetch.cli.record", "uffdprefetch.view.fetch"])
def test_who_watches_loads_nothing_of_the_service(entry: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, entry], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert not loaded & {"service", "readers", "pool", "sense", "warm", "orders", "predict"}


STARTED = """
import os, sys
before = set(sys.modules)  # by what the environment starts with each interpreter
import uffdprefetch.service.serve
if "pool" in sys.argv:
    from types import SimpleNamespace
    from uffdprefetch.base.config import Config
    from uffdprefetch.service import door
    pool = door.make_pool(Config.of(engine="pool", budget_bytes=1 << 30), -1, door.Ledger())
    fd = os.open(sys.executable, os.O_RDONLY)
    opened = SimpleNamespace(fd=fd, was=None)
    call = SimpleNamespace(unit_bytes=0)
    file = SimpleNamespace(pooled=None, opened=opened, size_bytes=1 << 20, call=call)
    assert pool.files.open(file).memfd >= 0  # what a mapping asks for
    pool.state(pool.pool.counts())
spared = {"numpy", "zipfile", "argparse", "asyncio", "tomllib"} & (sys.modules.keys() - before)
assert not spared, spared
if "pool" in sys.argv:
    file.pooled.absent(0, 1 << 20), file.pooled.touched(0, 1 << 20)
    pool.loader.aside = True
    assert not pool.can_choose() and "numpy" not in sys.modules
    pool.size.used_bytes = lambda: 600 << 20
    while not pool.can_choose():
        pass
    assert "uffdprefetch.pool.victims" in sys.modules
    assert not pool.chooses and pool.victims.wants_list() is not None and pool.chooses
    pool.close()
"""


@pytest.mark.parametrize("engine", ["cache", "pool"])
def test_a_service_starts_without_what_only_some_runs_need(engine: str) -> None:
    """Its job is running already, and may have read much by then, or waits: numpy takes 60 ms of a
    core."""
    subprocess.run([sys.executable, "-I", "-c", STARTED, engine], check=True, timeout=HANG_SECONDS)
