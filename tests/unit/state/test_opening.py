# SPDX-License-Identifier: Apache-2.0
"""Files are opened by threads that nobody waits for."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import wait_until

from uffdprefetch.base import file_systems
from uffdprefetch.native import uffd
from uffdprefetch.predict.bounds import LATELY_NS
from uffdprefetch.state import file_call, opening, quick_disks
from uffdprefetch.state.file_call import FileCall
from uffdprefetch.state.opening import KEPT_THREADS, OPENS_MAX, Opened, Opener, reopen


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


# -------------------------------------------------------------- what an open asks


@pytest.fixture
def fds(tmp_path: Path) -> Iterator[list[int]]:
    """Of some files."""
    made = []
    for name in "abcd":
        (tmp_path / name).write_bytes(bytes(5000))
        made.append(os.open(tmp_path / name, os.O_RDONLY))
    yield made
    for fd in made:
        os.close(fd)


def test_a_file_over_which_nothing_of_ours_may_lie_is_opened_once_less(fds: list[int]) -> None:
    with_it, without = reopen(fds[0]), reopen(fds[0], for_children=False)
    assert with_it.map_fd >= 0 > without.map_fd
    for one in (with_it, without):
        same = [os.fstat(fd).st_ino for fd in (one.fd, one.page_fd)]
        assert same == [os.fstat(fds[0]).st_ino] * 2
        one.close()


def test_the_file_system_is_asked_for_its_type_once_for_each_mount(
    fds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not uffd.mount_of(fds[0]):
        pytest.skip("the kernel gives mounts no number that stays (before 6.8)")
    asked: list[str | int] = []
    type_of = file_systems.type_of
    monkeypatch.setattr(opening, "_types", {})
    monkeypatch.setattr(file_systems, "type_of", lambda fd: (asked.append(fd), type_of(fd))[1])
    for fd in fds:
        one = reopen(fd)
        assert one.f_type == type_of(fd)
        one.close()
    assert len(asked) == 1
    elsewhere = os.open("/proc/self/stat", os.O_RDONLY)
    assert opening._type_of(elsewhere) == 0x9FA0, "another mount has a number of its own"
    os.close(elsewhere)


def test_where_mounts_have_no_number_each_file_is_asked(
    fds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uffd, "mount_of", lambda _: 0)
    types = iter((1, 2, 3, 4))
    monkeypatch.setattr(file_systems, "type_of", lambda _: next(types))
    assert [opening._type_of(fd) for fd in fds] == [1, 2, 3, 4]


def test_a_device_is_asked_once_in_a_while_what_the_kernel_reads_ahead_there(
    fds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    windows, now = iter((1 << 20, 2 << 20)), [LATELY_NS]
    monkeypatch.delenv("UFFDPREFETCH_TEST_READAHEAD", raising=False)
    monkeypatch.setattr(file_call, "_devices", {})
    monkeypatch.setattr(file_call.CLOCK, "now_ns", lambda: now[0])
    monkeypatch.setattr(file_call, "read_ahead_bytes", lambda *_: next(windows))
    made = [reopen(fd) for fd in fds]
    assert [FileCall.of(one).ahead_bytes for one in made] == [1 << 20] * 4
    now[0] += LATELY_NS + 1
    assert [FileCall.of(one).ahead_bytes for one in made] == [2 << 20] * 4
    for one in made:
        one.close()


def test_a_file_without_a_name_is_deleted(tmp_path: Path) -> None:
    for name, renamed, is_deleted in (
        ("a", None, True), ("b", "c", False), ("d", ".nfs0001", True), ("e", ".fuse_hidden1", True),
        ("f", ".nf", False),
    ):  # fmt: skip
        path = tmp_path / name
        path.touch()
        fd = os.open(path, os.O_RDONLY)
        assert not uffd.is_deleted(fd)
        if renamed is None:
            path.unlink()
        else:
            path.rename(tmp_path / renamed)
        assert uffd.is_deleted(fd) == is_deleted, name
        os.close(fd)
    assert not uffd.is_deleted(-1)


def test_only_for_a_pool_a_disk_is_asked_how_quick_it_is(
    fds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick_disks, "is_on_one", lambda fd, status: True)
    for for_pool in (False, True):
        one = reopen(fds[0], for_pool=for_pool)
        assert one.on_quick_disk is for_pool
        one.close()
