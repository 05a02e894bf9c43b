# SPDX-License-Identifier: Apache-2.0
"""Opens in marked directories, of real files: by fanotify(7), and by inotify(7) where that is
refused."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from conftest import HANG_SECONDS, require

from uffdprefetch.native.opens import Fanotify
from uffdprefetch.sense.opens import DirectoryGone, NameOpened, Opens, Overflow

#: As a queue is in Linux: fs.fanotify.max_queued_events, fs.inotify.max_queued_events.
QUEUE = 16384


def refuse() -> Any:
    raise OSError(errno.EPERM, "not permitted here")


def watcher(sensor: str, rundir: Path, **options: Any) -> Opens:
    rundir.mkdir(exist_ok=True)
    opens = Opens(str(rundir), **({"fanotify": refuse} if sensor == "inotify" else {}), **options)
    require(opens.sensor == sensor, f"no {sensor}: {opens.reason}")
    return opens


@pytest.fixture(params=("fanotify", "inotify"))
def opens(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opens]:
    made = watcher(request.param, tmp_path / "hub")
    yield made
    made.close()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    for name in ("a", "b", "sub/c"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(b"x")
    return tree


def others(script: str, *args: object) -> None:
    """Run as another process, so that its opens are none of ours."""
    subprocess.run([sys.executable, "-I", "-S", "-c", script, *map(str, args)], check=True)


OPEN = "import os, sys\nfor p in sys.argv[1:]: os.close(os.open(p, os.O_RDONLY))"


def named(events: list[Any]) -> list[tuple[int, str, bool]]:
    return [(e.directory, e.name, e.is_dir) for e in events if isinstance(e, NameOpened)]


def test_names_and_directories_are_told(opens: Opens, tree: Path) -> None:
    key, below = opens.mark(str(tree), subdirectories=True), opens.mark(str(tree / "sub"))
    assert key != below and opens.read() == []
    others(OPEN, tree / "b", tree / "a", tree / "sub", tree / "sub" / "c")
    assert select.select([opens], [], [], 0)[0]
    events = opens.read()
    assert {(key, "b", False), (key, "sub", True), (below, "", True)} <= set(named(events))
    files = [(directory, name) for directory, name, is_dir in named(events) if not is_dir]
    assert files == [(key, "b"), (key, "a"), (below, "c")]
    assert not any(e.ours for e in events if isinstance(e, NameOpened))
    assert opens.read() == [] and not select.select([opens], [], [], 0)[0]


def test_our_own_opens_are_told_apart(opens: Opens, tree: Path) -> None:
    key = opens.mark(str(tree))
    opens.expect(key, "a")
    os.close(os.open(tree / "a", os.O_RDONLY))
    others(OPEN, tree / "b", tree / "a")
    found = [(e.name, e.ours) for e in opens.read() if isinstance(e, NameOpened)]
    assert found == [("a", True), ("b", False), ("a", False)]


def test_an_open_that_failed_is_counted_off_no_other(opens: Opens, tree: Path) -> None:
    key = opens.mark(str(tree))
    opens.expect(key, "a")
    opens.unexpect(key, "a")
    others(OPEN, tree / "a")
    assert [e.ours for e in opens.read() if isinstance(e, NameOpened)] == [False]


def test_looking_at_a_file_is_no_open(opens: Opens, tree: Path) -> None:
    opens.mark(str(tree))
    os.stat(tree / "a")
    os.close(os.open(tree / "a", os.O_PATH))
    assert opens.read() == []


def test_what_is_unmarked_tells_nothing(opens: Opens, tree: Path) -> None:
    key = opens.mark(str(tree))
    others(OPEN, tree / "a")
    opens.unmark(key)
    others(OPEN, tree / "b")
    assert opens.read() == []
    opens.unmark(key)
    again = opens.mark(str(tree))
    assert again != key
    others(OPEN, tree / "b")
    assert named(opens.read()) == [(again, "b", False)]


def test_a_directory_is_told_of_until_each_who_had_it_marked_wants_it_no_more(
    opens: Opens, tree: Path
) -> None:
    key = opens.mark(str(tree))
    assert opens.mark(str(tree)) == key
    opens.unmark(key)
    others(OPEN, tree / "a")
    assert named(opens.read()) == [(key, "a", False)]
    opens.unmark(key)
    others(OPEN, tree / "a")
    assert opens.read() == []


def test_who_marks_a_directory_while_it_is_unmarked_is_told_of_it(
    opens: Opens, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of its file system may take its time for either."""
    group = opens._groups[opens.sensor]
    real, begun, goes_on = group.unmark, Event(), Event()

    def slowly(directory: int) -> None:
        begun.set()
        assert goes_on.wait(HANG_SECONDS)
        real(directory)

    monkeypatch.setattr(group, "unmark", slowly)
    with ThreadPoolExecutor(2) as pool:
        unmarking = pool.submit(opens.unmark, opens.mark(str(tree)))
        assert begun.wait(HANG_SECONDS)
        marking = pool.submit(opens.mark, str(tree))
        with pytest.raises(TimeoutError):
            marking.result(0.1)
        goes_on.set()
        unmarking.result()
        key = marking.result()
    others(OPEN, tree / "a")
    assert named(opens.read()) == [(key, "a", False)]


