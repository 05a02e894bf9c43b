# SPDX-License-Identifier: Apache-2.0
"""The manual pages and completions in share/: made of the command line as it is, and of use."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import HANG_SECONDS, require
from paths import ROOT

SHARE = ROOT / "share"
BASH = SHARE / "bash-completion" / "completions" / "uffdprefetch"
ZSH = SHARE / "zsh" / "site-functions" / "_uffdprefetch"


@pytest.fixture(scope="module")
def manual() -> ModuleType:
    for name in ("shtab", "argparse_manpage"):
        require(importlib.util.find_spec(name) is not None, f"{name} is not installed")
    require(sys.version_info[:2] == (3, 11), "argparse words its help differently in each Python")
    spec = importlib.util.spec_from_file_location("manual", ROOT / "tools" / "manual.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_they_are_those_of_this_command_line(
    manual: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make manual` makes them anew."""
    monkeypatch.setenv("COLUMNS", "200")
    made = manual.files()
    there = {str(path.relative_to(SHARE)) for path in SHARE.rglob("*") if path.is_file()}
    assert there == set(made)
    old = [name for name, text in made.items() if (SHARE / name).read_text() != text]
    assert old == []


def complete(*words: str, cwd: Path) -> list[str]:
    """What bash offers at the end of these words."""
    script = (
        f'source {BASH}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_uffdprefetch;'
        ' printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script, "bash", *words], cwd=cwd, capture_output=True, text=True,
        timeout=HANG_SECONDS, check=True,
    )  # fmt: skip
    return sorted(filter(None, map(str.strip, done.stdout.splitlines())))


def test_bash_completes_commands_options_choices_and_files(tmp_path: Path) -> None:
    (tmp_path / "run.uptrace").touch()
    assert complete("uffdprefetch", "s", cwd=tmp_path) == ["simulate", "summary"]
    assert "--engine" in complete("uffdprefetch", "wrap", "--e", cwd=tmp_path)
    assert complete("uffdprefetch", "wrap", "--policy", "st", cwd=tmp_path) == ["stride"]
    assert complete("uffdprefetch", "trace", "--format", "p", cwd=tmp_path) == ["perfetto", "png"]
    assert complete("uffdprefetch", "trace", "ru", cwd=tmp_path) == ["run.uptrace"]


class Zsh:
    """One at a terminal, with our completion: it completes only what is typed."""

    def __init__(self) -> None:
        environment = {**os.environ, "TERM": "dumb", "COLUMNS": "200"}
        pid, self._terminal = pty.fork()
        if not pid:
            os.execvpe("zsh", ["zsh", "-f", "-i"], environment)
        self._pid = pid
        self._type(f"PS1=; fpath=({ZSH.parent} $fpath); autoload -U compinit; compinit -u -D\n")
        self._type("print re''ady\n")  # the terminal echoes what is typed: not this word
        self._read_until("ready\r\n")

    def complete(self, line: str, offered: str) -> None:
        """Asserts that a tab after ``line`` makes it end in ``offered``."""
        self._type(f"\x15{line}\t")
        self._read_until(line[: line.rindex(" ") + 1] + offered)

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._terminal)

    def _type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def _read_until(self, words: str) -> None:
        read = b""
        while words.encode() not in read:
            assert select.select([self._terminal], [], [], HANG_SECONDS)[0], (words, read)
            read += os.read(self._terminal, 1 << 16)


def test_zsh_completes_commands_options_choices_and_files(tmp_path: Path) -> None:
    require(shutil.which("zsh") is not None, "there is no zsh here")
    (tmp_path / "run.uptrace").touch()
    with contextlib.closing(Zsh()) as zsh:
        zsh.complete("uffdprefetch sim", "simulate ")
        zsh.complete("uffdprefetch wrap --eng", "--engine ")
        zsh.complete("uffdprefetch wrap --policy st", "stride ")
        zsh.complete(f"uffdprefetch trace {tmp_path}/ru", f"{tmp_path}/run.uptrace ")


@pytest.mark.parametrize("path", sorted((SHARE / "man" / "man1").glob("*.1")), ids=lambda p: p.name)
def test_a_page_is_one_that_man_shows(path: Path) -> None:
    require(shutil.which("groff") is not None, "there is no groff here")
    done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    name = path.stem
    assert f"{name} - " in " ".join(done.stdout.replace("\x1b[0m", "").split())
