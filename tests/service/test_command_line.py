# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole: help, versions, and examples that are what they say."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import HANG_SECONDS, uffdprefetch
from paths import ROOT

from uffdprefetch import __version__
from uffdprefetch.base import options
from uffdprefetch.cli import COMMANDS, main, split_rest
from uffdprefetch.cli.parser import parser_of

SHOWN = [name for name, (_, text) in COMMANDS.items() if text]


def run(*words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        uffdprefetch(*words), capture_output=True, text=True, timeout=HANG_SECONDS
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", SHOWN)
def test_each_command_has_help_in_two_ways_and_a_version(name: str) -> None:
    status, out, err = run("help", name)
    assert (status, err) == (0, "") and out.startswith(f"usage: uffdprefetch {name}")
    assert run(name, "--help") == (status, out, err)
    assert run(name, "--version") == (0, f"uffdprefetch {__version__}\n", "")


@pytest.mark.parametrize(
    "words", ["summary --json FILE", "summary FILE --json", "profile show --json FILE.upl",
              "profile --json show FILE.upl", "profile show FILE.upl --json"]
)  # fmt: skip
def test_a_word_may_stand_before_an_option_and_behind_it(words: str) -> None:
    status, out, err = run(*words.split())
    assert (status, out) == (2, "") and "FILE" in err and "unrecognized" not in err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("wrap --polcy none true", "unrecognized arguments: --polcy (did you mean --policy?); see"
         " uffdprefetch wrap --help"),
        ("wrap --engine", "--engine: expected one argument; see uffdprefetch wrap --help"),
        ("trace sleep 1 --pid x", "--pid: invalid int value: 'x'; see uffdprefetch trace --help"),
        ("trace --zz sleep", "unrecognized arguments: --zz (a command goes after --); see"
         " uffdprefetch trace --help"),
        ("wrap -o %z true", "-o '%z': '%z' is no token (%h %p %j %r %q{VAR} %%)"),
        ("wrap --plan /none true", "--plan: cannot read /none: No such file or directory"),
        ("index --format zz /etc/passwd", "--format zz: one of lmdb, npy, arrow, tfrecord,"
         " safetensors, raw"),
        ("demo --configurations zz", "--configurations zz: one of baseline, prefetch-off,"
         " prefetch-on, warm cache"),
        ("wrpa", "no command 'wrpa': did you mean wrap?"),
    ],
)  # fmt: skip
def test_what_is_wrong_on_it_is_said_in_one_line(words: str, line: str) -> None:
    assert run(*words.split()) == (2, "", f"uffdprefetch: {line}\n")


#: Words with which each command comes to its options of quantities, and does nothing; a command to
#: run stands after them.
COMES_TO = {
    "wrap": [], "cluster": [], "compare": [], "trace": [], "demo": [], "top": [],
    "index": ["none"], "calibrate": ["none"], "warm": ["none"],
    "plan": ["none", "--bandwidth", "1GB/s", "--seconds-per-item", "1ms"],
    "simulate": ["--replay", "none", "--bandwidth", "1GB/s", "--latency", "1ms"],
}  # fmt: skip
RUN = ("wrap", "cluster", "compare", "trace")
QUANTITIES = ("SIZE", "SIZE,...", "SIZE[,HEADER]", "RATE", "TIME", "N", "N,N,...", "CORES", "0..1")


def quantities() -> list[tuple[str, str, bool]]:
    """(command, option, whether it wants --record-size beside it) of each with such a value."""
    found = []
    for name in SHOWN:
        command = importlib.import_module(COMMANDS[name][0]).Command()
        for action in parser_of(name, command)._actions:
            is_one = action.metavar in QUANTITIES or action.dest == "size"
            is_one = is_one and action.dest != "nodes"  # of a scenario: nothing is replayed
            if is_one and action.option_strings and action.nargs is None:
                option = action.option_strings[-1]
                found.append((name, option, option == "--header-size"))
    return found


@pytest.mark.parametrize("value", ["-5MiB", "5 sheep"])
@pytest.mark.parametrize(("name", "option", "of_raw"), quantities())
def test_a_wrong_quantity_is_one_line_that_names_its_option(
    capsys: pytest.CaptureFixture[str], name: str, option: str, of_raw: bool, value: str
) -> None:
    """A negative one too, which looks like an option."""
    more = ["--record-size", "5"] if of_raw else []
    runs = ["--", "true"] if name in RUN else []
    status = main([name, *COMES_TO[name], *more, option, value, *runs])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert re.match(rf"uffdprefetch: {option}\b", err) and err.count("\n") == 1, err
    assert value.split()[0] in err