def test_who_marks_a_directory_that_another_thread_marks_in_vain_is_refused_too(
    tmp_path: Path, tree: Path
) -> None:
    begun, goes_on = Event(), Event()

    class Slow(Fanotify):
        def mark(self, directory: int) -> None:
            begun.set()
            assert goes_on.wait(HANG_SECONDS)
            raise OSError(errno.EACCES, "not readable")

    opens = Opens(str(tmp_path), fanotify=Slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(opens.mark, str(tree))
        assert begun.wait(HANG_SECONDS)
        second = pool.submit(opens.mark, str(tree))
        with pytest.raises(TimeoutError):
            second.result(0.1)
        goes_on.set()
        for each in (first, second):
            with pytest.raises(PermissionError):
                each.result()
    opens.close()


def test_threads_that_mark_and_unmark_a_directory_leave_it_marked_for_who_is_left(
    opens: Opens, tree: Path
) -> None:
    """Each is told of it as long as it has it marked."""

    def come_and_go() -> None:
        for _ in range(300):
            opens.unmark(opens.mark(str(tree)))

    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(come_and_go) for _ in range(4)]
        while not all(each.done() for each in work):
            opens.read()
        for each in work:
            each.result()
    key = opens.mark(str(tree))
    others(OPEN, tree / "a")
    assert named(opens.read()) == [(key, "a", False)]
    opens.unmark(key)
    others(OPEN, tree / "a")
    assert opens.read() == []


def test_a_directory_has_one_key_by_whatever_way_it_is_named(opens: Opens, tree: Path) -> None:
    (tree.parent / "link").symlink_to(tree)
    fd = os.open(tree, os.O_PATH | os.O_DIRECTORY)
    key = opens.mark(fd)
    os.close(fd)
    assert opens.mark(str(tree.parent / "link")) == key
    fd = opens.open(key)
    assert os.path.samestat(os.fstat(fd), os.stat(tree))
    os.close(fd)
    others(OPEN, tree.parent / "link" / "a")
    assert named(opens.read()) == [(key, "a", False)]


def test_two_services_do_not_watch_one_directory(opens: Opens, tree: Path) -> None:
    key = opens.mark(str(tree))
    other = watcher(opens.sensor, tree.parent / "hub")
    with pytest.raises(OSError, match="another service") as refused:
        other.mark(str(tree))
    assert refused.value.errno == errno.EBUSY
    opens.unmark(key)
    other.mark(str(tree))
    other.close()


@pytest.mark.parametrize("name, number", [("a", errno.ENOTDIR), ("none", errno.ENOENT)])
def test_what_is_no_directory_is_refused(opens: Opens, tree: Path, name: str, number: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError) as refused:
        opens.mark(str(tree / name))
    assert refused.value.errno == number
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_that_is_removed_is_no_error(opens: Opens, tree: Path) -> None:
    key = opens.mark(str(tree / "sub"))
    others("import shutil, sys; shutil.rmtree(sys.argv[1])", tree / "sub")
    assert (DirectoryGone(key) in opens.read()) == (opens.sensor == "inotify"), (
        "fanotify does not say so"
    )
    opens.unmark(key)
    (tree / "sub").mkdir()
    assert opens.mark(str(tree / "sub")) != key


