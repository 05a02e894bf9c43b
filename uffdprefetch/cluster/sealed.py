# SPDX-License-Identifier: Apache-2.0
"""A key that goes from one process to another through a directory, and is in no file of it.

Each has a Diffie-Hellman pair in its own memory, and leaves the public half: what is sealed for it
opens only with the other half, which no file has. Who may write into the directory is trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

KEY_BYTES = 32
_BITS = 2048
#: Of a secret exponent: twice the strength that a group of 2048 bits has (RFC 3526, section 8).
_SECRET_BITS = 256
_GENERATOR = 2


def _arctan_of_inverse(n: int, one: int) -> int:
    """arctan(1 / n), of which 1 is ``one``."""
    total, power, k = 0, one // n, 1
    while power:
        total += power // k if k % 4 == 1 else -(power // k)
        power //= n * n
        k += 2
    return total


def _prime() -> int:
    """The prime of group 14, as RFC 3526 defines it by the digits of pi (here by Machin's formula,
    with guard bits)."""
    one = 1 << (_BITS + 64)
    pi = 4 * (4 * _arctan_of_inverse(5, one) - _arctan_of_inverse(239, one))
    digits = pi >> (_BITS + 64 - 1918)
    return (1 << 2048) - (1 << 1984) - 1 + (1 << 64) * (digits + 124476)


class Pair:
    """One process's."""

    def __init__(self) -> None:
        self._prime = _prime()
        self._secret = secrets.randbits(_SECRET_BITS) | 1 << (_SECRET_BITS - 1)
        self.public = f"{pow(_GENERATOR, self._secret, self._prime):x}"

    def _pad(self, other: str, about: str) -> bytes:
        number = int(other, 16)
        if not 1 < number < self._prime - 1:
            raise ValueError("a public half that is none")
        shared = pow(number, self._secret, self._prime).to_bytes(_BITS // 8, "big")
        return hmac.new(shared, about.encode(), hashlib.sha256).digest()

    def seal(self, key: bytes, other: str, about: str) -> str:
        """Seal a key for the process whose public half is ``other``. ``about``: known to both, and
        used for one seal only. Raises ValueError."""
        pad = self._pad(other, about)
        return bytes(a ^ b for a, b in zip(key, pad, strict=True)).hex()

    def open(self, sealed: str, other: str, about: str) -> bytes:
        """Open what ``other`` has sealed for this process. Raises ValueError."""
        pad = self._pad(other, about)
        return bytes(a ^ b for a, b in zip(bytes.fromhex(sealed), pad, strict=True))
