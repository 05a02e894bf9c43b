# SPDX-License-Identifier: Apache-2.0
"""packaging/: the recipes ask for what pyproject.toml asks for, and their tools take them."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_SECONDS, require
from paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGING = ROOT / "packaging"
EASYCONFIG = PACKAGING / "easybuild" / "uffdprefetch-0.1.0-foss-2024a.eb"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: What conda-forge calls otherwise.
CONDA = {"msgpack": "msgpack-python"}
RELEASE = "0.1.0"
MODULES = Path("/usr/share/modules/init/bash")


def needs() -> dict[str, str]:
    """What a run needs: name and least version."""
    found = {}
    for text in PROJECT["dependencies"]:
        match = re.match(r"([a-z0-9]+)>=([0-9.]+)", text)
        assert match is not None, text
        found[match[1]] = match[2]
    return found


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def test_needs_are_read() -> None:
    assert {"cffi", "msgpack", "numpy", "pyroute2", "rich", "tomli"} == needs().keys()


# ---- Spack --------------------------------------------------------------------------------------


def spack(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[type, list[tuple[str, Any, Any]]]:
    """A package's class, and the directives that it gave: (which, arguments, named ones)."""
    told: list[tuple[str, Any, Any]] = []
    language = types.ModuleType("spack.package")
    names = ("version", "variant", "depends_on", "conflicts", "license")
    for word in names:

        def note(*words: Any, _word: str = word, **named: Any) -> None:
            told.append((_word, words, named))

        setattr(language, word, note)
    language.PythonPackage = type("PythonPackage", (), {})  # type: ignore[attr-defined]
    language.__all__ = [*names, "PythonPackage"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spack", types.ModuleType("spack"))
    monkeypatch.setitem(sys.modules, "spack.package", language)
    made = runpy.run_path(str(PACKAGING / "spack" / "packages" / name / "package.py"))
    (package,) = (
        value for value in made.values()
        if isinstance(value, type) and value.__name__ != "PythonPackage"
    )  # fmt: skip
    return package, told


def test_the_spack_package_asks_for_what_a_run_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    package, told = spack("py-uffdprefetch", monkeypatch)
    assert package.__name__ == "PyUffdprefetch"  # as Spack makes it of the directory's name
    assert [words[0] for word, words, _ in told if word == "version"] == [RELEASE]
    asked = {}
    for word, words, named in told:
        if word == "depends_on" and "run" in named["type"]:
            name, _, least = words[0].removeprefix("py-").partition("@")
            asked[name] = least.removesuffix(":")
    assert asked.pop("python") == PROJECT["requires-python"].removeprefix(">=")
    extras = PROJECT["optional-dependencies"]
    for name, least in needs().items():
        told = asked.pop(name)
        assert version(told) == version(least)[: len(version(told))], name
    left = {f"{name}>={least}" for name, least in asked.items()}
    assert left == {*extras["cluster"], *extras["sim"]}


def test_what_spack_does_not_have_comes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    package, told = spack("py-pyroute2", monkeypatch)
    assert package.__name__ == "PyPyroute2"
    (release,) = (words[0] for word, words, _ in told if word == "version")
    assert version(release) >= version(needs()["pyroute2"])


# ---- EasyBuild ----------------------------------------------------------------------------------


def test_the_easyconfig_brings_what_a_run_needs() -> None:
    found: dict[str, Any] = {}
    exec(EASYCONFIG.read_text(), found)
    brought = {name.lower() for name, *_ in (*found["dependencies"], *found["exts_list"])}
    for name in needs().keys() - {"tomli"}:  # Python 3.12 has it
        bundled = {"rich": "python-bundle-pypi", "msgpack": "python-bundle-pypi",
                   "numpy": "scipy-bundle"}  # fmt: skip
        assert bundled.get(name, name) in brought, name
    assert found["version"] == RELEASE
    assert EASYCONFIG.name == (
        f"{found['name']}-{RELEASE}-{found['toolchain']['name']}-{found['toolchain']['version']}.eb"
    )


@pytest.mark.parametrize("check", ["--check-style", "--check-contrib", "--dry-run"])
def test_easybuild_takes_it(check: str, tmp_path: Path) -> None:
    eb = Path(sys.executable).parent / "eb"
    require(eb.exists(), "no EasyBuild here (the extra `test-all`)")
    require(MODULES.exists(), "no environment modules here (environment-modules)")
    settings = {
        "MODULES_TOOL": "EnvironmentModules", "ALLOW_MODULES_TOOL_MISMATCH": "1",
        "MODULE_SYNTAX": "Tcl", "PREFIX": str(tmp_path),
        "ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES": "1",
    }  # fmt: skip
    script = f'. {MODULES} && exec "$@"'
    robot = ["--robot"] if check == "--dry-run" else []
    done = subprocess.run(
        ["bash", "-c", script, "bash", eb, check, *robot, EASYCONFIG], capture_output=True,
        text=True, cwd=tmp_path, timeout=HANG_SECONDS,
        env={**os.environ, "PATH": f"{eb.parent}:{os.environ['PATH']}", "HOME": str(tmp_path),
             **{f"EASYBUILD_{name}": value for name, value in settings.items()}},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = {"--check-style": "style checks PASSed", "--check-contrib": "contribution checks PASSed",
            "--dry-run": f"(module:uffdprefetch/{RELEASE}-foss-2024a)"}  # fmt: skip
    shown = done.stdout if check != "--dry-run" else "".join(done.stdout.split())  # lines are cut
    assert said[check] in shown, done.stdout


# ---- conda --------------------------------------------------------------------------------------


@pytest.mark.parametrize("python", ["3.10", "3.12"])
def test_the_conda_recipe_is_rendered_and_asks_for_what_a_run_needs(python: str) -> None:
    rattler_build = pytest.importorskip("rattler_build")
    variants = (
        "c_compiler: [gcc]\nc_compiler_version: ['13']\nc_stdlib: [sysroot]\n"
        f"c_stdlib_version: ['2.34']\npython: ['{python}.*']\n"
    )
    recipe = rattler_build.Stage0Recipe.from_file(str(PACKAGING / "conda" / "recipe.yaml"))
    (made,) = recipe.render(rattler_build.VariantConfig.from_yaml(variants))
    found = made.recipe.to_dict()
    assert found["package"] == {"name": "uffdprefetch", "version": RELEASE}
    asked = dict(text.split(" >=") for text in found["requirements"]["run"])
    assert asked.pop("python") == PROJECT["requires-python"].removeprefix(">=")
    wanted = {CONDA.get(name, name): least for name, least in needs().items()}
    if python != "3.10":
        del wanted["tomli"]
    assert asked == wanted
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert {text.replace(" ", "") for text in found["requirements"]["host"]} >= set(build)
