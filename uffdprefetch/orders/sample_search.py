# SPDX-License-Identifier: Apache-2.0
"""Finds out which records the samples of a data set read, by what of the files is mapped
(orders/mapping.py): in one file of the process, then in several as one sequence.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.formats.cache import open_cached
from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.orders import stated
from uffdprefetch.orders.announcement import AnnounceError, Part, StoredAnnouncement
from uffdprefetch.orders.evidence import ENOUGH_SAMPLES
from uffdprefetch.orders.file_sequence import FileSequence, sequences
from uffdprefetch.orders.mapped_files import MappedFile, ResolveRequest, same_file
from uffdprefetch.orders.mapping import Hypothesis, KeyList, choose, hypotheses, in_each
from uffdprefetch.orders.path_search import SampleFiles
from uffdprefetch.orders.residency_evidence import Present
from uffdprefetch.predict.order.order import Order

#: Latest samples whose records are looked for among the touches.
SEEN_MAX = 1024
#: Samples on which hypotheses are tried for existing records before that.
PROBED = 64
#: Within the first batch, which is slow since nothing is read ahead, progress is inferred from page
#: tables: samples considered, and mapped ones in a row that are no chance.
BEGUN_MAX = 64
BEGUN_MIN = 8
#: Requests without enough evidence after which the service gives up.
TRIES_MAX = 60


@dataclass
class SampleLists:
    """A data set's lists of keys and paths. ``found``: by record files, the hypotheses that have
    been proven; ``files``: what is known of whole files."""

    lists: dict[str, KeyList] = field(default_factory=dict)
    found: dict[tuple[str, ...], tuple[Hypothesis, ...]] = field(default_factory=dict)
    tries: int = 0
    files: SampleFiles = field(default_factory=SampleFiles)


class SampleSearch:
    """One request for the order of a part's samples. Raises AnnounceError where the announcement
    contradicts itself."""

    def __init__(
        self,
        announcement: StoredAnnouncement,
        part: Part,
        request: ResolveRequest,
        known: SampleLists,
    ) -> None:
        self._announcement = announcement
        self._part = part
        self._request = request
        self._known = known
        self._samples = announcement.numbers(part.array)
        self._turns = announcement.turns(part, len(self._samples))
        if len(self._samples) and (
            self._samples.min() < 0 or self._samples.max() >= part.data_set.samples
        ):
            raise AnnounceError(f"a sample that is none of {part.data_set.samples}")
        self._indices: dict[int, RecordIndex] = {}  # by number of file
        self._whys: list[str] = []  # that nothing is proven
        self._undecided = False  # more that is read may prove something

    def orders(self) -> tuple[list[tuple[int, Order, str]], str | None, bool]:
        """([(file, order, how it is known)], a finding, whether to ask again)."""
        self._known.tries += 1
        files = self._files()
        chosen = self._in_one_file(files)
        if not chosen and not self._undecided:
            chosen = self._in_several()
        if chosen:
            return chosen, None, False
        if self._may_tell_later(files) and self._known.tries < TRIES_MAX:
            return [], None, True
        why = "; ".join(self._whys) or "nothing that was read could be told from the rest"
        reader = self._announcement.reader
        return [], f"{reader}: which records its samples read is not known: {why}", False

    def _files(self) -> list[int]:
        """Those that the part may be of."""
        named, files = self._part.file, self._request.files
        if named is None:
            return list(range(len(files)))
        return [i for i, file in enumerate(files) if same_file(named, file.path)]

    def _in_one_file(self, files: Sequence[int]) -> list[tuple[int, Order, str]]:
        chosen = []
        for i in files:
            file = self._request.files[i]
            try:
                self._indices[i] = open_cached(file.path)
            except UffdPrefetchError as error:
                self._whys.append(error.message)
                continue
            found = self._proven(self._indices[i], file, (file.path,))
            if found is not None:
                chosen.append((i, *found))
        return chosen

    def _in_several(self) -> list[tuple[int, Order, str]]:
        """In the first sequence of files that is proven."""
        files = self._request.files
        opened = [(files[i].path, index) for i, index in self._indices.items()]
        for row in sequences(opened, self._part.data_set.samples):
            numbers = [list(self._indices)[place] for place in row]
            some = [files[i] for i in numbers]
            sequence = FileSequence.of(some, [self._indices[i] for i in numbers])
            found = self._proven(sequence.index, sequence, tuple(file.path for file in some))
            if found is not None:
                how = f"{found[1]}, in {len(row)} files"
                return [(numbers[place], order, how) for place, order in sequence.orders(found[0])]
        return []

    def _may_tell_later(self, files: Sequence[int]) -> bool:
        """Whether more that is read or mapped may prove something: of a data set of several files
        some may be mapped with its first samples."""
        few = sum(map(len, self._indices.values())) < self._part.data_set.samples
        return self._undecided or not files or (few and self._request.read_items < ENOUGH_SAMPLES)

    def _proven(
        self, index: RecordIndex, file: MappedFile | FileSequence, paths: tuple[str, ...]
    ) -> tuple[Order, str] | None:
        """The order in a file, and by which hypotheses."""
        right = self._known.found.get(paths)
        if right is None:
            choice = self._choose(index, file)
            if choice is None:
                self._undecided = True
                return None
            right, why = choice
            if not right:
                self._whys += [why] if why else []
                return None
            self._known.found[paths] = right
        order = _order(self._announcement, right, index, self._samples, self._turns)
        return order, "; ".join(each.name for each in right)

    def _choose(
        self, index: RecordIndex, file: MappedFile | FileSequence
    ) -> tuple[tuple[Hypothesis, ...], str] | None:
        """(hypotheses, why) of what the samples read in a file; None: not decided yet."""
        part, samples = self._part, self._samples
        read_count = int(np.searchsorted(self._turns, self._request.read_items))
        probe = samples[:: max(1, len(samples) // PROBED)][:PROBED]
        more = (
            in_each(file.indices, part.data_set.samples) if isinstance(file, FileSequence) else ()
        )
        found = hypotheses(
            index, part.data_set.samples, list(self._known.lists.values()), probe, more
        )
        early = read_count == 0
        if early:
            read_count = begun(index, found, samples[:BEGUN_MAX], file.present)
            if read_count < BEGUN_MIN:
                return None
        read, ahead = samples[:read_count], samples[read_count : read_count + part.ahead]
        name = os.path.basename(file.path)
        choice = choose(index, found, read[-SEEN_MAX:], file.present, name, ahead)
        if early and not choice.hypotheses:  # that they have been read was a guess
            return None
        return (choice.hypotheses, choice.why) if choice.decided else None


def begun(index: RecordIndex, found: Sequence[Hypothesis], samples: Array, present: Present) -> int:
    """Number of the first samples that have been read, inferred before any progress is reported:
    the longest initial run with all pages mapped under one hypothesis, less one, which may be half
    read."""
    most = 0
    for hypothesis in found:
        records, which = hypothesis.records(samples)
        missing: Array = np.ones(len(samples), bool)
        missing[which] = False
        starts, ends = index.extents(records)
        owner: Array = np.repeat(which, index.extent_counts(records))
        missing[owner[present(starts, ends) < 1]] = True
        most = max(most, int(np.append(missing, True).argmax()) - 1)
    return most


def _order(
    announcement: StoredAnnouncement,
    right: Sequence[Hypothesis],
    index: RecordIndex,
    samples: Array,
    turns: Array,
) -> Order:
    """The bytes that samples read, under hypotheses that hold together."""
    pairs = [each.records(samples) for each in right]
    records = np.concatenate([pair[0] for pair in pairs])
    owner = np.concatenate([pair[1] for pair in pairs])
    by_owner = np.argsort(owner, kind="stable")
    records, owner = records[by_owner], owner[by_owner]
    order = stated.of_records(announcement.reader, records, index)
    return Order(order.starts, order.ends, turns[owner[order.item]], announcement.items)
