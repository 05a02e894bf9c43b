# SPDX-License-Identifier: Apache-2.0
"""Sizes, rates and durations as people write them."""

from __future__ import annotations

import pytest

from uffdprefetch.base import units
from uffdprefetch.base.errors import UffdPrefetchError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096), ("0", 0), ("16k", 16384), ("16K", 16384), ("1kB", 1000), ("1KiB", 1024),
        ("50MiB", 52428800), ("1.5GB", 1_500_000_000), (" 2 GiB ", 2 << 30), ("1TiB", 1 << 40),
        ("0.5KiB", 512), ("9007199254740993", 9007199254740993), ("7B", 7), ("3.", 3), (".5k", 512),
    ],
)  # fmt: skip
def test_sizes(text: str, size_bytes: int) -> None:
    assert units.parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 2", "5XB", "1e9", "ten", "5Mi8", "8EiB", "٣"])
def test_what_is_no_size_is_a_usage_error_in_one_line(text: str) -> None:
    with pytest.raises(UffdPrefetchError) as caught:
        units.parse_size(text)
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.message
    assert repr(text) in caught.value.message


def test_a_size_beyond_off_t_is_refused() -> None:
    assert units.parse_size("9223372036854775807") == 2**63 - 1
    with pytest.raises(UffdPrefetchError, match="too large"):
        units.parse_size("8192PiB")


@pytest.mark.parametrize(
    ("text", "rate"), [("300MB/s", 300_000_000), ("1GiB/s", 1 << 30), ("5MB", 5_000_000)]
)
def test_rates(text: str, rate: int) -> None:
    assert units.parse_rate(text) == rate


def test_what_is_no_rate_is_named_as_it_was_written() -> None:
    with pytest.raises(UffdPrefetchError, match="not a rate: 'fast/s'"):
        units.parse_rate("fast/s")


@pytest.mark.parametrize(
    ("text", "seconds"), [("10", 10), ("1.5s", 1.5), ("200ms", 0.2), ("2m", 120), ("1h", 3600)]
)
def test_durations(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == pytest.approx(seconds)
    with pytest.raises(UffdPrefetchError):
        units.parse_duration(text + " later")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (512, "512 B"), (1536, "1.5 KiB"), (50 << 20, "50 MiB"), (1023 << 20, "1023 MiB"),
     ((1 << 30) - 1, "1 GiB"), (1_500_000_000, "1.4 GiB"), (-(2 << 20), "-2 MiB")],
)  # fmt: skip
def test_sizes_for_people(size_bytes: int, text: str) -> None:
    assert units.format_size(size_bytes) == text


@pytest.mark.parametrize("size_bytes", [0, 1, 1023, 1024, 50 << 20, (50 << 20) + 1, 3 << 40])
def test_the_exact_spelling_is_read_back(size_bytes: int) -> None:
    assert units.parse_size(units.format_size_exact(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.3e-6, "3.3 us"), (0.015, "15 ms"), (0.99999, "1 s"), (12.34, "12.3 s"), (245, "4 min 5 s"),
     (3725, "1 h 2 min")],
)  # fmt: skip
def test_durations_for_people(seconds: float, text: str) -> None:
    assert units.format_duration(seconds) == text


def test_rates_for_people() -> None:
    assert units.format_rate(300e6) == "300 MB/s"
    assert units.format_rate(12.5e9) == "12.5 GB/s"
