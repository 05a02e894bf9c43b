# SPDX-License-Identifier: Apache-2.0
"""Hypotheses of which file each sample of a data set reads, and what opens say of them. Pure but
for what the caller answers: whether there is such a file.

A hypothesis is a list of names, with the directory before and the ending after them, and a way from
a sample to the list's element. evidence() compares the share of opened files among those that must
have been read with the share among those that cannot have been: a list of which each file is read
sooner or later, in another order, has the same share among both.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.job.channel import packed
from uffdprefetch.orders.file_order import PathColumn, check_paths
from uffdprefetch.orders.key_forms import shown
from uffdprefetch.orders.key_lists import KeyList
from uffdprefetch.orders.residency_evidence import CERTAIN, Share, certainty

Exists = Callable[[str], bool]
Elements = Callable[[Array], Array]

#: Samples whose files must all be there, as by a wrong list hardly all are; the first few are asked
#: for before the rest.
PROBES, PROBES_FIRST = 8, 2
#: Bounds on the work for a hostile job: lists, directories, endings, and files asked for.
LISTS_MAX, DIRECTORIES_MAX, ENDINGS_MAX, ASKED_MAX = 32, 16, 4, 1024
#: Hypotheses of one data set that are watched.
HYPOTHESES_MAX = 16
#: Longest text that is an ending (".jpeg", "_mask.png").
ENDING_BYTES = 16
#: Opened files and samples that are compared to find out what stands around a name, and how many
#: must agree.
LEARNED_FROM, LEARNED_LATEST, LEARNED_MIN = 256, 4096, 4
#: Widest number in a file's name that is formatted anew for each sample.
_DIGITS_MAX = 12
#: Names that are formatted at once: a second.
NUMBERED_MAX = 1 << 21
#: Files that decide whether a hypothesis is wrong, at least.
DECIDED_MIN = 8
_PIECES = re.compile(rb"[-_.]")
_NUMBER = re.compile(rb"[0-9]+")


class Affixes(NamedTuple):
    """What stands before and after an element."""

    before: bytes
    after: bytes


@dataclass(frozen=True, eq=False)
class PathHypothesis:
    """name: a line for people. elements: of the column, by samples (int64)."""

    name: str
    column: PathColumn
    elements: Elements

    def paths(self, samples: Array) -> list[str]:
        """The files of these samples."""
        return self.column.paths(self.elements(samples))


@dataclass(frozen=True, eq=False)
class _Way:
    """A way from samples to elements of a list of names."""

    names: KeyList
    name: str
    elements: Elements

    def hypothesis(self, around: Affixes) -> PathHypothesis:
        parts = [repr(shown(around.before)), f".{shown(self.name)}", repr(shown(around.after))]
        kept = [part for part, some in zip(parts, (around.before, True, around.after), strict=True)
                if some]  # fmt: skip
        name = f"files {' + '.join(kept)}"
        return PathHypothesis(name, PathColumn(self.names, *around), self.elements)


@dataclass(frozen=True, eq=False)
class SampleOpens:
    """Paths of files that were opened while a data set read the latest ``samples``."""

    samples: Array
    paths: Sequence[bytes]


def hypotheses(
    lists: Iterable[KeyList],
    samples_count: int,
    directories: Sequence[bytes],
    endings: Sequence[bytes],
    exists: Exists,
    opened: SampleOpens | None = None,
) -> list[PathHypothesis]:
    """Those of which the files of PROBES samples all exist.

    ``directories``: which relative names may be of; ``endings``: which names may lack. Where these
    explain nothing, it is looked what ``opened`` files have around the names, or around the
    samples' numbers.
    """
    probe = _spread(samples_count, PROBES)
    ask = _Existing(exists)
    found: list[PathHypothesis] = []

    def take(made: Iterable[PathHypothesis]) -> bool:
        one = [each for each in made if ask.all(each.paths(probe))][:1]
        found.extend(one)
        return bool(one)

    for way in _ways(list(lists)[:LISTS_MAX], samples_count):
        names = way.names.take(way.elements(probe))
        given = _affixes(names, directories, endings)
        if not take(map(way.hypothesis, given)) and opened is not None:
            take(map(way.hypothesis, _learned(way, opened)))
    if not found and opened is not None:
        take(_numbered(opened, samples_count))
    return found[:HYPOTHESES_MAX]


class _Existing:
    """Answers about files, ASKED_MAX of them."""

    def __init__(self, exists: Exists) -> None:
        self._exists, self._known = exists, dict[str, bool]()

    def all(self, paths: Sequence[str]) -> bool:
        """Whether there are all of these."""
        return all(map(self._one, paths[:PROBES_FIRST])) and all(map(self._one, paths))

    def _one(self, path: str) -> bool:
        if path not in self._known:
            if len(self._known) >= ASKED_MAX:
                return False
            self._known[path] = self._exists(path)
        return self._known[path]


def _spread(count: int, most: int) -> Array:
    """So many numbers below ``count``, all over it."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _affixes(
    names: Sequence[bytes], directories: Sequence[bytes], endings: Sequence[bytes]
) -> list[Affixes]:
    absolute = all(name.startswith(b"/") for name in names)
    before = [b""] if absolute else list(directories[:DIRECTORIES_MAX])
    return [Affixes(one, other) for other in (b"", *endings[:ENDINGS_MAX]) for one in before]


