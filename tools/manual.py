# SPDX-License-Identifier: Apache-2.0
"""Makes the manual pages and the completion of bash and zsh from the command line's own parsers.

    python tools/manual.py [DIRECTORY]

DIRECTORY (share/ by default) is laid out as a prefix's share/ is. What lies there is checked in, so
that installing needs neither of the two libraries; tests/service/test_manual.py finds what is old.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import shtab
from argparse_manpage.manpage import Manpage

from uffdprefetch import __version__
from uffdprefetch.base.options import OPTIONS
from uffdprefetch.cli import COMMANDS
from uffdprefetch.cli.parser import parser_of

ROOT = Path(__file__).resolve().parents[1]
#: Metavars of what is completed as a file, and as a directory.
FILES, DIRECTORIES = ("FILE", "FILE|DIR", "PATH", "TRACE", "SCENARIO", "F.png"), ("DIR",)
SHOWN = {name: text for name, (_, text) in COMMANDS.items() if text}


def of_a_command(
    name: str, parser: argparse.ArgumentParser | None = None
) -> argparse.ArgumentParser:
    """The parser with which the command reads its words."""
    command = importlib.import_module(COMMANDS[name][0]).Command()
    return parser_of(name, command, parser)


def page(parser: argparse.ArgumentParser, name: str, text: str, last: Sequence[str]) -> str:
    """A manual page, without a date: it is the same whenever it is made. ``last``: lines of roff
    that end it."""
    parser.usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    parser.prog, parser.epilog = name, None
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # lines are roff's to fill
    data = {
        "prog": name, "project_name": "uffdprefetch", "description": text,
        "version": __version__, "manual_title": "uffdprefetch", "manual_section": 1,
    }  # fmt: skip
    head, *rest = str(Manpage(parser, format="single-commands-section", _data=data)).splitlines()
    words = head.split('"')
    words[3] = ""  # the date
    return "\n".join(('"'.join(words), *rest, *last)).rstrip() + "\n"


def _verbatim(section: str, lines: Sequence[str]) -> list[str]:
    escaped = [line.replace("\\", "\\e").replace("-", "\\-") for line in lines]
    return [f".SH {section}", ".nf", *escaped, ".fi"]


def all_commands() -> argparse.ArgumentParser:
    """One parser that has each command as a subcommand."""
    whole = argparse.ArgumentParser(
        prog="uffdprefetch",
        description="Prefetches files, mapped or read by calls, ahead of the job that reads them.",
    )
    whole.add_argument("--version", action="version", version=f"uffdprefetch {__version__}")
    commands = whole.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in SHOWN.items():
        of_a_command(name, commands.add_parser(name, help=text))
    return whole


def completion(shell: str) -> str:
    """The script that completes the command line in a shell."""
    whole = all_commands()
    (commands,) = (a for a in whole._actions if isinstance(a, argparse._SubParsersAction))
    choices = {f"--{option.key}": option.choices for option in OPTIONS if option.choices}
    for name, parser in commands.choices.items():
        for action in parser._actions:
            key = action.option_strings[-1] if action.option_strings else ""
            if name in ("wrap", "cluster", "compare") and key in choices:
                action.choices = choices[key]
            elif action.metavar in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar in DIRECTORIES:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    text: str = shtab.complete(whole, shell)
    return text.rstrip() + "\n"


def files() -> dict[str, str]:
    """Path below share/ to content."""
    os.environ["COLUMNS"] = "80"  # argparse's width, wherever it is made
    names = ", ".join(f"uffdprefetch\\-{name}(1)" for name in SHOWN)
    whole = argparse.ArgumentParser(
        prog="uffdprefetch",
        usage="uffdprefetch COMMAND ...",
        description="Prefetches files, mapped or read by calls, ahead of the job that reads them,"
        " with no change of the job.",
    )
    commands = [f"uffdprefetch {name:<10} {text}" for name, text in SHOWN.items()]
    made = {
        "bash-completion/completions/uffdprefetch": completion("bash"),
        "zsh/site-functions/_uffdprefetch": completion("zsh"),
        "man/man1/uffdprefetch.1": page(
            whole, "uffdprefetch", "page prefetcher for HPC jobs that read by mmap",
            [*_verbatim("COMMANDS", commands), ".SH SEE ALSO", names],
        ),
    }  # fmt: skip
    for name, text in SHOWN.items():
        examples = getattr(importlib.import_module(COMMANDS[name][0]).Command(), "examples", ())
        last = [*(_verbatim("EXAMPLES", examples) if examples else []), ".SH SEE ALSO"]
        made[f"man/man1/uffdprefetch-{name}.1"] = page(
            of_a_command(name), f"uffdprefetch-{name}", text, [*last, "uffdprefetch(1)"]
        )
    return made


def main(argv: list[str]) -> int:
    """See the module."""
    share = Path(argv[1]) if len(argv) > 1 else ROOT / "share"
    for name, text in files().items():
        path = share / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
