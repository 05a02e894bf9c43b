# SPDX-License-Identifier: Apache-2.0
"""The one exception type, and the exit codes that it carries."""

from __future__ import annotations

#: The wrapped program's status is the wrapper's; these are the wrapper's own. 125-127 are those of
#: env(1) and timeout(1), so that a script that knows them knows ours.
EXIT_CANNOT = 1
EXIT_USAGE = 2
EXIT_OURS = 125
EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127


class UffdPrefetchError(Exception):
    """Something that the user can act on, in one line: what failed, what was seen, what to do.

    Only ``cli.main()`` prints it (prefixed ``uffdprefetch: ``) and ends the process with
    ``exit_code``; everything else lets it pass.
    """

    def __init__(self, message: str, exit_code: int = EXIT_CANNOT) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


def usage_error(message: str) -> UffdPrefetchError:
    """An option, variable or configuration key that cannot be used: exit status 2."""
    return UffdPrefetchError(message, EXIT_USAGE)
