# SPDX-License-Identifier: Apache-2.0
"""Lists in a dataset's attributes whose element i may lead to the record or the file of sample i.

Keys, paths, record numbers, kept as ``self.keys``, ``self.samples = [(path, label), ...]``,
``self.annotations = [{"image": ...}, ...]``, ``{0: "a", 1: "b"}``, objects with a ``path``, or the
column of a table (job/containers.py has where they are looked for). orders/mapping.py and
orders/path_search.py find which of them are used. No code of the user's is called, and no array
that maps a file is read.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from . import containers, path_tables
from .candidates import CandidateList, kind_of, probe_indices
from .containers import path_type

#: Bytes of all lists of one announcement.
CAP_BYTES = 256 << 20
#: Columns of one dataset: bounds the time for one with a thousand attributes.
CAP_LISTS = 32
#: Fields of an element that become columns, and columns of a table.
_FIELDS, _TABLE_FIELDS = 8, 32
#: Samples, at most, that share a file (views of an image): a list may be so much shorter, of so
#: many elements at least.
_VIEWS_MAX, _VIEWED_MIN = 64, 8


if TYPE_CHECKING:  # the job's Python may be too old for them
    Rows = Callable[[], Any]
    #: A field of an element: what it is called, and how it is got. Raises LookupError,
    #: AttributeError.
    Field = tuple[str, Callable[[Any], Any]]


def inventory(dataset: object) -> dict[str, tuple[int, int]]:
    """Its present containers: name -> (id, length)."""
    return {
        name: (id(value), containers.length(value))
        for name, value in containers.containers(dataset)
    }


def columns(dataset: object, samples: int) -> list[CandidateList]:
    """Candidate lists of a dataset of ``samples`` samples, cut to that length; of paths also those
    of which each element is of so many samples that it comes out even."""
    return _candidates(dataset, samples, None)


def late_columns(dataset: object, least: int, names: set[str]) -> list[CandidateList]:
    """Candidate lists of at least ``least`` elements in the attributes ``names``, uncut."""
    return _candidates(dataset, least, names)


def table_columns(dataset: object) -> list[CandidateList]:
    """The columns of paths of a Hugging Face dataset, by the rows of its table."""
    return _of_library(lambda: path_tables.path_columns("", dataset))[:CAP_LISTS]


def _candidates(dataset: object, samples: int, names: set[str] | None) -> list[CandidateList]:
    found: list[CandidateList] = []
    seen: set[int] = set()
    keyed: list[tuple[str, dict[Any, Any]]] = []
    for name, value in containers.containers(dataset):
        count = containers.length(value)
        viewed = count >= _VIEWED_MIN and samples % count == 0 and samples <= count * _VIEWS_MAX
        if id(value) in seen or (count < max(samples, 1) and not (viewed and names is None)):
            continue
        seen.add(id(value))  # the same list under two names
        if count < samples:
            found += [each for each in _columns(name, value, count) if each.kind == "text"]
        elif names is None or name in names:
            found += _columns(name, value, samples if names is None else count)
            if type(value) is dict:
                keyed.append((name, value))
    return [*found, *_by_keys(dataset, keyed, samples)][:CAP_LISTS]


# ---- what is in them -----------------------------------------------------------------------------


def _columns(name: str, value: Any, samples: int) -> list[CandidateList]:
    if type(value) is dict:
        if any(number not in value for number in probe_indices(samples)):
            return []
        return _of_rows(name, value, samples, lambda: [value[i] for i in range(samples)])
    if type(value) in (list, tuple):
        return _of_rows(name, value, samples, lambda: value[:samples])
    if containers.is_table(value):
        return _of_library(
            lambda: [*path_tables.path_columns(name, value), *path_tables.chosen_rows(name, value)]
        )
    if containers.is_pandas(value):
        of_pandas = _of_frame if containers.is_frame(value) else _of_series
        return _of_library(lambda: of_pandas(name, value, samples))
    return _of_array(name, value, samples)


def _of_library(find: Callable[[], Iterable[CandidateList]]) -> list[CandidateList]:
    """What is found in a table of a library's; nothing where it is made otherwise than those that
    are known."""
    try:
        return list(find())
    except (AttributeError, LookupError, NotImplementedError, OverflowError, TypeError, ValueError):
        return []


def _of_array(name: str, value: Any, samples: int, owner: Any = None) -> list[CandidateList]:
    """``owner``: the array that ``value`` is a column of."""
    kind = value.dtype.kind
    owner = value if owner is None else owner
    if value.ndim == 2:
        some = range(min(value.shape[1], _FIELDS)) if kind in "SUO" else ()
        parts = [(f"{name}[:, {i}]", value[:, i]) for i in some]
        return [each for label, part in parts for each in _of_array(label, part, samples, owner)]
    if kind == "O":
        return _of_rows(name, value, samples, lambda: value[:samples].tolist(), owner)
    if kind not in "SUiu" or (kind == "U" and value.dtype.itemsize * samples > 4 * CAP_BYTES):
        return []
    probes = [value[i].item() for i in probe_indices(samples)]
    if kind in "iu":
        return [_of_numbers(name, owner, samples, probes, lambda: value)]
    return [
        CandidateList(
            name, "bytes" if kind == "S" else "text", samples, _signature(owner, probes),
            lambda: value[:samples].tolist(),
        )
    ]  # fmt: skip


def _of_numbers(name: str, value: Any, samples: int, probes: Any, get: Rows) -> CandidateList:
    """``get``: a numpy array of integers."""
    return CandidateList(
        name, "ints", samples, _signature(value, probes),
        lambda: array("q", get()[:samples].astype("<i8").tobytes()),
    )  # fmt: skip


def _of_frame(name: str, value: Any, samples: int) -> Iterator[CandidateList]:
    """The columns of a pandas DataFrame, and its index."""
    for number, label in enumerate(value.columns[:_TABLE_FIELDS]):
        # a view that leaves no trace in the frame, as value[label] does in old versions
        yield from _of_series(f"{name}[{label}]", value.iloc[:, number], samples, value)
    yield from _of_series(f"{name}.index", value.index, samples, value)


def _of_series(name: str, value: Any, samples: int, owner: Any = None) -> list[CandidateList]:
    """A column of a table of pandas', ``owner``."""
    if not containers.is_pandas(value):
        return []  # an index that counts only
    kind = value.dtype.kind
    if kind not in "Oiu":
        return []
    cells = value.array
    probes = [cells[i] for i in probe_indices(samples)]
    owner = value if owner is None else owner
    if kind in "iu":
        whole = [int(probe) for probe in probes]
        return [_of_numbers(name, owner, samples, whole, value.to_numpy)]
    found = kind_of(probes)
    if found not in ("text", "bytes"):
        return []
    return [
        CandidateList(
            name, found, samples, _signature(owner, probes), lambda: value[:samples].tolist()
        )
    ]


