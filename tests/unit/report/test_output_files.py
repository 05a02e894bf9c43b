# SPDX-License-Identifier: Apache-2.0
"""report/output.py: the name and writing of the summary's JSON."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.report import output


def expand(pattern: str, rank: int | None = 3) -> str:
    return output.expand(pattern, "job-7", rank, {"VAR": "a/b c"}, host="node1", pid=42)


def test_tokens() -> None:
    assert expand("uffdprefetch.%j.%r") == "uffdprefetch.job-7.3"
    assert expand("d/%h-%p-%%") == "d/node1-42-%"
    assert expand("%r", rank=None) == "0"
    assert "/" not in expand("%q{VAR}") and expand("%q{VAR}").startswith("a_b_c")
    assert expand("x%q{UNSET}y") == "xy"


@pytest.mark.parametrize("pattern", ["%z", "%", "%q", "%q{VAR", "a%"])
def test_an_unknown_token_is_an_error_that_lists_the_known(pattern: str) -> None:
    with pytest.raises(UffdPrefetchError, match="%h %p %j %r") as caught:
        expand(pattern)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "file"),
    [("a", "a.summary.json"), ("a.summary.json", "a.summary.json"), ("a.json", "a.json")],
)
def test_the_suffix(tmp_path: Path, name: str, file: str) -> None:
    assert output.write(str(tmp_path / name), {"x": 1}, force=False) == str(tmp_path / file)
    assert json.loads((tmp_path / file).read_text()) == {"x": 1}


def test_numbers_instead_of_overwriting(tmp_path: Path) -> None:
    paths = [output.write(str(tmp_path / "a"), {"n": n}, force=False) for n in range(3)]
    assert [Path(p).name for p in paths] == [
        "a.summary.json", "a-2.summary.json", "a-3.summary.json",
    ]  # fmt: skip
    assert [json.loads(Path(p).read_text())["n"] for p in paths] == [0, 1, 2]


def test_force_replaces_whole_and_leaves_nothing_behind(tmp_path: Path) -> None:
    for n in range(2):
        output.write(str(tmp_path / "a"), {"n": n}, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["a.summary.json"]
    with pytest.raises(OSError):
        output.write(str(tmp_path / "no" / "dir"), {}, force=True)


@pytest.mark.parametrize(
    ("environ", "directory"),
    [
        ({"HOME": "{tmp}/home"}, "{tmp}/home/.local/state/uffdprefetch"),
        ({"HOME": "{tmp}/home", "XDG_STATE_HOME": "{tmp}/s"}, "{tmp}/s/uffdprefetch"),
        ({"XDG_STATE_HOME": "not/absolute"}, None),
        ({"HOME": "/dev/null"}, None),
        ({}, None),
    ],
)
def test_where_summaries_go_that_nobody_has_named(
    tmp_path: Path, environ: dict[str, str], directory: str | None
) -> None:
    told = {name: value.replace("{tmp}", str(tmp_path)) for name, value in environ.items()}
    pattern = output.default_pattern(told)
    if directory is None:
        assert pattern == "uffdprefetch.%j.%r"
        return
    made = directory.replace("{tmp}", str(tmp_path))
    assert pattern == f"{made}/%h.%j.%r"
    assert os.stat(made).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("force", [False, True])
def test_what_cannot_be_written_whole_is_not_there(tmp_path: Path, force: bool) -> None:
    """A full disk: half a file of JSON would be taken for a whole one by nobody, or by somebody."""
    (tmp_path / "a.summary.json").write_text("{}")
    limit = 1 << 12
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            output.write(str(tmp_path / "a"), {"n": "x" * 3 * limit}, force=force)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert [p.name for p in tmp_path.iterdir()] == ["a.summary.json"]
    assert (tmp_path / "a.summary.json").read_text() == "{}"


def test_names_that_are_no_text_are_written(tmp_path: Path) -> None:
    name = os.fsdecode(b"/data/caf\xe9.mdb")
    path = output.write(str(tmp_path / "a"), {"path": name}, force=False)
    assert json.loads(Path(path).read_bytes().decode("utf-8", "surrogateescape"))["path"] == name


@pytest.mark.parametrize("dangling", [False, True])
def test_a_symbolic_link_in_the_place_of_a_file_is_replaced_and_not_followed(
    tmp_path: Path, dangling: bool
) -> None:
    victim = tmp_path / "victim"
    if not dangling:
        victim.write_text("precious")
    (tmp_path / "a.summary.json").symlink_to(victim)
    path = output.write(str(tmp_path / "a"), {"n": 1}, force=True)
    assert not os.path.islink(path) and json.loads(Path(path).read_text()) == {"n": 1}
    assert not victim.exists() if dangling else victim.read_text() == "precious"


def test_without_force_a_dangling_symbolic_link_is_not_followed_either(tmp_path: Path) -> None:
    (tmp_path / "a.summary.json").symlink_to(tmp_path / "victim")
    assert output.write(str(tmp_path / "a"), {}, force=False).endswith("/a-2.summary.json")
    assert not (tmp_path / "victim").exists()


def test_the_file_has_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = output.write(str(tmp_path / "a"), {}, force=True)
    finally:
        os.umask(before)
    assert os.stat(path).st_mode & 0o777 == 0o640


#: Whatever appears in the directory becomes, as soon as it can be seen, a link to the victim; so
#: does every name that the program's number would tell.
ATTACKER = """
import os, sys
directory, victim, pid = sys.argv[1:]
os.chdir(directory)
def link(name):
    try: os.unlink(name)
    except OSError: pass
    try: os.symlink(victim, name)
    except OSError: pass
