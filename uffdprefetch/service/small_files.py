# SPDX-License-Identifier: Apache-2.0
"""Small files that processes of the job open one after the other: the next ones are read ahead.

Directories in which the job was seen to wait are watched, and what is opened in them tells the
order of their files (predict/tree_order.py).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from uffdprefetch.base import file_systems
from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.native import uffd
from uffdprefetch.native.paths import PathDone, PathState
from uffdprefetch.predict.bounds import ENTRIES_MAX, LATELY_NS
from uffdprefetch.predict.tree_order import TreeOrder
from uffdprefetch.sense.listing import WatchedDirectory, watch
from uffdprefetch.sense.opens import DirectoryGone, NameOpened, Opens, Overflow
from uffdprefetch.sense.read_calls import Key, ReadSeen
from uffdprefetch.service.small_reads import NamesAhead, SmallFileCounts, Watching

if TYPE_CHECKING:
    from uffdprefetch.protocol.snapshot import FileTree

#: Files of a directory that the job was seen to wait for, before it is watched: one alone is an
#: index, or a configuration.
WAITED_FILES = 2
#: Files of a tree in a row that were in memory: it is left, until the job waits there again. To be
#: told of each open takes CPU, too.
THERE_MOST = 16
#: How far above the first directory that is read the root of its tree is: training data lies in a
#: directory for each class, and these in one for each split.
LEVELS = 2
#: So many files of a tree were opened in a row, and none of them was expected: it has no order.
ORDERLESS_FILES = 256
#: A directory in which nothing was opened for so long is not watched any more.
QUIET_NS = 5 * LATELY_NS


@dataclass
class _WatchedFolder:
    """One that is watched. ``path``: from its tree's root; ``probed``: the file that is to tell
    what its mount keeps; ``last``: that was opened."""

    tree: _Tree
    path: str
    key: int
    opened_ns: int
    probed: str = ""
    last: str = ""

    def path_of(self, name: str) -> str:
        """See NamesAhead."""
        return self.tree.seen_by + os.path.join(self.tree.full_path(self.path), name)

    def came(self, name: str, done: PathDone) -> None:
        """See NamesAhead."""
        tree, watching = self.tree, self.tree.watching
        if done.probe is not None:
            watching.mounts.note(tree.device, done.probe, tree.full_path(self.path))
        elif name == self.probed:
            self.probed = ""
            watching.mounts.unanswered(tree.device)
        elif done.state is not PathState.DONE:
            watching.opens.unexpect(self.key, name)
        elif done.waited:
            tree.there = 0
        elif done.bytes:
            tree.there += 1


@dataclass
class _Tree:
    """Directories of a device below ``root``, a path as the job has it. ``seen_by``: what stands
    before it here; ``used``: files of its order, by the last time; ``unexpected``: files that were
    opened in a row; ``there``: that were in memory; ``went_on_ns``: when one was asked for, had
    come, or was used; ``lost``: files that were wanted in vain; ``ahead``: read in directories
    that are left."""

    root: str
    device: int
    seen_by: str
    watching: Watching
    order: TreeOrder = field(default_factory=TreeOrder)
    watched: dict[str, _WatchedFolder] = field(default_factory=dict)
    used: int = 0
    unexpected: int = 0
    there: int = 0
    went_on_ns: int = 0
    lost: int = 0
    ahead: SmallFileCounts = field(default_factory=SmallFileCounts)

    def counts(self) -> SmallFileCounts:
        """What was read ahead in its directories so far."""
        now = [self.watching.reads.counts_of(folder.key) for folder in self.watched.values()]
        return SmallFileCounts(
            directories=len(self.watched),
            read=self.ahead.read + sum(one.read for one in now),
            used=self.ahead.used + sum(one.used for one in now),
        )

    def below(self, directory: str) -> str | None:
        """The path of a directory from its root; None: it is not below it."""
        if directory == self.root:
            return ""
        prefix = self.root.rstrip("/") + "/"
        return directory[len(prefix) :] if directory.startswith(prefix) else None

    def full_path(self, below: str) -> str:
        """The reverse."""
        return os.path.join(self.root, below) if below else self.root


class SmallFiles:
    """Of one run. The service's thread calls everything here."""

    def __init__(
        self, watching: Watching, wants: Callable[[str], bool], clock: Clock = CLOCK
    ) -> None:
        """``wants``: whether a path may be read."""
        self._watching, self._wants, self._clock = watching, wants, clock
        self._opens, self._reads, self._mounts = watching.opens, watching.reads, watching.mounts
        self._trees: list[_Tree] = []
        self._by_key: dict[int, _WatchedFolder] = {}
        #: By directory, files that were waited for.
        self._waited: dict[str, dict[str, Key]] = {}
        #: Directories that are watched, are being listed, or were refused.
        self._asked: dict[str, None] = {}
        self._orderless: dict[str, None] = {}  # roots
        self._look_ns = 0

    # -------------------------------------------------------------- what is seen

    def seen(self, reads: Iterable[ReadSeen]) -> None:
        """A process waits for a small file."""
        for one in reads:
            directory, name = os.path.split(one.path)
            if directory in self._asked or root_of(directory) in self._orderless:
                continue
            if not self._wants(one.path):
                continue
            names = self._waited.setdefault(directory, {})
            names[name] = one.key
            if len(names) >= WAITED_FILES:
                del self._waited[directory]
                self._list(directory, partial(look, self._opens, directory, one.pid, names), names)
            _bound(self._waited)

    def _list(
        self, directory: str, look_at: Callable[[], ListedFolder], names: Iterable[str] = (),
        tree: _Tree | None = None,
    ) -> None:  # fmt: skip
        """Have a directory listed, and watched. ``names``: that were opened there; ``tree``: which
        goes on there."""
        if directory in self._asked:
            return
        if self._watching.opener.run(
            look_at, lambda found: self._listed(directory, list(names), tree, found)
        ):
            self._asked[directory] = None
            _bound(self._asked)

    def _listed(
        self, directory: str, names: list[str], tree: _Tree | None, found: ListedFolder | OSError
    ) -> None:
        if isinstance(found, OSError):
            if found.errno == errno.ESTALE:  # they may have been replaced just now
                self._asked.pop(directory, None)
            self._watching.refused(directory, found)
            return
        key, listing = found.listing.key, found.listing
        left = tree is not None and tree not in self._trees
        if left or key in self._by_key or self._mounts.drops(found.device):
            self._watching.leave(key)
            if left:
                self._asked.pop(directory, None)
            return
        tree = tree or self._tree_of(directory, found)
        below = tree.below(directory) or ""
        folder = _WatchedFolder(tree, below, key, self._clock.now_ns())
        tree.watched[below] = self._by_key[key] = folder
        tree.order.listed(below, listing.files, listing.subdirectories)
        self._reads.counts.directories += 1
        for name in names:
            tree.order.opened(below, name)
        if below:  # where the next directories are
            self._list_below(tree, os.path.dirname(below))
        self._probe(folder, names[0] if names else "")
        self._ask(tree)

    def _probe(self, folder: _WatchedFolder, name: str) -> None:
        """Where it is not known what the mount keeps, ask it: of a file that the job has read, and
        probably closed."""
        device = folder.tree.device
        if not name or self._mounts.is_known(device):
            return
        if self._reads.read(folder, folder.key, name, probe=True):
            folder.probed = name
            self._mounts.asked(device)

    def _tree_of(self, directory: str, found: ListedFolder) -> _Tree:
        for tree in self._trees:
            same = (tree.device, tree.seen_by) == (found.device, found.seen_by)
            if same and tree.below(directory) is not None:
                return tree
        if len(self._trees) >= ENTRIES_MAX:
            self._forget_tree(self._trees[0])
        tree = _Tree(root_of(directory), found.device, found.seen_by, self._watching)
        self._trees.append(tree)
        return tree

    def _list_below(self, tree: _Tree, below: str) -> None:
        directory = tree.full_path(below)
        path, device = tree.seen_by + directory, tree.device
        self._list(directory, lambda: look_below(self._opens, path, tree.seen_by, device), (), tree)

    # -------------------------------------------------------------- what is opened

    def step(
        self, now_ns: int, events: Iterable[NameOpened | DirectoryGone | Overflow],
        came: Iterable[NamesAhead],
    ) -> None:  # fmt: skip
        """What was opened, and whose files have come, since the last time."""
        changed = dict[int, _Tree]()
        for event in events:
            folder = None if isinstance(event, Overflow) else self._by_key.get(event.directory)
            if isinstance(event, Overflow):
                for tree in list(self._trees):
                    self._forget_tree(tree)
                changed.clear()
            elif folder is None:
                continue
            elif isinstance(event, DirectoryGone):
                self._leave(folder)
            elif not event.ours:
                self._opened(folder, event)
                changed[id(folder.tree)] = folder.tree
        for by in came:
            if isinstance(by, _WatchedFolder) and self._by_key.get(by.key) is by:
                changed[id(by.tree)] = by.tree
                by.tree.went_on_ns = now_ns
        for tree in changed.values():
            self._go_on(tree)
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + LATELY_NS
            for tree in list(self._trees):
                if not os.path.exists(tree.seen_by or "/"):  # its process has ended
                    self._forget_tree(tree)
            for folder in list(self._by_key.values()):
                if now_ns - folder.opened_ns > QUIET_NS:
                    self._leave(folder)

    def _go_on(self, tree: _Tree) -> None:
        """Or leave it."""
        used = tree.order.used
        if used != tree.used:
            tree.used, tree.unexpected = used, 0
            tree.went_on_ns = self._clock.now_ns()
        if tree.unexpected >= ORDERLESS_FILES or self._mounts.drops(tree.device):
            self._orderless[tree.root] = None
            _bound(self._orderless)
            self._forget_tree(tree)
        elif tree.there >= THERE_MOST:
            self._forget_tree(tree)
        else:
            self._ask(tree)

    def _opened(self, folder: _WatchedFolder, event: NameOpened) -> None:
        folder.opened_ns = event.at_ns
        order = folder.tree.order
        if event.is_dir:
            order.opened_directory("/".join(part for part in (folder.path, event.name) if part))
            return
        folder.tree.unexpected += 1
        self._probe(folder, folder.last)
        folder.last = event.name
        order.opened(folder.path, event.name)
        self._reads.opened(folder.key, event.name)

    # -------------------------------------------------------------- what is wanted

    def _ask(self, tree: _Tree) -> None:
        """Have read what is wanted now, and book what is thought lost."""
        for path, name in tree.order.given_up():
            folder = tree.watched.get(path)
            if folder is not None:
                self._reads.lost(folder.key, name)
                tree.lost += 1
        if not self._mounts.keeps(tree.device):
            return
        for path, name in tree.order.ahead(self._reads.room_files):
            tree.went_on_ns = self._clock.now_ns()
            folder = tree.watched.get(path)
            if folder is not None:
                self._read(folder, name)
        for path in tree.order.to_list():
            self._list_below(tree, path)

    def _read(self, folder: _WatchedFolder, name: str) -> None:
        if not self._wants(os.path.join(folder.tree.full_path(folder.path), name)):
            return
        self._opens.expect(folder.key, name)
        on = self._mounts.file_system(folder.tree.device)
        if not self._reads.read(folder, folder.key, name, on=on):
            self._opens.unexpect(folder.key, name)

    # -------------------------------------------------------------- they are left

    def _leave(self, folder: _WatchedFolder) -> None:
        tree = folder.tree
        tree.order.forget(folder.path)
        self._asked.pop(tree.full_path(folder.path), None)
        self._by_key.pop(folder.key, None)
        tree.watched.pop(folder.path, None)
        counts = self._reads.counts_of(folder.key)
        tree.ahead.read += counts.read
        tree.ahead.used += counts.used
        self._reads.leave(folder.key)
        self._watching.leave(folder.key)
        if not tree.watched:
            self._forget_tree(tree)

    def _forget_tree(self, tree: _Tree) -> None:
        if tree in self._trees:
            self._trees.remove(tree)
            for folder in list(tree.watched.values()):
                self._leave(folder)

    def fewest_ahead(self, since_ns: int) -> int:
        """How many files are wanted in the tree that has the fewest of those in which somebody has
        gone on since then; 0: in none."""
        ahead = (tree.order.wanted for tree in self._trees if tree.went_on_ns >= since_ns)
        return min((files for files in ahead if files), default=0)

    @property
    def active(self) -> bool:
        """Whether step() is to be called: something is watched."""
        return bool(self._by_key)

    def live(self) -> list[FileTree]:
        """For a watcher: the trees, what was opened in lately first."""
        latest = {id(tree): _latest(tree) for tree in self._trees if tree.watched}
        trees = sorted(
            (tree for tree in self._trees if tree.watched),
            key=lambda tree: -latest[id(tree)].opened_ns,
        )
        return [_live(tree, latest[id(tree)]) for tree in trees]


