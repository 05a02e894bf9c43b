# SPDX-License-Identifier: Apache-2.0
"""Small files that processes of the job open one after the other: the next ones are read ahead.

Directories in which the job was seen to wait are watched, and what is opened in them tells the
order of their files (predict/tree_order.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from uffdprefetch.base import file_systems
from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.base.procfs import from_here
from uffdprefetch.native import uffd
from uffdprefetch.native.paths import PathDone
from uffdprefetch.predict.bounds import ENTRIES_MAX, LATELY_NS
from uffdprefetch.predict.tree_order import TreeOrder
from uffdprefetch.sense.listing import WatchedDirectory, watch
from uffdprefetch.sense.opens import DirectoryGone, NameOpened, Opens, Overflow
from uffdprefetch.sense.read_calls import ReadSeen
from uffdprefetch.service.small_reads import Mounts, NamesAhead, Watching

#: Files of a directory that the job was seen to wait for, before it is watched: one alone is an
#: index, or a configuration.
WAITED_FILES = 2
#: So many files in a row that were in memory: the job needs no help in that directory, until it has
#: opened twice as many more.
THERE_MOST = 16
#: How far above the first directory that is read the root of its tree is: training data lies in a
#: directory for each class, and these in one for each split.
LEVELS = 2
#: So many files of a tree were opened, and no order explains it: it has none.
ORDERLESS_FILES = 256
#: A directory in which nothing was opened for so long is not watched any more.
QUIET_NS = 5 * LATELY_NS


@dataclass
class _WatchedFolder:
    """One that is watched. ``from_here``: its path as the service can open it; ``there``: files in
    a row that were in memory, ``rests``: for so many opens nothing is read."""

    tree: _Tree
    path: str
    key: int
    from_here: str
    device: int
    mounts: Mounts
    opened_ns: int
    there: int = 0
    rests: int = 0

    @property
    def full_path(self) -> str:
        """As the job sees it."""
        return os.path.join(self.tree.root, self.path)

    def path_of(self, name: str) -> str:
        """See NamesAhead."""
        return os.path.join(self.from_here, name)

    def came(self, name: str, done: PathDone) -> None:
        """See NamesAhead."""
        if done.probe is not None:
            self.mounts.note(self.device, done.probe.keeping, self.full_path)
        elif done.waited:
            self.there = 0
        elif done.bytes:
            self.there += 1

    def rest(self) -> bool:
        """Whether the last files were in memory, and nothing is to be read for a while."""
        if self.there < THERE_MOST:
            return False
        self.there, self.rests = 0, 2 * THERE_MOST
        return True


@dataclass
class _Tree:
    """Directories below ``root``, a path in the namespace of the process ``pid``. ``asked``: those
    that are watched, are being listed, or were refused; ``device``: where all of it lies, 0: not
    known yet; ``opened``: files; ``lost``: of those that its order takes for lost, how many are
    booked."""

    root: str
    pid: int
    order: TreeOrder = field(default_factory=TreeOrder)
    watched: dict[str, _WatchedFolder] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    device: int = 0
    opened: int = 0
    lost: int = 0

    @property
    def has_no_order(self) -> bool:
        """Whether what was opened is explained by none."""
        return self.opened >= ORDERLESS_FILES and not (self.order.used or self.order.lost)

    def below(self, directory: str) -> str | None:
        """The path of a directory from its root; None: it is not below it."""
        if directory == self.root:
            return ""
        prefix = self.root.rstrip("/") + "/"
        return directory[len(prefix) :] if directory.startswith(prefix) else None


class SmallFiles:
    """Of one run. The service's thread calls everything here."""

    def __init__(
        self, watching: Watching, wants: Callable[[str], bool], clock: Clock = CLOCK
    ) -> None:
        """``wants``: whether a path may be read."""
        self._watching, self._wants, self._clock = watching, wants, clock
        self._opens, self._reads, self._mounts = watching.opens, watching.reads, watching.mounts
        self._trees: dict[str, _Tree] = {}
        self._by_key: dict[int, _WatchedFolder] = {}
        self._waited: dict[str, set[str]] = {}  # by directory, files that were waited for
        self._orderless: dict[str, None] = {}  # trees
        self._look_ns = 0

    # -------------------------------------------------------------- what is seen

    def seen(self, reads: Iterable[ReadSeen]) -> None:
        """A process waits for a small file."""
        for one in reads:
            directory, name = os.path.split(one.path)
            if self._is_watched(directory) or not self._wants(one.path):
                continue
            names = self._waited.setdefault(directory, set())
            names.add(name)
            if len(names) >= WAITED_FILES:
                del self._waited[directory]
                self._begin(one.pid, directory, names)
            if len(self._waited) > ENTRIES_MAX:
                del self._waited[next(iter(self._waited))]

    def _is_watched(self, directory: str) -> bool:
        found = self._tree_of(directory)
        if found is not None:
            return found[1] in found[0].asked
        return root_of(directory) in self._orderless

    def _tree_of(self, directory: str) -> tuple[_Tree, str] | None:
        for tree in self._trees.values():
            below = tree.below(directory)
            if below is not None:
                return tree, below
        return None

    def _begin(self, pid: int, directory: str, names: set[str]) -> None:
        found = self._tree_of(directory)
        if found is None:
            root = root_of(directory)
            tree = self._trees[root] = _Tree(root, pid)
            found = tree, tree.below(directory) or ""
            if len(self._trees) > ENTRIES_MAX:
                self._forget_tree(next(iter(self._trees.values())))
        tree, below = found
        tree.pid = pid
        self._list(tree, below, tuple(names))

    def _list(self, tree: _Tree, below: str, names: tuple[str, ...] = ()) -> None:
        """Have a directory listed, and watched. ``names``: that were opened there."""
        if below in tree.asked:
            return
        try:
            path = from_here(tree.pid, os.path.join(tree.root, below))
        except OSError:  # it has ended: the next one that waits will do
            return
        if self._watching.opener.run(
            lambda: look(self._opens, path),
            lambda found: self._listed(tree, below, names, path, found),
        ):
            tree.asked.add(below)

    def _listed(
        self, tree: _Tree, below: str, names: tuple[str, ...], path: str, found: _Listed | OSError
    ) -> None:
        if isinstance(found, OSError):
            return
        key, listing = found.listing.key, found.listing
        self._watching.came(key)
        tree.device = tree.device or found.device  # the first is one that is read
        another = self._trees.get(tree.root) is not tree or tree.device != found.device
        if another or key in self._by_key or self._mounts.drops(found.device):
            self._watching.leave(key)
            return
        now = self._clock.now_ns()
        folder = _WatchedFolder(tree, below, key, path, found.device, self._mounts, now)
        tree.watched[below] = self._by_key[key] = folder
        tree.order.listed(below, listing.files, listing.subdirectories)
        self._reads.counts.directories += 1
        for name in names:
            tree.order.opened(below, name)
        if below:  # where the next directories are
            self._list(tree, os.path.dirname(below))
        # what the mount keeps is asked of a file that the job has read, and probably closed
        unknown = bool(names) and not self._mounts.is_known(folder.device)
        if unknown and self._reads.read(folder, key, names[0], probe=True):
            self._mounts.asked(folder.device)
        self._ask(tree)

    # -------------------------------------------------------------- what is opened

    def step(
        self, now_ns: int, events: Iterable[NameOpened | DirectoryGone | Overflow],
        came: Iterable[NamesAhead],
    ) -> None:  # fmt: skip
        """What was opened, and whose files have come, since the last time."""
        changed = dict[str, _Tree]()
        for event in events:
            folder = None if isinstance(event, Overflow) else self._by_key.get(event.directory)
            if isinstance(event, Overflow):
                for tree in list(self._trees.values()):
                    self._forget_tree(tree)
                changed.clear()
            elif folder is None:
                continue
            elif isinstance(event, DirectoryGone):
                self._leave(folder)
            elif not event.ours:
                self._opened(folder, event)
                changed[folder.tree.root] = folder.tree
        for by in came:
            if isinstance(by, _WatchedFolder) and self._by_key.get(by.key) is by:
                changed[by.tree.root] = by.tree
                if by.rest():
                    self._reads.withdraw(by.key)
        for tree in changed.values():
            if tree.has_no_order or self._mounts.drops(tree.device):
                self._orderless[tree.root] = None
                self._forget_tree(tree)
            else:
                self._ask(tree)
        while len(self._orderless) > ENTRIES_MAX:
            del self._orderless[next(iter(self._orderless))]
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + LATELY_NS
            for folder in list(self._by_key.values()):
                if now_ns - folder.opened_ns > QUIET_NS:
                    self._leave(folder)

    def _opened(self, folder: _WatchedFolder, event: NameOpened) -> None:
        folder.opened_ns = event.at_ns
        order = folder.tree.order
        if event.is_dir:
            order.opened_directory("/".join(part for part in (folder.path, event.name) if part))
            return
        folder.rests = max(0, folder.rests - 1)
        folder.tree.opened += 1
        order.opened(folder.path, event.name)
        self._reads.opened(folder.key, event.name)

    # -------------------------------------------------------------- what is wanted

    def _ask(self, tree: _Tree) -> None:
        """Have read what is wanted now, and book what is thought lost."""
        lost = tree.order.lost
        self._reads.lost(max(0, lost - tree.lost))
        tree.lost = max(lost, tree.lost)
        if not self._reads.has_room or not self._mounts.keeps(tree.device):
            return
        for path, name in tree.order.ahead():
            folder = tree.watched.get(path)
            if folder is not None and not folder.rests:
                self._read(folder, name)
        for path in tree.order.to_list():
            self._list(tree, path)

    def _read(self, folder: _WatchedFolder, name: str) -> None:
        if not self._wants(os.path.join(folder.full_path, name)):
            return
        self._opens.expect(folder.key, name)
        if not self._reads.read(folder, folder.key, name):
            self._opens.unexpect(folder.key, name)

    # -------------------------------------------------------------- they are left

    def _leave(self, folder: _WatchedFolder) -> None:
        tree = folder.tree
        tree.order.forget(folder.path)
        tree.lost = tree.order.lost  # booked now, by their bytes
        tree.watched.pop(folder.path, None)
        tree.asked.discard(folder.path)
        self._by_key.pop(folder.key, None)
        self._drop(folder.key)
        if not tree.watched:
            self._trees.pop(tree.root, None)

    def _drop(self, key: int) -> None:
        self._reads.leave(key)
        self._watching.leave(key)

    def _forget_tree(self, tree: _Tree) -> None:
        for folder in list(tree.watched.values()):
            self._leave(folder)
        self._trees.pop(tree.root, None)

    @property
    def active(self) -> bool:
        """Whether step() is to be called: something is watched."""
        return bool(self._by_key)


def root_of(directory: str) -> str:
    """Of the tree that begins with this directory."""
    for _ in range(LEVELS):
        directory = os.path.dirname(directory)
    return directory


class _Listed(NamedTuple):
    device: int
    listing: WatchedDirectory


def look(opens: Opens, path: str) -> _Listed:
    """List a directory, and watch it. Raises OSError: that cannot be, or it is in memory. May wait
    for storage."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if file_systems.known(file_systems.type_of(fd)).in_memory:
            raise OSError(f"{path} is in memory")
        return _Listed(os.fstat(fd).st_dev, watch(opens, path))
    finally:
        uffd.close_file(fd)
