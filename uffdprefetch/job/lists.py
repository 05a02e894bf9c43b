# SPDX-License-Identifier: Apache-2.0
"""Lists in a dataset's attributes whose element i may lead to the record or the file of sample i.

Keys, paths, record numbers, kept as ``self.keys``, ``self.samples = [(path, label), ...]``,
``self.annotations = [{"image": ...}, ...]``, ``{0: "a", 1: "b"}``, objects with a ``path``, or the
column of a table (job/containers.py has where they are looked for). orders/mapping.py and
orders/path_search.py find which of them are used. No code of the user's is called, and no array
that maps a file is read.
"""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from . import containers
from .containers import path_type

#: Bytes of all lists of one announcement.
CAP_BYTES = 256 << 20
#: Columns of one dataset: bounds the time for one with a thousand attributes.
CAP_LISTS = 32
#: Elements checked for their type before the whole list is; of a table that may map a file, where
#: each is a fault.
_PROBES, _TABLE_PROBES = 16, 4
#: Fields of an element that become columns, and columns of a table.
_FIELDS, _TABLE_FIELDS = 8, 32
#: Samples, at most, that share a file (views of an image): a list may be so much shorter, of so
#: many elements at least.
_VIEWS_MAX, _VIEWED_MIN = 64, 8
#: Bytes of a text, on average, in a column that is not read: no paths are so long.
_LONG_BYTES = 512


class CandidateList:
    """A candidate list: ``count`` elements of one kind.

    ``name``: the attribute, for people, with ``[field]`` for a field of each element. ``kind``:
    "text", "bytes" or "ints". ``signature``: changes with the list or its order.
    """

    def __init__(
        self, name: str, kind: str, count: int, signature: int, values: Callable[[], Any]
    ) -> None:
        self.name, self.kind, self.count, self.signature = name, kind, count, signature
        self._values = values

    def data(self) -> bytes | None:
        """All elements as an array of an announcement: int64, or packed (channel.packed()), text as
        UTF-8. None when one of them is of another type."""
        values = self._values()
        try:
            if self.kind == "ints":
                return array("q", values).tobytes() if _only(values, int) else None
            if self.kind == "text":
                if _only(values, path_type()):
                    values = list(map(os.fspath, values))
                if not _only(values, str):
                    return None
                body = "".join(values)
                if body.isascii():  # a million paths at once
                    return _packed(values, body.encode())
                values = [str.encode(value, "utf-8", "surrogateescape") for value in values]
            return _packed(values, b"".join(values)) if _only(values, bytes) else None
        except (TypeError, OverflowError, UnicodeError):
            return None


def _packed(strings: Any, body: bytes) -> bytes:
    """As channel.packed(), with ``body`` the strings' concatenated bytes."""
    ends = array("q", accumulate(map(len, strings)))
    return array("q", (len(ends),)).tobytes() + ends.tobytes() + body


def _only(values: Any, kind: Any) -> bool:
    return isinstance(values, array) or set(map(type, values)) <= {kind}


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
    return list(_of_table("", dataset))[:CAP_LISTS]


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
        if any(number not in value for number in _probe_indices(samples)):
            return []
        return _of_rows(name, value, samples, lambda: [value[i] for i in range(samples)])
    if type(value) in (list, tuple):
        return _of_rows(name, value, samples, lambda: value[:samples])
    if containers.is_frame(value):
        return list(_of_frame(name, value, samples))
    if containers.is_pandas(value):
        return _of_series(name, value, samples)
    if containers.is_table(value):
        return [*_of_table(name, value), *_of_chosen(name, value)]
    return _of_array(name, value, samples)


