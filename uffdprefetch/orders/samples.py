# SPDX-License-Identifier: Apache-2.0
"""Resolves announcements to orders of bytes: records, keys and ranges directly, samples of a data
set once it is known which records they read (orders/mapping.py).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from uffdprefetch.base.arrays import Array
from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.formats.cache import open_cached
from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.native import uffd
from uffdprefetch.orders import stated
from uffdprefetch.orders.announcement import AnnounceError, Announcement, Part
from uffdprefetch.orders.evidence import ENOUGH_SAMPLES
from uffdprefetch.orders.file_sequence import FileSequence, sequences
from uffdprefetch.orders.mapping import Hypothesis, KeyList, choose, hypotheses, in_each
from uffdprefetch.orders.residency_evidence import Present
from uffdprefetch.orders.stretches import in_the_whole
from uffdprefetch.orders.token_files import TokenFile
from uffdprefetch.predict.order.order import Order

Store = Callable[[Order, str], dict[str, Any]]

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
#: Data sets whose lists are kept, the latest.
TOKENS_MAX = 64

_scanning = threading.Lock()  # uffd.touched_runs() has one buffer


@dataclass(frozen=True)
class MappedFile:
    """A file that the announcing process and its children map. ``regions``: (pid, address, file
    offset, bytes) each."""

    path: str
    regions: Sequence[tuple[int, int, int, int]]

    def present(self, starts: Array, ends: Array) -> Array:
        """For each range of the file the share of its pages in one process's page table, the
        largest of all processes."""
        share: Array = np.zeros(len(starts))
        for pid, address, offset, length in self.regions:
            try:
                fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
                    first = max(start // uffd.PAGE_BYTES * uffd.PAGE_BYTES, offset)
                    last = min(-(-end // uffd.PAGE_BYTES) * uffd.PAGE_BYTES, offset + length)
                    if share[i] == 1 or first >= last:
                        continue
                    mapped = _mapped_bytes(fd, address + first - offset, last - first)
                    share[i] = max(share[i], mapped / (last - first))
            except OSError:
                continue
            finally:
                os.close(fd)
        return share


def _mapped_bytes(pagemap_fd: int, address: int, length: int) -> int:
    """Bytes of [address, +length) in a process's page table. Raises OSError."""
    mapped, end = 0, address + length
    while address < end:
        with _scanning:
            runs, stopped = uffd.touched_runs(pagemap_fd, address, end - address)
        mapped += sum(size for _, size in runs)
        if len(runs) < uffd.RUNS_AT_ONCE:
            break
        address = max(stopped, sum(runs[-1]))
    return mapped


class ResolveRequest:
    """State of the announcing process when an order is asked for."""

    def __init__(
        self,
        files: Sequence[dict[str, Any]],
        read_items: int,
        resolved: Sequence[tuple[int, str]],
        pid: int = 0,
    ) -> None:
        """``files``: of the service's question; ``read_items``: progress in items; ``resolved``:
        (part of the announcement, path) of the orders that the service has; ``pid``: of the
        process itself."""
        self.files = [
            MappedFile(each["path"], [(r[0], r[1], r[2], r[3]) for r in each["regions"]])
            for each in files
        ]
        self.read_items = read_items
        self._resolved = {(part, path) for part, path in resolved}
        self._pid = pid

    def resolved_files(self, part: int) -> set[str]:
        """The files of which the service has the part's order."""
        return {path for number, path in self._resolved if number == part}

    def file_numbers(self) -> dict[tuple[int, int], int]:
        """Which of ``files``, of those that the process itself maps, has this (device, inode)."""
        found: dict[tuple[int, int], int] = {}
        for i, file in enumerate(self.files):
            key = _identity(file.path)
            if key is not None and self.mappings(i):
                found[key] = i
        return found

    def mappings(self, number: int) -> list[tuple[int, int, int]]:
        """(address, offset, bytes) of the process's own mappings of ``files[number]``."""
        return [row[1:] for row in self.files[number].regions if row[0] == self._pid]


@dataclass
class _DataSet:
    """A data set's lists. ``found``: by paths, the hypotheses that have been proven."""

    lists: dict[str, KeyList] = field(default_factory=dict)
    found: dict[tuple[str, ...], tuple[Hypothesis, ...]] = field(default_factory=dict)
    tries: int = 0


