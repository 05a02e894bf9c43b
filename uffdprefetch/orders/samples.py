# SPDX-License-Identifier: Apache-2.0
"""Resolves announcements to orders of bytes: records, keys and ranges directly, samples of a data
set once it is known which records they read (orders/mapping.py).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.formats.cache import open_cached
from uffdprefetch.formats.index import RecordIndex
from uffdprefetch.orders import stated
from uffdprefetch.orders.announcement import AnnounceError, Part, StoredAnnouncement
from uffdprefetch.orders.file_links import with_aliases
from uffdprefetch.orders.file_order import PathOrder
from uffdprefetch.orders.mapped_files import ResolveRequest, identity, same_file
from uffdprefetch.orders.mapping import KeyList
from uffdprefetch.orders.path_search import FileAnswer, PathSearch, SampleFiles
from uffdprefetch.orders.sample_search import TRIES_MAX, SampleLists, SampleSearch
from uffdprefetch.orders.stretches import in_the_whole
from uffdprefetch.orders.token_files import TokenFile
from uffdprefetch.predict.order.order import Order

Store = Callable[[Order, str], dict[str, Any]]
StorePaths = Callable[[PathOrder, bool], dict[str, Any]]

#: Data sets whose lists are kept, the latest.
TOKENS_MAX = 64


class PartRecords(NamedTuple):
    """chosen: (file, order, how it is known). finding: a line for the user. again: whether to ask
    again; more: whether there are more orders when another file is mapped."""

    chosen: list[tuple[int, Order, str]]
    finding: str | None
    again: bool
    more: bool = False


class SampleResolver:
    """Resolves announced parts; keeps each data set's lists and proven hypotheses."""

    def __init__(self) -> None:
        self._sets: dict[tuple[int, str], SampleLists] = {}
        self._lock = threading.Lock()

    def _set(self, part: Part) -> SampleLists:
        with self._lock:
            name = part.data_set.name
            found = self._sets.pop(name, None) or SampleLists()
            self._sets[name] = found  # the latest last
            while len(self._sets) > TOKENS_MAX:
                del self._sets[next(iter(self._sets))]
            return found

    def take_lists(self, announcement: StoredAnnouncement) -> None:
        """Keep the lists of a new announcement. Raises AnnounceError."""
        for part in announcement.parts:
            if part.what not in ("samples", "lists") or (part.data_set.known and not part.lists):
                continue
            if part.tokens is not None:  # nothing has to be found out
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
                known.tries, known.files = 0, SampleFiles()

    def orders(
        self,
        announcement: StoredAnnouncement,
        request: ResolveRequest,
        store: Store,
        store_paths: StorePaths,
    ) -> dict[str, Any]:
        """See orders/indexer.py. Raises AnnounceError, UffdPrefetchError."""
        found: list[dict[str, Any]] = []
        of_files: list[dict[str, Any]] = []
        findings: list[str] = []
        watch: set[str] = set()
        pending = more = False
        tokens: list[tuple[int, int, Order, str]] = []
        for number, part in enumerate(announcement.parts):
            files = self._files(announcement, number, part, request)
            watch |= files.watch
            if files.order is not None:
                layout = store_paths(files.order, part.what == "samples")
                of_files.append({"part": number, "order": layout, "how": files.how})
            ordered = files.order is not None or number in request.files_ordered
            resolved = request.resolved_files(number)
            if part.what in ("lists", "paths") or ((ordered or resolved) and part.buffers is None):
                continue
            part_found = self._records(announcement, part, request, resolved, files)
            findings += [part_found.finding] if part_found.finding else []
            pending |= part_found.again
            more |= part_found.more
            if part.tokens is not None:
                tokens += [(number, *each) for each in part_found.chosen]
                continue
            for i, order, how in part_found.chosen:
                path = request.files[i].path
                found.append({"part": number, "file": i, "order": store(order, path), "how": how})
        whole = in_the_whole([order for _, _, order, _ in tokens])
        for (number, i, _, how), order in zip(tokens, whole, strict=True):
            path = request.files[i].path
            found.append({"part": number, "file": i, "order": store(order, path), "how": how})
        return {
            "orders": found, "file_orders": of_files, "watch": sorted(watch),
            "findings": findings, "again": pending, "more": more,
        }  # fmt: skip

    def _records(
        self,
        announcement: StoredAnnouncement,
        part: Part,
        request: ResolveRequest,
        resolved: set[str],
        files: FileAnswer,
    ) -> PartRecords:
        """Of a part the orders of records in mapped files; ``files``: what is known of whole ones
        that it may read instead."""
        if part.buffers is not None:
            chosen, finding, missing = self._told(announcement, part, request, resolved)
            again = missing and not chosen and not resolved
            return PartRecords(chosen, finding, again or files.undecided, missing)
        if part.tokens is not None:
            chosen, finding = self._tokens(announcement, part, part.tokens, request)
            return PartRecords(chosen, finding, not chosen and not finding)
        if part.what != "samples":
            chosen = self._stated(announcement, part, request)
            return PartRecords(chosen, None, not chosen)  # the file may be mapped later
        if not request.files and not files.why:
            return PartRecords([], None, True)
        known = self._set(part)
        chosen, finding, again = SampleSearch(announcement, part, request, known).orders()
        if finding and files.why:
            finding = f"{announcement.reader}: in which order it reads is not known: {files.why}"
        if files.undecided and not chosen:
            finding, again = None, True
        return PartRecords(chosen, finding, again, not chosen and known.tries < TRIES_MAX)

    def _files(
        self, announcement: StoredAnnouncement, number: int, part: Part, request: ResolveRequest
    ) -> FileAnswer:
        """What is known of the whole files that a part reads."""
        if number in request.files_ordered:
            return FileAnswer()
        if part.what == "paths":
            return FileAnswer(with_aliases(announcement.paths(part)), "paths announced")
        known = self._set(part)
        told = part.buffers is not None and not known.lists  # and of no files
        if part.what != "samples" or part.tokens is not None or told or request.opens is None:
            return FileAnswer()
        search = PathSearch(announcement, part, list(known.lists.values()), known.files)
        return search.answer(request.read_items, request.opens)

    # ---- records, keys, ranges ------------------------------------------------------------------

    def _stated(
        self, announcement: StoredAnnouncement, part: Part, request: ResolveRequest
    ) -> list[tuple[int, Order, str]]:
        """[(file, order, how it is known)] of a part, for each file that it may be of."""
        found = []
        for i, file in enumerate(request.files):
            if part.file is not None and not same_file(part.file, file.path):
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
        self,
        announcement: StoredAnnouncement,
        part: Part,
        tokens: TokenFile,
        request: ResolveRequest,
    ) -> tuple[list[tuple[int, Order, str]], str | None]:
        """([(file, order, how)], a finding) of a part that Megatron's arrays lead to."""
        found = [i for i, file in enumerate(request.files) if same_file(tokens.file, file.path)]
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
        self,
        announcement: StoredAnnouncement,
        part: Part,
        request: ResolveRequest,
        resolved: set[str],
    ) -> tuple[list[tuple[int, Order, str]], str | None, bool]:
        """([(file, order, how)] of those that are not ``resolved``, a finding, whether a file of
        the data set is not mapped yet)."""
        buffers = announcement.buffers(part)
        mapped = request.file_numbers()
        numbers = [mapped.get(identity(path) or (-1, -1)) for path in buffers.files]
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
