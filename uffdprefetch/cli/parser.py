# SPDX-License-Identifier: Apache-2.0
"""A command's argument parser, its short help and its whole one.

Loaded where argparse is wanted: a plain `wrap` goes without (docs/internals.md, "From `wrap` to the
job").
"""

from __future__ import annotations

import argparse
import difflib
import functools
import textwrap
from collections.abc import Collection, Sequence
from typing import Any, NoReturn, Protocol

from uffdprefetch import __version__
from uffdprefetch.base.errors import EXIT_USAGE, UffdPrefetchError


class CommandProtocol(Protocol):
    """Interface of a command; ``rest``: the words after ``--``, None without a ``--``. One that
    runs a command and has no words of its own tells by ``options_end`` where that begins if
    there is no ``--`` before it. ``examples``: lines for the help; ``rare``: its options that
    --help leaves to --help-all, if there are any."""

    examples: tuple[str, ...]

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace, rest: list[str] | None) -> int: ...


class CommandParser(argparse.ArgumentParser):
    """A parser that reports an error in one line, as all errors are."""

    def error(self, message: str) -> NoReturn:
        what = message.removeprefix("argument ")
        raise UffdPrefetchError(f"{what}; see {self.prog} --help", EXIT_USAGE)


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal. ``rare``: option strings that it leaves out."""

    def __init__(self, *args: Any, rare: Collection[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rare = rare

    def add_argument(self, action: argparse.Action) -> None:
        if not any(word in self._rare for word in action.option_strings):
            super().add_argument(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Paragraphs are filled, but for lines that are indented: those are commands."""
        paragraphs = (
            one if "\n " in f"\n{one}" else textwrap.fill(one, width) for one in text.split("\n\n")
        )
        return textwrap.indent("\n\n".join(paragraphs), indent)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """A value that may be left out is given by =: the next word may be the command."""
        text = super()._format_action_invocation(action)
        is_optional = bool(action.option_strings) and action.nargs == "?"
        return text.replace(" [", "[=") if is_optional else text


class _HelpAll(argparse._HelpAction):
    """Shows the rare options as well."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parser.formatter_class = Formatter
        super().__call__(parser, *args, **kwargs)


def parser_of(
    name: str, command: CommandProtocol, parser: argparse.ArgumentParser | None = None
) -> argparse.ArgumentParser:
    """A command's parser, with its help. ``parser``: one to be made it."""
    if parser is None:
        parser = CommandParser(prog=f"uffdprefetch {name}")
    parser.description = _dedented(command.__doc__ or "")
    parser.formatter_class = Formatter
    parser.allow_abbrev = False  # an abbreviation that is unique today is ambiguous tomorrow
    rare = getattr(command, "rare", ())
    if rare:
        parser.add_argument("--help-all", action=_HelpAll, help="this, and the rarer options, too")
        parser.formatter_class = functools.partial(Formatter, rare=rare)  # type: ignore[assignment]
    parser.add_argument("--version", action="version", version=f"uffdprefetch {__version__}")
    command.prepare_parser(parser)
    examples = getattr(command, "examples", ())
    if examples:
        parser.epilog = "examples:\n" + "".join(f"  {line}\n" for line in examples)
    return parser


def unrecognized(words: Sequence[str], parser: argparse.ArgumentParser, is_split: bool) -> str:
    """The error about words that are no options. ``is_split``: there is a ``--`` already."""
    key = words[0].partition("=")[0]
    near = difflib.get_close_matches(key, list(parser._option_string_actions), n=1)
    hint = ""
    if near and key.startswith("--"):
        hint = f" (did you mean {near[0]}?)"
    elif not is_split and "-- CMD" in (parser.usage or ""):
        hint = " (a command goes after --)"
    return f"unrecognized arguments: {' '.join(words)}{hint}"


def with_values(words: Sequence[str]) -> list[str]:
    """The words with a negative number joined to the option before it: argparse takes -5MiB for an
    option, and says that the one before it lacks its value."""
    found: list[str] = []
    for word in words:
        after = found[-1] if found else ""
        if word[:1] == "-" and word[1:2].isdigit() and after[:2] == "--" and "=" not in after:
            found[-1] = f"{after}={word}"
        else:
            found.append(word)
    return found


def _dedented(docstring: str) -> str:
    """A docstring as help text (Python 3.13 dedents it by itself)."""
    first, _, rest = docstring.partition("\n")
    return f"{first}\n{textwrap.dedent(rest)}".rstrip()