@pytest.mark.parametrize("content", [b"", b"garbage\n", bytes(range(256)) * 64])
@pytest.mark.parametrize(
    "words",
    [
        "trace {}", "trace --compare {} {}", "summary {}", "summary --compare {} {}",
        "index {}", "index --format npy {}", "index --format lmdb {}", "index --format arrow {}",
        "index --format tfrecord {}", "index --format safetensors {}",
        "plan {}", "simulate {}", "simulate --replay {} --bandwidth 1GB/s --latency 1ms",
        "wrap --plan {} -- true", "wrap --config {} -- true", "doctor --config {}",
    ],
)  # fmt: skip
def test_a_file_that_is_not_what_it_should_be_is_exit_status_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, content: bytes
) -> None:
    """Of whichever command, and one that is not there too."""
    for name in ("damaged", "nowhere"):
        path = tmp_path / name
        if name == "damaged":
            path.write_bytes(content)
        may_be = (
            (b"", "index --format tfrecord {}"),
            (b"", "wrap --config {} -- true"),
        )
        if name == "damaged" and (content, words) in (*may_be, (b"", "doctor --config {}")):
            continue  # an empty one is one
        status = main(words.replace("{}", str(path)).split())
        out, err = capsys.readouterr()
        assert (status, out) == (2, "")
        assert str(path) in err and err.count("\n") == 1, err


def examples(name: str) -> tuple[str, ...]:
    command = importlib.import_module(COMMANDS[name][0]).Command()
    return getattr(command, "examples", ())


@pytest.mark.parametrize("name", SHOWN)
def test_examples_are_of_options_that_there_are(name: str) -> None:
    module = importlib.import_module(COMMANDS[name][0])
    for line in examples(name):
        words = shlex.split(line.partition(">")[0])
        at = words.index("uffdprefetch") + 1
        assert words[at] == name
        command = module.Command()
        parser = argparse.ArgumentParser()
        command.prepare_parser(parser)
        parsed, rest = split_rest(words[at + 1 :], getattr(command, "options_end", None))
        parser.parse_args(parsed)
        assert rest is None or rest


def test_the_commands_that_people_begin_with_have_examples() -> None:
    assert all(examples(name) for name in ("wrap", "cluster", "trace", "doctor", "summary"))


def options_of(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Those that the help which ``words`` ask for has a line of."""
    with pytest.raises(SystemExit):
        main(words)
    return set(re.findall(r"^  (?:-\w(?: [A-Z]+)?, )?(--[\w-]+)", capsys.readouterr().out, re.M))


@pytest.mark.parametrize("name", ["wrap", "cluster", "compare"])
def test_help_shows_what_one_begins_with_and_help_all_shows_the_rest(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    command = importlib.import_module(COMMANDS[name][0]).Command()
    every = {a.option_strings[-1] for a in parser_of(name, command)._actions}
    shown, all_ = (options_of([name, word], capsys) for word in ("--help", "--help-all"))
    assert all_ == every
    assert shown == all_ - set(command.rare)
    shown -= {"--help", "--help-all", "--version"}
    assert {"--budget", "--policy", "--plan", "--include"} < shown
    assert 11 <= len(shown) <= 15 and len(all_) > len(shown) + 10


@pytest.mark.parametrize("name", SHOWN)
def test_help_fits_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = importlib.import_module(COMMANDS[name][0]).Command()
    for word in ("--help", *(["--help-all"] if hasattr(command, "rare") else [])):
        with pytest.raises(SystemExit):
            main([name, word])
        assert [one for one in capsys.readouterr().out.splitlines() if len(one) > 80] == []


@pytest.mark.parametrize("name", SHOWN)
def test_each_option_stands_in_the_reference(name: str) -> None:
    """Those of `wrap` in the first table, the others' in their own line of the second."""
    text = (ROOT / "docs" / "reference.md").read_text()
    lines = [one for one in text.splitlines() if one.startswith((f"| `{name}`", "Each has"))]
    own = text if name in ("wrap", "cluster", "compare") else "\n".join(lines)
    command = importlib.import_module(COMMANDS[name][0]).Command()
    for action in parser_of(name, command)._actions:
        for option in action.option_strings[-1:]:
            assert re.search(rf"`{option}[`\[ ]", own), option


def test_each_option_is_in_one_group_of_the_help() -> None:
    keys = [key for _, keys in options.GROUPS for key in keys]
    assert sorted(keys) == sorted(option.key for option in options.OPTIONS)