def test_another_directory_in_its_place_is_not_opened(opens: Opens, tree: Path) -> None:
    key = opens.mark(str(tree / "sub"))
    (tree / "sub").rename(tree / "old")
    with pytest.raises(FileNotFoundError):
        opens.open(key)
    (tree / "sub").mkdir()
    with pytest.raises(OSError, match="another directory"):
        opens.open(key)
    opens.unmark(key)
    opens.read()
    others(OPEN, tree / "old" / "c")
    assert opens.read() == []


def test_who_does_not_read_loses_the_newest_and_is_told(opens: Opens, tree: Path) -> None:
    key = opens.mark(str(tree))
    for number in range(QUEUE + 600):  # of one name several opens may be told as one
        os.close(os.open(tree / f"{number:05d}", os.O_CREAT | os.O_RDONLY))
    events: list[Any] = []
    while more := opens.read():
        events += more
    assert sum(isinstance(e, Overflow) for e in events) == 1
    names = [e.name for e in events if isinstance(e, NameOpened)]
    assert names == [f"{number:05d}" for number in range(len(names))] and len(names) <= QUEUE
    others(OPEN, tree / "a")
    assert named(opens.read()) == [(key, "a", False)], "it goes on"


def test_names_are_bytes_of_any_kind(opens: Opens, tree: Path) -> None:
    key = opens.mark(str(tree))
    names = [b"\xff\xfe.jpg", b"a b\n", "\N{SNOWMAN}".encode(), b"n" * 255]
    paths = [os.fsdecode(os.path.join(os.fsencode(tree), name)) for name in names]
    for path in paths:
        Path(path).touch()
    opens.read()
    script = (
        "import os, sys\nfor n in sys.stdin.buffer.read().split(b'\\0'): os.close(os.open(n, 0))"
    )
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], check=True,
        input=b"\0".join(map(os.fsencode, paths)),
    )  # fmt: skip
    assert [os.fsencode(name) for _, name, _ in named(opens.read())] == names
    opens.unmark(key)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that other users may enter."""
    require(os.geteuid() == 0, "only root can become another user")
    with tempfile.TemporaryDirectory(prefix="uffdprefetch-opens-") as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def test_a_user_without_rights_is_told_the_same(public: Path) -> None:
    tree = public / "tree"
    tree.mkdir()
    for name in "ab":
        (tree / name).touch()
    run, closed = public / "hub", tree / "closed"
    run.mkdir()
    os.chown(run, 65534, 65534)
    closed.mkdir(mode=0o711)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        as_nobody(run, tree, closed, write)
    os.close(write)
    with open(read) as pipe:
        told = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, told
    sensor, words = told.split("\n", 1)
    # of root's open it is not told whose it is; closed is not for it to read
    assert words.splitlines() == ["a False 0", "b True", str(errno.EACCES)], sensor


def as_nobody(run: Path, tree: Path, closed: Path, out: int) -> None:
    """In a child: what it is told of an open of root's, and of one of its own."""
    status = 1
    try:
        server = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", f"import os, sys\nsys.stdin.read(1)\n{OPEN}",
             str(tree / "a")], stdin=subprocess.PIPE,
        )  # fmt: skip
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        opens = Opens(str(run))
        key = opens.mark(str(tree))
        server.communicate(b"x")
        opens.expect(key, "b")
        os.close(os.open(tree / "b", os.O_RDONLY))
        lines = [opens.sensor]
        theirs, ours = (e for e in opens.read() if isinstance(e, NameOpened))
        lines += [f"{theirs.name} {theirs.ours} {theirs.pid}", f"{ours.name} {ours.ours}"]
        try:
            opens.mark(str(closed))
        except OSError as error:
            lines.append(str(error.errno))
        os.write(out, "\n".join(lines).encode())
        status = 0
    except BaseException as error:
        os.write(out, repr(error).encode())
    finally:
        os._exit(status)


