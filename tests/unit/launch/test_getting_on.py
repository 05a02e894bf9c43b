# SPDX-License-Identifier: Apache-2.0
"""A start is waited for as long as its process has a hundredth of a processor."""

from __future__ import annotations

import pytest

from uffdprefetch.launch import getting_on
from uffdprefetch.launch.getting_on import LEAST_NS, STANDS_SECONDS, GettingOn
from uffdprefetch.launch.service import START_TIMEOUT_SECONDS

#: Processor time that the quickest start takes, of a Python that starts in 0.03 s.
START_NS = 80_000_000


class Process:
    """One whose time is the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.had_ns = 1000.0, 5
        monkeypatch.setattr(getting_on.time, "monotonic", lambda: self.seconds)
        monkeypatch.setattr(getting_on, "_processor_ns", lambda pid: self.had_ns)

    def lives(self, seconds: float, had_ns: int) -> None:
        self.seconds += seconds
        self.had_ns += had_ns


def test_one_that_does_not_run_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    watched = GettingOn(1)
    process.lives(0.9 * STANDS_SECONDS, 0)
    assert not watched.stands()
    process.lives(0.1 * STANDS_SECONDS, LEAST_NS - 1)
    assert watched.stands()


def test_one_that_runs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    watched = GettingOn(1)
    for _ in range(5):
        process.lives(STANDS_SECONDS, LEAST_NS)
        assert not watched.stands()
    process.lives(STANDS_SECONDS, 0)
    assert watched.stands()


def test_with_less_it_would_hardly_be_up_in_time() -> None:
    seconds = START_NS / LEAST_NS * STANDS_SECONDS
    assert 0.5 * START_TIMEOUT_SECONDS < seconds < START_TIMEOUT_SECONDS


def test_who_cannot_be_seen_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getting_on, "STANDS_SECONDS", 0.0)
    assert GettingOn(0).stands()
