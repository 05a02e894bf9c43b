# SPDX-License-Identifier: Apache-2.0
"""Parses and formats sizes, rates and durations.

Decimal prefixes with a B are powers of 1000 (kB, MB, GB, TB), those with iB are powers of 1024; a
bare letter (16k, 2G) is a power of 1024, as in dd(1), ulimit and most HPC tools.
"""

from __future__ import annotations

from uffdprefetch.base.errors import usage_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
#: The smallest page of what this runs on.
PAGE_BYTES = 4096
#: A huge page (PMD) of x86, and of others with pages of 4 KiB.
HUGE_BYTES = 2 * MIB

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PREFIXES = "kmgtp"
#: The largest off_t; more is a typing error.
MAX_BYTES = 2**63 - 1

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def _split(text: str) -> tuple[str, str] | None:
    """('1.5', 'GB') of ' 1.5 GB ', or None where no number comes before the unit."""
    bare = text.strip()
    number = bare.rstrip(_LETTERS)
    unit = bare[len(number) :]
    number = number.rstrip()
    whole, _, part = number.partition(".")
    digits = whole + part
    return (number, unit) if digits.isascii() and digits.isdigit() else None


def _factor(unit: str) -> int | None:
    """Bytes per ``unit`` ('', 'B', 'k', 'MB', 'GiB', any case); None if there is no such unit."""
    unit = unit.lower()
    if unit in ("", "b"):
        return 1
    power = _PREFIXES.find(unit[0]) + 1
    if power == 0 or unit[1:] not in ("", "b", "ib"):
        return None
    return int(1000**power) if unit[1:] == "b" else int(1024**power)


def parse_size(text: str) -> int:
    """Bytes of '50MiB', '1.5GB', '16k' or '4096'.

    Raises UffdPrefetchError (exit 2) for anything else, for negative sizes and beyond 2^63-1.
    """
    parts = _split(text)
    factor = _factor(parts[1]) if parts else None
    if parts is None or factor is None:
        raise usage_error(f"not a size: {text!r} (write 4096, 16MiB or 1.5GB)")
    # Integers stay integers: from 2^53 on floats are not exact.
    number = parts[0]
    size_bytes = int(number) * factor if number.isdigit() else round(float(number) * factor)
    if size_bytes > MAX_BYTES:
        raise usage_error(f"size too large: {text!r} is more than 2^63-1 bytes")
    return size_bytes


def parse_rate(text: str) -> int:
    """Bytes per second of '300MB/s' or '300MB'; raises UffdPrefetchError (exit 2)."""
    stripped = text.strip()
    bare = stripped[:-2] if stripped.lower().endswith("/s") else stripped
    try:
        return parse_size(bare)
    except Exception:
        raise usage_error(f"not a rate: {text!r} (write 300MB/s or 1.5GiB/s)") from None


def parse_duration(text: str) -> float:
    """Seconds of '10', '1.5s', '200ms', '2m' or '1h'; raises UffdPrefetchError (exit 2)."""
    parts = _split(text)
    factor = _SECONDS.get(parts[1]) if parts else None
    if parts is None or factor is None:
        raise usage_error(f"not a duration: {text!r} (write 10, 1.5s, 200ms, 2m or 1h)")
    return float(parts[0]) * factor


def _three_digits(value: float) -> str:
    """1.23, 12.3, 123: three significant digits without an exponent, no trailing zeros."""
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_size(size_bytes: float) -> str:
    """'50 MiB', '1.5 GiB', '512 B': powers of 1024, three significant digits, for people."""
    value, unit = float(size_bytes), "B"
    for prefix in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1023.5:
            break
        value, unit = value / 1024, prefix
    sign = "-" if value < 0 else ""
    return f"{sign}{_three_digits(abs(value))} {unit}"


def format_size_exact(size_bytes: int) -> str:
    """The shortest text that parse_size() parses to exactly ``size_bytes``: '50MiB'."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size_bytes and size_bytes % 1024**power == 0:
            return f"{size_bytes // 1024**power}{unit}"
    return str(size_bytes)


def format_rate(bytes_per_second: float) -> str:
    """'300 MB/s': powers of 1000, as networks and file systems are rated."""
    value, unit = float(bytes_per_second), "B/s"
    for prefix in ("kB/s", "MB/s", "GB/s", "TB/s"):
        if value < 999.5:
            break
        value, unit = value / 1000, prefix
    return f"{_three_digits(value)} {unit}"


def format_duration(seconds: float) -> str:
    """'3.2 us', '15 ms', '12.3 s', '4 min 5 s', '1 h 2 min'."""
    if seconds < 1e-3:
        return f"{_three_digits(seconds * 1e6)} us"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 99.95:
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def node_map(cells: Iterable[int | None]) -> str:
    """Nodes of a run by one digit or letter each, number 36 as 0 again; '.' for none."""
    names = "0123456789" + _LETTERS[:26]
    return "".join("." if node is None else names[node % len(names)] for node in cells)
