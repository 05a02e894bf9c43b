# SPDX-License-Identifier: Apache-2.0
"""Frozen records for what `wrap` loads before it starts the job.

A ``@record`` class is what ``@dataclass(frozen=True)`` makes of it, and a type checker sees just
that. At run time the standard module is not loaded: it imports inspect, ast and re, which takes
longer than all else that a launcher does (docs/internals.md, "From `wrap` to the job").
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass as record
    from dataclasses import field
else:
    _MISSING = object()

    class field:
        """As dataclasses.field()."""

        def __init__(self, default_factory, compare=True, repr=True) -> None:
            self.default_factory = default_factory
            self.compare = compare
            self.repr = repr

    def record(frozen):
        """As dataclasses.dataclass(), of which only frozen classes are made here."""
        assert frozen
        return _made

    def _made(cls):
        names = tuple(cls.__annotations__)
        defaults = {name: getattr(cls, name) for name in names if hasattr(cls, name)}
        fields = {name: each for name, each in defaults.items() if isinstance(each, field)}
        compared = [name for name in names if name not in fields or fields[name].compare]
        shown = [name for name in names if name not in fields or fields[name].repr]

        def __init__(self, *args, **values):
            if len(args) > len(names):
                raise TypeError(f"{cls.__name__} has {len(names)} fields, not {len(args)}")
            for name, value in zip(names, args):  # noqa: B905 (checked above)
                if name in values:
                    raise TypeError(f"{cls.__name__}: {name!r} is given twice")
                values[name] = value
            for name in names:
                value = values.pop(name, _MISSING)
                if value is _MISSING:
                    value = defaults.get(name, _MISSING)
                    if value is _MISSING:
                        raise TypeError(f"{cls.__name__} lacks {name!r}")
                    if isinstance(value, field):
                        value = value.default_factory()
                self.__dict__[name] = value
            if values:
                raise TypeError(f"{cls.__name__} has no field {next(iter(values))!r}")

        def __setattr__(self, name, value):
            raise AttributeError(f"cannot assign to field {name!r}")

        def __eq__(self, other):
            if other.__class__ is not self.__class__:
                return NotImplemented
            return all(getattr(self, name) == getattr(other, name) for name in compared)

        def __hash__(self):
            return hash(tuple(getattr(self, name) for name in compared))

        def __repr__(self):
            values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
            return f"{cls.__qualname__}({values})"

        for each in (__init__, __setattr__, __eq__, __hash__, __repr__):
            setattr(cls, each.__name__, each)
        for name in fields:
            delattr(cls, name)
        return cls


__all__ = ["field", "record"]