foretold = ["a.summary.json", *(f"a.summary.json.{pid}{end}" for end in (".tmp", ".new", "~", ""))]
rounds = 0
while True:
    for name in {*foretold, *os.listdir(".")}:
        link(name)
    rounds += 1
    if rounds == 1:
        print("ready", flush=True)
"""


def test_whoever_races_in_the_directory_never_has_us_write_elsewhere(
    tmp_path: Path, children: Callable[..., subprocess.Popen[bytes]]
) -> None:
    directory, victim = tmp_path / "shared", tmp_path / "victim"
    directory.mkdir()
    victim.write_text("precious")
    words = [sys.executable, "-c", ATTACKER, str(directory), str(victim), str(os.getpid())]
    attacker = children(words, stdout=subprocess.PIPE)
    assert attacker.stdout is not None and attacker.stdout.readline() == b"ready\n"
    refused = 0
    for n in range(2000):
        try:
            output.write(str(directory / "a"), {"n": n}, force=True)
        except OSError:  # our file was taken away before it was moved
            refused += 1
        assert victim.read_text() == "precious", n
    attacker.kill()
    attacker.wait()
    assert attacker.poll() == -9 and refused < 2000
    path = output.write(str(directory / "a"), {"n": "last"}, force=True)
    assert not os.path.islink(path) and json.loads(Path(path).read_text()) == {"n": "last"}


def test_a_link_that_comes_in_between_gets_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is a pipe's when it is looked at, and another file's when it is opened."""
    victim, path = tmp_path / "victim", tmp_path / "a"
    victim.write_text("precious")
    path.symlink_to(victim)
    really = output._is_special
    monkeypatch.setattr(output, "_is_special", lambda one: isinstance(one, str) or really(one))
    output.replace_text(str(path), "ours")
    assert victim.read_text() == "precious"
    assert path.read_text() == "ours" and not path.is_symlink()


def test_what_is_no_regular_file_is_written_to_as_it_is(tmp_path: Path) -> None:
    """`trace -f -o /dev/null` as root made a file of it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    output.replace(str(pipe), lambda path: output.overwrite_text(path, "text"))
    assert os.read(reader, 10) == b"text" and pipe.is_fifo()
    output.replace(os.devnull, lambda path: output.overwrite_text(path, "text"))
    assert not os.path.isfile(os.devnull)
    os.close(reader)
