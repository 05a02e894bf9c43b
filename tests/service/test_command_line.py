# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole: help, versions, and examples that are what they say."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from conftest import HANG_SECONDS, uffdprefetch

from uffdprefetch import __version__
from uffdprefetch.base import options
from uffdprefetch.cli import COMMANDS, main, parser_of, split_rest

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
    "index": ["none"], "calibrate": ["none"],
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


def test_each_option_is_in_one_group_of_the_help() -> None:
    keys = [key for _, keys in options.GROUPS for key in keys]
    assert sorted(keys) == sorted(option.key for option in options.OPTIONS)
