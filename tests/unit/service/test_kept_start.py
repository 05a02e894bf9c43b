# SPDX-License-Identifier: Apache-2.0
"""The start profile of several runs, or several nodes of one, that end together: what each has read
is kept, and a run counts once."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import HANG_SECONDS
from start_profiles import name_entry

from uffdprefetch.base.config import LearnOptions
from uffdprefetch.orders import profile_store
from uffdprefetch.orders.start_profile import StartProfile
from uffdprefetch.service import learning
from uffdprefetch.service.learning import KeptStart


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "uffdprefetch" / "profiles" / "mine.upl"


def begun() -> KeptStart:
    """Of a service."""
    start = KeptStart(LearnOptions("mine"))
    start.begin()
    return start


def keep(name: str, start: KeptStart | None = None) -> None:
    (start or begun()).keep([name_entry(Path("/data", name))])


def kept(path: Path) -> tuple[int, set[str]]:
    found = profile_store.load(str(path))
    return found.runs, {Path(entry.path).name for entry in found.entries}


def test_of_two_runs_that_end_together_both_are_kept(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes when the first has read the profile, and not yet written."""
    second = threading.Thread(target=keep, args=("second",))
    came, load, lock = threading.Event(), learning._loaded, fcntl.flock

    def loaded(path: str) -> StartProfile | None:
        found = load(path)
        if threading.current_thread() is second:
            came.set()  # without a lock it reads the same as the first
        else:
            second.start()
            assert came.wait(HANG_SECONDS)
        return found

    def locked(fd: int, how: int) -> None:
        try:
            lock(fd, how)
        except BlockingIOError:
            came.set()
            raise

    monkeypatch.setattr(learning, "_loaded", loaded)
    monkeypatch.setattr(fcntl, "flock", locked)
    keep("first")
    second.join(HANG_SECONDS)
    assert kept(profile) == (1, {"first", "second"}), "neither has come after the other"


def test_a_run_of_several_nodes_counts_once(profile: Path) -> None:
    """Else what only the first node reads is gone before the next run."""
    for run in range(1, 4):
        nodes = [begun() for _ in range(5)]
        for node, start in enumerate(nodes):
            keep("first alone" if node == 0 else "all", start)
        assert kept(profile) == (run, {"first alone", "all"})
        assert {entry.seen for entry in profile_store.load(str(profile)).entries} == {2**run - 1}


def test_the_program_comes_first(profile: Path) -> None:
    """Nothing of its start is opened before that, and it is seen when it runs."""
    for path in ("/data/run", "/data/unseen"):
        start = KeptStart(LearnOptions("mine", program=path))
        start.begin()
        start.keep([name_entry(Path("/data", name)) for name in ("library", "run")])
        assert profile_store.load(str(profile)).entries[0].path == path


HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(profile: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock of the directory."""
    profile.parent.mkdir(parents=True)
    words = [sys.executable, "-c", HOLDS, str(profile.parent / ".lock")]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "\n"
        yield process
        process.kill()


def test_a_writer_that_dies_is_waited_for_no_more(
    profile: Path, holder: subprocess.Popen[str]
) -> None:
    writes = threading.Thread(target=keep, args=("mine",))
    writes.start()
    holder.kill()
    writes.join(HANG_SECONDS)
    assert kept(profile) == (1, {"mine"})


def test_one_that_stands_still_costs_nobody_a_record(
    profile: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_store, "_LOCKED_MOST_SECONDS", 0.05)
    keep("mine")
    assert holder.poll() is None and kept(profile) == (1, {"mine"})
