# SPDX-License-Identifier: Apache-2.0
"""Names and writing of the files that a run leaves behind."""

from __future__ import annotations

import os
import stat

from uffdprefetch.base import jsontext
from uffdprefetch.base.errors import EXIT_USAGE, UffdPrefetchError
from uffdprefetch.base.identity import file_name_safe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

SUFFIX = ".summary.json"
#: Summaries kept per node in the state directory, the newest.
KEPT = 50
#: Names in a directory where several runs, and nodes, leave theirs.
_AMONG_OTHERS = "%h.%j.%r"


def state_directory(environ: Mapping[str, str]) -> str | None:
    """Where a user's summaries lie ([XDG base directories]), whether or not it is there; None where
    no place is named. Homes are shared by nodes: names tell the node."""
    home = environ.get("HOME", "")
    state = environ.get("XDG_STATE_HOME") or (home and os.path.join(home, ".local", "state"))
    if not state or not os.path.isabs(state):
        return None
    return os.path.join(state, "uffdprefetch")


def default_pattern(environ: Mapping[str, str]) -> str:
    """Of a run whose user has named no place: in the state directory, which is made, else in the
    current one."""
    directory = state_directory(environ)
    try:
        if directory is not None:
            os.makedirs(directory, 0o700, exist_ok=True)
    except OSError:
        directory = None
    if directory is None or not os.access(directory, os.W_OK | os.X_OK):
        return "uffdprefetch.%j.%r"
    return os.path.join(directory.replace("%", "%%"), _AMONG_OTHERS)


def summaries(directory: str) -> list[str]:
    """The paths of those in a directory, the newest last. Raises OSError."""
    found = []
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        try:
            if name.endswith(SUFFIX):
                found.append((os.stat(path).st_mtime_ns, path))
        except OSError:
            pass  # another run's wrap has taken it away
    return [path for _, path in sorted(found)]


def keep_last(directory: str, host: str | None = None) -> None:
    """Remove all but the newest KEPT of this node's summaries there (``default_pattern``)."""
    mine = file_name_safe(os.uname().nodename if host is None else host) + "."
    try:
        own = [path for path in summaries(directory) if os.path.basename(path).startswith(mine)]
        for path in own[:-KEPT]:
            _remove(path)
    except OSError:
        pass


def expand(
    pattern: str,
    key: str,
    rank: int | None,
    environ: Mapping[str, str],
    host: str | None = None,
    pid: int | None = None,
    option: str = "-o",
) -> str:
    """Fill in the tokens of a pattern of an ``option``.

    %h host, %p pid, %j job key, %r rank (0 where no launcher gave one), %q{VAR} an environment
    variable (made safe for a file name; empty if unset), %% a percent sign. Raises
    UffdPrefetchError (exit 2) for any other token.
    """
    values = {
        "h": file_name_safe(os.uname().nodename if host is None else host),
        "p": str(os.getpid() if pid is None else pid),
        "j": key,
        "r": str(rank or 0),
        "%": "%",
    }
    made, rest = "", pattern
    while rest:
        text, begun, rest = rest.partition("%")
        made += text
        if not begun:
            break
        letter, rest = rest[:1], rest[1:]
        variable, closed, after = rest[1:].partition("}")
        if letter == "q" and rest.startswith("{") and closed:
            value = environ.get(variable, "")
            made += file_name_safe(value) if value else ""
            rest = after
        elif letter in values:
            made += values[letter]
        else:
            raise UffdPrefetchError(
                f"{option} {pattern!r}: {'%' + letter!r} is no token (%h %p %j %r %q{{VAR}} %%)",
                EXIT_USAGE,
            )
    return made


def summary_name(pattern: str, key: str, rank: int | None, environ: Mapping[str, str]) -> str:
    """expand(); of a directory that is there a name in it."""
    name = expand(pattern, key, rank, environ)
    if os.path.isdir(name):
        name = os.path.join(name, expand(_AMONG_OTHERS, key, rank, environ))
    return name


def replace(path: str, make: Callable[[str], None]) -> None:
    """Put what ``make`` writes into the file whose path it is given in the place of ``path``: whole
    or not at all.

    The directory may be one where others write (/tmp). So the new file has a name that nobody can
    prepare, is created and never opened by that name, and is moved over whatever ``path`` is: a
    symbolic link there is replaced, what it names stays as it is. Raises OSError, and whatever
    ``make`` does.
    """
    if _is_special(path):
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            if _is_special(fd):  # by its name it might be another one by now
                make(f"/proc/self/fd/{fd}")
                return
        finally:
            os.close(fd)
    temporary = os.path.join(os.path.dirname(path), f".{os.urandom(12).hex()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o666)
    try:
        make(f"/proc/self/fd/{fd}")  # by its name it might be another one by now
        os.replace(temporary, path)
    except BaseException:
        _remove(temporary)
        raise
    finally:
        os.close(fd)


def _is_special(path: str | int) -> bool:
    """Whether there is something that is no regular file: a terminal, a pipe, /dev/null."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def replace_text(path: str, text: str) -> None:
    """See replace()."""

    replace(path, lambda temporary: overwrite_text(temporary, text))


def overwrite_text(path: str, text: str) -> None:
    """Write a file. Names in it that are no UTF-8 are written with their bytes. Raises OSError."""
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def why_not(path: str) -> str | None:
    """Why no file of this name can be made, as far as that is known before; None: it seems it
    can."""
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        return f"there is no directory {directory}"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"directory {directory} cannot be written"
    return None


def _split(name: str) -> tuple[str, str]:
    if name.endswith(SUFFIX):
        return name[: -len(SUFFIX)], SUFFIX
    return os.path.splitext(name) if name.endswith(".json") else (name, SUFFIX)


def named(name: str) -> str:
    """The path of a summary of this name, where none is there yet."""
    return "".join(_split(name))


def is_older(path: str, seconds: float) -> bool:
    """Whether its mtime is older than ``seconds``, the run's duration: an earlier run left it, not
    another node of this one."""
    import time

    try:
        return os.stat(path).st_mtime < time.time() - seconds
    except OSError:
        return False


def write(name: str, summary: Mapping[str, Any], force: bool) -> str:
    """Write ``summary`` as JSON and return the path.

    ``name`` gets .summary.json appended unless it ends in .json. Without ``force`` nothing is
    overwritten: a file that is there gets a neighbour with a number. Raises OSError.
    """
    stem, suffix = _split(name)
    text = jsontext.dumps(summary, indent=2) + "\n"
    if force:
        replace_text(stem + suffix, text)
        return stem + suffix
    number = 1
    while True:
        path = stem + (f"-{number}" if number > 1 else "") + suffix
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        except FileExistsError:
            number += 1
            continue
        try:
            replace_text(path, text)
        except BaseException:
            _remove(path)  # nobody else's: it was made above
            raise
        return path
