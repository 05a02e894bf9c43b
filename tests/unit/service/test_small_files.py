# SPDX-License-Identifier: Apache-2.0
"""service/small_files.py: which directories are watched, and what is read ahead in them. Of the
kernel there are directories alone; what is opened and what was read is told by the tests."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from listed_names import GivenNames

from uffdprefetch.base.file_systems import FileSystem
from uffdprefetch.native.paths import Keeping, PathDone, PathState
from uffdprefetch.predict.bounds import LATELY_NS
from uffdprefetch.predict.name_orders import NameOrder
from uffdprefetch.sense.listing import WatchedDirectory
from uffdprefetch.sense.opens import DirectoryGone, NameOpened, Overflow
from uffdprefetch.service import small_files as module
from uffdprefetch.service.small_files import ORDERLESS_FILES, QUIET_NS, THERE_MOST, SmallFiles
from uffdprefetch.service.small_reads import Mounts, SmallFileCounts

FILES = 400


class Scene:
    """A job's tree ``root``/split/{a,b, ...}, and a service that watches it."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = tmp_path / "data"
        self.names = [f"{number:05}.jpg" for number in range(FILES)]
        for directory in "abcdefghijkl":
            (self.root / "split" / directory).mkdir(parents=True)
            for name in self.names[:2]:
                (self.root / "split" / directory / name).write_bytes(b"x")
        self.now_ns = 0
        self.marked: dict[int, str] = {}  # by key, the path; 0 is no key
        self.unmarked, self.left = list[int](), list[int]()
        self.asked: list[tuple[str, bool]] = []  # paths, and whether to see what is kept
        self.by: Any = None  # the last who asked
        self.expected: list[str] = []
        self.room_files, self.is_full, self.in_memory = FILES, False, False
        self.used, self.given_up, self.refused = list[str](), list[str](), set[str]()
        self.file_system, self.read_on = FileSystem("any"), set[FileSystem]()
        self.works: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self.said: list[str] = []
        monkeypatch.setattr(module, "watch", self._watch)
        monkeypatch.setattr(
            module.file_systems, "known", lambda _: SimpleNamespace(in_memory=self.in_memory)
        )
        ledger: Any = SimpleNamespace(leave_alone=lambda why, path: self.said.append(path))
        self.mounts = Mounts(ledger)
        watching: Any = SimpleNamespace(
            opens=SimpleNamespace(
                expect=lambda key, name: self.expected.append(name),
                unexpect=lambda key, name: self.expected.remove(name),
            ),
            reads=self, mounts=self.mounts, opener=self, leave=self._unmark,
            refused=lambda directory, error: self.said.append(error.strerror),
        )  # fmt: skip
        self.counts = SimpleNamespace(directories=0)
        clock: Any = SimpleNamespace(now_ns=lambda: self.now_ns)
        self.small = SmallFiles(watching, lambda path: path not in self.refused, clock)

    # ---- stand-ins

    def _watch(self, opens: Any, path: str) -> WatchedDirectory:
        key = next((key for key, known in self.marked.items() if os.path.samefile(known, path)), 0)
        key = key or len(self.marked) + len(self.unmarked) + 1
        self.marked[key] = path
        is_leaf = Path(path).parent.name == "split"
        files = GivenNames(self.names if is_leaf else [])
        below = [] if is_leaf else [one.name for one in Path(path).iterdir() if one.is_dir()]
        listing: Any = WatchedDirectory(key, files, GivenNames(sorted(below)))
        return listing  # type: ignore[no-any-return]

    def _unmark(self, key: int) -> None:
        self.unmarked.append(key)

    def run(self, work: Callable[[], Any], then: Callable[[Any], None]) -> bool:
        """Opener's."""
        self.works.append((work, then))
        return True

    def done(self) -> None:
        """All that may have waited has ended."""
        while self.works:
            work, then = self.works.pop(0)
            try:
                result = work()
            except OSError as error:
                result = error
            then(result)

    def read(
        self, by: Any, group: int, name: str, probe: bool = False, on: FileSystem | None = None
    ) -> bool:
        """SmallReads's, as what follows."""
        if on is not None:
            self.read_on.add(on)
        if self.is_full:
            return False
        self.by = by
        self.asked.append((by.path_of(name), probe))
        return True

    def opened(self, group: int, name: str) -> None:
        self.used.append(name)

    def lost(self, group: int, name: str) -> None:
        self.given_up.append(name)

    def counts_of(self, group: int) -> SmallFileCounts:
        return SmallFileCounts(read=3, used=2)

    def leave(self, group: int) -> None:
        self.left.append(group)

    # ---- what happens

    def waits(self, *names: str, directory: str = "split/a", pid: int = 0) -> None:
        """A process is seen waiting for files."""
        at = self.root / directory
        for name in names:
            status = os.stat(at / name) if (at / name).exists() else os.stat(at)
            key = status.st_dev, status.st_ino
            self.small.seen([SimpleNamespace(path=str(at / name), pid=pid, key=key)])  # type: ignore[list-item]

    def key(self, directory: str = "split/a") -> int:
        (found,) = (key for key, path in self.marked.items() if path == str(self.root / directory))
        return found

    def step(self, *events: Any, came: tuple[Any, ...] = ()) -> None:
        self.small.step(self.now_ns, events, came)
        self.done()

    def opens(self, names: list[str], directory: str = "split/a", ours: bool = False) -> None:
        key = self.key(directory)
        for name in names:
            self.step(NameOpened(key, name, False, ours, 0, self.now_ns))

    def begins(self, keeping: Keeping = Keeping.PAGES) -> None:
        """The directory is watched, and what the mount keeps is known."""
        self.waits(*self.names[:2])
        self.done()
        assert self.asked == [(str(self.root / "split/a" / self.names[0]), True)]
        self.came(self.names[0], keeping=keeping)
        self.asked.clear()
        self.expected.clear()

    def came(
        self, name: str, keeping: Keeping | None = None, waited: bool = True,
        state: PathState = PathState.DONE,
    ) -> None:  # fmt: skip
        probe: Any = None
        if keeping is not None:
            probe = SimpleNamespace(keeping=keeping, file_system=self.file_system)
        waited_bytes = 100 if waited else 0
        self.by.came(name, PathDone(1, 1, state, 0, None, 100, waited_bytes, False, 0, 0, 0, probe))
        self.step(came=(self.by,))

    @property
    def ahead(self) -> list[str]:
        """Paths from the root that were asked for."""
        return [os.path.relpath(path, self.root) for path, _ in self.asked]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_a_directory_is_watched_when_two_of_its_files_are_waited_for(scene: Scene) -> None:
    scene.waits(scene.names[0], scene.names[0])
    assert not scene.works and not scene.small.active
    scene.waits(scene.names[1])
    scene.done()
    assert scene.small.active and scene.counts.directories == 3
    above = [str(scene.root / below) for below in ("split/a", "split", "")]
    assert list(scene.marked.values()) == [one.rstrip("/") for one in above]
    scene.waits(*scene.names[:2])
    assert not scene.works, "it is watched already"


