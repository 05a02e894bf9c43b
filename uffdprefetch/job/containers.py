# SPDX-License-Identifier: Apache-2.0
"""Where a data set keeps its lists: in attributes and slots, one level inside attributes that are
objects or dictionaries, and in what its functions have closed over.

No code of the user's is called: instance dictionaries and slots are read past __getattribute__, and
of containers only exact types are known: built-in ones, numpy's array, pandas' DataFrame, Series
and Index, and Hugging Face's Dataset, none of which is imported.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

#: Packages whose objects are not searched for lists.
_FOREIGN = ("builtins", "numpy", "pandas", "pyarrow", "torch.nn", "torch.distributed", "logging")
_BUILTIN = (list, tuple, dict)
#: Members of a dictionary, and of a list, that are looked at: one of more is no group of lists.
_NAMED_MAX, _GROUP_MAX = 64, 8
#: Texts of a data set that may be the beginnings or endings of its paths, how long one is, and all.
TEXTS_MAX, TEXT_CHARACTERS, TEXTS_CHARACTERS = 32, 256, 4096


def containers(dataset: object) -> Iterator[tuple[str, Any]]:
    """Its containers: (name of the attribute, for people; value)."""
    if is_table(dataset):
        yield "", dataset
        return
    for name, value in attributes(dataset):
        yield from _of_value(name, value)
        if not is_container(value) and _is_holder(value):
            for inner, member in attributes(value):
                yield from _of_value(f"{name}.{inner}", member)


def _of_value(name: str, value: object) -> Iterator[tuple[str, Any]]:
    if is_container(value):
        yield name, value
        for key, member in _group(value):
            if is_container(member):
                yield f"{name}[{key}]", member
    elif type(value) is types.FunctionType:
        for free, member in _closed_over(value):
            if is_container(member):
                yield f"{name}.{free}", member


def _group(value: object) -> list[tuple[Any, Any]]:
    """Members of a short dictionary or list."""
    if type(value) is dict and len(value) <= _NAMED_MAX:
        return [(key, member) for key, member in value.items() if type(key) is str]
    if (type(value) is list or type(value) is tuple) and len(value) <= _GROUP_MAX:
        return list(enumerate(value))
    return []


def _closed_over(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or ()):  # noqa: B905
        try:
            yield name, cell.cell_contents
        except ValueError:
            pass  # nothing has been assigned yet


def texts(dataset: object) -> list[str]:
    """Short texts and paths among its attributes, one level inside objects and dictionaries too:
    they may be the directories or endings of the names in a list."""
    found: dict[str, None] = {}
    for _, value in attributes(dataset):
        members = [value, *(member for _, member in _group(value))]
        if not is_container(value) and _is_holder(value):
            members += [member for _, member in attributes(value)]
        for member in members:
            text = _text(member)
            if text and len(text) <= TEXT_CHARACTERS and "\0" not in text:
                found[text] = None
    lengths = accumulate(map(len, found))
    return [text for text, upto in zip(found, lengths) if upto <= TEXTS_CHARACTERS][:TEXTS_MAX]  # noqa: B905


def _text(value: object) -> str | None:
    if type(value) is str:
        return value
    return str(value) if type(value) is path_type() else None


def attributes(thing: object) -> list[tuple[str, Any]]:
    """Instance attributes and slots that have a value."""
    try:  # not vars(): __getattribute__ may be the user's
        state = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        state = {}
    found = list(state.items()) if type(state) is dict else []
    for name, slot in slots(type(thing)):
        try:
            found.append((name, slot.__get__(thing)))
        except AttributeError:
            pass  # it has no value
    return found


def slots(kind: type) -> Iterator[tuple[str, Any]]:
    """The slots of a class of the user's: (name, descriptor)."""
    for base in kind.__mro__:
        members = type.__getattribute__(base, "__dict__")
        if "__slots__" in members:
            for name, member in members.items():
                if type(member) is types.MemberDescriptorType:
                    yield name, member


def path_type() -> Any:
    """pathlib's type of paths here, where it is loaded."""
    return getattr(sys.modules.get("pathlib"), "PosixPath", None)


# ---- what is a container -------------------------------------------------------------------------


def is_container(value: object) -> bool:
    """Whether it is one of the types that the module names."""
    return type(value) in _BUILTIN or is_array(value) or is_pandas(value) or is_table(value)


def length(value: Any) -> int:
    """Elements of a container, rows of a table."""
    if not is_table(value):
        return len(value)
    chosen = vars(value).get("_indices")  # of its rows, where it was shuffled
    return int((vars(value)["_data"] if chosen is None else chosen).num_rows)


def is_array(value: Any) -> bool:
    """A numpy array of one dimension, or of some columns, whose base is known to be no mapped
    file."""
    kind = _member("numpy", "ndarray")
    if kind is None or type(value) is not kind or not 1 <= value.ndim <= 2:
        return False
    while type(value) is kind and value.base is not None:
        value = value.base
    return type(value) is kind or type(value) is bytes


def is_pandas(value: object) -> bool:
    """A DataFrame, Series, or Index that has values of its own."""
    return any(type(value) is _member("pandas", name) for name in ("DataFrame", "Series", "Index"))


def is_frame(value: object) -> bool:
    """A pandas DataFrame."""
    return type(value) is _member("pandas", "DataFrame")


def is_table(value: object) -> bool:
    """A data set of Hugging Face's library that has a table."""
    return type(value) is _member("datasets.arrow_dataset", "Dataset") and "_data" in vars(value)


def _member(module: str, name: str) -> Any:
    """A class of a module that is loaded, else one that nothing is of."""
    return getattr(sys.modules.get(module), name, _Nothing)


class _Nothing:
    """Has no instances."""


def _is_holder(value: object) -> bool:
    kind = type(value)
    return (
        kind is not path_type()
        and not issubclass(kind, type)
        and not any(
            (str(base.__module__) + ".").startswith(name + ".")
            for base in kind.__mro__[:-1] or (kind,)
            for name in _FOREIGN
        )
    )
