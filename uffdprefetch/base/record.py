# SPDX-License-Identifier: Apache-2.0
"""Dataclasses for what stands before a job: of `wrap`, and of the service that it starts.

``@dataclass`` and ``@record(frozen=True)`` make of a class what the standard module makes of it, as
far as it is used here, and a type checker sees just that. At run time that module is not asked: it
compiles up to six methods for each class, which took a fifth of the service's start, and imports
inspect, ast and re, which takes longer than all else that a launcher does (docs/internals.md, "From
`wrap` to the job"). Here __init__ is compiled, with the first of a class that is made; the other
methods are the same for all.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass, field, replace
    from dataclasses import dataclass as record
else:
    from reprlib import recursive_repr

    _MISSING = object()
    #: Of a class: its fields, and what stands behind each.
    _FIELDS = "_fields_of_record"

    class field:
        """As dataclasses.field()."""

        def __init__(
            self, *, default_factory=_MISSING, init=True, kw_only=False, compare=True, repr=True
        ) -> None:
            self.default_factory = default_factory
            self.init = init
            self.kw_only = kw_only
            self.compare = compare
            self.repr = repr

    _PLAIN = field()

    def dataclass(cls=None, /, *, frozen=False, eq=True):
        """As dataclasses.dataclass()."""
        if cls is None:
            return lambda it: _made(it, frozen, eq)
        return _made(cls, frozen, eq)

    record = dataclass

    def replace(one, /, **changes):
        """As dataclasses.replace()."""
        names = [name for name, each in _of(one).items() if _kind(each).init]
        return one.__class__(**{name: getattr(one, name) for name in names} | changes)

    def _of(one):
        return getattr(one, _FIELDS)

    def _kind(each):
        return each if isinstance(each, field) else _PLAIN

    def _made(cls, frozen, eq):
        own = {name: vars(cls).get(name, _MISSING) for name in vars(cls).get("__annotations__", ())}
        setattr(cls, _FIELDS, getattr(cls, _FIELDS, {}) | own)
        for name, each in own.items():
            if isinstance(each, field):
                delattr(cls, name)

        def __init__(self, *args, **values):
            cls.__init__ = _init_of(cls, frozen)
            cls.__init__(self, *args, **values)

        methods = {"__repr__": _repr}
        if eq:
            methods |= {"__eq__": _eq, "__hash__": _hash if frozen else None}
        if frozen:
            methods |= {"__setattr__": _setattr, "__delattr__": _delattr}
        cls.__init__ = __init__
        for name, method in methods.items():
            # __eq__ in a class brings a __hash__ of None along
            if cls.__dict__.get(name) is None:
                setattr(cls, name, method)
        return cls

    def _init_of(cls, frozen):
        """__init__ as it would be written by hand."""
        names = {"_MISSING": _MISSING, "_set": object.__setattr__}
        words, by_name, lines = ["self"], [], []
        for name, each in getattr(cls, _FIELDS).items():
            value, kind = name, _kind(each)
            given = by_name if kind.kw_only else words
            if kind.default_factory is not _MISSING:
                names[f"_make_{name}"] = kind.default_factory
                value = f"_make_{name}()"
                if kind.init:
                    given.append(f"{name}=_MISSING")
                    value += f" if {name} is _MISSING else {name}"
            elif not kind.init:
                continue
            elif each is _MISSING or each is kind:
                given.append(name)
            else:
                names[f"_default_{name}"] = each
                words.append(f"{name}=_default_{name}")
            lines.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
        if hasattr(cls, "__post_init__"):
            lines.append("self.__post_init__()")
        words += ["*", *by_name] if by_name else []
        body = "\n    ".join(lines or ["pass"])
        exec(f"def __init__({', '.join(words)}):\n    {body}\n", names)
        names["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
        return names["__init__"]

    def _compared(one):
        return [getattr(one, name) for name, each in _of(one).items() if _kind(each).compare]

    def _eq(self, other):
        if other.__class__ is not self.__class__:
            return NotImplemented
        return _compared(self) == _compared(other)

    def _hash(self):
        return hash(tuple(_compared(self)))

    @recursive_repr()
    def _repr(self):
        shown = [name for name, each in _of(self).items() if _kind(each).repr]
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"{self.__class__.__qualname__}({values})"

    def _setattr(self, name, value):
        raise AttributeError(f"cannot assign to field {name!r}")

    def _delattr(self, name):
        raise AttributeError(f"cannot delete field {name!r}")


__all__ = ["dataclass", "field", "record", "replace"]
