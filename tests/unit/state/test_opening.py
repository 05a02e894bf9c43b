# SPDX-License-Identifier: Apache-2.0
"""Files are opened by threads that nobody waits for."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from conftest import wait_until

from uffdprefetch.state.opening import KEPT_THREADS, OPENS_MAX, Opened, Opener


def names_of(opener: Opener, count: int) -> set[str]:
    """Which threads have done ``count`` works, one after the other."""
    names: list[str | OSError] = []
    for number in range(count):
        assert opener.run(lambda: threading.current_thread().name, names.append)
        wait_until(lambda n=number: opener.step() or len(names) > n, "the work")  # type: ignore[misc]
    return {str(name) for name in names}


def test_one_open_after_the_other_starts_no_thread_for_each() -> None:
    assert len(names_of(Opener(-1), 50)) <= KEPT_THREADS + 1


def test_what_hangs_keeps_nothing_else_waiting() -> None:
    opener, gate = Opener(-1), threading.Event()
    names_of(opener, 5)
    done: list[bool | OSError] = []
    for _ in range(OPENS_MAX - 1):
        assert opener.run(gate.wait, done.append)
    assert len(names_of(opener, 3)) <= KEPT_THREADS + 1
    assert opener.run(gate.wait, done.append)
    assert not opener.run(gate.wait, done.append), "one too many"
    gate.set()
    wait_until(lambda: opener.step() or len(done) == OPENS_MAX, "those that hung")


def test_as_many_threads_stay_as_are_kept() -> None:
    opener, gate = Opener(-1), threading.Event()
    threads: list[threading.Thread | OSError] = []

    def wait() -> threading.Thread:
        gate.wait()
        return threading.current_thread()

    for _ in range(20):
        opener.run(wait, threads.append)
    gate.set()
    wait_until(lambda: opener.step() or len(threads) == 20, "all")
    wait_until(
        lambda: (
            sum(isinstance(t, threading.Thread) and t.is_alive() for t in threads) == KEPT_THREADS
        ),
        "the others' end",
    )


def test_what_is_not_wanted_any_more_is_closed_and_not_opened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fd, found = os.open(tmp_path / "file", os.O_RDONLY), list[Opened | OSError]()
    opener = Opener(-1)
    opener.open(fd, found.append, is_wanted=lambda: False)
    wait_until(lambda: opener.step() or bool(found), "the answer")
    assert isinstance(found[0], OSError) and found[0].errno == errno.ECANCELED
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