def test_files_that_may_not_be_read_are_not_waited_for(scene: Scene) -> None:
    scene.refused = {str(scene.root / "split/a" / name) for name in scene.names[:2]}
    scene.waits(*scene.names[:2])
    assert not scene.works


def test_what_was_waited_for_tells_of_the_order_too(scene: Scene) -> None:
    scene.begins()
    scene.opens(scene.names[2:3])
    assert scene.ahead, "three in a row are an order"


def test_nothing_is_read_where_the_account_has_no_room(scene: Scene) -> None:
    scene.begins()
    scene.room_files = 0
    scene.opens(scene.names[:20])
    assert not scene.asked
    scene.room_files = FILES
    scene.opens(scene.names[20:21])
    assert f"split/a/{scene.names[21]}" in scene.ahead


def test_the_directory_that_was_listed_comes_next_where_nothing_else_is_known(
    scene: Scene,
) -> None:
    scene.waits(*scene.names[:2], directory="split/g")
    scene.done()
    scene.came(scene.names[0], keeping=Keeping.PAGES)
    scene.step(NameOpened(scene.key("split"), "k", True, False, 0, scene.now_ns))
    scene.opens(scene.names, directory="split/g")
    assert f"split/k/{scene.names[0]}" in scene.ahead
    assert {os.path.dirname(path) for path in scene.ahead} == {"split/g", "split/k"}


def test_the_next_files_of_an_order_are_read(scene: Scene) -> None:
    scene.begins()
    scene.opens(scene.names[:20])
    first = scene.names.index(scene.expected[0])
    assert first < 20 < first + len(scene.asked), "some way ahead"
    assert scene.ahead == [f"split/a/{name}" for name in scene.names[first:][: len(scene.asked)]]
    assert [os.path.basename(path) for path in scene.ahead] == scene.expected
    assert scene.used == scene.names[:20]
    assert scene.read_on == {scene.file_system}, "as the probe has found it"


