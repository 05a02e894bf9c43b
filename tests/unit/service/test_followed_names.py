# SPDX-License-Identifier: Apache-2.0
"""service/followed_names.py: what reads small files is made when it is needed, by the real sensors;
where it cannot be had, that is said once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from components import on_memory
from conftest import require, wait_until
from guess_bed import Bed

from uffdprefetch.base.clock import CLOCK
from uffdprefetch.job.channel import packed
from uffdprefetch.native import paths
from uffdprefetch.orders.file_order import FileOrder, PathColumn, of_items
from uffdprefetch.orders.key_lists import KeyList
from uffdprefetch.sense import opens
from uffdprefetch.sense.read_calls import ReadSeen
from uffdprefetch.service.followed_names import STEP_LEAST_NS, STEP_NS, FollowedNames
from uffdprefetch.service.ordered_files import AHEAD_FILES
from uffdprefetch.service.small_files import SmallFiles
from uffdprefetch.state.opening import Opener

PID, SMALL_BYTES = os.getpid(), 16 << 20


class Names:
    """A service's, whose run directory is ``rundir``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rundir: str) -> None:
        self.bed, self.opener = Bed(monkeypatch), Opener(-1)
        core = self.bed.core
        self.names = FollowedNames(rundir, SMALL_BYTES, core, self.opener, self.bed.ledger)

    def watch(self, directory: Path) -> bool:
        """Whether a directory is watched by now."""
        self.opener.step()
        return self.names.ordered.watch(PID, [str(directory)])

    def close(self) -> None:
        self.names.close()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Names]:
    names = Names(monkeypatch, str(tmp_path))
    yield names
    names.close()


def test_nothing_is_made_before_it_is_needed(made: Names) -> None:
    before = len(os.listdir("/proc/self/fd"))
    made.names.step(0, [])
    assert made.names.due_ns is None and made.names.describe() is None
    assert made.names.used_bytes == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_of_whom_nothing_is_watched_nothing_is_due(made: Names, tmp_path: Path) -> None:
    """Whoever had announced an order of one file made the service turn without a pause."""
    before = len(os.listdir("/proc/self/fd"))
    assert not made.names.ordered.opened(PID)
    assert made.names.due_ns is None
    made.names.ordered.forget(PID, [])
    assert len(os.listdir("/proc/self/fd")) == before, "and nothing was made for it"


def test_where_nothing_can_be_watched_nothing_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, "")
    assert not names.names.ordered.watch(PID, ["/"])
    assert names.names.due_ns is None
    names.close()