def _probe_indices(samples: int, most: int = _PROBES) -> list[int]:
    """Evenly spaced indices at which a list's elements are checked first."""
    if samples <= most:
        return list(range(samples))
    return [k * (samples - 1) // (most - 1) for k in range(most)]


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
    probes = [value[i].item() for i in _probe_indices(samples)]
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
    probes = [cells[i] for i in _probe_indices(samples)]
    owner = value if owner is None else owner
    if kind in "iu":
        whole = [int(probe) for probe in probes]
        return [_of_numbers(name, owner, samples, whole, value.to_numpy)]
    found = _kind(probes)
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
    probes = [value[i] for i in _probe_indices(samples)]
    kind = _kind(probes)
    if kind is not None:
        return [CandidateList(name, kind, samples, _signature(owner, probes), rows)]
    found = []
    for field, get in _fields(probes)[:_FIELDS]:
        try:
            part = [get(row) for row in probes]
        except (LookupError, AttributeError):
            continue
        kind = _kind(part)
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
        ids = [value[i] for i in _probe_indices(samples)]
        if _kind(ids) not in ("ints", "text") or ids == _probe_indices(samples):
            continue
        for other, rows in keyed:
            if all(key in rows for key in ids):
                numbers = dict(zip(_probe_indices(samples), [rows[key] for key in ids]))  # noqa: B905
                get = partial(_looked_up, value, rows, samples)
                yield from _of_rows(f"{other}[{name}]", numbers, samples, get, rows)


def _looked_up(keys: Any, rows: dict[Any, Any], samples: int) -> list[Any]:
    try:
        return [rows[key] for key in keys[:samples]]
    except (KeyError, TypeError):
        return [None]


def _kind(probes: list[Any]) -> str | None:
    types = set(map(type, probes))
    for kind, name in ((str, "text"), (bytes, "bytes"), (int, "ints")):
        if types == {kind}:
            return name
    return "text" if types == {path_type()} else None


def _signature(value: Any, probes: list[Any]) -> int:
    kept = id(value), containers.length(value), probes
    return zlib.crc32(repr(kept).encode("utf-8", "surrogatepass"))


# ---- tables of Hugging Face's library ------------------------------------------------------------


def _of_table(name: str, dataset: Any) -> Iterator[CandidateList]:
    """Columns of paths, also of images and audio that are kept as files, by the table's rows."""
    table = vars(vars(dataset)["_data"])["table"]
    for label, column in list(zip(table.column_names, table.columns))[:_TABLE_FIELDS]:  # noqa: B905
        found = _path_chunks(column.chunks)
        if found is None or not table.num_rows:
            continue
        suffix, chunks = found
        probes = [_cell(chunks, i) for i in _probe_indices(table.num_rows, _TABLE_PROBES)]
        if _kind(probes) == "text" and all("/" in path or "." in path for path in probes):
            yield CandidateList(
                f"{name}[{label}]{suffix}", "text", table.num_rows,
                zlib.crc32(repr((id(table), label, probes)).encode("utf-8", "surrogatepass")),
                partial(_cells, chunks),
            )  # fmt: skip


def _path_chunks(chunks: list[Any]) -> tuple[str, list[Any]] | None:
    """(field, chunks of text) of a column that may be of paths: of texts, or of structs of a path
    and no bytes, which Image and Audio are."""
    if not chunks:
        return None
    kind = str(chunks[0].type)
    suffix = ""
    if kind.startswith("struct<") and "path: string" in kind and "bytes: binary" in kind:
        places = {chunks[0].type.field(i).name: i for i in range(chunks[0].type.num_fields)}
        if any(chunk.field(places["bytes"]).null_count < len(chunk) for chunk in chunks):
            return None
        suffix, chunks = "[path]", [chunk.field(places["path"]) for chunk in chunks]
        kind = str(chunks[0].type)
    rows = sum(map(len, chunks))
    if kind not in ("string", "large_string") or not rows:
        return None
    return None if sum(each.nbytes for each in chunks) > _LONG_BYTES * rows else (suffix, chunks)


def _cell(chunks: list[Any], number: int) -> Any:
    for chunk in chunks:
        if number < len(chunk):
            return chunk[number].as_py()
        number -= len(chunk)
    return None


def _cells(chunks: list[Any]) -> list[Any]:
    return [path for chunk in chunks for path in chunk.to_pylist()]


def _of_chosen(name: str, dataset: Any) -> Iterator[CandidateList]:
    """The rows of a dataset that was shuffled or selected, by its samples."""
    chosen = vars(dataset).get("_indices")
    if chosen is not None and chosen.num_rows:
        rows = chosen.column(0)
        probes = [rows[i].as_py() for i in _probe_indices(chosen.num_rows, _TABLE_PROBES)]
        yield CandidateList(
            f"{name}._indices", "ints", chosen.num_rows,
            zlib.crc32(repr((id(chosen), probes)).encode()),
            lambda: array("q", rows.to_numpy().astype("<i8").tobytes()),
        )  # fmt: skip