def _of_rows(
    name: str, value: Any, samples: int, rows: Rows, owner: Any = None
) -> list[CandidateList]:
    """Columns of a sequence of elements, of lists of elements, of dictionaries, or of objects.
    ``owner``: the container that lives on, where ``value`` is made of it."""
    owner = value if owner is None else owner
    probes = [value[i] for i in probe_indices(samples)]
    kind = kind_of(probes)
    if kind is not None:
        return [CandidateList(name, kind, samples, _signature(owner, probes), rows)]
    found = []
    for field, get in _fields(probes)[:_FIELDS]:
        try:
            part = [get(row) for row in probes]
        except (LookupError, AttributeError):
            continue
        kind = kind_of(part)
        if kind is not None:
            found.append(
                CandidateList(
                    f"{name}{field}", kind, samples, _signature(owner, part),
                    partial(_field, rows, get, set(map(type, probes))),
                )
            )  # fmt: skip
    return found


def _fields(probes: Sequence[Any]) -> list[Field]:
    """What may be columns of rows like these."""
    kinds = set(map(type, probes))
    if kinds <= {tuple, list}:
        least = min(map(len, probes))
        return [(f"[{i}]", partial(_item, i)) for i in range(least)]
    if kinds == {dict}:
        return [(f"[{key}]", partial(_item, key)) for key in probes[0] if type(key) is str]
    if len(kinds) != 1:
        return []
    (kind,) = kinds
    if issubclass(kind, tuple):  # a namedtuple: past a __getitem__ of its own
        return [(f"[{i}]", partial(_place, i)) for i in range(min(map(tuple.__len__, probes)))]
    instance: list[Field] = [
        (f".{name}", partial(_attribute, name))
        for name, value in containers.attributes(probes[0])
        if type(name) is str and type(value) in (str, bytes, int, path_type())
    ]
    for name, slot in containers.slots(kind):
        instance = [(f".{name}", slot.__get__) if f == f".{name}" else (f, g) for f, g in instance]
    return instance


def _item(key: Any, row: Any) -> Any:
    return row[key]


def _place(number: int, row: Any) -> Any:
    return tuple.__getitem__(row, number)


def _attribute(name: str, row: Any) -> Any:
    return object.__getattribute__(row, "__dict__")[name]


def _field(rows: Rows, get: Callable[[Any], Any], kinds: set[type]) -> list[Any]:
    found = rows()
    some = {tuple, list, dict}
    if set(map(type, found)) <= (some if kinds <= some else kinds):
        try:
            return [get(row) for row in found]
        except (LookupError, AttributeError):
            pass
    return [None]  # of no kind: data() is None


def _by_keys(
    dataset: object, keyed: Sequence[tuple[str, dict[Any, Any]]], samples: int
) -> Iterator[CandidateList]:
    """Columns of dictionaries by keys that are another list's elements: images by their ids."""
    if not keyed:
        return
    for name, value in containers.containers(dataset):
        if type(value) not in (list, tuple) or len(value) < samples or not samples:
            continue
        ids = [value[i] for i in probe_indices(samples)]
        if kind_of(ids) not in ("ints", "text") or ids == probe_indices(samples):
            continue
        for other, rows in keyed:
            if all(key in rows for key in ids):
                numbers = dict(zip(probe_indices(samples), [rows[key] for key in ids]))  # noqa: B905
                get = partial(_looked_up, value, rows, samples)
                yield from _of_rows(f"{other}[{name}]", numbers, samples, get, rows)


def _looked_up(keys: Any, rows: dict[Any, Any], samples: int) -> list[Any]:
    try:
        return [rows[key] for key in keys[:samples]]
    except (KeyError, TypeError):
        return [None]


def _signature(value: Any, probes: list[Any]) -> int:
    kept = id(value), containers.length(value), probes
    return zlib.crc32(repr(kept).encode("utf-8", "surrogatepass"))
