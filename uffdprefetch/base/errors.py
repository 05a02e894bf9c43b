# SPDX-License-Identifier: Apache-2.0
"""The one exception type, and its exit codes."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

#: Exit statuses of our own; otherwise the wrapper's is the wrapped program's. 125-127 as env(1) and
#: timeout(1) have them.
EXIT_CANNOT = 1
EXIT_USAGE = 2
#: Exit status of a service for which there is no memory: EX_TEMPFAIL of sysexits.h.
EXIT_NO_ROOM = 75
EXIT_OURS = 125
EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127


class UffdPrefetchError(Exception):
    """An error that the user can act on, in one line: what failed, what was found, what to do.

    Only ``cli.main()`` prints it (prefixed ``uffdprefetch: ``) and ends the process with
    ``exit_code``; everything else lets it propagate.
    """

    def __init__(self, message: str, exit_code: int = EXIT_CANNOT) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


def named(what: str, parse: Callable[[str], T], text: str) -> T:
    """Parse a text; an error of ``parse`` is prefixed by ``what``: the option, variable or key."""
    try:
        return parse(text)
    except UffdPrefetchError as error:
        raise UffdPrefetchError(f"{what}: {error.message}", error.exit_code) from None


def pip_install(*names: str) -> str:
    """The command that installs packages where this program finds them."""
    import shlex
    import sys

    return f"{shlex.quote(sys.executable)} -m pip install {' '.join(names)}"


def usage_error(message: str) -> UffdPrefetchError:
    """An invalid option, variable or configuration key: exit status 2."""
    return UffdPrefetchError(message, EXIT_USAGE)
