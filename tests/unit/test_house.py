# SPDX-License-Identifier: Apache-2.0
"""The figures of tools/house.py, of a package that is made for it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

MODULES = {
    "__init__": "",
    "predict/__init__": "",
    "predict/a": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from uffdprefetch.predict import b
#: What it is for.
LIMIT = 7
OTHER = 1.5 * 3
NEW, SEEN, READ = 0, 1, 2
SOME, OTHERS, LAST = 1, 2, 4
NAME = "no number"
class Reader:
    when: "Callable[[], int] | None" = None
    def __init__(self):
        self.x, self.y = 1, 2
        self.x += 1
""",
    "predict/b": """
import uffdprefetch.predict.c
class Reader:
    pass
def plug(reader):
    reader.when = plug
""",
    "predict/c": "from uffdprefetch.predict.a import Reader\n",
    "sim": "def long(x):\n    return " + " or ".join(["x"] * 40) + "\n",
}


@pytest.fixture
def counted(tmp_path: Path) -> dict[str, str]:
    for name, text in MODULES.items():
        path = tmp_path / "uffdprefetch" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    house: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "house.py"))
    return dict(house["count"](tmp_path))


def test_what_is_counted(counted: dict[str, str]) -> None:
    assert counted["circles of imports"] == "1 (3)", "one of them is for types"
    assert counted["largest class"] == "Reader: 3 fields"
    assert counted["hooks that others plug in"] == "1"
    assert counted["class names borne twice"] == "1"
    assert counted["functions above 25 ways"] == "1"
    decide = counted["numbers that decide"], counted["all numbers"]
    assert decide == ("2", "2"), "names that are only told apart are none"
    assert counted["... with a comment of their own"] == "1"
