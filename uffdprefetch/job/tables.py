# SPDX-License-Identifier: Apache-2.0
"""What we know of objects that belong to the job, kept beside them instead of in them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Table:
    """Values by object. By identity, so nobody's __hash__ or __eq__ is called; without keeping the
    object alive (a value must not refer to its object); nothing that would be pickled with it.

    ``gone``: called with the value when the object has died, at any time and in any thread.
    """

    def __init__(self, on_death: Callable[[Any], object] | None = None) -> None:
        self._rows: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._on_death = on_death

    def get(self, thing: object) -> Any:
        """Its value, or None."""
        row = self._rows.get(id(thing))
        return row[1] if row is not None and row[0]() is thing else None

    def set(self, thing: object, value: object) -> None:
        """Raises TypeError for an object that cannot be referred to weakly."""
        key = id(thing)

        def forget(reference: weakref.ref[Any]) -> None:
            row = self._rows.get(key)
            if row is not None and row[0] is reference:  # not of another that lives there now
                del self._rows[key]
                if self._on_death is not None:
                    try:
                        self._on_death(row[1])
                    except Exception:
                        pass  # at the interpreter's end modules may be gone already

        self._rows[key] = (weakref.ref(thing, forget), value)