# ---- from a sample to an element -----------------------------------------------------------------


def _ways(lists: Sequence[KeyList], count: int) -> Iterator[_Way]:
    """Sample i reads element i, element i // k of a list that is k times shorter, or the element
    that a list of numbers says."""
    if count <= 0:
        return
    numbers = [each for each in lists if each.kind == "ints" and len(each) >= count]
    for each in lists:
        if not _may_be_names(each):
            continue
        if len(each) >= count:
            yield _Way(each, each.name, _itself)
        elif count % len(each) == 0:
            views = count // len(each)
            yield _Way(each, f"{each.name}[i // {views}]", _shared(views))
        for other in numbers:
            if _is_choice(other, count, len(each)):
                yield _Way(each, f"{each.name}[{other.name}[i]]", _chosen(other))


def _may_be_names(each: KeyList) -> bool:
    if each.kind == "ints" or not len(each):
        return False
    try:
        check_paths(each)
    except ValueError:
        return False
    few = each.take(_spread(len(each), PROBES))
    return len(few) == 1 or len(set(few)) > 1


def _is_choice(numbers: KeyList, count: int, elements: int) -> bool:
    """Whether numbers are places in a list, mostly different ones, and not as they come."""
    some = numbers.numbers[:count]
    if int(some.min()) < 0 or int(some.max()) >= elements:
        return False
    few = some[_spread(count, 64)]
    return len(np.unique(few)) > len(few) // 2 and bool((few != _spread(count, 64)).any())


def _itself(samples: Array) -> Array:
    return samples


def _shared(views: int) -> Elements:
    return lambda samples: samples // views


def _chosen(numbers: KeyList) -> Elements:
    return lambda samples: numbers.numbers[samples].astype(np.int64)


# ---- what stands around a name, by files that were opened ----------------------------------------


def _learned(way: _Way, opened: SampleOpens) -> Iterator[Affixes]:
    """What files that were opened have around the names of the latest samples."""
    names = set(way.names.take(way.elements(opened.samples[-LEARNED_LATEST:])))
    latest = opened.paths[-LEARNED_FROM:]
    votes = Counter(around for path in latest for around in set(_around(path, names)))
    for around, agree in votes.most_common(2):
        if agree >= LEARNED_MIN:
            yield around


def _around(path: bytes, names: set[bytes]) -> Iterator[Affixes]:
    """What stands before and after a part of a path that is one of the names: its last components,
    with or without an ending, or a piece of the last one."""
    base = path.rfind(b"/") + 1
    ends = [len(path), *(base + cut.start() for cut in _PIECES.finditer(path[base:]))]
    starts = [base, *(base + cut.end() for cut in _PIECES.finditer(path[base:]))]
    above = base
    for _ in range(2):  # directories that names may have with them
        above = path.rfind(b"/", 0, max(above - 1, 0)) + 1
        starts.append(above)
    for start in starts:
        for end in ends:
            if start < end and path[start:end] in names:
                yield Affixes(path[:start], path[end:])


def _numbered(opened: SampleOpens, count: int) -> Iterator[PathHypothesis]:
    """Names that are the sample's number, counted from 0 or 1, in so many digits."""
    latest = set(opened.samples[-LEARNED_LATEST:].tolist())
    votes: Counter[tuple[Affixes, int]] = Counter()
    widths: dict[tuple[Affixes, int], int] = {}
    for path in opened.paths[-LEARNED_FROM:]:
        for run in _NUMBER.finditer(path, path.rfind(b"/") + 1):
            if len(run[0]) > _DIGITS_MAX:
                continue
            padded = len(run[0]) if run[0].startswith(b"0") else 0
            around = Affixes(path[: run.start()], path[run.end() :])
            for base in (0, 1):
                if int(run[0]) - base in latest:
                    votes[around, base] += 1
                    widths[around, base] = max(widths.get((around, base), 0), padded)
    for (around, base), agree in votes.most_common(2):
        if agree >= LEARNED_MIN and count <= NUMBERED_MAX:
            form = f"%0{widths[around, base]}d" if widths[around, base] > 1 else "%d"
            numbers = (form.encode() % number for number in range(base, base + count))
            names = KeyList.parse(form, "bytes", packed(numbers))
            yield _Way(names, f"{form} from {base}", _itself).hypothesis(around)


# ---- what opens say ------------------------------------------------------------------------------


class FileEvidence(NamedTuple):
    """Which of the files of a hypothesis were opened: ``read``, of those that were or may have been
    read; ``sure``, of those that were read since all opens are seen; ``other``, of some that were
    not read."""

    read: Share
    sure: Share
    other: Share

    @property
    def proves(self) -> bool:
        """Whether what was read was opened, and not by chance."""
        return any(
            share.holds and certainty(share, self.other) >= CERTAIN
            for share in (self.read, self.sure)
        )

    @property
    def refutes(self) -> bool:
        """Whether files that must have been read were not opened."""
        return self.sure.count >= DECIDED_MIN and not self.sure.holds


def evidence(
    read: Sequence[str], sure: Sequence[str], other: Sequence[str], opened: frozenset[str]
) -> FileEvidence:
    """Of the real paths of these files, and of all that were opened."""
    return FileEvidence(*(
        Share(sum(path in opened for path in paths), len(paths)) for paths in (read, sure, other)
    ))  # fmt: skip
