# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole: help, versions, and examples that are what they say."""

from __future__ import annotations

import argparse
import importlib
import shlex
import subprocess

import pytest
from conftest import HANG_SECONDS, uffdprefetch

from uffdprefetch import __version__
from uffdprefetch.base import options
from uffdprefetch.cli import COMMANDS, split_rest

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
        ("wrpa", "no command 'wrpa': did you mean wrap?"),
    ],
)  # fmt: skip
def test_what_is_wrong_on_it_is_said_in_one_line(words: str, line: str) -> None:
    assert run(*words.split()) == (2, "", f"uffdprefetch: {line}\n")


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
