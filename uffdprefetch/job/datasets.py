# SPDX-License-Identifier: Apache-2.0
"""Describes a loader's dataset to the service, which finds the records of its samples.

An item number is mapped through Subset and ConcatDataset (torch's own code, nothing that overrides
it), and through the indices of Hugging Face's shuffled datasets, to sample numbers of *base*
datasets. Each of these is a *part* of an announcement, with the files in which its samples lie
where it tells them (job/arrow_tables.py, job/token_files.py), else with the lists that may hold its
keys (job/lists.py).

A part has a token, the same in the job and in its workers, though a spawned worker shares nothing
with its parent but a pickled copy. So it is made of the dataset's class, its index among the
loader's base datasets, and its attributes that are short strings; a forked worker inherits it.
"""

from __future__ import annotations

import os
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import count
from typing import Any, ClassVar

from . import arrow_tables, containers, lists, token_files
from .channel import packed
from .samplers import Unknown, plain, runs
from .tables import IdentityTable

_DATASET = "torch.utils.data.dataset"
_HUGGING_FACE = "datasets.arrow_dataset"
#: Nested datasets that are followed.
_DEPTH = 16
#: Longest attribute that is part of a token.
_TOKEN_TEXT = 256
#: As orders/announcement.py's PARTS_MAX.
CAP_PARTS = 256
#: Parts that say which texts their data sets have: bounds an announcement's JSON to 900 KB, be each
#: character an escape of six.
CAP_TEXTS = 32


class DatasetInfo:
    """Published properties of a base dataset, while it lives."""

    #: By name: numbers in use by living datasets of that name.
    _given: ClassVar[dict[str, set[int]]] = {}

    def __init__(self, name: str) -> None:
        self._name = name
        given = self._given.setdefault(name, set())
        self._number = next(n for n in count(1) if n not in given)
        given.add(self._number)
        self.token = name if self._number == 1 else f"{name}-{self._number}"
        #: lists.inventory() when its workers, if any, were about to start.
        self.containers: dict[str, tuple[int, int]] = {}
        self.published: list[tuple[str, int]] | None = None

    def __del__(self) -> None:
        self._given[self._name].discard(self._number)


class BaseDataset:
    """A base dataset; ``samples``: those that are read, in order (int64); ``turns``: the item
    number of each in the loader's order (None: all items in order); ``table``: what they are rows
    of, of Hugging Face."""

    def __init__(
        self, dataset: Any, samples: array[int], turns: array[int] | None, table: Any = None
    ) -> None:
        self.dataset, self.samples, self.turns, self.table = dataset, samples, turns, table

    def rows(self) -> int:
        """The number of its samples."""
        return len(self.dataset) if self.table is None else self.table.num_rows


_known = IdentityTable()
_tables = IdentityTable()  # what _buffers() has found


def discover_datasets(dataset: object) -> list[DatasetInfo]:
    """The base datasets of a loader, each of which gets a token. To be called before workers are
    forked. Calls no code of the user's."""
    found = []
    for index, base in enumerate(_base_datasets(dataset)):
        known = _known.get(base)
        if known is None:
            known = DatasetInfo(_name(base, index))
            _known.set(base, known)
        known.containers = lists.inventory(base)
        found.append(known)
    return found


def _name(base: object, index: int) -> str:
    kind = type(base)
    texts = sorted(
        (name, value)
        for name, value in containers.attributes(base)
        if type(name) is str and type(value) is str and len(value) <= _TOKEN_TEXT
    )
    module = kind.__module__.replace("__mp_main__", "__main__")  # so a spawned worker names it
    content = repr((module, kind.__qualname__, texts)).encode("utf-8", "surrogatepass")
    return f"{kind.__name__[:32]}-{index}-{zlib.crc32(content):08x}"


# ---- from a loader's dataset to its base datasets ------------------------------------------------


def _is(dataset: object, name: str) -> bool:
    """Whether its samples come from the code of torch's class ``name``, not overridden."""
    return runs(dataset, _DATASET, name, "__getitem__") and (
        getattr(type(dataset), "__getitems__", None) is None
        or runs(dataset, _DATASET, name, "__getitems__")
    )