def test_where_fanotify_cannot_mark_inotify_does(tmp_path: Path, tree: Path) -> None:
    class Picky(Fanotify):
        def mark(self, directory: int) -> None:
            if os.readlink(f"/proc/self/fd/{directory}").endswith("sub"):
                raise OSError(errno.EXDEV, "another file system")
            super().mark(directory)

    opens = Opens(str(tmp_path), fanotify=Picky)
    key, below = opens.mark(str(tree)), opens.mark(str(tree / "sub"))
    assert (opens.told_by(key), opens.told_by(below)) == ("fanotify", "inotify")
    others(OPEN, tree / "sub" / "c", tree / "a")
    assert {(key, "a", False), (below, "c", False)} <= set(named(opens.read()))
    opens.unmark(below)
    others(OPEN, tree / "sub" / "c", tree / "b")
    assert [(d, n) for d, n, is_dir in named(opens.read()) if not is_dir] == [(key, "b")]
    opens.close()


def test_what_comes_after_its_end_is_refused(tmp_path: Path, tree: Path) -> None:
    """A thread may wait for a server meanwhile."""
    for sensor in ("fanotify", "inotify"):
        opens = watcher(sensor, tmp_path / "hub")
        key = opens.mark(str(tree))
        opens.close()
        with pytest.raises(OSError) as refused:
            opens.mark(str(tree / "sub"))
        assert refused.value.errno == errno.EBADF
        opens.unmark(key)
        with pytest.raises(KeyError):
            opens.open(key)


def test_directories_are_marked_by_threads_while_opens_are_read(tmp_path: Path) -> None:
    paths = [tmp_path / "t" / f"{number:03d}" for number in range(200)]
    for path in paths:
        path.mkdir(parents=True)
        (path / "a").touch()
    opens = watcher("fanotify", tmp_path / "hub")
    with ThreadPoolExecutor(4) as pool:
        made = [
            pool.submit(opens.mark, str(path), number % 2 == 1) for number, path in enumerate(paths)
        ]
        while not all(each.done() for each in made):
            opens.read()
        keys = [each.result() for each in made]
    assert len(set(keys)) == len(paths)
    others(OPEN, *(path / "a" for path in paths))
    assert {key for key, name, _ in named(opens.read()) if name == "a"} == set(keys)
    opens.close()


def test_nothing_is_left_open(tmp_path: Path, tree: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for sensor in ("fanotify", "inotify"):
        opens = watcher(sensor, tmp_path / "hub")
        opens.mark(str(tree))
        opens.close()
    assert os.listdir("/proc/self/fd") == before
    assert not list((tmp_path / "hub").iterdir())


def test_a_directory_is_marked_through_a_process_that_sees_it_elsewhere(
    opens: Opens, tree: Path
) -> None:
    """As in a container: by its root, in whose namespace the path means something else."""
    require(os.geteuid() == 0, "only root can mount")
    script = (
        'mount --bind "$1" /mnt && cd /mnt && echo in && read go && cat a > /dev/null && echo out'
    )
    job = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", script, "sh", str(tree)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert job.stdin and job.stdout
    says: Callable[[], str] = job.stdout.readline
    if says() != "in\n":
        job.wait()
        require(False, "no mount namespace can be had")
    key = opens.mark(f"/proc/{job.pid}/root/mnt")
    os.close(opens.open(key))
    opens.read()
    job.stdin.write("go\n")
    job.stdin.flush()
    assert says() == "out\n"
    assert (key, "a", False) in named(opens.read())
    job.communicate()


def test_a_mark_keeps_no_file_system_mounted(opens: Opens, tmp_path: Path) -> None:
    require(os.geteuid() == 0, "only root can mount")
    where = tmp_path / "mount"
    where.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "none", str(where)], capture_output=True)
    require(not mounted.returncode, "nothing can be mounted here")
    key = opens.mark(str(where))
    assert not subprocess.run(["umount", str(where)]).returncode
    assert (DirectoryGone(key) in opens.read()) == (opens.sensor == "inotify")
    opens.unmark(key)
