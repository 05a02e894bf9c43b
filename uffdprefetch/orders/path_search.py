# SPDX-License-Identifier: Apache-2.0
"""Finds out which files the samples of a data set read, by what its processes open
(orders/path_hypotheses.py). Asks the file system, in the helper's threads.

First it is told in which directories opens have to be watched: those of some files that are read
soon, and of some that are read late. When these are watched, opens prove or refute a hypothesis.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.orders import path_hypotheses
from uffdprefetch.orders.announcement import Part, StoredAnnouncement
from uffdprefetch.orders.file_links import RealNames, with_aliases
from uffdprefetch.orders.file_order import PathOrder, PathTable, of_items
from uffdprefetch.orders.key_lists import KeyList
from uffdprefetch.orders.opens import JobOpens
from uffdprefetch.orders.path_hypotheses import (
    ENDING_BYTES,
    LEARNED_MIN,
    FileEvidence,
    PathHypothesis,
    SampleOpens,
)

#: Directories that are to be watched for one data set, half of them for the files of each kind.
DIRECTORIES_MAX = 64
#: Texts that may be a directory below another one.
BELOW_MAX = 8
#: Latest samples, and later ones, of which it is looked whether their files were opened.
SEEN_MAX, OTHER_MAX = 1024, 256
#: Samples after which nothing is found out any more.
GIVEN_UP_ITEMS = 4096
#: Files that are asked whether they are symbolic links, as in the stores of some data sets all are.
LINKS_TRIED = 16
#: Real paths that are looked up one by one where they are.
LINKS_MAX = 128


@dataclass
class SampleFiles:
    """What is known of a data set's files. ``proven``: all that a sample reads."""

    made: list[PathHypothesis] | None = None
    learned_from: int = 0  # opens by which it was tried to find out more
    links: dict[str, bool] = field(default_factory=dict)  # by names of hypotheses
    why: str = ""  # that nothing is to be found out any more
    proven: tuple[PathHypothesis, ...] = ()
    table: PathTable | None = None
    aliases: Sequence[tuple[str, str]] | None = None
    names: RealNames = field(default_factory=RealNames)


@dataclass(frozen=True)
class FileAnswer:
    """order, how: once they are known. watch: directories in which opens are to be seen. undecided:
    whether more that is opened may prove something. why: that nothing is proven."""

    order: PathOrder | None = None
    how: str = ""
    watch: frozenset[str] = frozenset()
    undecided: bool = False
    why: str = ""


