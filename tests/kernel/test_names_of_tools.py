# SPDX-License-Identifier: Apache-2.0
"""Programs that go over a tree: what they open is seen (sense/opens.py), and known before that
(predict/tree_order.py).

Each is run once, while all directories are watched; then its opens are told one after the other, as
a service would hear of them, which lists a directory when something was opened there or when it is
asked for. What was wanted before it was opened is what could have been read ahead.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import require

from uffdprefetch.predict.tree_order import TreeOrder
from uffdprefetch.sense.listing import WatchedDirectory, watch
from uffdprefetch.sense.opens import NameOpened, Opens

DIRECTORIES, FILES = 20, 60


def make_tree(root: Path, directories: int, files: int, suffixes: tuple[str, ...]) -> None:
    """Names, inode numbers and the order of readdir(3) have nothing to do with each other."""
    chance = random.Random(7)
    names = [f"c{number:02d}" for number in range(directories)]
    chance.shuffle(names)
    for name in names:
        (root / name).mkdir(parents=True)
    todo = [(name, number) for name in names for number in range(files)]
    chance.shuffle(todo)
    for name, number in todo:
        stem = root / name / f"{chance.randrange(10**6):06d}-{number}"
        for suffix in suffixes:
            stem.with_suffix(suffix).write_bytes(b"x" * 100)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("names") / "tree"
    make_tree(root, DIRECTORIES, FILES, (".bin",))
    return root


@dataclass
class Walk:
    """A run of a program, as it was seen."""

    watched: dict[str, WatchedDirectory]
    events: list[tuple[str, str, bool]]  # directory, name, whether it is one
    order: TreeOrder = field(default_factory=TreeOrder)
    wanted: set[tuple[str, str]] = field(default_factory=set)
    opened: set[tuple[str, str]] = field(default_factory=set)
    foreseen: int = 0

    def list(self, path: str) -> None:
        if not self.order.is_listed(path) and path in self.watched:
            directory = self.watched[path]
            self.order.listed(path, directory.files, directory.subdirectories)

    def tell(self) -> None:
        for path, name, is_dir in self.events:
            if is_dir:
                self.order.opened_directory(f"{path}/{name}".lstrip("/"))
                continue
            if (path, name) not in self.opened:
                self.foreseen += (path, name) in self.wanted
                self.opened.add((path, name))
            self.list("")
            self.list(path)
            self.order.opened(path, name)
            self.wanted.update(self.order.ahead())
            while asked := self.order.to_list():
                for each in asked:
                    self.list(each)
                self.wanted.update(self.order.ahead())

    @property
    def share(self) -> float:
        """Of its opens, those that were wanted before."""
        return self.foreseen / len(self.opened)

    @property
    def in_vain(self) -> float:
        """What was wanted and never opened, in opens."""
        return len(self.wanted - self.opened) / len(self.opened)


def seen(root: Path, rundir: Path, words: list[str]) -> Walk:
    """Run a program there, and have its opens told."""
    rundir.mkdir()
    opens = Opens(str(rundir))
    paths = [root, *sorted(path for path in root.rglob("*") if path.is_dir())]
    watched = {}
    for path in paths:
        watched[str(path.relative_to(root)).removeprefix(".")] = watch(opens, str(path))
    by_key = {directory.key: path for path, directory in watched.items()}
    while opens.read():
        pass
    subprocess.run(words, cwd=root, check=True, stdout=subprocess.DEVNULL)
    events = []
    while found := opens.read():
        for each in found:
            assert isinstance(each, NameOpened), "the queue is large enough"
            if not each.ours and each.name:
                events.append((by_key[each.directory], each.name, each.is_dir))
    opens.close()
    walk = Walk(watched, events)
    walk.tell()
    return walk


def python(script: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", f"import glob, os, random\n{script}"]


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


PROGRAMS = {
    "tar": shell("tar cf - . | cat"),
    "md5sum": shell("md5sum */*"),
    "cp -r": shell("cp -r . ../copy; rm -r ../copy"),
    "grep -r": ["grep", "-r", "-c", "x", "."],
    "find, xargs": shell("find . -type f | xargs md5sum"),
    "find, xargs -P4": shell("find . -type f | xargs -P4 -n 50 md5sum"),
    "rsync": shell("rsync -a . ../copied; rm -r ../copied"),
    "os.walk": python(
        "for path, _, files in os.walk('.'):\n"
        "    for name in files: open(os.path.join(path, name), 'rb').read()"
    ),
    "sorted": python("for path in sorted(glob.glob('*/*')): open(path, 'rb').read()"),
    "sorted, 4 threads": python(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(4) as pool:\n"
        "    list(pool.map(lambda p: open(p, 'rb').read(), sorted(glob.glob('*/*'))))"
    ),
    "each twice": python(
        "import mmap\n"
        "for path in sorted(glob.glob('*/*')):\n"
        "    open(path, 'rb').close()\n"
        "    with open(path, 'rb') as file: mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_program_opens_is_known_before(name: str, tree: Path, tmp_path: Path) -> None:
    require(name != "rsync" or shutil.which("rsync"), "no rsync")
    walk = seen(tree, tmp_path / "hub", PROGRAMS[name])
    assert len(walk.opened) == DIRECTORIES * FILES
    assert walk.share >= 0.9 and walk.in_vain <= 0.05, (walk.share, walk.in_vain)


def test_a_stack_of_names_is_an_order_from_behind(tree: Path, tmp_path: Path) -> None:
    script = (
        "todo = ['.']\n"
        "while todo:\n"
        "    path = todo.pop()\n"
        "    if os.path.isdir(path): todo += [entry.path for entry in os.scandir(path)]\n"
        "    else: open(path, 'rb').read()"
    )
    walk = seen(tree, tmp_path / "hub", python(script))
    assert walk.share >= 0.9 and walk.in_vain <= 0.05, (walk.share, walk.in_vain)


@pytest.mark.parametrize("seed", range(3))
def test_of_a_shuffled_stream_nothing_is_known(seed: int, tree: Path, tmp_path: Path) -> None:
    script = (
        f"random.seed({seed})\npaths = sorted(glob.glob('*/*'))\nrandom.shuffle(paths)\n"
        "for path in paths: open(path, 'rb').read()"
    )
    walk = seen(tree, tmp_path / "hub", python(script))
    assert walk.share <= 0.1, walk.share


def test_a_second_epoch_is_known_as_the_first(tree: Path, tmp_path: Path) -> None:
    script = "for path in 2 * sorted(glob.glob('*/*')): open(path, 'rb').read()"
    walk = seen(tree, tmp_path / "hub", python(script))
    first = len(walk.events) - DIRECTORIES * FILES
    events, walk.events = walk.events, []
    again = Walk(walk.watched, [])
    for half in (events[:first], events[first:]):
        again.events, again.foreseen = half, 0
        again.wanted, again.opened = set(), set()
        again.tell()
    assert again.share >= 0.9


def test_what_is_left_out_by_its_suffix_is_not_wanted(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    make_tree(root, 4, 60, (".jpg", ".json", ".txt"))
    walk = seen(root, tmp_path / "hub", shell("md5sum */*.jpg"))
    assert {Path(name).suffix for _, name in walk.opened} == {".jpg"}
    assert walk.share >= 0.85 and walk.in_vain <= 0.1, (walk.share, walk.in_vain)
    whole = seen(root, tmp_path / "run2", shell("md5sum */*"))
    assert whole.share >= 0.9 and whole.in_vain <= 0.05, (whole.share, whole.in_vain)


@pytest.mark.parametrize("name", ["tar", "os.walk", "find, xargs"])
def test_a_deep_tree_of_small_directories_is_known(name: str, tmp_path: Path) -> None:
    root = tmp_path / "tree"
    for number in range(5):
        make_tree(root / f"split{number}", 8, 12, (".bin",))
    walk = seen(root, tmp_path / "hub", PROGRAMS[name])
    assert walk.share >= 0.7 and walk.in_vain <= 0.1, (walk.share, walk.in_vain)