class SampleResolver:
    """Resolves announced parts; keeps each data set's lists and proven hypotheses."""

    def __init__(self) -> None:
        self._sets: dict[tuple[int, str], _DataSet] = {}
        self._lock = threading.Lock()

    def _set(self, part: Part) -> _DataSet:
        with self._lock:
            name = part.owner, part.token
            found = self._sets.pop(name, None) or _DataSet()
            self._sets[name] = found  # the latest last
            while len(self._sets) > TOKENS_MAX:
                del self._sets[next(iter(self._sets))]
            return found

    def take_lists(self, announcement: Announcement) -> None:
        """Keep the lists of a new announcement. Raises AnnounceError."""
        for part in announcement.parts:
            if part.what not in ("samples", "lists") or (part.known and not part.lists):
                continue
            if part.buffers is not None or part.tokens is not None:  # nothing has to be found out
                self._set(part).tries = 0
                continue
            lists: dict[str, KeyList] = {}
            for each in part.lists:
                try:
                    lists[each.name] = KeyList.parse(
                        each.name, each.kind, announcement.array(each.array)
                    )
                except ValueError as error:
                    raise AnnounceError(f"list {each.name}: {error}") from None
            known = self._set(part)
            with self._lock:
                if part.what == "samples":  # they are all that there are
                    known.lists, known.found = lists, {}
                else:
                    known.lists |= lists
                known.tries = 0

    def orders(
        self, announcement: Announcement, request: ResolveRequest, store: Store
    ) -> dict[str, Any]:
        """See orders/indexer.py. Raises AnnounceError, UffdPrefetchError."""
        found: list[dict[str, Any]] = []
        findings: list[str] = []
        pending = more = False
        tokens: list[tuple[int, int, Order, str]] = []
        for number, part in enumerate(announcement.parts):
            resolved = request.resolved_files(number)
            if part.what == "lists" or (resolved and part.buffers is None):
                continue
            again = False
            if part.buffers is not None:
                chosen, finding, missing = self._told(announcement, part, request, resolved)
                more |= missing
                again = missing and not chosen and not resolved
            elif part.tokens is not None:
                chosen, finding = self._tokens(announcement, part, part.tokens, request)
                again = not chosen and not finding
                tokens += [(number, *each) for each in chosen]
                chosen = []
            elif part.what == "samples":
                chosen, finding, again = self._mapped(announcement, part, request)
                more |= not chosen and self._set(part).tries < TRIES_MAX
            else:
                chosen, finding = self._stated(announcement, part, request), None
                again = not chosen  # the file may be mapped later
            findings += [finding] if finding else []
            pending |= again
            for i, order, how in chosen:
                path = request.files[i].path
                found.append({"part": number, "file": i, "order": store(order, path), "how": how})
        whole = in_the_whole([order for _, _, order, _ in tokens])
        for (number, i, _, how), order in zip(tokens, whole, strict=True):
            path = request.files[i].path
            found.append({"part": number, "file": i, "order": store(order, path), "how": how})
        return {"orders": found, "findings": findings, "again": pending, "more": more}

    # ---- records, keys, ranges ------------------------------------------------------------------

    def _stated(
        self, announcement: Announcement, part: Part, request: ResolveRequest
    ) -> list[tuple[int, Order, str]]:
        """[(file, order, how it is known)] of a part, for each file that it may be of."""
        found = []
        for i, file in enumerate(request.files):
            if part.file is not None and not _same(part.file, file.path):
                continue
            size = os.stat(file.path).st_size
            where = announcement.reader
            spec: stated.OrderSpec
            index: RecordIndex | None = None
            if part.what == "ranges":
                pairs = announcement.numbers(part.array)
                if len(pairs) % 2:
                    raise AnnounceError("ranges that are no pairs")
                spec = stated.RangeOrder(where, stated.InlineNumbers(pairs.reshape(-1, 2)))
            elif part.what == "records":
                spec = stated.RecordOrder(
                    where, stated.InlineNumbers(announcement.numbers(part.array))
                )
            else:
                keys = KeyList.parse("keys", "bytes", announcement.array(part.array))
                spec = stated.KeyOrder(where, keys.take(np.arange(len(keys))))
            if part.what != "ranges":
                index = open_cached(file.path)
            order = spec.resolve(index, size)
            turns = announcement.turns(part, order.items)
            order = Order(order.starts, order.ends, turns[order.item], announcement.items)
            found.append((i, order, f"{part.what} announced"))
        return found

    def _tokens(
        self, announcement: Announcement, part: Part, tokens: TokenFile, request: ResolveRequest
    ) -> tuple[list[tuple[int, Order, str]], str | None]:
        """([(file, order, how)], a finding) of a part that Megatron's arrays lead to."""
        found = [i for i, file in enumerate(request.files) if _same(tokens.file, file.path)]
        if not found:
            return [], None  # it may be mapped later
        samples = announcement.numbers(part.array)
        turns = announcement.turns(part, len(samples))
        try:
            order = tokens.order(samples, announcement.array)
            if len(order.ends) and int(order.ends.max()) > os.stat(tokens.file).st_size:
                raise ValueError(f"{tokens.file}: tokens beyond its end")
        except (OSError, ValueError, TypeError) as error:
            return [], f"{announcement.reader}: its order is not known: {error}"
        order = replace(order, item=turns[order.item], items=announcement.items)
        return [(i, order, "tokens as the data set tells") for i in found], None

    # ---- samples of which the data set tells where they lie --------------------------------------

    def _told(
        self, announcement: Announcement, part: Part, request: ResolveRequest, resolved: set[str]
    ) -> tuple[list[tuple[int, Order, str]], str | None, bool]:
        """([(file, order, how)] of those that are not ``resolved``, a finding, whether a file of
        the data set is not mapped yet)."""
        buffers = announcement.buffers(part)
        mapped = request.file_numbers()
        numbers = [mapped.get(_identity(path) or (-1, -1)) for path in buffers.files]
        missing = None in numbers
        there = [i for i in numbers if i is not None]
        new = [i for i in there if request.files[i].path not in resolved]
        known = self._set(part)
        known.tries = 0 if new else known.tries + 1
        if not new:
            return [], None, missing and known.tries < TRIES_MAX
        samples = announcement.numbers(part.array)
        turns = announcement.turns(part, len(samples))
        orders = []
        try:
            for i in there:
                path = request.files[i].path
                try:
                    order = buffers.order(
                        open_cached(path), request.mappings(i), samples, announcement.reader
                    )
                except ValueError as error:
                    raise ValueError(f"{path}: {error}") from None
                orders.append(replace(order, item=turns[order.item], items=announcement.items))
        except (ValueError, UffdPrefetchError) as error:
            return [], f"{announcement.reader}: its order is not known: {error}", False
        how = "records as the data set tells"
        if len(buffers.files) > 1:
            how += f", in {len(buffers.files)} files"
        chosen = [
            (i, order, how)
            for i, order in zip(there, in_the_whole(orders), strict=True)
            if i in new and len(order.item)
        ]
        return chosen, None, missing

    # ---- samples --------------------------------------------------------------------------------

    def _mapped(
        self, announcement: Announcement, part: Part, request: ResolveRequest
    ) -> tuple[list[tuple[int, Order, str]], str | None, bool]:
        """([(file, order, how)], a finding, whether to ask again)."""
        known = self._set(part)
        samples = announcement.numbers(part.array)
        turns = announcement.turns(part, len(samples))
        if len(samples) and (samples.min() < 0 or samples.max() >= part.samples):
            raise AnnounceError(f"a sample that is none of {part.samples}")
        if part.file is not None:
            files = [i for i, f in enumerate(request.files) if _same(part.file, f.path)]
        else:
            files = list(range(len(request.files)))
        chosen, whys, pending = [], [], False
        indices: dict[int, RecordIndex] = {}
        known.tries += 1

        def proven(
            index: RecordIndex, file: MappedFile | FileSequence, paths: tuple[str, ...]
        ) -> tuple[Order, str] | None:
            nonlocal pending
            right = known.found.get(paths)
            if right is None:
                choice = self._choose(known, part, index, samples, turns, file, request.read_items)
                pending |= choice is None
                right, why = choice or ((), "")
                if not right:
                    whys.extend([why] if why else [])
                    return None
                known.found[paths] = right
            order = _order(announcement, right, index, samples, turns)
            return order, "; ".join(each.name for each in right)

        for i in files:
            file = request.files[i]
            try:
                indices[i] = open_cached(file.path)
            except UffdPrefetchError as error:
                whys.append(error.message)
                continue
            found = proven(indices[i], file, (file.path,))
            if found is not None:
                chosen.append((i, *found))
        if chosen:
            return chosen, None, False
        opened = [(request.files[i].path, index) for i, index in indices.items()]
        for row in () if pending else sequences(opened, part.samples):
            numbers = [list(indices)[place] for place in row]
            some = [request.files[i] for i in numbers]
            sequence = FileSequence.of(some, [indices[i] for i in numbers])
            paths = tuple(file.path for file in some)
            found = proven(sequence.index, sequence, paths)
            if found is not None:
                how = f"{found[1]}, in {len(row)} files"
                orders = sequence.orders(found[0])
                return [(numbers[place], order, how) for place, order in orders], None, False
        # of a data set of several files some may be mapped with its first samples
        few = sum(map(len, indices.values())) < part.samples
        pending |= not files or (few and request.read_items < ENOUGH_SAMPLES)
        if pending and known.tries < TRIES_MAX:
            return [], None, True
        why = "; ".join(whys) or "nothing that was read could be told from the rest"
        return (
            [],
            f"{announcement.reader}: which records its samples read is not known: {why}",
            False,
        )

    def _choose(
        self, known: _DataSet, part: Part, index: RecordIndex, samples: Array, turns: Array,
        file: MappedFile | FileSequence, read_items: int,
    ) -> tuple[tuple[Hypothesis, ...], str] | None:  # fmt: skip
        """(hypotheses, why) of what the samples read in a file; None: not decided yet."""
        read_count = int(np.searchsorted(turns, read_items))
        probe = samples[:: max(1, len(samples) // PROBED)][:PROBED]
        more = in_each(file.indices, part.samples) if isinstance(file, FileSequence) else ()
        found = hypotheses(index, part.samples, list(known.lists.values()), probe, more)
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
    """How many of the first samples have been read, inferred before any progress is reported: the
    longest initial run with all pages mapped under one hypothesis, less one, which may be half
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


def _same(a: str, b: str) -> bool:
    """Whether two paths are one file, or an LMDB's directory and its data file."""
    inside = os.path.join(a, "data.mdb")
    a = inside if os.path.isdir(a) else a
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False


def _identity(path: str) -> tuple[int, int] | None:
    """Device and inode."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _order(
    announcement: Announcement,
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
