# SPDX-License-Identifier: Apache-2.0
"""Which files are a program's own."""

from __future__ import annotations

import pytest

from uffdprefetch.state.admission import is_of_a_program


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