def test_how_far_ahead_is_told_of_who_went_on(scene: Scene) -> None:
    assert scene.small.fewest_ahead(0) == 0, "nothing is wanted"
    scene.begins()
    scene.now_ns = 10**9
    scene.opens(scene.names[:20])
    left = set(scene.expected) - set(scene.names[:20])
    assert scene.small.fewest_ahead(10**9) == len(left) > 0
    assert scene.small.fewest_ahead(10**9 + 1) == 0, "nobody has gone on since"
    scene.now_ns += 1
    scene.came(scene.names[20])
    assert scene.small.fewest_ahead(10**9 + 1) == len(left), "what has come may be used up soon"
    scene.now_ns += 1
    scene.room_files = 0
    scene.opens(scene.names[300:301])
    assert scene.small.fewest_ahead(10**9 + 2) == 0, "who is elsewhere uses nothing up"
    scene.opens(scene.names[20:21])
    assert scene.small.fewest_ahead(10**9 + 2) > 0


def test_the_next_directory_follows(scene: Scene) -> None:
    scene.begins()
    for directory in ("split/a", "split/b", "split/c", "split/d"):
        scene.waits(*scene.names[:2], directory=directory)
        scene.done()
        scene.opens(scene.names[: FILES - 2], directory=directory)
    assert f"split/d/{scene.names[-1]}" in scene.ahead
    assert f"split/e/{scene.names[0]}" in scene.ahead


def test_our_own_opens_and_refused_paths_count_for_nothing(scene: Scene) -> None:
    scene.begins()
    scene.refused = {str(scene.root / "split/a" / name) for name in scene.names}
    scene.opens(scene.names[:20], ours=True)
    assert not scene.used
    scene.opens(scene.names[:20])
    assert scene.used and not scene.asked and not scene.expected


def test_what_could_not_be_asked_for_is_not_expected(scene: Scene) -> None:
    scene.begins()
    scene.is_full = True
    scene.opens(scene.names[:20])
    assert not scene.asked and not scene.expected


@pytest.mark.parametrize("state", [PathState.WITHDRAWN, PathState.FAILED, PathState.NOT_REGULAR])
def test_what_was_not_opened_is_expected_no_more(scene: Scene, state: PathState) -> None:
    scene.begins()
    scene.opens(scene.names[:20])
    name = scene.expected[0]
    scene.came(name, state=state)
    assert name not in scene.expected


@pytest.mark.parametrize("keeping", [Keeping.WHILE_OPEN, Keeping.NOTHING])
def test_where_the_mount_keeps_nothing_the_tree_is_left_and_that_is_said(
    scene: Scene, keeping: Keeping
) -> None:
    scene.begins(keeping)
    scene.opens(scene.names[:20]) if scene.small.active else None
    assert not scene.small.active and not scene.asked
    assert scene.said == [str(scene.root / "split/a")]
    scene.waits(*scene.names[2:4])
    assert not scene.works
    (scene.root / "split/a/below").mkdir()  # of a tree of which nothing is known
    for name in scene.names[:2]:
        (scene.root / "split/a/below" / name).touch()
    scene.waits(*scene.names[:2], directory="split/a/below")
    scene.done()
    assert not scene.small.active and scene.key("split/a/below") in scene.unmarked


def test_what_a_file_did_not_tell_of_its_mount_the_next_one_does(scene: Scene) -> None:
    """It may have been removed, or may not be read."""
    scene.waits(*scene.names[:2])
    scene.done()
    scene.came(scene.names[0], state=PathState.FAILED)
    scene.opens(scene.names[2:3])
    assert len(scene.asked) == 1, "this one may be open still"
    scene.opens(scene.names[3:5])
    assert scene.asked[1:] == [(str(scene.root / "split/a" / scene.names[2]), True)]
    scene.came(scene.names[2], state=PathState.FAILED)
    scene.waits(*scene.names[:2], directory="split/b")
    scene.done()
    assert scene.asked[-1] == (str(scene.root / "split/b" / scene.names[0]), True)
    scene.came(scene.names[0], keeping=Keeping.PAGES)
    scene.opens(scene.names[:20])
    assert f"split/a/{scene.names[20]}" in scene.ahead


