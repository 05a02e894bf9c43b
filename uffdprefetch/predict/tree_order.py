# SPDX-License-Identifier: Apache-2.0
"""The directories of a tree, and which of their files are wanted next.

Where a directory ends, the files of the next one come, which is found as they are: by the order in
which the subdirectories of its parent are gone over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from uffdprefetch.predict.bounds import ENTRIES_MAX
from uffdprefetch.predict.file_orders import (
    STEP_NAMES,
    WINDOW_MOST_FILES,
    DirectoryOrder,
    FileCursor,
)
from uffdprefetch.predict.name_orders import (
    WINDOW_FILES,
    DirectoryPass,
    NameOrder,
    Names,
    OrderEvidence,
)


@dataclass(eq=False)
class _ListedDirectory:
    """``files``; ``entered``: the subdirectories in which files were opened."""

    files: DirectoryOrder
    entered: DirectoryPass
    last: str = ""  # subdirectory that was entered


class TreeOrder:
    """The directories of a tree, and which files come next in all of them. A directory is known by
    its path from the tree's root, which is ''."""

    def __init__(self) -> None:
        self.files = OrderEvidence()
        self.directories = OrderEvidence()
        self._listed: dict[str, _ListedDirectory] = {}
        self._changed: dict[str, None] = {}
        self._awaited: dict[str, str] = {}  # a directory that is not listed: who wants its files
        self._to_list: dict[str, None] = {}
        self._seen: dict[str, None] = {}  # directories that were listed by the job
        self._is_believed = False  # that directories are gone over as their files are
        self._stream: FileCursor | None = None  # the last one that was about to leave a directory

    def listed(self, path: str, files: Names, directories: Names) -> None:
        """What lies in a directory. Of more than ENTRIES_MAX the first are forgotten."""
        while len(self._listed) >= ENTRIES_MAX:
            self.forget(next(iter(self._listed)))
        self._listed[path] = _ListedDirectory(
            DirectoryOrder(files, self.files), DirectoryPass(directories)
        )
        who = self._awaited.pop(path, None)
        if who in self._listed:
            self._changed[who] = None

    def is_listed(self, path: str) -> bool:
        """Whether listed() was called for it."""
        return path in self._listed

    def forget(self, path: str) -> None:
        """It is not watched any more."""
        self._listed.pop(path, None)
        self._changed.pop(path, None)

    @property
    def used(self) -> int:
        """Files that were wanted and opened, in directories that are watched."""
        return sum(each.files.used for each in self._listed.values())

    @property
    def wanted(self) -> int:
        """Files that are wanted and not opened yet."""
        return sum(each.files.wanted for each in self._listed.values())

    def opened(self, path: str, name: str) -> None:
        """A file was opened in a directory that is listed."""
        self._entered(path)
        listed = self._listed.get(path)
        if listed is None:
            return
        if self._stream is not None:  # though nothing was wanted there in time
            listed.files.begin(0, self._stream)
        if listed.files.opened(name):
            self._changed[path] = None

    def opened_directory(self, path: str) -> None:
        """A directory was: whoever goes over the tree lists it."""
        self._seen.pop(path, None)
        self._seen[path] = None
        if len(self._seen) > WINDOW_MOST_FILES:
            del self._seen[next(iter(self._seen))]

    def _entered(self, path: str) -> None:
        """A file is opened below each of its directories."""
        self._seen.pop(path, None)
        while path:
            path, _, name = path.rpartition("/")
            above = self._listed.get(path)
            if above is None or above.last == name:
                continue
            above.last = name
            index = above.entered.names.find(name)
            if index < 0:
                continue
            if index not in above.entered or above.entered.begins_anew(index):
                self.directories.note(above.entered, index)
            above.entered.add(index)

    def _following(self, path: str) -> Iterator[str]:
        """The directories after one, as they are gone over: its own subdirectories, those beside
        it, and those beside its parent, where two of these were entered by now: else what is gone
        over may end with the parent ..."""
        if not self._is_believed and (likely := self.files.best()) is not None:
            self.directories.believe(likely)
            self._is_believed = True
        order = self.directories.best()
        if order is None:
            yield from list(self._seen)
            return
        yield from self._below(path, order, -1)
        entered_least = 1
        while path:
            path, _, name = path.rpartition("/")
            above = self._listed.get(path)
            if above is None:
                yield path  # has to be listed first
                return
            if above.entered.number < entered_least:
                return
            entered_least = 2
            names = above.entered.names
            index = names.find(name)
            yield from self._below(path, order, names.place(order, index) if index >= 0 else -1)

    def _below(self, path: str, order: NameOrder, place: int) -> Iterator[str]:
        """The subdirectories that an order has after a place, each with its own."""
        listed = self._listed.get(path)
        if listed is None:
            return
        names = listed.entered.names
        for after in range(place + 1, len(names)):
            index = names.index(order, after)
            if index in listed.entered:
                continue
            below = f"{path}/{names.name(index)}" if path else names.name(index)
            yield below
            yield from self._below(below, order, -1)

    def given_up(self) -> list[tuple[str, str]]:
        """The files that were wanted and were given up since the last time: (directory, name). Of a
        directory that is forgotten all are, and it is not said."""
        return [
            (path, name) for path in self._changed for name in self._listed[path].files.given_up()
        ]

    def ahead(self, most: int = STEP_NAMES) -> list[tuple[str, str]]:
        """The files that are wanted and were not before: (directory, name), ``most`` of them now,
        and the others the next time."""
        found: list[tuple[str, str]] = []
        changed, self._changed = self._changed, {}
        for path in changed:
            listed = self._listed[path]
            found += [(path, name) for name in listed.files.ahead(more=most - len(found))]
            if (stream := listed.files.leaving) is not None:
                found += self._beyond(path, stream, most - len(found))
            if len(found) >= most:
                self._changed[path] = None
        return found

    def _beyond(self, path: str, stream: FileCursor, most: int) -> list[tuple[str, str]]:
        """The first files of the directories that come next, for a stream that leaves one. From the
        first on that is not listed, they are thought to have as many files as that one; so many are
        asked for at a time as files at first, as each takes a few requests, one after the other."""
        found: list[tuple[str, str]] = []
        self._stream = stream
        short, unlisted = stream.short, 0
        files = max(1, len(self._listed[path].files.names))
        for number, after in enumerate(self._following(path)):
            listed = self._listed.get(after)
            if listed is None:
                self._to_list[after] = None
                self._awaited[after] = path
                unlisted += 1
            elif not unlisted:
                listed.files.begin(short, stream)
                names = listed.files.ahead(more=most - len(found))
                found += [(after, name) for name in names]
                if len(found) >= most:
                    break  # this one comes first
                short -= sum(cursor.outstanding for cursor in listed.files.cursors)
            short -= files if unlisted else 0
            if short <= 0 or unlisted >= WINDOW_FILES or number >= WINDOW_MOST_FILES:
                break
        return found

    def to_list(self) -> list[str]:
        """Directories whose content is asked for, by listed(), since the last time."""
        asked, self._to_list = list(self._to_list), {}
        return asked
