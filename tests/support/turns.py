# SPDX-License-Identifier: Apache-2.0
"""Which tests may run at the same time in the workers of one run (pytest-xdist).

The tests of a file run in one worker, in their order; so do those of a folder in FOLDERS. A test
marked ``alone`` (it changes or counts what belongs to the whole machine) runs while no other test
of the run does. Two locks on files: who waits to be alone holds the gate, so nobody starts
meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

#: A Slurm of several nodes is on a machine once at a time.
FOLDERS = ("tests/slurm",)


class ByFile(LoadScopeScheduling):
    """What one worker is given at a time."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return next((one for one in FOLDERS if Path(path).is_relative_to(one)), path)


class Turns:
    """The turns of a run whose workers know ``directory``."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        os.makedirs(directory, exist_ok=True)
        for name in ("gate", "turn"):
            os.close(self._open(name))

    def _open(self, name: str) -> int:
        return os.open(
            os.path.join(self.directory, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )

    @contextlib.contextmanager
    def taken(self, alone: bool) -> Iterator[None]:
        """While a test runs."""
        gate, turn = self._open("gate"), self._open("turn")
        try:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(turn, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(gate, fcntl.LOCK_UN)
            yield
        finally:
            # Said, since a process that the test has forked may have our descriptors still.
            fcntl.flock(turn, fcntl.LOCK_UN)
            fcntl.flock(gate, fcntl.LOCK_UN)
            os.close(turn)
            os.close(gate)