def _base_datasets(dataset: Any, depth: int = 0) -> list[Any]:
    """Its base datasets, in their order."""
    if depth < _DEPTH and _is(dataset, "Subset"):
        return _base_datasets(vars(dataset)["dataset"], depth + 1)
    if depth < _DEPTH and _is(dataset, "ConcatDataset"):
        inner = vars(dataset)["datasets"]
        return [base for one in inner for base in _base_datasets(one, depth + 1)]
    if depth < _DEPTH and token_files.is_blended(dataset):
        return [
            base for one in vars(dataset)["datasets"] for base in _base_datasets(one, depth + 1)
        ]
    return [dataset]


def spread(dataset: Any, items: array[int], torch: Any) -> list[BaseDataset]:
    """The base datasets with the samples that ``items`` are mapped to, in their order.

    Raises Unknown, or IndexError, for what cannot be followed.
    """
    return _spread(dataset, items, None, torch, 0)


def _spread(
    dataset: Any, numbers: array[int], turns: array[int] | None, torch: Any, depth: int
) -> list[BaseDataset]:
    if depth < _DEPTH and _is(dataset, "Subset"):
        indices = plain(vars(dataset)["indices"], torch)
        inner = array("q", map(indices.__getitem__, numbers))
        return _spread(vars(dataset)["dataset"], inner, turns, torch, depth + 1)
    if depth < _DEPTH and _is(dataset, "ConcatDataset"):
        inner_datasets = list(vars(dataset)["datasets"])
        ends = list(vars(dataset)["cumulative_sizes"])
        shares = [(array("q"), array("q")) for _ in inner_datasets]
        for index, number in enumerate(numbers):
            which = bisect_right(ends, number) if number >= 0 else -1
            if not 0 <= which < len(shares):
                raise Unknown(f"item {number} of a ConcatDataset of {ends[-1]}")
            shares[which][0].append(number - (ends[which - 1] if which else 0))
            shares[which][1].append(index if turns is None else turns[index])
        return _of_each(inner_datasets, shares, torch, depth)
    mixed = token_files.blended(dataset, numbers, turns) if depth < _DEPTH else None
    if mixed is not None:
        return _of_each(*mixed, torch, depth)
    if runs(dataset, _HUGGING_FACE, "Dataset", "__getitem__"):
        # Shuffled or selected: _indices maps its samples to rows of the table.
        table, chosen = vars(dataset)["_data"], vars(dataset)["_indices"]
        rows = numbers if chosen is None else arrow_tables.rows_of(chosen, numbers)
        return [BaseDataset(dataset, rows, turns, table)]
    return [BaseDataset(dataset, numbers, turns)]


def _of_each(
    datasets: Sequence[Any], shares: Sequence[tuple[array[int], array[int]]], torch: Any, depth: int
) -> list[BaseDataset]:
    """``shares``: the (numbers, turns) of each dataset."""
    return [
        base
        for inner_dataset, (inner, its_turns) in zip(datasets, shares)  # noqa: B905
        for base in _spread(inner_dataset, inner, its_turns, torch, depth + 1)
    ]


# ---- what is published ---------------------------------------------------------------------------


class Description:
    """Parts and arrays of an announcement; published() once it has been sent."""

    def __init__(self, parts: list[dict[str, Any]], arrays: dict[str, Any]) -> None:
        self.parts, self.arrays = parts, arrays
        self._news: dict[DatasetInfo, list[tuple[str, int]]] = {}

    def has(self, known: DatasetInfo, signatures: list[tuple[str, int]]) -> bool:
        """Whether these lists of a dataset are in here or have been published before."""
        return self._news.get(known, known.published) == signatures

    def will_have(self, known: DatasetInfo, signatures: list[tuple[str, int]]) -> None:
        """These lists are in here."""
        self._news[known] = signatures

    def published(self) -> None:
        """The lists in here need not be sent again."""
        for known, signatures in self._news.items():
            known.published = signatures


