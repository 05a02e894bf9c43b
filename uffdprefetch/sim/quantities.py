# SPDX-License-Identifier: Apache-2.0
"""Converters of a scenario file's values. Each takes a TOML value and raises ValueError with a
message that says what is needed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from uffdprefetch.base.errors import UffdPrefetchError
from uffdprefetch.base.units import parse_rate, parse_size
from uffdprefetch.sim.model import Curve

MB = 1e6


def _quantity(parse: Callable[[str], int], example: str) -> Callable[[Any], float]:
    def convert(value: Any) -> float:
        text = value.strip() if isinstance(value, str) else value
        if not isinstance(text, str) or text[-1:].isdigit() or text[-1:] in ".,":
            raise ValueError(f"{value!r} has no unit: write {example}")
        if text.startswith("-"):
            raise ValueError(f"{value!r} is negative")
        try:
            return parse(text) / MB
        except UffdPrefetchError as error:
            raise ValueError(error.message) from None

    return convert


size_mb = _quantity(parse_size, '"50GiB" or "27kB"')
_any_rate = _quantity(parse_rate, '"66MB/s"')


def rate_mb(value: Any) -> float:
    """MB/s of '66MB/s'; ValueError without a unit, for zero and for negative rates."""
    rate = _any_rate(value)
    if not isinstance(value, str) or not value.strip().endswith("/s"):
        raise ValueError(f'{value!r} is no rate: write "66MB/s"')
    if rate <= 0:
        raise ValueError(f"{value!r}: a rate is more than nothing")
    return rate


def whole(least: int, most: int | None = None) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{value!r}: a whole number from {least} on is needed")
        if most is not None and value > most:
            raise ValueError(f"{value!r}: at most {most}")
        return value

    return convert


def kind(wanted: type, what: str) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, wanted):
            raise ValueError(f"{value!r}: {what} is needed")
        return value

    return convert


def one_of(choices: Sequence[str]) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if value not in choices:
            near = difflib.get_close_matches(str(value), choices, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(choices)}"
            raise ValueError(f"{value!r} is unknown; {hint}")
        return str(value)

    return convert


text = kind(str, "a text")
boolean = kind(bool, "true or false")


def curve(value: Any) -> Curve:
    """'86MB/s' for any number of clients, or a table {1 = "66MB/s", 2 = "86MB/s"}."""
    if isinstance(value, str):
        return Curve.flat(rate_mb(value))
    if not isinstance(value, Mapping):
        raise ValueError(f'{value!r}: a curve is a rate or a table such as {{1 = "66MB/s"}}')
    if not value:
        raise ValueError("a curve without a point: give at least one rate")
    points = {}
    for at, rate in value.items():
        if not at.isdigit() or int(at) < 1:
            raise ValueError(f"a curve's points are whole numbers from 1 on, not {at!r}")
        try:
            points[int(at)] = rate_mb(rate)
        except ValueError as error:
            raise ValueError(f"at {at}: {error}") from None
    return Curve(points)


def seconds(value: Any) -> float:
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not 0 < value < float("inf")
    ):
        raise ValueError(f"{value!r}: seconds are needed")
    return float(value)


def numbers(value: Any) -> dict[str, float]:
    """A table of plain numbers."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r}: a table such as {{s = 0.5}} is needed")
    for name, each in value.items():
        if not isinstance(each, (int, float)) or isinstance(each, bool):
            raise ValueError(f"{name}: {each!r} is no number")
    return {name: float(each) for name, each in value.items()}
