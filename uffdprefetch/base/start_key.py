# SPDX-License-Identifier: Apache-2.0
"""By which name a program's start profile is kept, and where: asked before a job starts, so that it
loads next to nothing."""

from __future__ import annotations

import os

from uffdprefetch import __version__
from uffdprefetch.base.identity import file_name_safe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

SUFFIX = ".upl"
#: Of the directory with the learned orders of a key (orders/learned_ranges.py).
RANGES_SUFFIX = ".ranges"
#: By these a site and a user choose which libraries a program finds.
ENVIRONMENT = ("VIRTUAL_ENV", "CONDA_PREFIX", "LOADEDMODULES")
#: Of a key's digest: enough that two of a user's programs never share one.
_KEY_CHARS = 24
#: Of the text behind -c, for people.
_TEXT_CHARS = 60
#: Of a command's arguments, asked for whether they are files: the job waits for that.
ARGUMENTS_ASKED = 32


def started(command: Sequence[str], program: str) -> tuple[str, str, str]:
    """What starts by a command whose first word was found to be the file ``program``: that, ``-m``,
    ``-c`` or nothing, and what it runs: the first argument that is a file, else what stands behind
    the first ``-m`` or ``-c``."""
    return _real(program), *_what_it_runs(command[1:])


def described(start: tuple[str, str, str]) -> str:
    """It in a line, for people: of a program's own text the beginning."""
    program, flag, what = start
    if flag == "-c":
        what = what.strip().partition("\n")[0][:_TEXT_CHARS]
    return " ".join(filter(None, (program, flag, what)))


def start_key(start: tuple[str, str, str], environ: Mapping[str, str]) -> str:
    """The key of what starts, in its environment. No other argument, no rank and no number of them
    is part of it: the ranks of a job start alike."""
    parts = [*start]
    parts += [environ.get(name, "") for name in ENVIRONMENT]
    parts.append(__version__)
    digest = _sha256("\0".join(parts).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:_KEY_CHARS]


def _real(path: str) -> str:
    try:
        return os.path.realpath(path)
    except OSError:  # the working directory has been removed
        return path


def _sha256(data: bytes) -> Any:
    """hashlib's, without OpenSSL, which hashlib loads and for which the job would wait."""
    for name in ("_sha2", "_sha256"):  # since Python 3.12, and before
        try:
            return __import__(name).sha256(data)
        except ImportError:
            continue
    import hashlib

    return hashlib.sha256(data)


def _what_it_runs(arguments: Sequence[str]) -> tuple[str, str]:
    for at, word in enumerate(arguments[:ARGUMENTS_ASKED]):
        if word in ("-m", "-c") and at + 1 < len(arguments):
            return word, arguments[at + 1]
        if os.path.isfile(word):
            return "", _real(word)
    return "", ""


def profile_directory(environ: Mapping[str, str]) -> str | None:
    """Where a user's start profiles lie ([XDG base directories]), whether or not it is there; None
    where no place is named."""
    home = environ.get("HOME", "")
    cache = environ.get("XDG_CACHE_HOME") or (home and os.path.join(home, ".cache"))
    if not cache or not os.path.isabs(cache):
        return None
    return os.path.join(cache, "uffdprefetch", "profiles")


def profile_path(directory: str, key: str) -> str:
    """The file of a key, or of the name that a user has given instead."""
    return os.path.join(directory, file_name_safe(key) + SUFFIX)


def ranges_path(directory: str, key: str) -> str:
    """The directory with the learned orders of a key, or of the name that a user has given."""
    return ranges_beside(profile_path(directory, key))


def ranges_beside(path: str) -> str:
    """The same, of the key of a profile's file."""
    return path.removesuffix(SUFFIX) + RANGES_SUFFIX