def describe(dataset: Any, items: array[int], file: str | None, torch: Any) -> Description:
    """An epoch that reads ``items`` of ``dataset``, as {"what": "samples"} parts.

    Raises Unknown, or what a dataset's own __len__ raises.
    """
    discover_datasets(dataset)
    description = Description([], {})
    room = lists.CAP_BYTES
    bases = [base for base in spread(dataset, items, torch) if base.samples]
    if len(bases) > CAP_PARTS:
        raise Unknown(f"{len(bases)} data sets in one loader are more than {CAP_PARTS}")
    for number, base in enumerate(bases):
        samples = base.rows()
        if min(base.samples) < 0 or max(base.samples) >= samples:
            raise Unknown(f"sample numbers beyond the {samples} of the dataset")
        name = f"p{number}"
        known: DatasetInfo = _known.get(base.dataset)
        part: dict[str, Any] = {
            "what": "samples", "array": name + ".samples", "samples": samples,
            "token": known.token, "file": file, "lists": [],
        }  # fmt: skip
        description.arrays[name + ".samples"] = base.samples
        if base.turns is not None:
            part["turns"] = name + ".turns"
            description.arrays[name + ".turns"] = base.turns
        description.parts.append(part)
        if token_files.is_tokens(base.dataset):
            part["tokens"], made = token_files.describe(base.dataset, name)
            description.arrays.update(made)
            continue
        part["cwd"] = _cwd()
        part["texts"] = containers.texts(base.dataset) if number < CAP_TEXTS else []
        found = None if base.table is None else _buffers(base)
        if found is not None and found.files:
            part["files"], part["buffers"] = name + ".files", name + ".buffers"
            description.arrays[name + ".files"] = packed(map(os.fsencode, found.files))
            description.arrays[name + ".buffers"] = found.numbers
        # what base.samples counts are rows of its table
        columns = (
            lists.columns(base.dataset, samples)
            if base.table is None
            else lists.table_columns(base.dataset)
        )
        signatures = [(column.name, column.signature) for column in columns]
        if description.has(known, signatures):
            part["known"] = True
        else:
            part["lists"], made = _lists(columns, name + ".list", room)
            description.arrays.update(made)
            room -= sum(map(len, made.values()))
            description.will_have(known, signatures)
    return description


def _cwd() -> str:
    """The directory that relative paths are of."""
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return "/"


def _buffers(base: BaseDataset) -> arrow_tables.TableBuffers | None:
    """Those of the columns that its samples give; found once for a table and these columns."""
    state = vars(base.dataset)
    given, others = state.get("_format_columns"), state.get("_output_all_columns")
    columns = None if given is None or others else tuple(given)
    before = _tables.get(base.table)
    if before is None or before[0] != columns:
        before = columns, arrow_tables.buffers(base.table, columns)
        _tables.set(base.table, before)
    found: arrow_tables.TableBuffers | None = before[1]
    return found


def _lists(
    columns: list[lists.CandidateList], prefix: str, room: int
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Descriptions of columns, and their arrays: at most ``room`` bytes."""
    described: list[dict[str, Any]] = []
    arrays: dict[str, bytes] = {}
    for column in columns:
        data = column.data() if 8 * column.count <= room else None
        if data is not None and len(data) <= room:
            name = f"{prefix}{len(described)}"
            arrays[name] = data
            room -= len(data)
            described.append(
                {"name": column.name, "array": name, "kind": column.kind, "count": column.count}
            )
    return described, arrays


# ---- lists that come late: a dataset that opens its file when it is first read -------------------


def known_datasets(dataset: object) -> list[DatasetInfo]:
    """As discover_datasets(), without updating the containers of known ones."""
    known = [_known.get(base) for base in _base_datasets(dataset)]
    return known if all(known) else discover_datasets(dataset)


def late_lists(
    dataset: Any, items: array[int], before: list[DatasetInfo], torch: Any
) -> list[tuple[str, list[dict[str, Any]], dict[str, bytes]]]:
    """Lists that base datasets have got since ``before``, the result of known_datasets(), while
    ``items`` were read: (token, descriptions of the lists, their arrays). Calls no code of the
    user's (such as __len__), so a list counts when it is long enough for these items."""
    found = []
    for known, base in zip(before, spread(dataset, items, torch)):  # noqa: B905
        now = lists.inventory(base.dataset)
        new = {name for name in now if known.containers.get(name) != now[name]}
        if new and base.samples:
            columns = lists.late_columns(base.dataset, max(base.samples) + 1, new)
            described, arrays = _lists(columns, "list", lists.CAP_BYTES)
            if described:
                found.append((known.token, described, arrays))
    return found
