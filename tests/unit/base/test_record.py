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


def mutable() -> list[Any]:
    """... one that can be changed, with what else the service's classes have, and one below it."""

    def fields(module: Any) -> type:
        class Base:
            start: int
            some: list[int] = module.field(default_factory=list)
            twice: int = module.field(init=False)
            apart: int = module.field(kw_only=True)

            def __post_init__(self) -> None:
                self.twice = 2 * self.start

        base = module.dataclass(Base)

        class Below(base):  # type: ignore[misc,valid-type]
            more: Any = None

        Below.__qualname__ = "Below"
        return module.dataclass(Below)  # type: ignore[no-any-return]

    return [fields(dataclasses), fields(record)]


@pytest.mark.parametrize(
    ("kind", "module"),
    list(zip(mutable(), (dataclasses, record), strict=True)),
    ids=["dataclass", "record"],
)
def test_one_that_can_be_changed_is_made_copied_compared_and_shown_as_a_dataclass(
    kind: Any, module: Any
) -> None:
    one = kind(3, [1], apart=5)
    assert vars(one) == {"start": 3, "some": [1], "twice": 6, "apart": 5, "more": None}
    assert repr(one) == "Below(start=3, some=[1], twice=6, apart=5, more=None)"
    other = module.replace(one, start=4)
    assert (other.twice, other.apart, other.some) == (8, 5, [1]) and other != one
    assert kind(3, [1], apart=5) == one and kind(3, apart=5).some == []
    one.more = one
    assert repr(one).endswith("more=...)")
    with pytest.raises(TypeError):
        hash(one)
    with pytest.raises(TypeError):
        kind(3, [1], None, 5)
    assert module.dataclass(eq=False)(type("Same", (), {"__annotations__": {}}))() != kind(
        3, apart=5
    )
