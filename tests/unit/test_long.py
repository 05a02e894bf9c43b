# SPDX-License-Identifier: Apache-2.0
"""The list of what `make test` leaves out names tests that there are."""

from __future__ import annotations

import re

import pytest
from conftest import is_long, long_tests
from paths import ROOT


@pytest.mark.parametrize("name", long_tests())
def test_what_is_left_out_is_there(name: str) -> None:
    path, _, function = name.partition("::")
    assert (ROOT / path).exists()
    assert not function or re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.M)


def test_a_folder_a_file_a_test_or_all_variants_but_some_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = {"a": None, "b/c.py": None, "d.py::t": None, "e.py::t": frozenset({"x", "y-[z]"})}
    monkeypatch.setattr("conftest.long_tests", lambda: named)
    inside = ["a/b.py::t", "a/c/d.py::t[1]", "b/c.py::t", "d.py::t", "d.py::t[1]", "e.py::t[z]"]
    assert all(is_long(name) for name in inside)
    outside = ["ab/b.py::t", "b/d.py::t", "d.py::t2", "e.py::t[x]", "e.py::t[y-[z]]", "new.py::t"]
    assert not any(is_long(name) for name in outside)