def test_what_is_in_memory_is_watched_no_more_until_it_is_waited_for(scene: Scene) -> None:
    scene.begins()
    scene.opens(scene.names[:60])
    for name in scene.names[20 : 20 + THERE_MOST]:
        assert scene.small.active
        scene.came(name, waited=False)
    assert not scene.small.active and sorted(scene.unmarked) == sorted(scene.marked)
    scene.waits(*scene.names[:2])
    scene.done()
    assert scene.small.active


def test_one_that_was_waited_for_counts_anew(scene: Scene) -> None:
    scene.begins()
    scene.opens(scene.names[:60])
    for number, name in enumerate(scene.names[20:60]):
        scene.came(name, waited=number % (THERE_MOST - 1) == 0)
    assert scene.small.active


def scattered(scene: Scene) -> list[str]:
    """In none of the four orders."""
    return [scene.names[number * 173 % FILES] for number in range(FILES)]


def test_a_tree_without_an_order_is_left_for_good(scene: Scene) -> None:
    scene.begins()
    for _ in range(2):
        if scene.small.active:
            scene.opens(scattered(scene)[: ORDERLESS_FILES - 1])
    assert not scene.small.active
    scene.waits(*scene.names[:2])
    assert not scene.works


def test_whoever_goes_on_without_an_order_costs_nothing_more(scene: Scene) -> None:
    """After a walk in order: else each open of what is in memory by now would be told of."""
    scene.begins()
    scene.opens(scene.names)
    assert scene.small.active
    for _ in range(3):
        if scene.small.active:
            scene.opens(scattered(scene)[:ORDERLESS_FILES])
    assert not scene.small.active


