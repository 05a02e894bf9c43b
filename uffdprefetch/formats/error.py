# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a file, and where."""

from __future__ import annotations

from uffdprefetch.base.errors import EXIT_USAGE, UffdPrefetchError


class FormatError(UffdPrefetchError):
    """``what`` is wrong with a file at byte ``offset``, where ``detail`` was found."""

    def __init__(self, what: str, offset: int, detail: str) -> None:
        super().__init__(f"{what} at byte {offset}: {detail}", EXIT_USAGE)
        self.what = what
        self.offset = offset
        self.detail = detail

    def of(self, path: str) -> FormatError:
        """This error with the file's name in front."""
        named = FormatError(self.what, self.offset, self.detail)
        named.message = f"{path}: {self.message}"
        named.args = (named.message,)
        return named
