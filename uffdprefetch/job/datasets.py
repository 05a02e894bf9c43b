# SPDX-License-Identifier: Apache-2.0
"""What the service needs to know of a dataset to find the records of its samples.

A loader's item number leads through Subset and ConcatDataset (torch's own code, nothing that
overrides it), and through what Hugging Face's datasets have shuffled, to sample numbers of inner
datasets. Each of these is a *part* of an announcement,
with the lists that may hold its keys (job/lists.py).

A part has a token: the same in the job and in workers that look for lists too, though a worker
that was spawned shares nothing with its parent but a pickled copy. So it is made of the dataset's
class, its place among those of the loader, and its attributes that are short strings; a forked
worker finds the one that was given before the fork.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_right
from itertools import count
from typing import Any, ClassVar

from . import lists
from .samplers import Unknown, plain, runs
from .tables import Table

_DATASET = "torch.utils.data.dataset"
_HUGGING_FACE = "datasets.arrow_dataset"
_DEPTH = 16
_TOKEN_TEXT = 256
#: orders/announcement.py's PARTS_MAX.
CAP_PARTS = 256


class DatasetInfo:
    """What was said of an inner dataset, as long as it lives."""

    #: Of names that several living datasets have: which numbers behind it are given.
    _given: ClassVar[dict[str, set[int]]] = {}

    def __init__(self, name: str) -> None:
        self._name = name
        given = self._given.setdefault(name, set())
        self._number = next(n for n in count(1) if n not in given)
        given.add(self._number)
        self.token = name if self._number == 1 else f"{name}-{self._number}"
        #: What it had when its workers, if any, were about to start.
        self.containers: dict[str, tuple[int, int]] = {}
        self.published: list[tuple[str, int]] | None = None

    def __del__(self) -> None:
        self._given[self._name].discard(self._number)


class BaseDataset:
    """An inner dataset; ``samples``: which of its samples are read, in order (int64); ``turns``:
    the item number of each in the loader's order (None: all items in order); ``rows``: how many
    samples it has, where that is not its length."""

    def __init__(
        self, dataset: Any, samples: array[int], turns: array[int] | None, rows: int | None = None
    ) -> None:
        self.dataset, self.samples, self.turns, self.rows = dataset, samples, turns, rows


_known = Table()


def discover_datasets(dataset: object) -> list[DatasetInfo]:
    """What is known of the inner datasets of a loader, each with a token from now on. To be called
    before workers are forked. Calls nothing of the user's."""
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
        for name, value in lists.attributes(base)
        if type(name) is str and type(value) is str and len(value) <= _TOKEN_TEXT
    )
    module = kind.__module__.replace("__mp_main__", "__main__")  # so a spawned worker names it
    content = repr((module, kind.__qualname__, texts)).encode("utf-8", "surrogatepass")
    return f"{kind.__name__[:32]}-{index}-{zlib.crc32(content):08x}"


# ---- through what a loader's dataset is made of --------------------------------------------------


def _is(dataset: object, name: str) -> bool:
    """Whether it gives its samples by the code of torch's class ``name``."""
    return runs(dataset, _DATASET, name, "__getitem__") and (
        getattr(type(dataset), "__getitems__", None) is None
        or runs(dataset, _DATASET, name, "__getitems__")
    )


def _base_datasets(dataset: Any, depth: int = 0) -> list[Any]:
    """Its inner datasets, from the first to the last."""
    if depth < _DEPTH and _is(dataset, "Subset"):
        return _base_datasets(vars(dataset)["dataset"], depth + 1)
    if depth < _DEPTH and _is(dataset, "ConcatDataset"):
        inner = vars(dataset)["datasets"]
        return [base for one in inner for base in _base_datasets(one, depth + 1)]
    return [dataset]


def spread(dataset: Any, items: array[int], torch: Any) -> list[BaseDataset]:
    """The inner datasets with the samples that ``items`` lead to, in their order.

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
        return [
            base
            for inner_dataset, (inner, its_turns) in zip(inner_datasets, shares)  # noqa: B905
            for base in _spread(inner_dataset, inner, its_turns, torch, depth + 1)
        ]
    if runs(dataset, _HUGGING_FACE, "Dataset", "__getitem__"):
        # Shuffled or selected: its samples are rows of a table, by a table of their numbers.
        table, chosen = vars(dataset)["_data"], vars(dataset)["_indices"]
        if chosen is not None:
            rows = chosen.column(0).to_pylist()
            inner = array("q", map(rows.__getitem__, numbers))
            return [BaseDataset(dataset, inner, turns, table.num_rows)]
    return [BaseDataset(dataset, numbers, turns)]


# ---- what is published ---------------------------------------------------------------------------


class Description:
    """Parts and arrays of an announcement; published() when it has arrived."""

    def __init__(self, parts: list[dict[str, Any]], arrays: dict[str, Any]) -> None:
        self.parts, self.arrays = parts, arrays
        self._news: dict[DatasetInfo, list[tuple[str, int]]] = {}

    def has(self, known: DatasetInfo, signatures: list[tuple[str, int]]) -> bool:
        """Whether these lists of a dataset have been said, here or before."""
        return self._news.get(known, known.published) == signatures

    def will_have(self, known: DatasetInfo, signatures: list[tuple[str, int]]) -> None:
        """They are in here."""
        self._news[known] = signatures

    def published(self) -> None:
        """What is in here need not be said again."""
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
        samples = len(base.dataset) if base.rows is None else base.rows
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
        columns = lists.columns(base.dataset, samples)
        signatures = [(column.name, column.signature) for column in columns]
        if description.has(known, signatures):
            part["known"] = True
        else:
            part["lists"], made = _lists(columns, name + ".list", room)
            description.arrays.update(made)
            room -= sum(map(len, made.values()))
            description.will_have(known, signatures)
        description.parts.append(part)
    return description


def _lists(
    columns: list[lists.Column], prefix: str, room: int
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """What is said of columns, and their arrays: at most ``room`` bytes."""
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
    """As discover_datasets(), but what was known of the inner datasets stays as it was."""
    known = [_known.get(base) for base in _base_datasets(dataset)]
    return known if all(known) else discover_datasets(dataset)


def late_lists(
    dataset: Any, items: array[int], before: list[DatasetInfo], torch: Any
) -> list[tuple[str, list[dict[str, Any]], dict[str, bytes]]]:
    """Lists that inner datasets have got since ``before``, the answer of known_datasets(), when
    ``items`` were read: (token, what is said of the lists, their arrays). Calls nothing of the
    user's, so a list counts when it is long enough for these items."""
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
