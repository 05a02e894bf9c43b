# SPDX-License-Identifier: Apache-2.0
"""cluster/hold.py: what holds a node's service ends with the run, however the run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import HANG_SECONDS, clean_environment, wait_until
from paths import ROOT

from uffdprefetch.cluster import hold
from uffdprefetch.cluster.meeting import Meeting


class Held:
    """A holder whose input stays open, and the process that has started it all."""

    def __init__(self, base: Path, node: int) -> None:
        self.meeting = Meeting(base, "run", 9)
        self.owner = subprocess.Popen(["sleep", "600"])
        self.meeting.post(hold.OWNER, hold.owner_here(self.owner.pid))
        environ = {**clean_environment(), "PYTHONPATH": str(ROOT), hold.NUMBER: str(node)}
        self.holder = subprocess.Popen(
            [sys.executable, "-m", "uffdprefetch.cluster.hold", str(self.meeting.path)],
            stdin=subprocess.PIPE, env=environ,
        )  # fmt: skip
        wait_until(lambda: self.meeting.note(hold.note_of(node)), "what it tells")

    def ended(self) -> bool:
        return self.holder.wait(HANG_SECONDS) == 0

    def close(self) -> None:
        for process in (self.holder, self.owner):
            process.kill()
            process.wait()
        assert self.holder.stdin is not None
        self.holder.stdin.close()


@pytest.fixture(params=[0, 3])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Held]:
    one = Held(tmp_path, request.param)
    yield one
    one.close()


def test_it_ends_with_the_process_that_has_started_all_and_says_so(held: Held) -> None:
    """Its input is still open: the srun through which an end would come may have been killed."""
    held.owner.kill()
    held.owner.wait()
    assert held.ended() and held.meeting.note(hold.OVER) == {"by": "its end"}


def test_it_ends_with_its_input(held: Held) -> None:
    assert held.holder.stdin is not None
    held.holder.stdin.close()
    assert held.ended() and held.meeting.note(hold.OVER) is not None


def test_it_ends_when_another_says_so_and_not_by_the_job_s_signals(held: Held) -> None:
    for number in hold.IGNORED:
        os.kill(held.holder.pid, number)
    held.meeting.post(hold.OVER, {"by": "command"})
    assert held.ended() and held.meeting.note(hold.OVER) == {"by": "command"}
    assert held.owner.poll() is None and held.holder.returncode != -signal.SIGTERM