def test_what_is_opened_is_told_to_the_orders(made: Names, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a").write_bytes(b"a")
    wait_until(lambda: made.watch(data), "the mark")
    assert made.names.due_ns == 0
    (data / "a").read_bytes()

    def seen() -> bool:
        now_ns = made.names.due_ns
        assert now_ns is not None
        made.names.step(now_ns, [])
        assert made.names.due_ns == now_ns + STEP_NS
        return list(made.names.ordered.opened(PID)) == [str(data / "a")]

    # a root's events have a pid, and its own are told apart: a child's are the job's
    os.spawnlp(os.P_WAIT, "cat", "cat", "/dev/null", str(data / "a"))
    wait_until(seen, "its open")
    described = made.names.describe()
    assert described is not None and described["read"] == 0
    made.names.ordered.forget(PID, [])
    assert made.names.due_ns is None


def test_small_files_that_are_waited_for_and_opened_in_order_are_read_ahead(
    made: Names, tmp_path: Path
) -> None:
    require(not on_memory(tmp_path), "files in memory are not read; set TMPDIR")
    data = tmp_path / "data"
    data.mkdir()
    files = [data / f"{number:02}" for number in range(60)]
    for file in files:
        file.write_bytes(b"x" * 5000)

    def waits(file: Path) -> Any:
        status = file.stat()
        key = status.st_dev, status.st_ino
        return SimpleNamespace(path=str(file), pid=PID, key=key)

    def counts(name: str) -> int:
        made.opener.step()
        made.names.step(made.names.due_ns or 0, [])
        described = made.names.describe()
        assert described is not None
        return int(described[name])

    made.names.step(0, [waits(file) for file in files[:2]])
    wait_until(lambda: counts("directories"), "the directory to be watched")
    os.spawnlp(os.P_WAIT, "cat", "cat", *(os.devnull, *map(str, files[2:10])))
    wait_until(lambda: counts("there") + counts("read"), "the next ones")


@pytest.mark.parametrize("sensor", ["fanotify", "inotify"])
def test_our_own_opens_move_no_order(
    made: Names, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sensor: str
) -> None:
    require(not on_memory(tmp_path), "files in memory are not read; set TMPDIR")
    if sensor == "inotify":

        def refuse() -> None:
            raise OSError(22, "no fanotify")

        monkeypatch.setattr(opens.Opens.__init__, "__defaults__", (CLOCK, refuse, None))
    for number in range(3 * AHEAD_FILES):
        (tmp_path / str(number)).write_bytes(b"%d" % number)
    each = np.arange(3 * AHEAD_FILES)
    names = KeyList.parse("n", "bytes", packed([b"%d" % number for number in each]))
    column = PathColumn(names, f"{tmp_path}/".encode())
    order = FileOrder(of_items([column], [each], each, len(each)), "--plan")
    made.names.ordered.follow(PID, order)

    def there() -> int:
        made.opener.step()
        made.names.step(made.names.due_ns or 0, [])
        described = made.names.describe()
        assert described is not None
        return int(described["there"] + described["read"])

    wait_until(lambda: there() == AHEAD_FILES, "the first files")
    wait_until(lambda: there() == AHEAD_FILES, "what we have opened")
    assert order.position == 0
    os.spawnlp(os.P_WAIT, "cat", "cat", *(os.devnull, *(str(tmp_path / str(i)) for i in range(2))))
    wait_until(lambda: there() == AHEAD_FILES + 2, "the next ones")
    assert order.position == 2
    made.names.ordered.forget(PID, [order])


def test_what_reads_small_files_keeps_to_the_bounds_of_the_run(made: Names, tmp_path: Path) -> None:
    core = made.bed.core
    made.watch(tmp_path)
    small, watching = made.names._small, made.names._watching
    assert small is not None and watching is not None
    reads = watching.reads
    assert small._wants == core.table.wants and reads._most_bytes == SMALL_BYTES
    assert reads._account is core.ahead.account and reads._measured == core.ahead.measured
    assert reads._bounds._bucket is core.scheduler.bucket
    assert reads._bounds._allowed_bytes() == core.windows.allowed_bytes


def test_a_directory_is_unmarked_though_all_threads_were_busy_when_it_was_left(
    made: Names, tmp_path: Path
) -> None:
    wait_until(lambda: made.watch(tmp_path), "the mark")
    watching, opener = made.names._watching, made.opener
    assert watching is not None
    run, opener.run = opener.run, lambda work, then: False  # type: ignore[method-assign]
    made.names.ordered.forget(PID, [])
    opener.run = run  # type: ignore[method-assign]
    assert not made.names.ordered.active and made.names.due_ns is not None

    def unmarked() -> bool:
        made.names.step(made.names.due_ns or 0, [])
        opener.step()
        return not watching.opens._marks

    wait_until(unmarked, "the end of the mark")
    assert made.names.due_ns is None


def test_nothing_is_left_open_in_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = Names(monkeypatch, str(tmp_path))
    before = os.listdir("/proc/self/fd")
    wait_until(lambda: names.watch(tmp_path), "the mark")
    assert os.listdir("/proc/self/fd") != before
    names.close()
    assert os.listdir("/proc/self/fd") == before


def test_it_is_not_asked_more_often_than_it_is_due(made: Names, tmp_path: Path) -> None:
    wait_until(lambda: made.watch(tmp_path), "the mark")
    made.names.step(5, [])
    due_ns = made.names.due_ns
    made.names.step(6, [])
    assert made.names.due_ns == due_ns == 5 + STEP_NS


@pytest.mark.parametrize(
    ("ahead", "wait_ns"),
    [(1, STEP_LEAST_NS), (32, STEP_NS // 2), (64, STEP_NS), (200, STEP_NS), (0, STEP_NS)],
)
def test_a_window_that_is_only_begun_is_looked_at_sooner(
    made: Names, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ahead: int, wait_ns: int
) -> None:
    """Of 8 files that have come the last is opened a millisecond later."""
    asked = list[int]()
    monkeypatch.setattr(SmallFiles, "fewest_ahead", lambda _, since: asked.append(since) or ahead)
    wait_until(lambda: made.watch(tmp_path), "the mark")
    made.names.step(10**9, [])
    assert made.names.due_ns == 10**9 + wait_ns
    assert asked == [10**9 - STEP_NS]


@pytest.mark.parametrize("part", ["Opens", "PathReader"])
def test_what_cannot_be_had_is_said_once(
    made: Names, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(opens if part == "Opens" else paths, part, refuse)
    before = os.listdir("/proc/self/fd")
    for _ in range(2):
        assert not made.watch(tmp_path)
        waiting: Any = ReadSeen
        made.names.step(0, [waiting])
    (line,) = made.bed.ledger.degradations
    assert line.startswith("small files are not read ahead: ") and "too many open files" in line
    assert made.names.describe() is None
    assert os.listdir("/proc/self/fd") == before


def test_without_a_run_directory_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Names(monkeypatch, "")
    assert not made.watch(Path("/"))
    assert made.bed.ledger.degradations == []
    made.close()
