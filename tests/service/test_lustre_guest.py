# SPDX-License-Identifier: Apache-2.0
"""The short form of the tests on a real Lustre client (tests/lustre), and what starts them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from lustre import guest

pytestmark = pytest.mark.slow

#: A guest on a machine that is busy with other things.
LIMIT_SECONDS = 900


def test_the_short_form_passes_on_a_lustre_client() -> None:
    run_guest, why = guest.program(os.environ)
    if run_guest is None:
        pytest.skip(why)  # never a failure: an image is no part of a machine
    guest.compiled()
    line = guest.command(run_guest, guest.test_words(short=True), LIMIT_SECONDS)
    ended = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_SECONDS + 60)
    assert ended.returncode == 0, ended.stdout[-20000:] + ended.stderr[-5000:]
    assert " passed" in ended.stdout and " failed" not in ended.stdout


def test_an_image_is_named_by_its_directory_or_its_program(tmp_path: Path) -> None:
    program = tmp_path / "run-guest"
    program.write_text("#!/bin/sh\n")
    there = {"GUEST_QEMU": "true"}
    assert guest.program({})[0] is None
    assert "cannot be executed" in guest.program({guest.VARIABLE: str(program), **there})[1]
    program.chmod(0o755)
    for named in (tmp_path, program):
        assert guest.program({guest.VARIABLE: str(named), **there}) == (program, "")
    absent = {guest.VARIABLE: str(program), "GUEST_QEMU": "no-such-emulator"}
    assert guest.program(absent) == (None, "no-such-emulator is missing")


def test_what_the_guest_needs_of_this_machine_is_shared_once(tmp_path: Path) -> None:
    tree, packages = tmp_path / "tree", tmp_path / "packages"
    (tree / ".venv" / "lib").mkdir(parents=True)
    packages.mkdir()
    paths = ["", "/usr/lib/python3", str(tree / ".venv" / "lib"), str(packages), "/nowhere"]
    assert guest.shared(tree, str(tree / ".venv"), paths) == [str(tree), str(packages)]
