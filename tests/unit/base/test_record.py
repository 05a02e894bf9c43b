# SPDX-License-Identifier: Apache-2.0
"""base/record.py is the standard module's dataclass, as far as it is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from uffdprefetch.base import record


def both() -> list[Any]:
    """The same class, by either module."""

    def fields(module: Any, decorate: Callable[[type], type]) -> type:
        class Pair:
            number: int
            text: str = "x"
            origins: Mapping[str, str] = module.field(
                default_factory=dict, compare=False, repr=False
            )

        Pair.__qualname__ = "Pair"
        return decorate(Pair)

    return [fields(m, d(frozen=True)) for m, d in ((dataclasses, dataclasses.dataclass),
                                                   (record, record.record))]  # fmt: skip


@pytest.mark.parametrize("pair", both(), ids=["dataclass", "record"])
def test_it_is_made_compared_shown_and_frozen_as_a_dataclass(pair: Any) -> None:
    one = pair(1, origins={"a": "b"})
    assert (one.number, one.text, one.origins) == (1, "x", {"a": "b"})
    assert vars(one) == {"number": 1, "text": "x", "origins": {"a": "b"}}
    assert one == pair(number=1) and hash(one) == hash(pair(number=1))
    assert one != pair(1, "y") and one != (1, "x")
    assert pair(1).origins is not pair(1).origins
    assert repr(one) == "Pair(number=1, text='x')"
    assert pair.text == "x"
    with pytest.raises(AttributeError, match="cannot assign to field 'number'"):
        one.number = 2


@pytest.mark.parametrize("pair", both(), ids=["dataclass", "record"])
@pytest.mark.parametrize(
    ("values", "named"), [((), {}), ((1, "x", {}, 4), {}), ((1,), {"number": 1}), ((1,), {"no": 1})]
)
def test_wrong_arguments_are_a_type_error(pair: Any, values: Any, named: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        pair(*values, **named)
