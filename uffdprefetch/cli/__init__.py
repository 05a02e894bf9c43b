# SPDX-License-Identifier: Apache-2.0
"""The command line: one file per command, and main().

A command is a class ``Command`` in ``cli/NAME.py``: its docstring is the help, ``prepare_parser``
adds the options and ``run`` returns the exit status. Only the command in use is imported: start-up
is fast, and a command that cannot be imported breaks no other.

`wrap` stands before every job, so nothing that it does before the job may load much: a module that
it comes by imports at its head what is cheap, and the rest where it is used (docs/internals.md,
"From `wrap` to the job").
"""

from __future__ import annotations

import gc
import os
import sys

from uffdprefetch import __version__
from uffdprefetch.base.errors import EXIT_CANNOT, EXIT_USAGE, UffdPrefetchError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from uffdprefetch.cli.parser import CommandProtocol

#: name -> (module, one line of help); None hides a command from the help.
COMMANDS: dict[str, tuple[str, str | None]] = {
    "wrap": ("uffdprefetch.cli.wrap", "run a command with the files that it reads prefetched"),
    "cluster": (
        "uffdprefetch.cli.cluster",
        "run a command on many nodes that share what they read",
    ),
    "compare": (
        "uffdprefetch.cli.compare",
        "run a command plainly and under wrap in turns: what wrap brings",
    ),
    "top": ("uffdprefetch.cli.top", "watch a running job of yours on this node"),
    "summary": ("uffdprefetch.cli.summary", "what a run has left behind; two runs compared"),
    "doctor": ("uffdprefetch.cli.doctor", "what works on this machine, and what would lift it"),
    "trace": ("uffdprefetch.cli.trace", "record who reads what, and show a recording"),
    "index": ("uffdprefetch.cli.index", "which bytes of a record file hold which record"),
    "plan": ("uffdprefetch.cli.plan", "check a plan: who reads which records in which order"),
    "profile": ("uffdprefetch.cli.profile", "what programs read when they start: see and keep it"),
    "warm": ("uffdprefetch.cli.warm", "read ahead what a program reads when it starts"),
    "pack": ("uffdprefetch.cli.pack", "many small files, or tars, into one LMDB"),
    "unpack": ("uffdprefetch.cli.unpack", "the files of a packed LMDB again"),
    "simulate": ("uffdprefetch.cli.simulate", "what data-loading policies would take on a cluster"),
    "calibrate": ("uffdprefetch.cli.calibrate", "measure the bandwidths that simulate needs"),
    "demo": ("uffdprefetch.cli.demo", "a slow file system, a training-like job, before and after"),
    "serve": ("uffdprefetch.cli.serve", None),
    "record": ("uffdprefetch.cli.record", None),
}


def split_rest(
    argv: Sequence[str], options_end: Callable[[Sequence[str]], int] | None = None
) -> tuple[list[str], list[str] | None]:
    """Split at the first ``--``, or where the options end: argparse must not interpret the job's
    words."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    if options_end is not None and options_end(words[:at]) < at:
        at = options_end(words[:at])
        return words[:at], words[at:]
    return words[:at], words[at + 1 :] if at < len(words) else None


def _usage() -> str:
    lines = [
        "usage: uffdprefetch COMMAND ...",
        "",
        "Prefetches files, mapped or read by calls, ahead of the job that reads them.",
        "",
    ]
    lines += [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items() if text]
    lines += ["", "uffdprefetch COMMAND --help tells the options; --version the version."]
    docs = documentation()
    if docs:
        lines.append(f"documentation (docs/): {docs}")
    return "\n".join(lines)


def documentation() -> str | None:
    """The directory that is called docs/ in what we say: share/doc/uffdprefetch of the prefix that
    this package is installed below, or the checkout's; None: this package came without."""
    above = os.path.dirname(os.path.abspath(__file__))
    while above != os.path.dirname(above):
        for name in ("share/doc/uffdprefetch", "docs"):
            if os.path.exists(os.path.join(above, name, "summary-schema.md")):
                return os.path.join(above, name)
        above = os.path.dirname(above)
    return None


class PlainArguments:
    """As argparse.Namespace, of options that were plain."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)


def _dispatch(argv: Sequence[str]) -> int:
    if len(argv) > 1 and argv[0] == "help":
        argv = [argv[1], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else EXIT_USAGE
    if argv[0] in ("-V", "--version"):
        print(f"uffdprefetch {__version__}")
        return 0
    name = argv[0]
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, [n for n, (_, text) in COMMANDS.items() if text])
        hint = f"did you mean {near[0]}?" if near else "see uffdprefetch --help"
        raise UffdPrefetchError(f"no command {name!r}: {hint}", EXIT_USAGE)
    module = COMMANDS[name][0]
    # What modules make stays: the collector would look through it again and again.
    gc.disable()
    __import__(module)
    gc.freeze()
    gc.enable()
    command: CommandProtocol = sys.modules[module].Command()
    words, rest = split_rest(argv[1:], getattr(command, "options_end", None))
    if hasattr(command, "parse_plain"):  # what starts beside a job
        plain = command.parse_plain(words)
        if plain is not None:
            return command.run(PlainArguments(plain), rest)  # type: ignore[arg-type]
    from uffdprefetch.cli.parser import parser_of, unrecognized, with_values

    parser = parser_of(name, command)
    # a word may stand behind an option: `profile show --json FILE`
    args, unknown = parser.parse_known_intermixed_args(with_values(words))
    if unknown:
        parser.error(unrecognized(unknown, parser, rest is not None))
    return command.run(args, rest)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; the only place where errors are printed."""
    try:
        return _dispatch(sys.argv[1:] if argv is None else argv)
    except UffdPrefetchError as error:
        print(f"uffdprefetch: {error.message}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        # Before the job's start: die of SIGINT, as a program that does not catch it.
        import signal

        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # `uffdprefetch doctor | head`: the reader has closed the pipe. The interpreter's flush at
        # exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_CANNOT
