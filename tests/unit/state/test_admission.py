# SPDX-License-Identifier: Apache-2.0
"""Which files are a program's own, and when files that nobody maps are looked at."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.file_states import file_of
from uffdprefetch.base.config import Config
from uffdprefetch.state.admission import LOOK_NS, FileTable, is_of_a_program
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Ledger


@pytest.mark.parametrize(
    ("path", "of_a_program"),
    [
        ("/data/set/lock.mdb", True),
        ("/lib/libtorch_cpu.so.2", True),
        ("/usr/lib/jvm/java-17-openjdk-amd64/lib/modules", True),
        ("/usr/lib/jvm/java-17-openjdk-amd64/lib/server/classes.jsa", True),
        ("/home/a/.cache/app/dynamic.jsa", True),
        ("/data/modules", False),
        ("/data/set/data.mdb", False),
        ("/data/lib/modules/train.bin", False),
    ],
)
def test_a_file_of_a_program_is_known_by_its_name(path: str, of_a_program: bool) -> None:
    assert is_of_a_program(path) == of_a_program


def test_a_file_that_is_left_has_not_all_others_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a third of a core for a job that maps a thousand files, one after the other."""
    now, looked = SimpleNamespace(ns=1), list[FileState]()
    monkeypatch.setattr(FileState, "deleted", lambda file: looked.append(file))
    clock = SimpleNamespace(now_ns=lambda: now.ns)
    table = FileTable(Config(), SimpleNamespace(), Ledger(), clock)  # type: ignore[arg-type]
    number, each = 100, 10  # none of them is idle for long yet
    for one in range(number):
        file = file_of(1 << 20, f"/{one}", one)
        table.files[file.key] = file
        table.left(file, 1)
        now.ns += LOOK_NS // each
        assert table.look_ns <= now.ns
        table.look(now.ns)
        assert file in looked and now.ns < table.look_ns <= now.ns + LOOK_NS
    assert len(looked) <= number + sum(range(0, number + each, each))
