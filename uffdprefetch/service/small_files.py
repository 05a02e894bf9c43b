# SPDX-License-Identifier: Apache-2.0
"""Small files that processes of the job open one after the other: the next ones are read ahead.

Directories in which the job was seen to wait are watched, and what is opened in them tells the
order of their files (predict/file_orders.py). The account of all guesses bounds what is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from uffdprefetch.base import file_systems
from uffdprefetch.base.clock import CLOCK, Clock
from uffdprefetch.base.units import MIB
from uffdprefetch.native import uffd
from uffdprefetch.native.paths import Keeping, PathDone, PathReader, PathRequest, PathState
from uffdprefetch.predict.bounds import ENTRIES_MAX, LATELY_NS
from uffdprefetch.predict.price import Account
from uffdprefetch.predict.storage import BLOCK_BYTES, Link
from uffdprefetch.predict.tree_order import TreeOrder
from uffdprefetch.sense.listing import WatchedDirectory, watch
from uffdprefetch.sense.opens import DirectoryGone, NameOpened, Opens, Overflow
from uffdprefetch.sense.read_calls import ReadSeen
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import Opener

#: Files of a directory that the job was seen to wait for, before it is watched: one alone is an
#: index, or a configuration.
WAITED_FILES = 2
#: So many files in a row that were in memory: the job needs no help in that directory, until it has
#: opened twice as many more.
THERE_MOST = 16
#: How far above the first directory that is read the root of its tree is: training data lies in a
#: directory for each class, and these in one for each split.
LEVELS = 2
#: A file is read no further than so many times the mean of those before it: one that is larger by
#: far is followed as it is read (opened_files.py).
MEANS = 4
#: A directory in which nothing was opened for so long is not watched any more.
QUIET_NS = 5 * LATELY_NS


@dataclass
class _Directory:
    """One that is watched. ``read``: bytes by name, of files that were read ahead and not opened
    since; ``there``: files in a row that were in memory, ``rests``: for so many opens nothing is
    read."""

    tree: _Tree
    path: str
    key: int
    fd: int
    device: int
    opened_ns: int
    read: dict[str, int] = field(default_factory=dict)
    there: int = 0
    rests: int = 0


@dataclass
class _Tree:
    """Directories below ``root``, a path in the namespace of the process ``pid``; ``fd``: of it."""

    root: str
    pid: int
    order: TreeOrder = field(default_factory=TreeOrder)
    watched: dict[str, _Directory] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)  # being listed, or refused
    lost: int = 0  # of those that its order tells, so many are booked

    def below(self, directory: str) -> str | None:
        """The path of a directory from its root; None: it is not below it."""
        if directory == self.root:
            return ""
        prefix = self.root.rstrip("/") + "/"
        return directory[len(prefix) :] if directory.startswith(prefix) else None


@dataclass
class SmallFileCounts:
    """Of a run: files, and their bytes."""

    directories: int = 0
    read: int = 0
    read_bytes: int = 0
    used: int = 0
    used_bytes: int = 0
    there: int = 0


class SmallFiles:
    """Of one run. The service's thread calls everything here."""

    def __init__(
        self, opens: Opens, reader: PathReader, *, most_bytes: int, opener: Opener,
        account: Account, measured: Callable[[], Link], wants: Callable[[str], bool],
        ledger: Ledger, clock: Clock = CLOCK,
    ) -> None:  # fmt: skip
        """``most_bytes``: a file that is as large is none; ``measured``: the link; ``wants``:
        whether a path may be read."""
        self._most_bytes, self._opens, self._reader = most_bytes, opens, reader
        self._opener, self._account, self._measured = opener, account, measured
        self._wants, self._ledger, self._clock = wants, ledger, clock
        self._trees: dict[str, _Tree] = {}
        self._by_key: dict[int, _Directory] = {}
        self._waited: dict[str, set[str]] = {}  # by directory, files that were waited for
        self._requests: dict[int, tuple[_Directory, str]] = {}
        self._number = 0
        #: By device: whether its mount keeps what is read; None: it is being found out.
        self._keeps: dict[int, bool | None] = {}
        self.counts = SmallFileCounts()
        self._look_ns = 0

    @property
    def fds(self) -> tuple[int, int]:
        """Readable when step() has something to do."""
        return self._opens.fileno(), self._reader.fileno()

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
        return found is not None and found[1] in found[0].asked

    def _tree_of(self, directory: str) -> tuple[_Tree, str] | None:
        for tree in self._trees.values():
            below = tree.below(directory)
            if below is not None:
                return tree, below
        return None

    def _begin(self, pid: int, directory: str, names: set[str]) -> None:
        found = self._tree_of(directory)
        if found is None:
            root = directory
            for _ in range(LEVELS):
                root = os.path.dirname(root)
            tree = self._trees[root] = _Tree(root, pid)
            found = tree, tree.below(directory) or ""
            if len(self._trees) > ENTRIES_MAX:
                self._forget_tree(next(iter(self._trees.values())))
        tree, below = found
        tree.pid = pid
        self._list(tree, below, names)
        if below:  # of its parent, where the next directories are
            self._list(tree, os.path.dirname(below))

    def _list(self, tree: _Tree, below: str, names: Iterable[str] = ()) -> None:
        """Have a directory listed, and watched from before that on."""
        if below in tree.asked:
            return
        tree.asked.add(below)
        path = f"/proc/{tree.pid}/root{os.path.join(tree.root, below)}"
        names = tuple(names)
        if not self._opener.run(
            lambda: look(self._opens, path), lambda found: self._listed(tree, below, names, found)
        ):
            tree.asked.discard(below)

    def _listed(
        self, tree: _Tree, below: str, names: tuple[str, ...], found: _Watched | OSError
    ) -> None:
        if isinstance(found, OSError):
            return
        key, listing = found.listing.key, found.listing
        if self._trees.get(tree.root) is not tree or key in self._by_key:
            self._drop(key, found.fd)
            return
        now = self._clock.now_ns()
        directory = _Directory(tree, below, key, found.fd, found.device, now)
        tree.watched[below] = self._by_key[key] = directory
        tree.order.listed(below, listing.files, listing.subdirectories)
        self.counts.directories += 1
        for name in names:
            tree.order.opened(below, name)
        self._find_out(directory, names)
        self._ask(tree)

    def _find_out(self, directory: _Directory, names: tuple[str, ...]) -> None:
        """What the mount keeps: by a file that the job has read, and probably closed."""
        if directory.device in self._keeps or not names:
            return
        self._number += 1
        request = PathRequest(self._number, names[0], dir_fd=directory.fd, probe=True)
        if self._reader.submit(request):
            self._requests[self._number] = directory, names[0]
            self._keeps[directory.device] = None

    def _note_keeping(self, directory: _Directory, done: PathDone) -> None:
        keeping = done.probe.keeping if done.probe is not None else Keeping.UNKNOWN
        keeps = keeping not in (Keeping.NOTHING, Keeping.WHILE_OPEN)
        self._keeps[directory.device] = keeps
        if not keeps:
            self._ledger.leave_alone(
                f"its small files are left to the kernel: its file system keeps {keeping.value}",
                os.path.join(directory.tree.root, directory.path),
            )

    # -------------------------------------------------------------- what is opened

    def step(self, now_ns: int) -> None:
        """Once a turn."""
        changed = dict[str, _Tree]()
        for event in self._opens.read():
            if isinstance(event, Overflow):
                for tree in list(self._trees.values()):
                    self._forget_tree(tree)
                changed.clear()
            elif isinstance(event, DirectoryGone):
                gone = self._by_key.get(event.directory)
                if gone is not None:
                    self._leave(gone)
            elif isinstance(event, NameOpened) and not event.ours:
                directory = self._by_key.get(event.directory)
                if directory is not None:
                    self._opened(directory, event)
                    changed[directory.tree.root] = directory.tree
        for done in self._reader.reap():
            directory, name = self._requests.pop(done.id)
            if self._by_key.get(directory.key) is directory:
                self._done(directory, name, done)
                changed[directory.tree.root] = directory.tree
        for tree in changed.values():
            self._ask(tree)
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + LATELY_NS
            for directory in list(self._by_key.values()):
                if now_ns - directory.opened_ns > QUIET_NS:
                    self._leave(directory)

    def _opened(self, directory: _Directory, event: NameOpened) -> None:
        directory.opened_ns = event.at_ns
        order, path = directory.tree.order, directory.path
        if event.is_dir:
            inner = f"{path}/{event.name}" if path and event.name else event.name or path
            order.opened_directory(inner)
            return
        directory.rests = max(0, directory.rests - 1)
        order.opened(path, event.name)
        ahead_bytes = directory.read.pop(event.name, None)
        if ahead_bytes is not None:
            self.counts.used += 1
            self.counts.used_bytes += ahead_bytes
            self._account.note_use(ahead_bytes, 0, True, self._measured())

    def _done(self, directory: _Directory, name: str, done: PathDone) -> None:
        if done.probe is not None:
            self._note_keeping(directory, done)
            return
        if done.state is not PathState.DONE:
            return
        if not done.waited:
            self.counts.there += 1
            directory.there += 1
            if directory.there >= THERE_MOST:
                directory.there, directory.rests = 0, 2 * THERE_MOST
                self._reader.withdraw(directory.key)
            return
        directory.there = 0
        self.counts.read += 1
        self.counts.read_bytes += done.bytes
        self._account.asked += done.bytes
        directory.read[name] = done.bytes

    # -------------------------------------------------------------- what is wanted

    def _ask(self, tree: _Tree) -> None:
        """Have read what is wanted now, and books kept of what was not used."""
        lost = tree.order.lost
        if lost > tree.lost:
            self._account.lost += (lost - tree.lost) * self._mean_bytes
            tree.lost = lost
        under_way_bytes = len(self._requests) * self._mean_bytes
        if self._account.room_bytes(self._measured()) <= under_way_bytes:
            return
        for path, name in tree.order.ahead():
            directory = tree.watched.get(path)
            if directory is not None and not directory.rests and self._keeps.get(directory.device):
                self._read(directory, name)
        for path in tree.order.to_list():
            self._list(tree, path)

    @property
    def _mean_bytes(self) -> int:
        """Of a file."""
        return self.counts.read_bytes // self.counts.read if self.counts.read else BLOCK_BYTES

    def _read(self, directory: _Directory, name: str) -> None:
        if not self._wants(os.path.join(directory.tree.root, directory.path, name)):
            return
        self._number += 1
        request = PathRequest(
            self._number, name, group=directory.key, dir_fd=directory.fd,
            most_bytes=min(self._most_bytes, max(MIB, MEANS * self._mean_bytes)),
        )  # fmt: skip
        self._opens.expect(directory.key, name)
        if self._reader.submit(request):
            self._requests[self._number] = directory, name
        else:
            self._opens.unexpect(directory.key, name)

    # -------------------------------------------------------------- they are left

    def _leave(self, directory: _Directory) -> None:
        self._reader.withdraw(directory.key)
        self._account.lost += sum(directory.read.values())
        tree = directory.tree
        tree.order.forget(directory.path)
        tree.lost = tree.order.lost  # booked, by their bytes
        tree.watched.pop(directory.path, None)
        tree.asked.discard(directory.path)
        self._by_key.pop(directory.key, None)
        self._drop(directory.key, directory.fd)
        if not tree.watched:
            self._trees.pop(tree.root, None)

    def _drop(self, key: int, fd: int) -> None:
        self._reader.close_directory(fd)
        self._opener.run(lambda: self._opens.unmark(key), lambda _: None)

    def _forget_tree(self, tree: _Tree) -> None:
        for directory in list(tree.watched.values()):
            self._leave(directory)
        self._trees.pop(tree.root, None)

    def close(self) -> None:
        """End it."""
        self._reader.close()
        self._opens.close()


def with_threads(rundir: str, make: Callable[[Opens, PathReader], SmallFiles]) -> SmallFiles:
    """With a sensor and threads of its own. Raises OSError."""
    opens = Opens(rundir)
    try:
        return make(opens, PathReader())
    except OSError:
        opens.close()
        raise


class _Watched(NamedTuple):
    """``fd``: of the directory."""

    fd: int
    device: int
    listing: WatchedDirectory


def look(opens: Opens, path: str) -> _Watched:
    """List a directory, and watch it. Raises OSError: that cannot be, or it is in memory. May wait
    for storage."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if file_systems.known(file_systems.type_of(fd)).in_memory:
            raise OSError(f"{path} is in memory")
        return _Watched(fd, os.fstat(fd).st_dev, watch(opens, fd))
    except BaseException:
        uffd.close_file(fd)
        raise