class PathSearch:
    """One request for the order of the files of a part's samples."""

    def __init__(
        self,
        announcement: StoredAnnouncement,
        part: Part,
        lists: Sequence[KeyList],
        known: SampleFiles,
    ) -> None:
        """``lists``: of the data set. Raises AnnounceError."""
        self._part, self._lists, self._known = part, lists, known
        self._items = announcement.items
        self._samples = announcement.numbers(part.array)
        self._turns = announcement.turns(part, len(self._samples))

    def answer(self, read_items: int, opens: JobOpens) -> FileAnswer:
        """``read_items``: progress."""
        known = self._known
        if known.proven:
            return FileAnswer(self._order(), self._how())
        if known.why:
            return FileAnswer(why=known.why)
        made = self._hypotheses(read_items, opens)
        if not made:
            searched = bool(self._lists or opens.paths) and read_items < GIVEN_UP_ITEMS
            return FileAnswer(undecided=searched)
        if opens.since_items is not None:
            judged = [(each, self._evidence(each, read_items, opens)) for each in made]
            proven = tuple(each for each, seen in judged if seen.proves)
            if proven:
                known.proven = proven
                return FileAnswer(self._order(), self._how())
            made = known.made = [each for each, seen in judged if not seen.refutes]
        begun = opens.since_items or 0
        if not made or read_items >= begun + self._part.ahead + GIVEN_UP_ITEMS:
            known.why = "the files of its lists are opened in another order"
            return FileAnswer(why=known.why)
        return FileAnswer(watch=self._directories(made, read_items), undecided=True)

    # ---- hypotheses ------------------------------------------------------------------------------

    def _hypotheses(self, read_items: int, opens: JobOpens) -> list[PathHypothesis]:
        """Those that are left. Looked for once by the lists alone, then by what was opened, each
        time that has doubled."""
        known = self._known
        seen = len(opens.paths)
        more = not known.made and seen >= max(2 * known.learned_from, LEARNED_MIN)
        if known.made is not None and not more:
            return known.made
        known.learned_from, opened = seen, None
        if seen:
            upto = self._place(read_items + self._part.ahead)
            opened = SampleOpens(self._samples[:upto], list(map(os.fsencode, opens.paths)))
        known.made = path_hypotheses.hypotheses(
            self._lists,
            self._part.data_set.samples,
            self._before(),
            self._after(),
            _is_file,
            opened,
        )
        return known.made

    def _before(self) -> list[bytes]:
        """Directories of which relative names may be."""
        cwd, given = self._part.surroundings
        found = [cwd]
        for text in given[: path_hypotheses.DIRECTORIES_MAX]:
            name = os.path.join(cwd, text)
            found += [name] if os.path.isdir(name) else []
        below = [text for text in given if not os.path.isabs(text)][:BELOW_MAX]
        for root in found[1:3]:  # such as root/split
            some = (os.path.join(root, text) for text in below)
            found += [name for name in some if os.path.isdir(name)]
        return [os.fsencode(os.path.join(name, "")) for name in dict.fromkeys(found)]

    def _after(self) -> list[bytes]:
        """Endings that names may lack."""
        encoded = map(os.fsencode, self._part.surroundings.texts)
        return [text for text in encoded if b"." in text and len(text) <= ENDING_BYTES]

    # ---- evidence --------------------------------------------------------------------------------

    def _place(self, items: int) -> int:
        """How many samples are of the first ``items`` items."""
        return int(np.searchsorted(self._turns, items, "left"))

    def _evidence(self, each: PathHypothesis, read_items: int, opens: JobOpens) -> FileEvidence:
        assert opens.since_items is not None
        read, later = self._place(read_items), self._place(read_items + self._part.ahead)
        first = self._place(opens.since_items + self._part.ahead)
        read_now = self._real(each, self._samples[:read][-SEEN_MAX:])
        sure = read_now[len(read_now) - max(0, min(read - first, len(read_now))) :]
        other = self._real(each, self._others(each, later))

        def watched(paths: list[str]) -> list[str]:
            where = opens.directories
            return [path for path in paths if not where or os.path.dirname(path) in where]

        return path_hypotheses.evidence(
            watched(read_now), watched(sure), watched(other)[:OTHER_MAX], frozenset(opens.paths)
        )

    def _real(self, each: PathHypothesis, samples: Array) -> list[str]:
        """The real paths of the files of these samples; where they are links, of the latest."""
        names, links = self._known.names, self._known.links
        if each.name not in links:
            few = samples[:: max(1, len(samples) // LINKS_TRIED)]
            links[each.name] = names.any_links(each.paths(few)[:LINKS_TRIED])
        if links[each.name]:
            return list(map(names.file, each.paths(samples[-LINKS_MAX:])))
        return list(map(names.in_directory, each.paths(samples)))

    def _others(self, each: PathHypothesis, later: int) -> Array:
        """Samples that are not read until ``later``, nor are their files."""
        used = np.unique(each.elements(self._samples[:later]))
        others = self._samples[later:]
        others = others[~np.isin(each.elements(others), used)]
        return others[:: max(1, len(others) // SEEN_MAX)][:SEEN_MAX]

    def _directories(self, made: Sequence[PathHypothesis], read_items: int) -> frozenset[str]:
        """Those of files that are read soon, and of files that are read late, by each hypothesis in
        turn."""
        later = self._place(read_items + self._part.ahead)
        most = max(1, DIRECTORIES_MAX // (2 * len(made)))
        found: set[str] = set()
        for each in made:
            for samples in (self._samples[self._place(read_items) :], self._others(each, later)):
                some: set[str] = set()
                for path in self._real(each, samples[:LINKS_MAX]):
                    some.add(os.path.dirname(path))
                    if len(some) == most:
                        break
                found |= some
        return frozenset(found)

    # ---- the order -------------------------------------------------------------------------------

    def _order(self) -> PathOrder:
        proven, known = self._known.proven, self._known
        columns = [each.column for each in proven]
        elements = [each.elements(self._samples) for each in proven]
        order = of_items(columns, elements, self._turns, self._items, known.table)
        known.table = order.table
        if known.aliases is None:
            known.aliases = with_aliases(order, known.names).aliases
        return replace(order, aliases=known.aliases)

    def _how(self) -> str:
        return "; ".join(each.name for each in self._known.proven)


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False
