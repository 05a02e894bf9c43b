# SPDX-License-Identifier: Apache-2.0
"""Who maps a file, and since when nobody does."""

from __future__ import annotations

from uffdprefetch.base.record import dataclass


@dataclass
class Mappings:
    """Of one file, of all processes; state/admission.py closes what nobody maps."""

    attached: int = 0  # regions
    gone: int = 0  # regions that there were
    copied: bool = False  # it was mapped private and writable
    opened_again: bool = False  # since take_opened()
    idle_ns: int = 0  # since when it is unmapped
    last_pid: int = 0  # the process that mapped it last
    says_random: bool = False  # a job has said so (MADV_RANDOM), last
    resting: bool = False  # unmapped: not read, about to be closed

    def wanted(self, *, opened: bool = False) -> None:
        """It is about to be mapped; ``opened``: it was opened for that."""
        self.resting, self.idle_ns = False, 0
        self.opened_again = self.opened_again or opened

    def take_opened(self) -> bool:
        """Whether it was opened again since this was asked last."""
        opened, self.opened_again = self.opened_again, False
        return opened

    def needed(self, now: int) -> None:
        """It is still needed, though nobody maps it."""
        self.idle_ns = now

    def say_random(self, so: bool) -> None:
        """Whether a job says that it reads it here and there: the last one that has mapped it, or
        said how it reads."""
        self.says_random = so

    def came(self, *, copies: bool) -> None:
        """A region has come, ``copies``: private and writable."""
        self.attached += 1
        self.copied = self.copied or copies

    def went(self) -> None:
        """One has gone."""
        self.attached -= 1
        self.gone += 1