def test_a_tree_is_of_one_device(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root of the first may be above all that the job reads."""
    real = os.stat(scene.root)
    scene.waits(*scene.names[:2])
    scene.done()
    for tree in scene.small._trees:
        tree.device, tree.root = real.st_dev + 1, "/"
    scene.waits(*scene.names[:2], directory="split/b")
    scene.done()
    assert str(scene.root / "split/b") in scene.marked.values()
    assert {tree.device for tree in scene.small._trees} == {real.st_dev, real.st_dev + 1}


def test_another_file_system_is_not_entered_on_a_guess(scene: Scene) -> None:
    """Nor mounted: automount does when a directory is opened."""
    with pytest.raises(OSError) as refused:
        module.look_below(None, str(scene.root), "", os.stat(scene.root).st_dev + 1)  # type: ignore[arg-type]
    assert refused.value.errno == errno.EXDEV and not scene.marked


def test_another_directory_of_the_same_name_is_not_watched(scene: Scene) -> None:
    """The job sees other mounts, and has ended; it may be seen again."""
    path = str(scene.root / "split/a")
    for _ in range(2):
        for name in scene.names[:2]:
            one: Any = SimpleNamespace(path=f"{path}/{name}", pid=1 << 30, key=(1, 1))
            scene.small.seen([one])
        assert len(scene.works) == 1
        scene.done()
    assert not scene.marked and not scene.small.active


def test_a_directory_that_is_elsewhere_here_is_seen_through_the_process(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And left when that has ended."""
    path, name = "/elsewhere/split/a", scene.names[0]
    inside, ended = f"/proc/77/root{path}", list[bool]()

    def stat(of: Any) -> Any:
        if str(of).startswith(inside):
            return SimpleNamespace(st_dev=7, st_ino=8)
        raise FileNotFoundError(of)

    monkeypatch.setattr(module.os, "stat", stat)
    seen: list[tuple[str, str, int]] = []

    def look_below(opens: Any, at: str, seen_by: str, device: int) -> Any:
        seen.append((at, seen_by, device))
        names = GivenNames(scene.names)
        return module.ListedFolder(device, seen_by, WatchedDirectory(1, names, GivenNames([])))  # type: ignore[arg-type]

    monkeypatch.setattr(module, "look_below", look_below)
    listed = module.look(None, path, 77, {name: (7, 8)})  # type: ignore[arg-type]
    assert seen == [(inside, "/proc/77/root", 7)]
    scene.small._listed(path, [name], None, listed)
    assert scene.asked == [(f"{inside}/{name}", True)]
    monkeypatch.setattr(module.os.path, "exists", lambda path: not ended)
    scene.step()
    assert scene.small.active
    ended.append(True)
    scene.now_ns += 2 * LATELY_NS
    scene.step()
    assert not scene.small.active


def test_one_directory_by_two_paths_is_watched_once(scene: Scene) -> None:
    (scene.root / "link").symlink_to("split")
    scene.waits(*scene.names[:2])
    scene.done()
    key = scene.key()
    scene.small._list(
        str(scene.root / "link/a"),
        lambda: module.look_below(None, str(scene.root / "link/a"), "", os.stat(scene.root).st_dev),  # type: ignore[arg-type]
    )
    scene.done()
    assert scene.unmarked == [key], "the second mark"
    assert not scene.left, "what is read ahead by the first goes on"
    assert scene.small.active


def test_what_is_wanted_and_left_out_is_lost_once(scene: Scene) -> None:
    scene.begins()
    scene.opens(scene.names[:20])
    assert scene.expected and not scene.given_up
    scene.opens(scattered(scene)[20:60])
    in_vain = set(scene.expected) - set(scene.used)
    assert in_vain and in_vain <= set(scene.given_up) <= set(scene.expected)
    assert len(set(scene.given_up)) == len(scene.given_up)


def test_after_an_overflow_all_begins_anew(scene: Scene) -> None:
    scene.begins()
    scene.step(Overflow(0))
    assert not scene.small.active and sorted(scene.unmarked) == sorted(scene.marked)
    scene.waits(*scene.names[:2])
    scene.done()
    assert scene.small.active


def test_a_directory_that_is_gone_or_quiet_is_left(scene: Scene) -> None:
    scene.begins()
    scene.step(DirectoryGone(scene.key("split")))
    assert scene.small.active
    (tree,) = scene.small._trees
    assert not tree.order.is_listed("split") and tree.order.is_listed("split/a")
    scene.now_ns = QUIET_NS
    scene.opens(scene.names[:1])
    scene.now_ns = QUIET_NS + LATELY_NS
    scene.step()
    assert scene.small.active and scene.left == [scene.key("split"), scene.key("")]
    scene.now_ns = 2 * QUIET_NS + LATELY_NS
    scene.step()
    assert not scene.small.active and scene.key() in scene.left
    assert not scene.small._trees, "nothing of it is kept"


def test_what_comes_for_a_directory_that_was_left_is_no_error(scene: Scene) -> None:
    scene.begins()
    scene.opens(scene.names[:20])
    scene.step(DirectoryGone(scene.key()), NameOpened(scene.key(), "x", False, False, 0, 0))
    scene.came(scene.names[20])
    scene.opens(scene.names[20:30])


def test_why_a_directory_is_refused_is_said_and_it_is_not_asked_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(opens: Any, path: str) -> WatchedDirectory:
        raise OSError(errno.EBUSY, "another service of this user watches it")

    monkeypatch.setattr(module, "watch", refuse)
    scene.waits(*scene.names[:2])
    scene.done()
    assert scene.said == ["another service of this user watches it"]
    scene.waits(*scene.names[:2])
    assert not scene.works and not scene.small.active


def test_what_is_in_memory_itself_is_not_watched(scene: Scene) -> None:
    scene.in_memory = True
    scene.waits(*scene.names[:2])
    scene.done()
    assert not scene.marked and not scene.small.active


def test_a_listing_that_comes_late_leaves_no_mark(scene: Scene) -> None:
    """The tree was forgotten meanwhile."""
    scene.waits(*scene.names[:2])
    work, then = scene.works.pop()
    then(work())  # its parent is asked for now
    parent = scene.works.pop()
    scene.step(Overflow(0))
    parent[1](parent[0]())
    assert sorted(scene.unmarked) == sorted(scene.marked) and not scene.small.active
    scene.waits(*scene.names[:2])
    scene.done()
    assert scene.counts.directories == 4, "the first, and all three anew"


@pytest.mark.parametrize("order", list(NameOrder))
def test_each_order_is_followed(scene: Scene, order: NameOrder) -> None:
    scene.begins()
    walked = GivenNames(scene.names, [number ^ 5 for number in range(FILES)]).ordered(order)
    scene.names = list(scene.names)
    scene.opens(walked[:40])
    if order is not NameOrder.INODE:  # the listing here numbers them as they are
        assert f"split/a/{walked[40]}" in scene.ahead


def test_a_watcher_is_told_of_a_tree_by_the_directory_that_is_read(scene: Scene) -> None:
    scene.begins()
    scene.opens(scene.names[:40])
    (tree,) = scene.small.live()
    path = str(scene.root / "split/a")
    assert (tree.path, tree.latest, tree.order) == (path, path, "readdir")
    assert (tree.directories, tree.lost) == (1, 0), "those above it are not read"
    assert (tree.read, tree.used) == (3 * 3, 3 * 2), "of each that is watched"
    scene.step(Overflow(0))
    assert scene.small.live() == []
