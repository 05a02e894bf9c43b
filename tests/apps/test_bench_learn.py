# SPDX-License-Identifier: Apache-2.0
"""bench/learn.py: the tree that it makes has all that its programs import."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from conftest import require
from paths import BENCH


def test_of_a_virtual_environment_the_systems_packages_are_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of what is installed needs some of those (matplotlib: pyparsing)."""
    require(BENCH.is_dir(), "the benches are only in a source tree")
    monkeypatch.syspath_prepend(BENCH)
    learn = importlib.import_module("learn")
    own, systems, other = (tmp_path / name for name in ("a/site-packages", "b/dist-packages", "c"))
    for path, text in ((own, "own"), (systems, "system's"), (other, "no packages")):
        path.mkdir(parents=True)
        (path / "both.py").write_text(text)
    (systems / "needed.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(other), str(own), str(tmp_path / "none"), str(systems)])
    assert learn.places_of_packages() == [str(own), str(systems)]
    monkeypatch.setattr(learn, "packages_of", lambda tree: tree / "packages")
    learn.make_tree(tmp_path / "source", archives=False)
    made = tmp_path / "source" / "tree" / "packages"
    assert (made / "both.py").read_text() == "own" and (made / "needed.py").exists()
