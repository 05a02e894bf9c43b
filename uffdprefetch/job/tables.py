# SPDX-License-Identifier: Apache-2.0
"""State of ours for the job's objects, kept outside of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class IdentityTable:
    """Values by object identity: no __hash__ or __eq__ of the job's is called, the object is not
    kept alive (a value must not refer to it), and nothing is pickled with it.

    ``on_death``: called with the value after the object has died, at any time and in any thread.
    """

    def __init__(self, on_death: Callable[[Any], object] | None = None) -> None:
        self._rows: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._on_death = on_death

    def get(self, thing: object) -> Any:
        """Its value, or None."""
        row = self._rows.get(id(thing))
        return row[1] if row is not None and row[0]() is thing else None

    def set(self, thing: object, value: object) -> None:
        """Set its value. Raises TypeError for an object without weak references."""
        key = id(thing)

        def forget(reference: weakref.ref[Any]) -> None:
            row = self._rows.get(key)
            if row is not None and row[0] is reference:  # not of another object at this id
                del self._rows[key]
                if self._on_death is not None:
                    try:
                        self._on_death(row[1])
                    except Exception:
                        pass  # at the interpreter's end modules may be gone already

        self._rows[key] = (weakref.ref(thing, forget), value)