def _latest(tree: _Tree) -> _WatchedFolder:
    """The directory in which a file was opened last."""
    return max(tree.watched.values(), key=lambda folder: folder.opened_ns)


def _live(tree: _Tree, latest: _WatchedFolder) -> FileTree:
    from uffdprefetch.protocol.snapshot import FileTree  # most runs are not watched

    # those above are watched, too, for the directories that come next
    read = [path for path, folder in tree.watched.items() if folder.last] or list(tree.watched)
    paths = [tree.full_path(path) for path in read]
    order, counts = tree.order.files.best(), tree.counts()
    return FileTree(
        path=os.path.commonpath(paths),
        directories=len(paths),
        latest=tree.full_path(latest.path),
        order=order.name.lower() if order is not None else None,
        read=counts.read,
        used=counts.used,
        lost=tree.lost,
    )


def root_of(directory: str) -> str:
    """Of the tree that begins with this directory."""
    for _ in range(LEVELS):
        directory = os.path.dirname(directory)
    return directory


class ListedFolder(NamedTuple):
    """A directory. ``seen_by``: what stands before its path where the service sees it elsewhere."""

    device: int
    seen_by: str
    listing: WatchedDirectory


def look(opens: Opens, directory: str, pid: int, names: Mapping[str, Key]) -> ListedFolder:
    """List a directory in which a process has opened files, and watch it: where it has these.
    Raises OSError: that cannot be, another directory has its name, or it is in memory. May wait
    for storage."""
    for seen_by in ("", f"/proc/{pid}/root"):
        path = seen_by + directory
        if any(_is_file(os.path.join(path, name), key) for name, key in names.items()):
            return look_below(opens, path, seen_by, os.stat(path).st_dev)
    raise OSError(errno.ESTALE, "its files are not there", directory)


def _is_file(path: str, key: Key) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == key


def look_below(opens: Opens, path: str, seen_by: str, device: int) -> ListedFolder:
    """As look(), of a directory in which nothing was opened; none of another device, which may be
    mounted when it is opened (automount)."""
    if os.lstat(path).st_dev != device:
        raise OSError(errno.EXDEV, "another file system is mounted there", path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if file_systems.known(file_systems.type_of(fd)).in_memory:
            raise OSError(f"{path} is in memory")
        return ListedFolder(os.fstat(fd).st_dev, seen_by, watch(opens, path))
    finally:
        uffd.close_file(fd)


def _bound(table: dict[str, Any]) -> None:
    """Forget the oldest beyond ENTRIES_MAX."""
    while len(table) > ENTRIES_MAX:
        del table[next(iter(table))]
